#include "kernels/core/paged_tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>

#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

alignas(16) uint16_t memory[1 << 16];

// A contiguous tensor at the beginning of `memory`.
PagedTensor Contiguous(std::vector<int64_t> shape) {
  PagedTensor tensor;
  tensor.data = memory;
  tensor.strides.resize(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    tensor.strides[i] = stride;
    stride *= shape[i];
  }
  tensor.shape = std::move(shape);
  tensor.allocation = memory;
  tensor.allocation_bytes = 2 * stride;
  return tensor;
}

std::string Refusal(absl::string_view axes, const PagedTensor& tensor) {
  const absl::Status status = ReadPagedAxes(axes, tensor, PagedDtype::kF16).status();
  EXPECT_EQ(ReasonOf(status), "PAGED_CACHE_INVALID") << status;
  return std::string(status.message());
}

// Are all numbers of all planes in places of their own, by looking at each.
bool AreApart(const std::vector<PlacedPlane>& planes, int64_t pages, int64_t heads) {
  std::set<const uint16_t*> seen;
  for (const auto& [plane, order] : planes) {
    for (int64_t page = 0; page < pages; ++page) {
      for (int64_t head = 0; head < heads; ++head) {
        for (const int32_t token : order->token_places) {
          for (const int32_t channel : order->channel_places) {
            const auto* const at = static_cast<const uint16_t*>(plane.base) +
                                   page * plane.page_stride + head * plane.head_stride + token +
                                   channel;
            if (!seen.insert(at).second) return false;
          }
        }
      }
    }
  }
  return true;
}

TEST(PagedTensorTest, LettersSayWhereEachNumberLies) {
  const auto axes = ReadPagedAxes("KBTHD", Contiguous({2, 5, 4, 3, 8}), PagedDtype::kF16);
  ASSERT_TRUE(axes.ok()) << axes.status();
  EXPECT_EQ(axes->page_count, 5);
  EXPECT_EQ(axes->head_count, 3);
  ASSERT_EQ(axes->planes.size(), 2u);
  EXPECT_EQ(axes->planes[1].base, memory + 5 * 4 * 3 * 8);
  EXPECT_EQ(axes->planes[1].page_stride, 4 * 3 * 8);
  EXPECT_EQ(axes->planes[1].head_stride, 8);
  EXPECT_EQ(axes->order.token_places, std::vector<int32_t>({0, 24, 48, 72}));
  EXPECT_EQ(axes->order.channel_places, std::vector<int32_t>({0, 1, 2, 3, 4, 5, 6, 7}));
}

TEST(PagedTensorTest, LettersThatComeTwiceAreDigits) {
  // [pages, heads, 4 / 2 channels, 4 tokens, 2 channels].
  const auto axes = ReadPagedAxes("BHDTD", Contiguous({5, 3, 2, 4, 2}), PagedDtype::kF16);
  ASSERT_TRUE(axes.ok()) << axes.status();
  EXPECT_EQ(axes->order.channel_places, std::vector<int32_t>({0, 1, 8, 9}));
  EXPECT_EQ(axes->order.token_places, std::vector<int32_t>({0, 2, 4, 6}));
  EXPECT_EQ(RunOfPlaces(axes->order.channel_places), 2);
}

TEST(PagedTensorTest, LayersOfOneTensorArePlanesOfTheirOwn) {
  const auto axes = ReadPagedAxes("BLKTHD", Contiguous({5, 3, 2, 4, 1, 8}), PagedDtype::kF16);
  ASSERT_TRUE(axes.ok()) << axes.status();
  ASSERT_EQ(axes->planes.size(), 6u);
  EXPECT_EQ(axes->planes[5].base, memory + 5 * 32);
  EXPECT_EQ(axes->planes[5].page_stride, 6 * 32);
}

TEST(PagedTensorTest, WhatIsNoPagedTensorIsRefusedByName) {
  EXPECT_THAT(Refusal("KBXHD", Contiguous({2, 5, 4, 3, 8})), HasSubstr("no axis is 'X'"));
  EXPECT_THAT(Refusal("KBTD", Contiguous({2, 5, 4, 8})), HasSubstr("B and H must come once"));
  EXPECT_THAT(Refusal("KKBTHD", Contiguous({2, 2, 5, 4, 3, 8})), HasSubstr("at most once"));
  EXPECT_THAT(Refusal("BHTE", Contiguous({5, 3, 4, 8})), HasSubstr("or E alone"));
  EXPECT_THAT(Refusal("BTHD", Contiguous({2, 5, 4, 3, 8})), HasSubstr("one length and stride"));
  EXPECT_THAT(Refusal("KBTHD", Contiguous({3, 5, 4, 3, 8})), HasSubstr("length 3, must be 2"));
  PagedTensor tensor = Contiguous({2, 5, 4, 3, 8});
  tensor.strides[1] = -96;
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("stride -96"));
  tensor = Contiguous({2, 5, 4, 3, 8});
  tensor.shape[2] = 0;
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("length 0"));
  tensor = Contiguous({2, 5, 4, 3, 8});
  tensor.strides[0] = int64_t{1} << 50;
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("2^40"));
  tensor = Contiguous({5, 3, 32});
  tensor.strides = {192, 64, 2};
  tensor.allocation_bytes = sizeof(memory);
  EXPECT_THAT(Refusal("BHE", tensor), HasSubstr("has stride 2, must be 1"));
}

