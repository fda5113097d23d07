// Where an engine's paged cache keeps its numbers: tensors with strides and a letter for each axis.
//
//   B pages   H KV heads   T tokens of a page   D channels of a head
//   L layers, where one tensor has all      K keys, then values, where one tensor has both
//   E all numbers of a page and head, in an order that two tables give (T and D are then left out)
//
// T and D may come several times: they are then digits of the token or channel, the highest first.
//
//   "KBTHD"   [2, blocks, block_size, heads, dim]        "BKHTD"  [blocks, 2, heads, block_size,
//   dim] "BTHD"    keys and values apart                      "LKBTHD" all layers in one "BHDTD"
//   [blocks, heads, dim / x, block_size, x]    "BHKE"   an order that was learnt
#ifndef CERTKV_KERNELS_CORE_PAGED_TENSOR_H_
#define CERTKV_KERNELS_CORE_PAGED_TENSOR_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/core/half.h"

namespace certkv {

enum class PagedDtype : uint8_t { kF16 = 1, kBf16 = 2, kFp8E4m3 = 3 };
inline constexpr int64_t PagedElementBytes(PagedDtype dtype) {
  return dtype == PagedDtype::kFp8E4m3 ? 1 : 2;
}

// Where element (token, channel) of a page and head lies, in elements from the first:
// token_places[token] + channel_places[channel].
struct PageOrder {
  std::vector<int32_t> token_places;    // [tokens of a page]
  std::vector<int32_t> channel_places;  // [channels]
  bool operator==(const PageOrder& other) const = default;
};

struct PagedTensor {
  const void* data = nullptr;        // its first element
  std::vector<int64_t> shape;        // a length >= 1 for each axis
  std::vector<int64_t> strides;      // elements, >= 0, for each axis
  const void* allocation = nullptr;  // what it must not leave; null: not known, not checked
  int64_t allocation_bytes = 0;
};

// Keys or values of one layer in such a tensor.
struct PagedPlane {
  const void* base = nullptr;  // of page 0 and head 0, place 0
  int64_t page_stride = 0;     // elements
  int64_t head_stride = 0;
};

// What the letters say of one tensor.
struct PagedAxes {
  std::vector<PagedPlane> planes;  // [layers][keys, values]; one of the two without K
  int64_t page_count = 0;
  int64_t head_count = 0;
  PageOrder order;  // empty tables with E, whose length is then element_count
  int64_t element_count = 0;
};

// Errors: InvalidArgument [PAGED_CACHE_INVALID], naming the axis: letters that aren't there or are
// too many, another number of axes than letters, a length or stride out of range, a null or
// misaligned address, elements beside the allocation.
absl::StatusOr<PagedAxes> ReadPagedAxes(absl::string_view axes, const PagedTensor& tensor,
                                        PagedDtype dtype);

// Do no two numbers of these planes lie in one place? Planes of one order each, which have the same
// pages and heads. Exact, whatever the strides; made once, in time that grows with the elements of
// a page.
// Errors: InvalidArgument [PAGED_CACHE_INVALID], naming two planes by index.
struct PlacedPlane {
  PagedPlane plane;
  const PageOrder* order;
};
absl::Status CheckPlanesApart(absl::Span<const PlacedPlane> planes, int64_t page_count,
                              int64_t head_count, int64_t element_bytes);

// The largest n so that places come in runs of n that follow each other by 1.
int32_t RunOfPlaces(const std::vector<int32_t>& places);

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_PAGED_TENSOR_H_
