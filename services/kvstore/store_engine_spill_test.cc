// Blocks that memory has no room for: they go down, come back whole, or are not found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/tile_checksum.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/fake_spill_store.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

class StoreEngineSpillTest : public testing::Test {
 protected:
  StoreEngineSpillTest() { Start(); }

  // A store on what is on the disk; the one before is gone as by kill -9.
  void Start() {
    harness_.reset();
    tier_ = std::make_unique<SpillTier>(std::make_unique<FakeSpillStore>(&disk_),
                                        SpillLimits{.size_bytes = disk_bytes_}, &clock_);
    ASSERT_TRUE(tier_->Load().ok());
    StoreShape shape;
    shape.device_slots = slots_ / 2;
    shape.backing_slots = slots_;
    shape.config = config_;
    shape.spill = tier_.get();
    harness_ = std::make_unique<StoreHarness>(shape, spec_);
    worker_ = harness_->Attach("worker");
  }
  StoreHarness& store() { return *harness_; }
  StoreCounters Counters() { return store().engine.GetStats().counters; }
  // Looks blocks up and reads them all; how many there were.
  int32_t ReadAll(int32_t chain, int32_t count) {
    auto found = store().engine.LookupAndLease(worker_.session, ChainKeys(chain, count), 0);
    EXPECT_TRUE(found.ok()) << found.status();
    if (!found.ok() || found->blocks.empty()) return 0;
    for (const BlockHandle& handle : found->blocks) {
      EXPECT_TRUE(store().IsReadable(worker_, handle));
      EXPECT_TRUE(handle.device.present());
    }
    EXPECT_TRUE(store().engine.ReleaseLease(worker_.session, found->lease).ok());
    return static_cast<int32_t>(found->blocks.size());
  }

  CacheSpec spec_ = TinySpec();
  KvStoreConfig config_;
  int32_t slots_ = 8;
  int64_t disk_bytes_ = int64_t{1} << 30;
  FakeClock clock_;
  FakeDisk disk_;
  std::unique_ptr<SpillTier> tier_;
  std::unique_ptr<StoreHarness> harness_;
  StoreHarness::Worker worker_;
};

TEST_F(StoreEngineSpillTest, EvictedBlocksComeBack) {
  auto events = store().engine.events()->Subscribe(CacheId{}, {}, [] {});
  for (int32_t chain = 0; chain < 6; ++chain) store().PutUnleased(worker_, chain, 0, 4);
  EXPECT_EQ(Counters().blocks_evicted, 0) << "none was lost";
  EXPECT_EQ(Counters().blocks_spilled, 6 * 4 - 8);
  for (int32_t chain = 0; chain < 6; ++chain) EXPECT_EQ(ReadAll(chain, 4), 4) << chain;
  EXPECT_GT(Counters().blocks_restored, 0);
  bool has_spilled = false;
  bool has_restored = false;
  for (auto event = (*events)->Take(); event.ok() && event->has_value();
       event = (*events)->Take()) {
    has_spilled |= (*event)->kind == BlockEventKind::kSpilled;
    has_restored |= (*event)->kind == BlockEventKind::kRestored;
  }
  EXPECT_TRUE(has_spilled && has_restored);
  store().engine.CheckInvariants();
}

TEST_F(StoreEngineSpillTest, AnImmediateLookupLeavesTheDiskAlone) {
  for (int32_t chain = 0; chain < 4; ++chain) store().PutUnleased(worker_, chain, 0, 4);
  EXPECT_FALSE(store().engine.TryLookupAndLease(worker_.session, ChainKeys(0, 4), 0).has_value());
  const auto unknown = store().engine.TryLookupAndLease(worker_.session, ChainKeys(77, 4), 0);
  ASSERT_TRUE(unknown.has_value());
  EXPECT_TRUE((*unknown)->blocks.empty());
}

