// Damage: bits flipped in the store's memory are found, repaired, or make the block vanish.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/core/status.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

constexpr int64_t kEverything = int64_t{1} << 40;

class StoreEngineCheckTest : public testing::Test {
 protected:
  // The first byte of a record of the block's layer 0.
  uint8_t* Scan(const BlockHandle& handle, int32_t layer = 0) {
    return worker_.device_memory->base() +
           harness_.device_layout.scan_offset(handle.device.slot, layer, 0, 0);
  }
  uint8_t* Detail(const BlockHandle& handle, int32_t layer = 0) {
    return worker_.device_memory->base() +
           harness_.device_layout.detail_offset(handle.device.slot, layer, 0, 0);
  }
  uint8_t* Keys(const BlockHandle& handle, int32_t layer = 0) {
    return worker_.backing_memory->base() +
           harness_.backing_layout.key_offset(handle.backing.slot, layer, 0);
  }
  uint8_t* Values(const BlockHandle& handle, int32_t layer = 0) {
    return worker_.backing_memory->base() +
           harness_.backing_layout.value_offset(handle.backing.slot, layer, 0);
  }
  BlockHandle HandleOf(int32_t chain, int32_t index) { return harness_.Info(chain, index).handle; }
  StoreCounters Counters() { return harness_.engine.GetStats().counters; }
  // A whole round of the scrubber.
  void ScrubRound() {
    while (harness_.engine.Scrub(kEverything) > 0) continue;
  }

  StoreHarness harness_;
  StoreHarness::Worker worker_ = harness_.Attach("worker");
};

TEST_F(StoreEngineCheckTest, AScrubRebuildsPlanesInPlace) {
  const auto sealed = harness_.Put(worker_, 1, 0, 3);
  ASSERT_TRUE(sealed.ok());
  const BlockHandle handle = sealed->blocks[1];
  Scan(handle)[100] ^= 1;
  Detail(handle, 1)[7] ^= 0x80;
  ASSERT_FALSE(harness_.IsReadable(worker_, handle));
  ScrubRound();
  EXPECT_TRUE(harness_.IsReadable(worker_, handle)) << "under the same handle, while it is leased";
  EXPECT_EQ(Counters().blocks_rebuilt, 1);
  EXPECT_EQ(Counters().blocks_lost, 0);
  EXPECT_EQ(Counters().blocks_scrubbed, 3);
  EXPECT_EQ(Counters().scrub_rounds, 1);
  harness_.engine.CheckInvariants();
}

TEST(DitheredCheckTest, AScrubRebuildsTheSameBytes) {
  CacheSpec spec = TinySpec();
  for (LayerSpec& layer : spec.layers) layer.key_format = KeyFormat::kK8D;
  StoreHarness harness(StoreShape{}, spec);
  StoreHarness::Worker worker = harness.Attach("worker");
  const auto sealed = harness.Put(worker, 1, 0, 2);
  ASSERT_TRUE(sealed.ok());
  uint8_t* scan = worker.device_memory->base() +
                  harness.device_layout.scan_offset(sealed->blocks[1].device.slot, 1, 0, 0);
  const auto bytes = static_cast<size_t>(harness.device_layout.tile_layout(1).scan_bytes);
  const std::vector<uint8_t> before(scan, scan + bytes);
  EXPECT_EQ(harness.engine.Scrub(kEverything) > 0, true);
  EXPECT_EQ(harness.engine.GetStats().counters.blocks_rebuilt, 0);
  scan[300] ^= 4;                              // a code
  scan[offsetof(TileHeader, key_check)] ^= 1;  // and what says whose dither it has
  ASSERT_FALSE(harness.IsReadable(worker, sealed->blocks[1]));
  while (harness.engine.Scrub(kEverything) > 0) continue;
  while (harness.engine.Scrub(kEverything) > 0) continue;
  EXPECT_EQ(harness.engine.GetStats().counters.blocks_rebuilt, 1);
  EXPECT_EQ(std::vector<uint8_t>(scan, scan + bytes), before);
}

