// PagedCache: a cache that an engine owns, in pages, described once so that blocks are sealed
// straight from it by block table.
//
//   PagedCacheOptions options;
//   options.axes = "KBTHD";                                  // vLLM's [2, blocks, block_size,
//   heads, dim] options.dtype = PagedDtype::kBf16; options.tensors = {...}; // one for each layer
//   auto cache = PagedCache::Create(worker->spec(), options);
//   auto sequence = worker->PutPaged(token_ids, *cache, block_table, context);
//
// Rows are moved once, from the engine's pages into the staging slot that is sealed: nothing else
// holds them in between, and nothing is rounded. The store maps no memory of the engine's.
#ifndef CERTKV_CLIENTS_CPP_PAGED_CACHE_H_
#define CERTKV_CLIENTS_CPP_PAGED_CACHE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "clients/cpp/worker.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/paged_tensor.h"
#include "kernels/core/scaled_e4m3.h"
#include "kernels/core/slab_layout.h"
#include "kernels/ops/device_runtime.h"
#include "kernels/ops/paged_rows.h"

namespace certkv::client {

struct PagedCacheOptions {
  // A letter for each axis of a tensor, the outermost first; kernels/core/paged_tensor.h.
  std::string axes;
  PagedDtype dtype = PagedDtype::kF16;
  // Layer by layer; without K in `axes` keys of a layer and then its values; with L one for all
  // layers, or, without K, two.
  std::vector<PagedTensor> tensors;
  // FP8: [layers] scales, one for each layer's keys and values, or one for all layers. An original
  // is code * scale, which must be exact.
  std::vector<float> key_scales;
  std::vector<float> value_scales;
  // With E in `axes`: where a page's numbers lie, in [0, length of E).
  PageOrder key_order;
  PageOrder value_order;
  // Null: tensors are host memory. Otherwise they are memory of `device`, and this moves them.
  DeviceRuntime* runtime = nullptr;
  int32_t device = 0;
};

// Borrows the engine's memory: tensors stay where they are while it, or a call with it, lives. The
// engine may write to pages, but not to those that a call copies.
//
// Invariants:
//  1. Every number of every page lies in its tensor, and no two in one place.
//  2. It has what the spec's geometry asks for: layers, KV heads, d and d_v.
//  3. An original is a number of the spec's original_dtype, bit for bit what the engine's
//     attention reads.
class PagedCache {
 public:
  // Errors: InvalidArgument [PAGED_CACHE_INVALID], axes, shapes, strides or addresses that can't be
  //         or that aren't the spec's, a dtype that isn't its original_dtype; InvalidArgument
  //         [FP8_SCALE_INVALID | FP8_SCALE_INEXACT]; FailedPrecondition [DEVICE_NOT_HERE], memory
  //         isn't that device's; Internal [DEVICE_FAILED].
  // Time grows with the numbers of one page.
  static absl::StatusOr<std::unique_ptr<PagedCache>> Create(const CacheSpec& spec,
                                                            const PagedCacheOptions& options);

  const SpecDigest& spec_digest() const { return digest_; }
  int32_t page_tokens() const { return static_cast<int32_t>(orders_[0].token_places.size()); }
  int64_t page_count() const { return page_count_; }
  bool is_on_device() const { return runtime_ != nullptr; }
  DeviceRuntime* runtime() const { return runtime_; }
  int32_t device() const { return device_; }

  // Are tokens [first_token, first_token + token_count) of a sequence there, whose tokens i *
  // page_tokens and on are in page pages[i]?
  // Errors: InvalidArgument [BLOCK_TABLE_INVALID], the table is too short, or names a page that the
  //         cache doesn't have.
  absl::Status CheckTable(absl::Span<const int32_t> pages, int64_t first_token,
                          int64_t token_count) const;

  // Writes rows into slots of the staging slab at `base`, which is pinned where is_on_device. The
  // table was checked for them. On an error the slots hold nothing of use.
  // Blocks until done. On a device: after what was queued on the default stream, so an engine that
  // writes pages on another stream waits for that first.
  // Errors, on a device only: as CopyPagedRowsOnDevice.
  // Threads: calls are safe from several threads when slots differ.
  absl::Status CopyRows(absl::Span<const int32_t> pages, absl::Span<const SlotRows> rows,
                        const SlabLayout& layout, uint8_t* base) const;

 private:
  explicit PagedCache(const CacheSpec& spec);
  absl::Status ReadTensors(const PagedCacheOptions& options);
  absl::Status ReadOrders(const PagedCacheOptions& options, int part, const PagedAxes& axes);
  absl::Status ReadScales(const PagedCacheOptions& options);
  absl::Status CheckDevice(const PagedCacheOptions& options) const;
  PagedRows RowsOf(int32_t layer, int part) const;

  const CacheSpec spec_;
  const SpecDigest digest_;
  PagedDtype dtype_ = PagedDtype::kF16;
  DeviceRuntime* runtime_ = nullptr;
  int32_t device_ = 0;
  int64_t page_count_ = 0;
  PageOrder orders_[2];             // of keys, of values
  int32_t token_runs_[2] = {1, 1};  // RunOfPlaces of the orders
  int32_t channel_runs_[2] = {1, 1};
  std::vector<PagedPlane> planes_;        // [layers][keys, values]
  std::vector<E4m3Originals> originals_;  // FP8: [layers][keys, values]
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_PAGED_CACHE_H_