TEST_F(StoreEngineSpillTest, ARestartFindsAllThatWasWritten) {
  for (int32_t chain = 0; chain < 2; ++chain) store().PutUnleased(worker_, chain, 0, 3);
  const auto leased = store().Lookup(worker_, 1, 3);
  ASSERT_TRUE(leased.ok());
  store().engine.SpillAll();
  EXPECT_EQ(disk_.files.size(), 6u) << "leased ones too";
  Start();
  for (int32_t chain = 0; chain < 2; ++chain) EXPECT_EQ(ReadAll(chain, 3), 3) << chain;
  EXPECT_EQ(Counters().blocks_restored, 6);
  EXPECT_EQ(Counters().lookup_blocks_found, 6);
  // A chain goes on where it ended.
  store().PutUnleased(worker_, 1, 3, 1);
  EXPECT_EQ(ReadAll(1, 4), 4);
}

class DitheredSpillTest : public StoreEngineSpillTest {
 protected:
  DitheredSpillTest() {
    for (LayerSpec& layer : spec_.layers) layer.key_format = KeyFormat::kK8D;
    Start();
  }
  // The planes of the chain's first block, which must be readable.
  std::vector<uint8_t> Planes() {
    EXPECT_EQ(ReadAll(0, 1), 1);
    const BlockHandle handle = store().Info(0, 0).handle;
    std::vector<uint8_t> planes;
    for (int32_t layer = 0; layer < spec_.layer_count(); ++layer) {
      const SlabLayout& layout = store().device_layout;
      const uint8_t* scan =
          worker_.device.data() + layout.scan_offset(handle.device.slot, layer, 0, 0);
      const uint8_t* detail =
          worker_.device.data() + layout.detail_offset(handle.device.slot, layer, 0, 0);
      planes.insert(planes.end(), scan, scan + layout.tile_layout(layer).scan_bytes);
      planes.insert(planes.end(), detail, detail + layout.tile_layout(layer).detail_bytes);
    }
    return planes;
  }
};

TEST_F(DitheredSpillTest, ARestartReadsTheSameBytesWithTheSameSecret) {
  store().PutUnleased(worker_, 0, 0, 1);
  const std::vector<uint8_t> sealed = Planes();
  store().engine.SpillAll();
  Start();
  EXPECT_EQ(Planes(), sealed);
  // Made again from the originals alone, they are the same again.
  disk_.files.begin()->second.payload[200] ^= 1;
  Start();
  EXPECT_EQ(Planes(), sealed);
}

TEST_F(DitheredSpillTest, PlanesOfALostSecretAreMadeAgain) {
  store().PutUnleased(worker_, 0, 0, 1);
  const std::vector<uint8_t> sealed = Planes();
  store().engine.SpillAll();
  disk_.secret = "another one";
  Start();
  EXPECT_NE(Planes(), sealed);
  disk_.secret = "";  // none is kept: each process has its own
  Start();
  EXPECT_NE(Planes(), sealed);
}

TEST_F(StoreEngineSpillTest, AChainLongerThanMemoryIsFoundAsFarAsItFits) {
  const auto long_chain = store().Put(worker_, 0, 0, 4);
  ASSERT_TRUE(long_chain.ok());
  store().engine.SpillAll();
  EXPECT_EQ(ReadAll(0, 100), 4);
}

TEST_F(StoreEngineSpillTest, DamagedPlanesOnDiskAreMadeAgain) {
  store().PutUnleased(worker_, 0, 0, 1);
  store().engine.SpillAll();
  disk_.files.begin()->second.payload[200] ^= 1;
  Start();
  EXPECT_EQ(ReadAll(0, 1), 1);
}