TEST_F(StoreEngineCheckTest, ATileOfAnotherBlockIsRebuilt) {
  harness_.PutUnleased(worker_, 1, 0, 2);
  // Valid by its own checksums, in the wrong place.
  std::memcpy(Scan(HandleOf(1, 0)), Scan(HandleOf(1, 1)),
              static_cast<size_t>(harness_.device_layout.tile_layout(0).scan_bytes));
  std::memcpy(Detail(HandleOf(1, 0)), Detail(HandleOf(1, 1)),
              static_cast<size_t>(harness_.device_layout.tile_layout(0).detail_bytes));
  ScrubRound();
  EXPECT_TRUE(harness_.IsReadable(worker_, HandleOf(1, 0)));
  EXPECT_EQ(Counters().blocks_rebuilt, 1);
}

TEST_F(StoreEngineCheckTest, ADamagedOriginalVanishesFromLookupsWithAnEvent) {
  harness_.PutUnleased(worker_, 1, 0, 3);
  auto events = harness_.engine.events()->Subscribe(CacheId{}, {}, [] {});
  ASSERT_TRUE(events.ok());
  Values(HandleOf(1, 1), 1)[20] ^= 4;
  ScrubRound();
  EXPECT_EQ(Counters().blocks_lost, 1);
  const auto event = (*events)->Take();
  ASSERT_TRUE(event.ok() && event->has_value());
  EXPECT_EQ((*event)->kind, BlockEventKind::kLost);
  EXPECT_EQ((*event)->key, ChainKey(1, 1));
  EXPECT_TRUE(harness_.Info(1, 1).lost);
  const auto found = harness_.Lookup(worker_, 1, 3);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->blocks.size(), 1u);
  // It is said once, and it may be sealed again.
  ScrubRound();
  EXPECT_FALSE((*events)->Take()->has_value());
  EXPECT_EQ(Counters().blocks_lost, 1);
  const auto again = harness_.Put(worker_, 1, 1, 1);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(harness_.Lookup(worker_, 1, 3)->blocks.size(), 3u);
  EXPECT_TRUE(harness_.IsReadable(worker_, again->blocks[0]));
}

TEST_F(StoreEngineCheckTest, PlanesOfADamagedOriginalAreNotRebuiltFromIt) {
  const auto sealed = harness_.Put(worker_, 1, 0, 1);
  ASSERT_TRUE(sealed.ok());
  const BlockHandle handle = sealed->blocks[0];
  const std::vector<uint8_t> before(Scan(handle), Scan(handle) + 64);
  Scan(handle)[3] ^= 1;
  Keys(handle)[0] ^= 1;
  ScrubRound();
  EXPECT_EQ(Counters().blocks_rebuilt, 0);
  EXPECT_EQ(Counters().blocks_lost, 1);
  EXPECT_EQ(Scan(handle)[3] ^ 1, before[3]) << "left as it was";
}

TEST_F(StoreEngineCheckTest, FetchOriginalsRepairsPlanesAndSaysWhatIsLost) {
  const auto sealed = harness_.Put(worker_, 1, 0, 2);
  ASSERT_TRUE(sealed.ok());
  Scan(sealed->blocks[0])[70] ^= 2;
  const auto keys = ChainKeys(1, 2);
  const auto fetched = harness_.engine.FetchOriginals(worker_.session, sealed->lease, keys);
  ASSERT_TRUE(fetched.ok()) << fetched.status();
  EXPECT_TRUE(harness_.IsReadable(worker_, (*fetched)[0]));
  EXPECT_EQ(Counters().blocks_rebuilt, 1);
  Keys(sealed->blocks[1])[70] ^= 2;
  const auto lost = harness_.engine.FetchOriginals(worker_.session, sealed->lease, keys);
  EXPECT_EQ(ReasonOf(lost.status()), "ORIGINAL_LOST");
  EXPECT_EQ(harness_.engine.LookupAndLease(worker_.session, keys, 0)->blocks.size(), 1u);
}

TEST_F(StoreEngineCheckTest, ScrubbingLeavesTheOrderOfEvictionAlone) {
  for (int32_t chain = 0; chain < 16; ++chain) harness_.PutUnleased(worker_, chain, 0, 1);
  ScrubRound();
  harness_.PutUnleased(worker_, 100, 0, 1);
  EXPECT_EQ(harness_.CountPrefix(0, 1), 0) << "the oldest goes, although it was read last";
  EXPECT_EQ(harness_.CountPrefix(1, 1), 1);
}

