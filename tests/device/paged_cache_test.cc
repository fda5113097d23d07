// Rows out of an engine's pages: every order of axes, dtype and page size, by the host and by the
// kernel (host memory is the device), held against a loop over single numbers.
#include "clients/cpp/paged_cache.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"
#include "kernels/cuda/on_cpu/sharing/injected_failures.h"
#include "kernels/ops/device.h"
#include "tests/device/paged_engine.h"

namespace certkv {
namespace {

using client::PagedCache;
using client::SlotRows;
using cuda_on_cpu::InjectFailure;
using cuda_on_cpu::RuntimeCall;
using ::testing::HasSubstr;

constexpr uint8_t kUntouched = 0xa5;
constexpr int32_t kSlots = 4;

DeviceRuntime* HostMemoryDevice() {
  CERTKV_CHECK(cuda::UseDevice().ok(), "host memory is a device");
  return RegisteredDeviceRuntime();
}

CacheSpec Spec(PagedDtype dtype, int32_t block_tokens = 64, int32_t value_dim = 64) {
  CacheSpec spec;
  spec.model = "paged";
  spec.kv_head_count = 3;
  spec.group_size = 2;
  spec.head_dim = 64;
  spec.value_dim = value_dim;
  spec.block_tokens = block_tokens;
  spec.rope_pairing = RopePairing::kNone;
  spec.logit_scale = 0.125f;
  spec.original_dtype = dtype == PagedDtype::kBf16 ? OriginalDtype::kBf16 : OriginalDtype::kF16;
  spec.layers.resize(2);
  return spec;
}

// Slots of a staging slab, and what is in them.
class Slots {
 public:
  explicit Slots(const CacheSpec& spec)
      : layout_(spec, SlabKind::kStaging, kSlots),
        memory_(layout_.slab_bytes() + 64, kUntouched),
        base_(memory_.data() + (64 - reinterpret_cast<uintptr_t>(memory_.data()) % 64)) {}

  const SlabLayout& layout() const { return layout_; }
  uint8_t* base() { return base_; }

  // Slots hold what the engine has of `rows`, and everything else is as it was.
  void ExpectRows(const PagedEngine& engine, const std::vector<SlotRows>& rows) {
    std::vector<uint8_t> expected(memory_.size(), kUntouched);
    const int64_t shift = base_ - memory_.data();
    const CacheSpec& spec = engine.spec();
    for (const SlotRows& slot : rows) {
      for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
        for (int32_t head = 0; head < spec.kv_head_count; ++head) {
          for (int part = 0; part < 2; ++part) {
            const int64_t at = part == 0 ? layout_.key_offset(slot.slot, layer, head)
                                         : layout_.value_offset(slot.slot, layer, head);
            const int32_t channels = part == 0 ? spec.head_dim : spec.value_dim;
            auto* const out = reinterpret_cast<uint16_t*>(expected.data() + shift + at);
            for (int32_t token = 0; token < slot.token_count; ++token) {
              for (int32_t c = 0; c < channels; ++c) {
                out[token * channels + c] =
                    engine.OriginalAt(layer, part, slot.first_token + token, head, c);
              }
            }
          }
        }
      }
    }
    EXPECT_TRUE(memory_ == expected);
  }
  void ExpectUntouched() {
    EXPECT_EQ(std::count(memory_.begin(), memory_.end(), kUntouched),
              static_cast<int64_t>(memory_.size()));
  }