// As the release before wrote them: whole, by their own checksums.
TEST_F(StoreEngineSpillTest, PlanesOfTheTilesBeforeAreMadeAgain) {
  store().PutUnleased(worker_, 0, 0, 1);
  store().engine.SpillAll();
  const TileLayout& layout = store().device_layout.tile_layout(0);
  uint8_t* const scan = disk_.files.begin()->second.payload.data();
  TileHeader header;
  std::memcpy(&header, scan, sizeof(header));
  ASSERT_EQ(header.magic, kTileMagic) << "a payload begins with a scan record";
  --header.format_version;
  std::memcpy(scan, &header, sizeof(header));
  header.scan_checksum = ScanChecksum(layout, scan);
  std::memcpy(scan, &header, sizeof(header));
  Start();
  EXPECT_EQ(ReadAll(0, 1), 1);
  EXPECT_EQ(tier_->GetStats().blocks_damaged, 0);
  const BlockHandle handle = store().Info(0, 0).handle;
  std::memcpy(
      &header,
      worker_.device.data() + store().device_layout.scan_offset(handle.device.slot, 0, 0, 0),
      sizeof(header));
  EXPECT_EQ(header.format_version, kTileFormatVersion);
}

// Tiles of another release may be smaller or larger.
TEST_F(StoreEngineSpillTest, PlanesOfAnotherSizeAreMadeAgain) {
  for (const int change : {128, -64}) {
    SCOPED_TRACE(change);
    store().PutUnleased(worker_, 0, 0, 2);
    store().engine.SpillAll();
    for (auto& [id, file] : disk_.files) {
      if (change > 0) {
        file.payload.insert(file.payload.begin(), change, 0x5a);
      } else {
        file.payload.erase(file.payload.begin(), file.payload.begin() - change);
      }
      file.block.payload_bytes += change;
    }
    Start();
    EXPECT_EQ(ReadAll(0, 2), 2);
    EXPECT_EQ(tier_->GetStats().blocks_damaged, 0);
    disk_.files.clear();
    Start();
  }
}

TEST_F(StoreEngineSpillTest, APayloadWithoutRoomForItsOriginalsIsNotFound) {
  store().PutUnleased(worker_, 0, 0, 1);
  store().engine.SpillAll();
  auto& file = disk_.files.begin()->second;
  file.payload.resize(100);
  file.block.payload_bytes = 100;
  Start();
  EXPECT_EQ(ReadAll(0, 1), 0);
  EXPECT_EQ(tier_->GetStats().blocks_damaged, 1);
}

TEST_F(StoreEngineSpillTest, DamagedOriginalsOnDiskAreNotFound) {
  store().PutUnleased(worker_, 0, 0, 3);
  store().engine.SpillAll();
  disk_.files.at({DigestCacheSpec(TinySpec()), ChainKey(0, 1)}).payload.back() ^= 1;
  Start();
  EXPECT_EQ(ReadAll(0, 3), 1);
  EXPECT_EQ(tier_->GetStats().blocks_damaged, 1);
  EXPECT_EQ(ReadAll(0, 3), 1);
  store().PutUnleased(worker_, 0, 1, 1);
  EXPECT_EQ(ReadAll(0, 3), 3) << "what comes after is good again";
  store().engine.CheckInvariants();
}

TEST_F(StoreEngineSpillTest, FlippedBitsOnDiskGiveTheBlockOrNothing) {
  store().PutUnleased(worker_, 0, 0, 1);
  store().engine.SpillAll();
  const auto good = disk_.files.begin()->second;
  const auto id = disk_.files.begin()->first;
  std::mt19937 random(7);
  for (int i = 0; i < 2000; ++i) {
    disk_.files[id] = good;
    auto& payload = disk_.files[id].payload;
    payload[random() % payload.size()] ^= static_cast<uint8_t>(1 << random() % 8);
    if (i % 100 == 0) Start();
    ReadAll(0, 1);  // checks every byte of what it finds
    ASSERT_TRUE(store().engine.DropBlocks(worker_.session, {ChainKey(0, 0)}).ok());
    SpilledBlock block = good.block;
    ASSERT_TRUE(tier_->Write(id.first, block, good.payload).ok());
  }
}

