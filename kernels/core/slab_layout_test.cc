#include "kernels/core/slab_layout.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

// Two formats, two heads, two tiles a block; d and d_v differ.
CacheSpec SmallSpec() {
  CacheSpec spec;
  spec.model = "slab";
  spec.kv_head_count = 2;
  spec.group_size = 1;
  spec.head_dim = 80;
  spec.value_dim = 64;
  spec.block_tokens = 128;
  spec.rotary_dim = 80;
  spec.logit_scale = 0.125f;
  spec.layers = {
      {.key_format = KeyFormat::kK8, .value_format = ValueFormat::kV4},
      {.key_format = KeyFormat::kFp8E4m3, .value_format = ValueFormat::kV8, .witness_bands = 4}};
  return spec;
}

using Extent = std::pair<int64_t, int64_t>;  // [begin, end)

// Checks that `extents` lie in [first, end) one behind the other without a hole, aligned to 64.
void ExpectTiling(std::vector<Extent> extents, int64_t first, int64_t end) {
  std::sort(extents.begin(), extents.end());
  int64_t filled = first;
  for (const auto& [begin, extent_end] : extents) {
    EXPECT_EQ(begin, filled);
    EXPECT_EQ(begin % kPlaneAlignment, 0);
    filled = extent_end;
  }
  EXPECT_EQ(filled, end);
}

TEST(SlabLayoutTest, DeviceRecordsTileTheSlab) {
  const CacheSpec spec = SmallSpec();
  for (const int32_t slots : {1, 3, 512, 513}) {
    const SlabLayout layout(spec, SlabKind::kDevice, slots);
    std::vector<Extent> extents;
    for (int32_t slot = 0; slot < slots; ++slot) {
      for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
        for (int32_t head = 0; head < spec.kv_head_count; ++head) {
          for (int32_t tile = 0; tile < 2; ++tile) {
            const int64_t scan = layout.scan_offset(slot, layer, head, tile);
            const int64_t detail = layout.detail_offset(slot, layer, head, tile);
            extents.emplace_back(scan, scan + layout.tile_layout(layer).scan_bytes);
            extents.emplace_back(detail, detail + layout.tile_layout(layer).detail_bytes);
          }
        }
      }
    }
    const int64_t first = 4096 + (slots > 512 ? 8192 : 4096);
    ExpectTiling(extents, first, first + slots * layout.slot_bytes());
    EXPECT_EQ(layout.slab_bytes() % kSlabPageBytes, 0);
    EXPECT_GE(layout.slab_bytes(), first + slots * layout.slot_bytes());
    EXPECT_LT(layout.slab_bytes(), first + slots * layout.slot_bytes() + kSlabPageBytes);
    EXPECT_LE(layout.generation_offset(slots - 1) + 8, first) << "generations end before records";
  }
}

TEST(SlabLayoutTest, OriginalsTileTheSlab) {
  const CacheSpec spec = SmallSpec();
  for (const SlabKind kind : {SlabKind::kBacking, SlabKind::kStaging}) {
    const SlabLayout layout(spec, kind, 5);
    std::vector<Extent> extents;
    for (int32_t slot = 0; slot < 5; ++slot) {
      for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
        for (int32_t head = 0; head < spec.kv_head_count; ++head) {
          const int64_t key = layout.key_offset(slot, layer, head);
          const int64_t value = layout.value_offset(slot, layer, head);
          extents.emplace_back(key, key + 2 * OriginalKeyBytes(spec));
          extents.emplace_back(value, value + 2 * OriginalValueBytes(spec));
        }
      }
    }
    ExpectTiling(extents, 8192, 8192 + 5 * layout.slot_bytes());
  }
}

TEST(SlabLayoutTest, NeighbouringSlotsAreReadInAddressOrder) {
  const SlabLayout layout(SmallSpec(), SlabKind::kDevice, 4);
  const int64_t scan_bytes = layout.tile_layout(1).scan_bytes;
  EXPECT_EQ(layout.scan_offset(2, 1, 1, 1) - layout.scan_offset(2, 1, 1, 0), scan_bytes);
  EXPECT_EQ(layout.scan_offset(3, 1, 1, 0) - layout.scan_offset(2, 1, 1, 1), scan_bytes);
  const int64_t detail_bytes = layout.tile_layout(1).detail_bytes;
  EXPECT_EQ(layout.detail_offset(3, 1, 1, 0) - layout.detail_offset(2, 1, 1, 1), detail_bytes);
}

TEST(SlabLayoutTest, SlotBytesIsWhatOneMoreSlotCosts) {
  const CacheSpec spec = SmallSpec();
  for (const SlabKind kind : {SlabKind::kDevice, SlabKind::kBacking, SlabKind::kStaging}) {
    const SlabLayout layout(spec, kind, 1);
    EXPECT_EQ(SlabLayout::SlotBytes(spec, kind), layout.slot_bytes());
    const SlabLayout more(spec, kind, 1 + 4096);
    // The words of 4096 more generations are 32768 bytes; slots of 64-byte units round to pages.
    EXPECT_EQ(more.slab_bytes() - layout.slab_bytes(), 4096 * layout.slot_bytes() + 32768);
  }
}