TEST(PagedTensorTest, AddressesOutsideTheAllocationOrMisalignedAreRefused) {
  PagedTensor tensor = Contiguous({2, 5, 4, 3, 8});
  ASSERT_TRUE(ReadPagedAxes("KBTHD", tensor, PagedDtype::kF16).ok());
  tensor.allocation_bytes -= 2;
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("outside its allocation of 1918 bytes"));
  tensor = Contiguous({2, 5, 4, 3, 8});
  tensor.data = memory + 1;
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("outside its allocation"));
  tensor = Contiguous({2, 5, 4, 3, 8});
  tensor.allocation = memory + 1;
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("outside its allocation"));
  tensor = Contiguous({2, 5, 4, 3, 8});
  tensor.strides[1] += 1;  // the last page leaves it
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("outside its allocation"));
  tensor = Contiguous({2, 5, 4, 3, 8});
  tensor.data = reinterpret_cast<const uint8_t*>(memory) + 1;
  tensor.allocation = nullptr;
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("multiple of its 2 byte elements"));
  tensor.data = nullptr;
  EXPECT_THAT(Refusal("KBTHD", tensor), HasSubstr("is at 0x0"));
}

TEST(PagedTensorTest, RunsOfPlacesAreTheLargestThatAllHave) {
  EXPECT_EQ(RunOfPlaces({0, 1, 2, 3}), 4);
  EXPECT_EQ(RunOfPlaces({0, 1, 8, 9}), 2);
  EXPECT_EQ(RunOfPlaces({0, 1, 2, 3, 8, 9}), 2);
  EXPECT_EQ(RunOfPlaces({0, 4, 8}), 1);
  EXPECT_EQ(RunOfPlaces({5}), 1);
}

// The check against looking at every number, over strides that fit and strides that don't.
TEST(PagedTensorTest, PlanesAreApartExactlyWhenNoTwoNumbersMeet) {
  constexpr int64_t kPages = 3, kHeads = 2, kTokens = 2, kChannels = 2;
  int apart = 0, together = 0;
  for (const int64_t page_stride : {0, 1, 4, 8, 9, 12, 16, 24}) {
    for (const int64_t head_stride : {0, 1, 2, 4, 8, 24}) {
      for (const int64_t token_stride : {1, 2, 4, 8}) {
        for (const int64_t channel_stride : {1, 2, 3}) {
          for (const int64_t values_at : {0, 1, 4, 8, 12, 16, 24, 32, 48}) {
            PageOrder order;
            for (int64_t t = 0; t < kTokens; ++t) {
              order.token_places.push_back(static_cast<int32_t>(t * token_stride));
            }
            for (int64_t c = 0; c < kChannels; ++c) {
              order.channel_places.push_back(static_cast<int32_t>(c * channel_stride));
            }
            const std::vector<PlacedPlane> planes = {
                {{memory, page_stride, head_stride}, &order},
                {{memory + values_at, page_stride, head_stride}, &order}};
            const bool are_apart = AreApart(planes, kPages, kHeads);
            const absl::Status status = CheckPlanesApart(planes, kPages, kHeads, 2);
            EXPECT_EQ(status.ok(), are_apart)
                << page_stride << " " << head_stride << " " << token_stride << " " << channel_stride
                << " " << values_at << ": " << status;
            ++(are_apart ? apart : together);
          }
        }
      }
    }
  }
  EXPECT_GT(apart, 100);
  EXPECT_GT(together, 100);
}

TEST(PagedTensorTest, OverlapNamesThePlanes) {
  const PageOrder order = {{0, 8}, {0, 1, 2, 3}};
  const std::vector<PlacedPlane> planes = {{{memory + 4096, 16, 0}, &order},
                                           {{memory, 16, 0}, &order},
                                           {{memory + 4, 16, 0}, &order},
                                           {{memory + 32, 16, 0}, &order}};
  EXPECT_TRUE(CheckPlanesApart(absl::MakeSpan(planes).subspan(0, 3), 2, 1, 2).ok());
  const absl::Status status = CheckPlanesApart(planes, 3, 1, 2);
  EXPECT_EQ(ReasonOf(status), "PAGED_CACHE_INVALID");
  EXPECT_THAT(std::string(status.message()), HasSubstr("plane 1 and plane 3"));
}

}  // namespace
}  // namespace certkv
