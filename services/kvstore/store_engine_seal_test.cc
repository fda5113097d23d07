// Reserving, sealing, aborting.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using testing::HasSubstr;

constexpr uint16_t kF16Nan = 0x7e00;
constexpr uint16_t kF16Infinity = 0x7c00;

class SealTest : public testing::Test {
 protected:
  // Puts a number into a staging slot that Write() filled.
  void Poke(int64_t plane_offset, int32_t token, int32_t channel, uint16_t value) {
    std::memcpy(worker_.mapped_staging.data() + plane_offset + 2 * (token * 64 + channel), &value,
                sizeof(value));
  }
  absl::StatusOr<LeasedBlocks> Seal(const std::vector<SealEntry>& entries) {
    return store_.engine.SealBlocks(worker_.session, entries, 0);
  }
  // What a failed call must leave behind: nothing.
  void ExpectNothingLeft(int32_t blocks_before = 0) {
    const StoreStats stats = store_.engine.GetStats();
    EXPECT_EQ(stats.caches[0].backing_slots_used, blocks_before);
    EXPECT_EQ(stats.caches[0].device_slots_used, blocks_before);
    EXPECT_EQ(stats.caches[0].blocks_leased, 0);
    EXPECT_EQ(stats.lease_count, 0);
    // All staging slots can be reserved again.
    const auto all = store_.engine.ReserveBlocks(worker_.session, 16);
    ASSERT_TRUE(all.ok()) << all.status();
    EXPECT_TRUE(store_.engine.AbortBlocks(worker_.session, *all).ok());
    store_.engine.CheckInvariants();
  }

  StoreHarness store_;
  StoreHarness::Worker worker_ = store_.Attach("writer");
};

TEST_F(SealTest, StoresBothTiersAndLeasesThem) {
  const auto sealed = store_.Put(worker_, 1, 0, 4);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  ASSERT_EQ(sealed->blocks.size(), 4u);
  EXPECT_EQ(sealed->shared_count, 0);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(sealed->blocks[i].key, ChainKey(1, i));
    EXPECT_EQ(sealed->blocks[i].device.slot, i) << "a chain lies in neighbouring slots";
    EXPECT_TRUE(store_.IsReadable(worker_, sealed->blocks[i]));
  }
  EXPECT_EQ(store_.Info(1, 3).parent, ChainKey(1, 2));
  EXPECT_EQ(store_.Info(1, 0).seal_time_ms, store_.clock.NowMs());
}

TEST_F(SealTest, WhatIsSealedDoesNotFollowTheStagingMemory) {
  auto entries = store_.Write(worker_, 1, 0, 1);
  const auto sealed = Seal(entries);
  ASSERT_TRUE(sealed.ok());
  std::memset(worker_.mapped_staging.data() +
                  worker_.staging->layout().key_offset(entries[0].staging_slot, 0, 0),
              0x55, 8192);
  EXPECT_TRUE(store_.IsReadable(worker_, sealed->blocks[0]));
}

TEST_F(SealTest, KeyThatIsThereAlreadyIsShared) {
  const auto first = *store_.Put(worker_, 1, 0, 2);
  auto other = store_.Attach("other");
  const auto second = store_.Put(other, 1, 0, 3);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->shared_count, 2);
  EXPECT_EQ(second->blocks[0].device, first.blocks[0].device);
  EXPECT_EQ(second->blocks[1].backing, first.blocks[1].backing);
  const StoreStats stats = store_.engine.GetStats();
  EXPECT_EQ(stats.caches[0].backing_slots_used, 3);
  EXPECT_EQ(stats.counters.blocks_sealed, 3);
  EXPECT_EQ(stats.counters.blocks_shared, 2);
}

TEST_F(SealTest, NanInOneKeyPublishesNothingOfTheCallAndIsNamed) {
  auto entries = store_.Write(worker_, 1, 0, 5);
  Poke(worker_.staging->layout().key_offset(entries[3].staging_slot, 1, 0), 17, 42, kF16Nan);
  const absl::Status status = Seal(entries).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), "NON_FINITE_KEY");
  const std::string text(status.message());
  EXPECT_THAT(text, HasSubstr("token 17"));
  EXPECT_THAT(text, HasSubstr("channel 42"));
  EXPECT_THAT(text, HasSubstr("layer 1"));
  EXPECT_THAT(text, HasSubstr(ToHex(ChainKey(1, 3).view(), 8)));
  EXPECT_EQ(store_.CountPrefix(1, 5), 0);
  ExpectNothingLeft();
}