TEST_F(StoreEngineCheckTest, ScrubReadsAboutWhatItMayAndGoesOn) {
  for (int32_t chain = 0; chain < 4; ++chain) harness_.PutUnleased(worker_, chain, 0, 1);
  const int64_t block_bytes =
      harness_.device_layout.slot_bytes() + harness_.backing_layout.slot_bytes();
  EXPECT_EQ(harness_.engine.Scrub(1), block_bytes) << "at least one block";
  EXPECT_EQ(harness_.engine.Scrub(2 * block_bytes), 2 * block_bytes);
  EXPECT_EQ(harness_.engine.Scrub(kEverything), block_bytes);
  EXPECT_EQ(harness_.engine.Scrub(kEverything), 0) << "the round ends";
  EXPECT_EQ(harness_.engine.Scrub(1), block_bytes);
  EXPECT_EQ(Counters().bytes_scrubbed, 5 * block_bytes);
}

TEST_F(StoreEngineCheckTest, ADemotedBlocksOriginalsAreScrubbedToo) {
  for (int32_t chain = 0; chain < 12; ++chain) harness_.PutUnleased(worker_, chain, 0, 1);
  ASSERT_FALSE(HandleOf(0, 0).device.present());
  Keys(HandleOf(0, 0))[9] ^= 1;
  ScrubRound();
  EXPECT_TRUE(harness_.Info(0, 0).lost);
}

// One block of the store, and where each of its planes lies.
struct Region {
  std::string name;
  uint8_t* begin;
  int64_t bytes;
};

// 75,000 flips of quantized bits and 25,000 of original ones: each is found, and what is served
// afterwards is what was sealed, or nothing.
TEST_F(StoreEngineCheckTest, AHundredThousandFlippedBitsGiveNoWrongBytes) {
  constexpr int kFlips = 100'000;
  harness_.PutUnleased(worker_, 1, 0, 1);
  const TileLayout& layout = harness_.device_layout.tile_layout(0);
  std::mt19937 random(20260301);
  int64_t rebuilt = 0;
  int64_t lost = 0;
  for (int i = 0; i < kFlips; ++i) {
    const BlockHandle handle = HandleOf(1, 0);
    const auto layer = static_cast<int32_t>(random() % 2);
    const bool is_original = i % 4 == 3;
    const Region quantized[] = {
        {"header", Scan(handle, layer), 64},
        {"scales and zeros", Scan(handle, layer) + layout.scale_offset,
         layout.witness_offset - layout.scale_offset},
        {"coarse", Scan(handle, layer) + layout.coarse_offset, 4 * layout.coarse_bytes},
        {"detail", Detail(handle, layer), layout.detail_bytes},
    };
    const int64_t half = int64_t{2} * harness_.spec.block_tokens * harness_.spec.head_dim;
    const Region originals[] = {{"keys", Keys(handle, layer), half},
                                {"values", Values(handle, layer), half}};
    const Region& region = is_original ? originals[random() % 2] : quantized[random() % 4];
    uint8_t* byte = region.begin + random() % region.bytes;
    *byte ^= static_cast<uint8_t>(1 << random() % 8);
    ScrubRound();
    if (is_original) {
      ++lost;
      ASSERT_EQ(harness_.Lookup(worker_, 1, 1)->blocks.size(), 0u) << region.name << ", flip " << i;
      harness_.PutUnleased(worker_, 1, 0, 1);
    } else {
      ++rebuilt;
      // Every plane, against the originals that follow from the key, every so often; the bytes of
      // the flip each time.
      if (i % 64 == 0) {
        ASSERT_TRUE(harness_.IsReadable(worker_, handle)) << region.name << ", flip " << i;
      }
    }
    const StoreCounters counters = Counters();
    ASSERT_EQ(counters.blocks_rebuilt, rebuilt) << region.name << ", flip " << i;
    ASSERT_EQ(counters.blocks_lost, lost) << region.name << ", flip " << i;
  }
  EXPECT_TRUE(harness_.IsReadable(worker_, HandleOf(1, 0)));
  harness_.engine.CheckInvariants();
}

}  // namespace
}  // namespace certkv::kvstore