 private:
  SlabLayout layout_;
  std::vector<uint8_t> memory_;
  uint8_t* base_;
};

class PagedCacheTest : public ::testing::Test {
 protected:
  ~PagedCacheTest() override {
    cuda_sharing::InjectFailures("");
    RegisterDeviceRuntime(nullptr);
    RegisterDevice(nullptr);
  }
};

constexpr PagedDtype kDtypes[] = {PagedDtype::kF16, PagedDtype::kBf16, PagedDtype::kFp8E4m3};

// Blocks in the middle of a sequence and a tail, out of an engine of that shape.
void ExpectCopies(const PagedEngineShape& shape, int32_t block_tokens, DeviceRuntime* runtime) {
  SCOPED_TRACE(absl::StrCat(shape.axes, " dtype ", static_cast<int>(shape.dtype), " pages of ",
                            shape.page_tokens, " blocks of ", block_tokens));
  const bool has_parts = absl::StrContains(shape.axes, "K");
  const CacheSpec spec = Spec(shape.dtype, block_tokens, has_parts ? 64 : 80);
  PagedEngine engine(spec, shape, 7, runtime);
  auto cache = PagedCache::Create(spec, engine.options);
  ASSERT_TRUE(cache.ok()) << cache.status();
  EXPECT_EQ((*cache)->page_tokens(), shape.page_tokens);
  Slots slots(spec);
  const std::vector<SlotRows> rows = {
      {3, 0, block_tokens}, {0, 2 * block_tokens, block_tokens}, {1, 3 * block_tokens, 37}};
  ASSERT_TRUE((*cache)->CheckTable(engine.pages(), 0, 3 * block_tokens + 37).ok());
  const absl::Status copied =
      (*cache)->CopyRows(engine.pages(), rows, slots.layout(), slots.base());
  ASSERT_TRUE(copied.ok()) << copied;
  slots.ExpectRows(engine, rows);
}

TEST_F(PagedCacheTest, EveryOrderDtypeAndPageSizeGivesTheNumbersOfALoop) {
  for (const char* axes : {"KBTHD", "BKTHD", "KBHTD", "BKHTD", "BTHD", "BHTD", "LKBTHD", "BLKHTD",
                           "LBTHD", "BHDT", "BHDTD", "BHTDTD", "BTDH", "BHE", "BHKE"}) {
    for (const PagedDtype dtype : kDtypes) {
      for (const int32_t page_tokens : {8, 16, 24, 32, 64, 128}) {
        ExpectCopies({axes, dtype, page_tokens, 240 / page_tokens + 2}, 64, nullptr);
      }
    }
    ExpectCopies({axes, PagedDtype::kBf16, 16, 30}, 128, nullptr);
  }
}

TEST_F(PagedCacheTest, KernelGivesTheNumbersOfALoop) {
  DeviceRuntime* const device = HostMemoryDevice();
  for (const char* axes :
       {"KBTHD", "BKTHD", "KBHTD", "BKHTD", "BTHD", "BHTD", "LKBTHD", "BLKHTD", "LBTHD", "BHDTD"}) {
    for (const PagedDtype dtype : kDtypes) {
      for (const int32_t page_tokens : {16, 24, 128}) {
        ExpectCopies({axes, dtype, page_tokens, 240 / page_tokens + 2}, 64, device);
      }
    }
  }
}

TEST_F(PagedCacheTest, OrderThatNoKernelHasIsRefusedAndNothingIsWritten) {
  DeviceRuntime* const device = HostMemoryDevice();
  for (const char* axes : {"BHDT", "BHTDTD", "BHE"}) {
    const CacheSpec spec = Spec(PagedDtype::kF16);
    PagedEngine engine(spec, {axes}, 8, device);
    auto cache = PagedCache::Create(spec, engine.options);
    ASSERT_TRUE(cache.ok()) << cache.status();
    Slots slots(spec);
    const absl::Status status =
        (*cache)->CopyRows(engine.pages(), {{0, 0, 64}}, slots.layout(), slots.base());
    EXPECT_EQ(ReasonOf(status), "PAGED_CACHE_INVALID") << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("multiples of 16 bytes"));
    slots.ExpectUntouched();
  }
}