TEST_F(SealTest, InfinityInOneValueIsRefused) {
  auto entries = store_.Write(worker_, 1, 0, 1);
  Poke(worker_.staging->layout().value_offset(entries[0].staging_slot, 0, 0), 63, 63, kF16Infinity);
  const absl::Status status = Seal(entries).status();
  EXPECT_EQ(ReasonOf(status), "NON_FINITE_VALUE");
  ExpectNothingLeft();
}

TEST_F(SealTest, FirstBadNumberByPlaceIsNamedWhateverTheThreadsDo) {
  for (int round = 0; round < 20; ++round) {
    auto entries = store_.Write(worker_, 1, 0, 6);
    for (int i = 1; i < 6; ++i) {
      Poke(worker_.staging->layout().key_offset(entries[i].staging_slot, 0, 0), 10 + i, i, kF16Nan);
    }
    EXPECT_THAT(std::string(Seal(entries).status().message()), HasSubstr("token 11"));
  }
}

TEST_F(SealTest, SlotThatIsNotReservedIsRefusedAndTheOthersAreFreed) {
  for (const int32_t wrong : {-1, 15, 16, 1 << 30}) {
    auto entries = store_.Write(worker_, 1, 0, 2);
    const int32_t written = entries[1].staging_slot;
    entries[1].staging_slot = wrong;
    const absl::Status status = Seal(entries).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), "RESERVATION_NOT_FOUND");
    EXPECT_EQ(store_.CountPrefix(1, 2), 0);
    ASSERT_TRUE(store_.engine.AbortBlocks(worker_.session, {written}).ok());
  }
  ExpectNothingLeft();
}

TEST_F(SealTest, SlotIsSealedOnce) {
  const auto entries = store_.Write(worker_, 1, 0, 1);
  ASSERT_TRUE(Seal(entries).ok());
  EXPECT_EQ(ReasonOf(Seal(entries).status()), "RESERVATION_NOT_FOUND");
}

TEST_F(SealTest, MalformedEntriesAreRefused) {
  auto entries = store_.Write(worker_, 1, 0, 2);
  entries[1] = {entries[1].staging_slot, entries[0].key, entries[0].parent};
  EXPECT_EQ(ReasonOf(Seal(entries).status()), "DUPLICATE_ENTRY");
  entries = store_.Write(worker_, 1, 0, 2);
  entries[1].staging_slot = entries[0].staging_slot;
  EXPECT_EQ(ReasonOf(Seal(entries).status()), "DUPLICATE_ENTRY");
  store_.engine.AbortBlocks(worker_.session, {0, 1}).IgnoreError();
  entries = store_.Write(worker_, 1, 0, 1);
  entries[0].key = BlockKey{};
  EXPECT_EQ(ReasonOf(Seal(entries).status()), "BLOCK_KEY_INVALID");
  entries = store_.Write(worker_, 1, 0, 1);
  entries[0].parent = entries[0].key;
  EXPECT_EQ(ReasonOf(Seal(entries).status()), "BLOCK_KEY_INVALID");
  EXPECT_EQ(ReasonOf(Seal({}).status()), "BATCH_SIZE");
  ExpectNothingLeft();
}

TEST_F(SealTest, ChildWithoutItsParentIsRefused) {
  const absl::Status status = store_.Put(worker_, 1, 3, 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), "PARENT_NOT_FOUND");
  auto entries = store_.Write(worker_, 1, 0, 2);
  std::swap(entries[0], entries[1]);
  EXPECT_EQ(ReasonOf(Seal(entries).status()), "PARENT_NOT_FOUND") << "a chain comes in order";
  ExpectNothingLeft();
}