TEST(SlabLayoutTest, SlabsOverFourGibibytesDoNotOverflow) {
  CacheSpec spec = SmallSpec();
  spec.kv_head_count = 256;
  spec.head_dim = 256;
  spec.value_dim = 256;
  const SlabLayout device(spec, SlabKind::kDevice, 1 << 20);
  const int64_t last = device.detail_offset((1 << 20) - 1, 1, 255, 1);
  EXPECT_GT(last, int64_t{1} << 40);
  EXPECT_LE(last + device.tile_layout(1).detail_bytes, device.slab_bytes());
  const SlabLayout backing(spec, SlabKind::kBacking, 1 << 20);
  EXPECT_LE(backing.value_offset((1 << 20) - 1, 1, 255) + 2 * OriginalValueBytes(spec),
            backing.slab_bytes());
}

TEST(SlabLayoutTest, AcceptsItsOwnHeader) {
  const SlabLayout layout(SmallSpec(), SlabKind::kBacking, 3);
  std::vector<uint8_t> page(4096);
  layout.WriteHeader(page.data());
  EXPECT_TRUE(layout.CheckHeader(page.data(), layout.slab_bytes()).ok());
  EXPECT_EQ(std::memcmp(page.data(), "ECKSLAB1", 8), 0);
}

TEST(SlabLayoutTest, RefusalOfAForeignHeaderNamesTheField) {
  const SlabLayout layout(SmallSpec(), SlabKind::kBacking, 3);
  const std::vector<std::pair<const char*, std::function<void(SlabHeader&)>>> edits = {
      {"magic", [](SlabHeader& h) { h.magic ^= 1; }},
      {"version", [](SlabHeader& h) { h.version = 2; }},
      {"kind", [](SlabHeader& h) { h.kind = SlabKind::kDevice; }},
      {"spec_digest", [](SlabHeader& h) { h.spec_digest[31] ^= 1; }},
      {"slot_count", [](SlabHeader& h) { h.slot_count = 4; }},
      {"slab_bytes", [](SlabHeader& h) { h.slab_bytes += 4096; }}};
  for (const auto& [field, apply] : edits) {
    SlabHeader header = {};
    layout.WriteHeader(reinterpret_cast<uint8_t*>(&header));
    apply(header);
    const absl::Status status =
        layout.CheckHeader(reinterpret_cast<const uint8_t*>(&header), layout.slab_bytes());
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << field;
    EXPECT_EQ(ReasonOf(status), "SLAB_MISMATCH");
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string("field ") + field + " is "));
  }
}

TEST(SlabLayoutTest, ADitherSecretIsWhereKeysAreDithered) {
  CacheSpec spec = SmallSpec();
  std::vector<uint8_t> page(4096);
  const auto check = [&page](const SlabLayout& layout) {
    return layout.CheckHeader(page.data(), layout.slab_bytes());
  };
  // Other formats have none, whatever is given.
  SlabLayout(spec, SlabKind::kDevice, 3, 77).WriteHeader(page.data());
  EXPECT_TRUE(check(SlabLayout(spec, SlabKind::kDevice, 3)).ok());
  page[64] = 1;
  EXPECT_EQ(ReasonOf(check(SlabLayout(spec, SlabKind::kDevice, 3))), "SLAB_MISMATCH");

  spec.layers[1] = {.key_format = KeyFormat::kK8D, .value_format = ValueFormat::kV8};
  SlabLayout(spec, SlabKind::kDevice, 3, 77).WriteHeader(page.data());
  SlabLayout reader(spec, SlabKind::kDevice, 3);
  ASSERT_TRUE(check(reader).ok());
  reader.AdoptDitherSecret(page.data());
  EXPECT_EQ(reader.tile_layout(0).dither_secret, 0u);
  EXPECT_EQ(reader.tile_layout(1).dither_secret, 77u);
  SlabLayout(spec, SlabKind::kBacking, 3, 77).WriteHeader(page.data());
  EXPECT_TRUE(check(SlabLayout(spec, SlabKind::kBacking, 3)).ok()) << "originals need none";

  SlabLayout(spec, SlabKind::kDevice, 3, 0).WriteHeader(page.data());
  const absl::Status missing = check(SlabLayout(spec, SlabKind::kDevice, 3));
  EXPECT_EQ(ReasonOf(missing), "SLAB_MISMATCH");
  EXPECT_THAT(std::string(missing.message()), HasSubstr("dither_secret is 0"));
}

TEST(SlabLayoutTest, RefusesAMappingOfAnotherSizeWithoutReadingIt) {
  const SlabLayout layout(SmallSpec(), SlabKind::kStaging, 3);
  EXPECT_EQ(ReasonOf(layout.CheckHeader(nullptr, 63)), "SLAB_MISMATCH");
  EXPECT_EQ(ReasonOf(layout.CheckHeader(nullptr, layout.slab_bytes() - 1)), "SLAB_MISMATCH");
}

TEST(SlabLayoutTest, GenerationMatchesOnlyItsOwnSlotAndValue) {
  const SlabLayout layout(SmallSpec(), SlabKind::kDevice, 4);
  std::vector<uint64_t> words(layout.slab_bytes() / 8);
  auto* base = reinterpret_cast<uint8_t*>(words.data());
  GenerationAt(base, layout, 2).store(6);
  EXPECT_EQ(words[(4096 + 16) / 8], 6u);
  EXPECT_TRUE(GenerationMatches(base, layout, {.slot = 2, .generation = 6}));
  EXPECT_TRUE(GenerationStillMatches(base, layout, {.slot = 2, .generation = 6}));
  for (const SlotRef& stale : {SlotRef{2, 4}, SlotRef{2, 7}, SlotRef{1, 6}, SlotRef{3, 6}}) {
    EXPECT_FALSE(GenerationMatches(base, layout, stale));
    EXPECT_FALSE(GenerationStillMatches(base, layout, stale));
  }
}

}  // namespace
}  // namespace certkv