TEST_F(PagedCacheTest, DevicePagesThatAreMisalignedAreRefused) {
  DeviceRuntime* const device = HostMemoryDevice();
  const CacheSpec spec = Spec(PagedDtype::kF16);
  for (int kind = 0; kind < 2; ++kind) {
    PagedEngine engine(spec, {"BTHD"}, 9, device);
    for (PagedTensor& tensor : engine.options.tensors) {
      tensor.shape[0] = 4;
      if (kind == 0) tensor.data = static_cast<const uint8_t*>(tensor.data) + 2;
      if (kind == 1) tensor.strides[0] += 4;
    }
    auto cache = PagedCache::Create(spec, engine.options);
    ASSERT_TRUE(cache.ok()) << cache.status();
    Slots slots(spec);
    const absl::Status status =
        (*cache)->CopyRows({0, 1, 2, 3}, {{0, 0, 64}}, slots.layout(), slots.base());
    EXPECT_EQ(ReasonOf(status), "PAGED_CACHE_INVALID") << status;
    slots.ExpectUntouched();
  }
}

TEST_F(PagedCacheTest, AddressesOfAnotherDeviceOrOfTheHostAreRefused) {
  DeviceRuntime* const device = HostMemoryDevice();
  const CacheSpec spec = Spec(PagedDtype::kF16);
  PagedEngine on_host(spec, {"BTHD"}, 10);
  on_host.options.runtime = device;
  const absl::Status host = PagedCache::Create(spec, on_host.options).status();
  EXPECT_EQ(ReasonOf(host), "DEVICE_NOT_HERE") << host;
  EXPECT_THAT(std::string(host.message()), HasSubstr("no memory of device 0 but of -1"));
  PagedEngine on_device(spec, {"BTHD"}, 10, device);
  on_device.options.device = 1;
  EXPECT_EQ(ReasonOf(PagedCache::Create(spec, on_device.options).status()), "DEVICE_NOT_HERE");
  on_device.options.device = 0;
  EXPECT_TRUE(PagedCache::Create(spec, on_device.options).ok());
  // The first number of the tensor at the highest address is the device's, the last is nobody's.
  PagedTensor& highest = *std::max_element(
      on_device.options.tensors.begin(), on_device.options.tensors.end(),
      [](const PagedTensor& a, const PagedTensor& b) { return std::less<>()(a.data, b.data); });
  highest.allocation = nullptr;
  highest.strides[2] = int64_t{1} << 34;
  const absl::Status beyond = PagedCache::Create(spec, on_device.options).status();
  EXPECT_EQ(ReasonOf(beyond), "DEVICE_NOT_HERE") << beyond;
  cuda_sharing::InjectFailures("cudaPointerGetAttributes=1");
  PagedEngine other(spec, {"BTHD"}, 10, device);
  EXPECT_EQ(ReasonOf(PagedCache::Create(spec, other.options).status()), "DEVICE_FAILED");
}

TEST_F(PagedCacheTest, WithoutADeviceItsPagesAreRefused) {
  DeviceRuntime* const device = HostMemoryDevice();
  const CacheSpec spec = Spec(PagedDtype::kF16);
  PagedEngine engine(spec, {"KBTHD"}, 11, device);
  auto cache = PagedCache::Create(spec, engine.options);
  ASSERT_TRUE(cache.ok()) << cache.status();
  RegisterDevice(nullptr);
  Slots slots(spec);
  EXPECT_EQ(
      ReasonOf((*cache)->CopyRows(engine.pages(), {{0, 0, 64}}, slots.layout(), slots.base())),
      "DEVICE_MISSING");
  slots.ExpectUntouched();
}