TEST_F(SealTest, KeyUnderAnotherParentIsRefused) {
  store_.PutUnleased(worker_, 1, 0, 2);
  auto entries = store_.Write(worker_, 1, 1, 1);
  entries[0].parent = BlockKey{};
  EXPECT_EQ(ReasonOf(Seal(entries).status()), "PARENT_MISMATCH");
  ExpectNothingLeft(2);
}

TEST_F(SealTest, ReservationsAreLimitedAndAbortIsIdempotent) {
  EXPECT_EQ(store_.engine.ReserveBlocks(worker_.session, 16)->size(), 16u);
  const absl::Status full = store_.engine.ReserveBlocks(worker_.session, 1).status();
  EXPECT_EQ(ReasonOf(full), "STAGING_FULL");
  EXPECT_TRUE(store_.engine.AbortBlocks(worker_.session, {3, 3, 4}).ok());
  EXPECT_TRUE(store_.engine.AbortBlocks(worker_.session, {3}).ok());
  EXPECT_EQ(store_.engine.ReserveBlocks(worker_.session, 2)->size(), 2u);
  EXPECT_EQ(ReasonOf(store_.engine.AbortBlocks(worker_.session, {16})), "STAGING_SLOT_INVALID");
  EXPECT_EQ(ReasonOf(store_.engine.ReserveBlocks(worker_.session, 0).status()), "BATCH_SIZE");
  EXPECT_EQ(ReasonOf(store_.engine.ReserveBlocks(worker_.session, -1).status()), "BATCH_SIZE");
  EXPECT_EQ(store_.engine.GetStats().counters.blocks_aborted, 2);
}

// Large enough that a seal is under way while another thread acts.
CacheSpec LargeSpec() {
  CacheSpec spec = TinySpec("large");
  spec.kv_head_count = 8;
  spec.layers.resize(16);
  return spec;
}

TEST(ConcurrentSealTest, TwoWorkersSealingTheSameBlocksStoreThemOnce) {
  for (int round = 0; round < 5; ++round) {
    StoreShape shape;
    shape.device_slots = 4;  // not enough for two copies, even for a moment
    shape.backing_slots = 4;
    StoreHarness store(shape, LargeSpec());
    auto a = store.Attach("a");
    auto b = store.Attach("b");
    const auto from_a = store.Write(a, 1, 0, 4);
    const auto from_b = store.Write(b, 1, 0, 4);
    absl::StatusOr<LeasedBlocks> sealed_a;
    absl::StatusOr<LeasedBlocks> sealed_b;
    std::thread other([&] { sealed_b = store.engine.SealBlocks(b.session, from_b, 0); });
    sealed_a = store.engine.SealBlocks(a.session, from_a, 0);
    other.join();
    ASSERT_TRUE(sealed_a.ok()) << sealed_a.status();
    ASSERT_TRUE(sealed_b.ok()) << sealed_b.status();
    EXPECT_EQ(sealed_a->shared_count + sealed_b->shared_count, 4);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(sealed_a->blocks[i].device, sealed_b->blocks[i].device);
      EXPECT_TRUE(store.IsReadable(a, sealed_a->blocks[i]));
    }
    EXPECT_EQ(store.engine.GetStats().counters.blocks_sealed, 4);
    store.engine.CheckInvariants();
  }
}