TEST_F(StoreEngineSpillTest, DamageInMemoryIsNotWrittenDown) {
  store().PutUnleased(worker_, 0, 0, 2);
  const BlockHandle handle = store().Info(0, 1).handle;
  worker_.backing_memory->base()[store().backing_layout.key_offset(handle.backing.slot, 0, 0)] ^= 1;
  store().engine.SpillAll();
  EXPECT_EQ(disk_.files.size(), 1u);
  EXPECT_EQ(Counters().blocks_lost, 1);
}

TEST_F(StoreEngineSpillTest, AFullDiskCostsBlocksAndNothingElse) {
  disk_.is_full = true;
  for (int32_t chain = 0; chain < 6; ++chain) store().PutUnleased(worker_, chain, 0, 4);
  EXPECT_EQ(Counters().blocks_evicted, 6 * 4 - 8);
  EXPECT_EQ(ReadAll(5, 4), 4);
  EXPECT_NE(store().engine.GetStats().spill.error, "");
  // It is not tried each of the 16 times: only by those that write when the first one fails, the
  // caller and the pool's two threads at most.
  EXPECT_GE(store().engine.GetStats().spill.write_errors, 1);
  EXPECT_LE(store().engine.GetStats().spill.write_errors, 3);
}

TEST_F(StoreEngineSpillTest, ADroppedBlockIsGoneFromDiskToo) {
  for (int32_t chain = 0; chain < 4; ++chain) store().PutUnleased(worker_, chain, 0, 4);
  ASSERT_EQ(ReadAll(0, 4), 4);
  const auto dropped = store().engine.DropBlocks(worker_.session, {ChainKey(0, 1), ChainKey(1, 0)});
  ASSERT_TRUE(dropped.ok());
  EXPECT_EQ(*dropped, 3 + 4);
  EXPECT_EQ(ReadAll(0, 4), 1);
  EXPECT_EQ(ReadAll(1, 4), 0);
  Start();
  EXPECT_EQ(ReadAll(1, 4), 0);
}

TEST_F(StoreEngineSpillTest, SpillAheadLetsWritersPassWithoutTheDisk) {
  config_.spill_ahead_percent = 50;
  Start();
  store().PutUnleased(worker_, 0, 0, 4);
  store().PutUnleased(worker_, 1, 0, 4);
  store().engine.SpillAhead();
  EXPECT_EQ(disk_.files.size(), 4u);
  store().engine.SpillAhead();
  EXPECT_EQ(disk_.files.size(), 4u) << "nothing more to do";
  disk_.is_full = true;
  store().PutUnleased(worker_, 2, 0, 4);
  EXPECT_EQ(Counters().blocks_evicted, 0);
  EXPECT_EQ(Counters().blocks_spilled, 4);
}

TEST_F(StoreEngineSpillTest, RoomThatOthersTakeMeanwhileCostsNoBlock) {
  store().PutUnleased(worker_, 0, 0, 4);
  store().PutUnleased(worker_, 1, 0, 2);
  StoreHarness::Worker other = store().Attach("other");
  std::atomic<bool> was_taken{false};
  disk_.before_put = [&] {
    if (!was_taken.exchange(true)) store().PutUnleased(other, 9, 0, 2);  // of the free slots
  };
  store().PutUnleased(worker_, 2, 0, 4);
  disk_.before_put = [] {};
  EXPECT_TRUE(was_taken);
  EXPECT_EQ(Counters().blocks_evicted, 0);
  EXPECT_EQ(Counters().blocks_spilled, 4);
  EXPECT_EQ(ReadAll(0, 4), 4);
  store().engine.CheckInvariants();
}

TEST_F(StoreEngineSpillTest, ManyBlocksAtOnceCostNoBlock) {
  slots_ = 120;
  Start();
  for (int32_t chain = 0; chain < 12; ++chain) store().PutUnleased(worker_, chain, 0, 10);
  StoreHarness::Worker other = store().Attach("other", 50);
  store().PutUnleased(other, 20, 0, 50);  // more than are written between two looks
  EXPECT_EQ(Counters().blocks_evicted, 0);
  EXPECT_EQ(Counters().blocks_spilled, 50);
}