TEST_F(PagedCacheTest, EveryCallOfTheDeviceThatFailsIsAnError) {
  DeviceRuntime* const device = HostMemoryDevice();
  const CacheSpec spec = Spec(PagedDtype::kFp8E4m3);
  PagedEngine engine(spec, {"KBTHD", PagedDtype::kFp8E4m3}, 12, device);
  auto cache = PagedCache::Create(spec, engine.options);
  ASSERT_TRUE(cache.ok()) << cache.status();
  Slots slots(spec);
  for (const RuntimeCall call : {RuntimeCall::kAllocate, RuntimeCall::kCopy, RuntimeCall::kLaunch,
                                 RuntimeCall::kSynchronize}) {
    InjectFailure(call, 0, cudaErrorMemoryAllocation);  // whatever it is
    const absl::Status status =
        (*cache)->CopyRows(engine.pages(), {{0, 0, 64}}, slots.layout(), slots.base());
    EXPECT_FALSE(status.ok()) << static_cast<int>(call);
    EXPECT_THAT(ReasonOf(status), ::testing::StartsWith("DEVICE_"));
  }
  EXPECT_TRUE((*cache)->CopyRows(engine.pages(), {{0, 0, 64}}, slots.layout(), slots.base()).ok());
}

TEST_F(PagedCacheTest, DescriptionsThatAreNotTheSpecsAreRefusedByName) {
  struct BadCache {
    const char* name;
    void (*change)(CacheSpec* spec, client::PagedCacheOptions* options);
    const char* reason;
    const char* message;
  };
  const BadCache bad[] = {
      {"heads", [](auto* spec, auto*) { spec->kv_head_count = 4; }, "PAGED_CACHE_INVALID",
       "has 3 KV heads, the spec has 4"},
      {"channels", [](auto* spec, auto*) { spec->head_dim = 80; }, "PAGED_CACHE_INVALID",
       "has 64 channels of keys, the spec has 80"},
      {"value channels", [](auto* spec, auto*) { spec->value_dim = 80; }, "PAGED_CACHE_INVALID",
       "has 64 channels of values, the spec has 80"},
      {"layers", [](auto* spec, auto*) { spec->layers.resize(3); }, "PAGED_CACHE_INVALID",
       "has 2 tensors, must have 3"},
      {"dtype", [](auto* spec, auto*) { spec->original_dtype = OriginalDtype::kBf16; },
       "PAGED_CACHE_INVALID", "cache is float16"},
      {"scales", [](auto*, auto* options) { options->key_scales = {1}; }, "PAGED_CACHE_INVALID",
       "scales are for FP8"},
      {"spec", [](auto* spec, auto*) { spec->group_size = 0; }, "CACHE_SPEC_INVALID", "group_size"},
      {"pages", [](auto*, auto* options) { options->tensors[1].shape[1] = 5; },
       "PAGED_CACHE_INVALID", "5 pages of 16 tokens, the first has 24"},
      {"page tokens", [](auto*, auto* options) { options->tensors[1].shape[2] = 8; },
       "PAGED_CACHE_INVALID", "different orders"},
      {"one memory", [](auto*, auto* options) { options->tensors[1] = options->tensors[0]; },
       "PAGED_CACHE_INVALID", "plane 0 and plane 2"},
      {"page stride", [](auto*, auto* options) { options->tensors[1].strides[1] -= 64; },
       "PAGED_CACHE_INVALID", "plane 2 and plane 2"},
      {"values over keys", [](auto*, auto* options) { options->tensors[0].strides[0] = 192; },
       "PAGED_CACHE_INVALID", "plane 0 and plane 1"},
      {"beyond its end", [](auto*, auto* options) { options->tensors[0].allocation_bytes -= 1; },
       "PAGED_CACHE_INVALID", "outside its allocation"},
      {"null", [](auto*, auto* options) { options->tensors[0].data = nullptr; },
       "PAGED_CACHE_INVALID", "is at 0x0"},
      {"other axes", [](auto*, auto* options) { options->axes = "KBHTD"; }, "PAGED_CACHE_INVALID",
       "has 16 KV heads, the spec has 3"},
  };
  for (const BadCache& one : bad) {
    SCOPED_TRACE(one.name);
    CacheSpec spec = Spec(PagedDtype::kF16);
    PagedEngine engine(spec, {}, 13);
    ASSERT_TRUE(PagedCache::Create(spec, engine.options).ok());
    one.change(&spec, &engine.options);
    const absl::Status status = PagedCache::Create(spec, engine.options).status();
    EXPECT_EQ(ReasonOf(status), one.reason) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(one.message));
  }
}