// The planes must be made from the copy that is kept, not from memory that the worker still writes.
TEST(ConcurrentSealTest, TiersAgreeWhileTheWorkerScribbles) {
  StoreHarness store({}, LargeSpec());
  auto worker = store.Attach("scribbler");
  const SlabLayout& staging = worker.staging->layout();
  int64_t changed = 0;
  for (int round = 0; round < 10; ++round) {
    const auto entries = store.Write(worker, round, 0, 1);
    auto* halves = reinterpret_cast<uint16_t*>(worker.mapped_staging.data() +
                                               staging.key_offset(entries[0].staging_slot, 0, 0));
    const int64_t count = staging.slot_bytes() / 2;
    std::atomic<bool> done{false};
    std::thread scribbler([&] {
      for (uint32_t i = 0; !done.load(); i += 127) halves[i % count] = 0x3c00;
    });
    const auto sealed = store.engine.SealBlocks(worker.session, entries, 0);
    done.store(true);
    scribbler.join();
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    const BlockHandle handle = sealed->blocks[0];
    changed += store.IsReadable(worker, handle) ? 0 : 1;
    for (int32_t layer = 0; layer < store.spec.layer_count(); ++layer) {
      for (int32_t head = 0; head < store.spec.kv_head_count; ++head) {
        const uint8_t* originals = worker.backing.data();
        const SlabLayout& device = store.device_layout;
        const SlabLayout& backing = store.backing_layout;
        const absl::Status status = VerifyTile(
            device.tile_layout(layer),
            worker.device.data() + device.scan_offset(handle.device.slot, layer, head, 0),
            worker.device.data() + device.detail_offset(handle.device.slot, layer, head, 0),
            reinterpret_cast<const uint16_t*>(originals +
                                              backing.key_offset(handle.backing.slot, layer, head)),
            reinterpret_cast<const uint16_t*>(
                originals + backing.value_offset(handle.backing.slot, layer, head)));
        ASSERT_TRUE(status.ok()) << status;
      }
    }
    ASSERT_TRUE(store.engine.ReleaseLease(worker.session, sealed->lease).ok());
  }
  EXPECT_GT(changed, 0) << "the scribbler came in time at least once";
}

TEST(ConcurrentSealTest, WaiterTakesOverWhenTheFirstSealFails) {
  StoreHarness store({}, LargeSpec());
  auto a = store.Attach("a");
  auto b = store.Attach("b");
  for (int round = 0; round < 5; ++round) {
    const auto bad = store.Write(a, round, 0, 1);
    const auto good = store.Write(b, round, 0, 1);
    // The last element that is looked at, so that the bad seal takes its time.
    const int64_t last = a.staging->layout().value_offset(bad[0].staging_slot, 15, 7) + 64 * 64 * 2;
    std::memcpy(a.mapped_staging.data() + last - 2, &kF16Nan, 2);
    absl::StatusOr<LeasedBlocks> failed;
    std::thread other([&] { failed = store.engine.SealBlocks(a.session, bad, 0); });
    const auto sealed = store.engine.SealBlocks(b.session, good, 0);
    other.join();
    // Whoever came first: the good one is stored, and the bad one is refused or shares it.
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    EXPECT_TRUE(store.IsReadable(b, sealed->blocks[0]));
    EXPECT_TRUE(failed.ok() || ReasonOf(failed.status()) == "NON_FINITE_VALUE") << failed.status();
    ASSERT_TRUE(store.engine.ReleaseLease(b.session, sealed->lease).ok());
  }
  store.engine.CheckInvariants();
}

TEST(ConcurrentSealTest, SessionThatDiesWhileItsBlocksAreSealedLeavesNothing) {
  StoreHarness store({}, LargeSpec());
  int aborted = 0;
  for (int round = 0; round < 20; ++round) {
    auto worker = store.Attach("dying", 4);
    const auto entries = store.Write(worker, round, 0, 4);
    absl::Status status;
    std::thread sealing(
        [&] { status = store.engine.SealBlocks(worker.session, entries, 0).status(); });
    std::this_thread::yield();
    store.engine.EndSession(worker.session, "its socket closed");
    worker.staging.reset();
    sealing.join();
    if (status.ok()) continue;  // the seal was faster
    ++aborted;
    EXPECT_EQ(ReasonOf(status), "SESSION_NOT_FOUND");
    EXPECT_EQ(store.CountPrefix(round, 4), 0) << "nothing half-written is visible";
    const StoreStats stats = store.engine.GetStats();
    EXPECT_EQ(stats.lease_count, 0);
    EXPECT_EQ(stats.caches[0].blocks_leased, 0);
    store.engine.CheckInvariants();
  }
  EXPECT_GT(aborted, 0);
  // All slots are there: the store can be filled to the last one.
  auto worker = store.Attach("w");
  EXPECT_TRUE(store.Put(worker, 100, 0, 8).ok());
  EXPECT_EQ(store.engine.GetStats().caches[0].device_slots_used, 8);
}

}  // namespace
}  // namespace certkv::kvstore