TEST_F(StoreEngineSpillTest, WhatTheDiskRefusesIsTriedOnce) {
  store().PutUnleased(worker_, 0, 0, 1);
  store().engine.SpillAll();
  ASSERT_EQ(disk_.files.size(), 1u);
  disk_bytes_ = static_cast<int64_t>(disk_.files.begin()->second.payload.size());
  disk_.files.clear();
  Start();
  for (int32_t chain = 0; chain < 2; ++chain) store().PutUnleased(worker_, chain, 0, 4);
  // While one block is written there is no room for another.
  disk_.before_put = [this] {
    while (store().engine.GetStats().spill.blocks_refused == 0)
      absl::SleepFor(absl::Milliseconds(1));
  };
  store().PutUnleased(worker_, 2, 0, 4);
  EXPECT_EQ(Counters().blocks_evicted + Counters().blocks_spilled, 4);
  EXPECT_GE(Counters().blocks_evicted, 3);
  EXPECT_LE(store().engine.GetStats().spill.blocks_refused, 3);
}

TEST_F(StoreEngineSpillTest, AChainLongerThanTheDeviceTierIsFoundAsFarAsItFits) {
  for (int32_t index = 0; index < 6; index += 3) store().PutUnleased(worker_, 0, index, 3);
  store().engine.SpillAll();
  Start();
  EXPECT_EQ(ReadAll(0, 6), 4);
}

TEST_F(StoreEngineSpillTest, ALookupWaitsNoLongerThanItMay) {
  config_.spill_wait_ms = 5;
  slots_ = 40;
  Start();
  for (int32_t index = 0; index < 20; index += 10) store().PutUnleased(worker_, 0, index, 10);
  store().engine.SpillAll();
  Start();
  disk_.on_get = [this] { harness_->clock.AdvanceMs(1); };
  EXPECT_EQ(ReadAll(0, 20), 16) << "one batch, which takes 16 ms";
  EXPECT_EQ(ReadAll(0, 20), 20) << "the next lookup goes on";
}

// Lookups wait for one batch of 16; what comes after is left to Prefetch().
class PrefetchTest : public StoreEngineSpillTest {
 protected:
  void StartWithOnDisk(int32_t chains, int32_t slots = 80, int32_t blocks = 20) {
    config_.spill_wait_ms = 5;
    slots_ = slots;
    Start();
    for (int32_t chain = 0; chain < chains; ++chain) {
      for (int32_t index = 0; index < blocks; index += 10) {
        store().PutUnleased(worker_, chain, index, 10);
      }
      store().engine.SpillAll();
    }
    Start();
    disk_.on_get = [this] { harness_->clock.AdvanceMs(1); };
  }
  int32_t PrefetchAll() {
    while (store().engine.Prefetch()) {
    }
    store().engine.CheckInvariants();
    return static_cast<int32_t>(Counters().blocks_prefetched);
  }
};

TEST_F(PrefetchTest, TheNextLookupFindsTheRestInMemory) {
  StartWithOnDisk(2);
  ASSERT_EQ(ReadAll(0, 20), 16);
  EXPECT_EQ(PrefetchAll(), 4);
  const auto next = store().engine.TryLookupAndLease(worker_.session, ChainKeys(0, 20), 0);
  ASSERT_TRUE(next.has_value()) << "nothing to wait for";
  ASSERT_TRUE(next->ok());
  ASSERT_EQ((*next)->blocks.size(), 20u);
  for (const BlockHandle& handle : (*next)->blocks)
    EXPECT_TRUE(store().IsReadable(worker_, handle));
  EXPECT_EQ(store().CountPrefix(1, 20), 0) << "the other chain was not asked for";
  EXPECT_FALSE(store().engine.Prefetch());
  EXPECT_EQ(Counters().prefetches_refused, 0);
}