TEST_F(PagedCacheTest, ScalesThatAreMissingNaNOrInexactAreRefused) {
  const CacheSpec spec = Spec(PagedDtype::kFp8E4m3);
  const auto reason_of = [&](std::vector<float> keys, std::vector<float> values) {
    PagedEngine engine(spec, {"KBTHD", PagedDtype::kFp8E4m3}, 14);
    engine.options.key_scales = std::move(keys);
    engine.options.value_scales = std::move(values);
    return ReasonOf(PagedCache::Create(spec, engine.options).status());
  };
  EXPECT_EQ(reason_of({1}, {0.5f}), "");
  EXPECT_EQ(reason_of({1, 2}, {0.5f}), "");
  EXPECT_EQ(reason_of({}, {0.5f}), "PAGED_CACHE_INVALID");
  EXPECT_EQ(reason_of({1, 1, 1}, {0.5f}), "PAGED_CACHE_INVALID");
  EXPECT_EQ(reason_of({1}, {std::numeric_limits<float>::quiet_NaN()}), "FP8_SCALE_INVALID");
  EXPECT_EQ(reason_of({0}, {1}), "FP8_SCALE_INVALID");
  EXPECT_EQ(reason_of({1, 0.0123f}, {1}), "FP8_SCALE_INEXACT");
}

TEST_F(PagedCacheTest, OrdersThatLeaveTheirPageAreRefused) {
  const CacheSpec spec = Spec(PagedDtype::kF16);
  for (int kind = 0; kind < 3; ++kind) {
    PagedEngine engine(spec, {"BHE"}, 15);
    PageOrder& order = engine.options.value_order;
    if (kind == 0) order.token_places[3] += 1024;
    if (kind == 1) order.channel_places[3] = -1;
    if (kind == 2) order = {};
    const absl::Status status = PagedCache::Create(spec, engine.options).status();
    EXPECT_EQ(ReasonOf(status), "PAGED_CACHE_INVALID") << kind;
    EXPECT_THAT(std::string(status.message()), HasSubstr("order of values"));
  }
}

TEST_F(PagedCacheTest, BlockTablesThatAreShortOrNameNoPageAreRefused) {
  const CacheSpec spec = Spec(PagedDtype::kF16);
  PagedEngine engine(spec, {}, 16);
  auto cache = PagedCache::Create(spec, engine.options);
  ASSERT_TRUE(cache.ok()) << cache.status();
  const auto check = [&](std::vector<int32_t> pages, int64_t first, int64_t count) {
    const absl::Status status = (*cache)->CheckTable(pages, first, count);
    EXPECT_TRUE(status.ok() || ReasonOf(status) == "BLOCK_TABLE_INVALID") << status;
    return std::string(status.message());
  };
  EXPECT_EQ(check({0, 23}, 0, 32), "");
  EXPECT_EQ(check({0, 23, -1}, 0, 32), "");  // an entry that isn't read
  EXPECT_EQ(check({-1, 23}, 16, 16), "");
  EXPECT_THAT(check({0, 23}, 0, 33), HasSubstr("tokens 0 to 32, asked for 33 from 0"));
  EXPECT_THAT(check({0, 23}, 17, 16), HasSubstr("asked for 16 from 17"));
  EXPECT_THAT(check({0, 23}, -1, 16), HasSubstr("asked for 16 from -1"));
  EXPECT_THAT(check({}, 0, 1), HasSubstr("a block table of 0 pages"));
  EXPECT_THAT(check({0, 24}, 0, 17), HasSubstr("entry 1 of a block table is page 24"));
  EXPECT_THAT(check({-1, 0}, 15, 1), HasSubstr("entry 0 of a block table is page -1"));
}

}  // namespace
}  // namespace certkv