TEST_F(PrefetchTest, NoMoreIsQueuedThanTheConfigSays) {
  StartWithOnDisk(1);
  const StoreStats stats = store().engine.GetStats();
  config_.spill_prefetch_bytes =
      3 * (stats.caches[0].device_slot_bytes + stats.caches[0].backing_slot_bytes) + 1;
  StartWithOnDisk(1);
  ASSERT_EQ(ReadAll(0, 20), 16);
  EXPECT_EQ(PrefetchAll(), 3);
  EXPECT_EQ(Counters().prefetches_refused, 1);
  EXPECT_EQ(store().CountPrefix(0, 20), 19);
}

TEST_F(PrefetchTest, ZeroTurnsItOff) {
  config_.spill_prefetch_bytes = 0;
  StartWithOnDisk(1);
  ASSERT_EQ(ReadAll(0, 20), 16);
  EXPECT_EQ(PrefetchAll(), 0);
  EXPECT_EQ(ReadAll(0, 20), 20) << "the next lookup waits itself";
}

TEST_F(PrefetchTest, NobodyLosesABlockForIt) {
  StartWithOnDisk(1, 40);  // 20 in the device tier
  store().PutUnleased(worker_, 5, 0, 2);
  ASSERT_EQ(ReadAll(0, 20), 16);
  EXPECT_EQ(PrefetchAll(), 2);
  EXPECT_EQ(Counters().prefetches_refused, 2);
  EXPECT_EQ(Counters().blocks_demoted, 0);
  EXPECT_TRUE(store().Info(5, 1).handle.device.present());
}

TEST_F(PrefetchTest, ATenantGetsNothingBeyondItsQuota) {
  StartWithOnDisk(1);
  const int64_t slot = SlabLayout::SlotBytes(TinySpec(), SlabKind::kBacking);
  config_.tenant_quotas = {{.tenant = "*", .backing_limit_bytes = 18 * slot}};
  Start();
  disk_.on_get = [this] { harness_->clock.AdvanceMs(1); };
  ASSERT_EQ(ReadAll(0, 20), 16);
  EXPECT_EQ(PrefetchAll(), 2);
  EXPECT_EQ(Counters().prefetches_refused, 2);
  EXPECT_EQ(store().CountPrefix(0, 20), 18);
}

TEST_F(PrefetchTest, WhatWasDroppedMeanwhileStaysAway) {
  StartWithOnDisk(1);
  ASSERT_EQ(ReadAll(0, 20), 16);
  ASSERT_TRUE(store().engine.DropBlocks(worker_.session, {ChainKey(0, 17)}).ok());
  EXPECT_EQ(PrefetchAll(), 1);
  EXPECT_EQ(store().CountPrefix(0, 20), 17);
  ASSERT_TRUE(store().engine.DropBlocks(worker_.session, {ChainKey(0, 0)}).ok());
  EXPECT_EQ(PrefetchAll(), 1);
}

TEST_F(PrefetchTest, DamageOnDiskEndsIt) {
  StartWithOnDisk(1);
  disk_.files.at({DigestCacheSpec(TinySpec()), ChainKey(0, 18)}).payload.back() ^= 1;
  ASSERT_EQ(ReadAll(0, 20), 16);
  EXPECT_EQ(PrefetchAll(), 2);
  EXPECT_EQ(tier_->GetStats().blocks_damaged, 1);
  EXPECT_EQ(ReadAll(0, 20), 18);
}

TEST_F(PrefetchTest, WhatTwoLookupsLeftIsReadOnce) {
  StartWithOnDisk(1, 200, 60);
  ASSERT_EQ(ReadAll(0, 60), 16);
  ASSERT_EQ(ReadAll(0, 60), 32) << "before the first was served";
  EXPECT_EQ(PrefetchAll(), 28);
  EXPECT_EQ(tier_->GetStats().blocks_read, 60);
  EXPECT_EQ(ReadAll(0, 60), 60);
  EXPECT_EQ(Counters().prefetches_refused, 0);
}

}  // namespace
}  // namespace certkv::kvstore
