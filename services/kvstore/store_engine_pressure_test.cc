// What goes when a tier is full, what stays, and looking after blocks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#include "kernels/core/status.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using testing::HasSubstr;

StoreShape Shape(int32_t device_slots, int32_t backing_slots) {
  StoreShape shape;
  shape.device_slots = device_slots;
  shape.backing_slots = backing_slots;
  return shape;
}

bool IsInDevice(StoreHarness& store, int32_t chain, int32_t index) {
  return store.Info(chain, index).handle.device.present();
}

TEST(PressureTest, FullDeviceTierDemotesTheLeastRecentlyUsedAndKeepsTheOriginal) {
  StoreHarness store(Shape(3, 8));
  auto worker = store.Attach("w");
  for (int chain = 1; chain <= 3; ++chain) store.PutUnleased(worker, chain, 0, 1);
  ASSERT_TRUE(store.engine.ReleaseLease(worker.session, store.Lookup(worker, 1, 1)->lease).ok());
  store.PutUnleased(worker, 4, 0, 1);
  EXPECT_TRUE(IsInDevice(store, 1, 0)) << "used a moment ago";
  EXPECT_FALSE(IsInDevice(store, 2, 0)) << "the oldest";
  EXPECT_TRUE(IsInDevice(store, 3, 0));
  EXPECT_TRUE(store.IsReadable(worker, store.Info(2, 0).handle)) << "its original stays";
  EXPECT_EQ(store.engine.GetStats().counters.blocks_demoted, 1);
  EXPECT_EQ(store.engine.GetStats().counters.blocks_evicted, 0);
}

TEST(PressureTest, LookupBringsADemotedBlockBackWithinTheCall) {
  StoreHarness store(Shape(2, 8));
  auto worker = store.Attach("w");
  for (int chain = 1; chain <= 4; ++chain) store.PutUnleased(worker, chain, 0, 1);
  ASSERT_FALSE(IsInDevice(store, 1, 0));
  EXPECT_FALSE(store.engine.TryLookupAndLease(worker.session, ChainKeys(1, 1), 0).has_value());
  const auto found = store.Lookup(worker, 1, 1);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->blocks.size(), 1u);
  EXPECT_TRUE(found->blocks[0].device.present());
  EXPECT_TRUE(store.IsReadable(worker, found->blocks[0]));
  const StoreStats stats = store.engine.GetStats();
  EXPECT_EQ(stats.counters.blocks_promoted, 1);
  EXPECT_EQ(stats.counters.lookups, 1) << "the attempt does not count";
  EXPECT_TRUE(store.engine.TryLookupAndLease(worker.session, ChainKeys(1, 1), 0)->ok());
  store.engine.CheckInvariants();
}

TEST(PressureTest, SealOfADemotedBlockSharesAndPromotesIt) {
  StoreHarness store(Shape(2, 8));
  auto worker = store.Attach("w");
  for (int chain = 1; chain <= 4; ++chain) store.PutUnleased(worker, chain, 0, 1);
  ASSERT_FALSE(IsInDevice(store, 1, 0));
  const auto sealed = store.Put(worker, 1, 0, 2);
  ASSERT_TRUE(sealed.ok()) << sealed.status();
  EXPECT_EQ(sealed->shared_count, 1);
  EXPECT_TRUE(store.IsReadable(worker, sealed->blocks[0]));
  EXPECT_TRUE(sealed->blocks[0].device.present());
  EXPECT_EQ(store.engine.GetStats().counters.blocks_promoted, 1);
}

TEST(PressureTest, DamagedOriginalIsFoundOnPromotionAndEndsThePrefix) {
  StoreHarness store(Shape(4, 8));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 3);
  store.PutUnleased(worker, 2, 0, 4);
  ASSERT_FALSE(IsInDevice(store, 1, 1));
  const auto slabs = *store.engine.ConnectSession(
      store.engine.AttachWorker({store.cache, "x", SessionRole::kReader, 0})->fd_token);
  const int32_t slot = store.Info(1, 1).handle.backing.slot;
  slabs.backing->base()[store.backing_layout.key_offset(slot, 0, 0)] ^= 1;
  const auto found = store.Lookup(worker, 1, 3);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->blocks.size(), 1u);
  EXPECT_EQ(store.Info(1, 1).lease_count, 0);
  EXPECT_EQ(store.Info(1, 2).lease_count, 0);
  EXPECT_EQ(store.Put(worker, 1, 2, 1)->shared_count, 1) << "its child is there still";
  store.engine.CheckInvariants();
}

TEST(PressureTest, FullBackingTierEvictsWholly) {
  StoreHarness store(Shape(3, 3));
  auto worker = store.Attach("w");
  for (int chain = 1; chain <= 3; ++chain) store.PutUnleased(worker, chain, 0, 1);
  const BlockHandle old = store.Info(1, 0).handle;
  store.PutUnleased(worker, 4, 0, 1);
  EXPECT_EQ(store.CountPrefix(1, 1), 0);
  EXPECT_EQ(store.CountPrefix(2, 1), 1);
  EXPECT_FALSE(store.IsReadable(worker, old)) << "the generation has moved on";
  EXPECT_EQ(store.Info(4, 0).handle.backing.slot, old.backing.slot) << "in the same slot";
  EXPECT_EQ(store.engine.GetStats().counters.blocks_evicted, 1);
}

TEST(PressureTest, ChainIsEvictedFromItsEnd) {
  StoreHarness store(Shape(6, 6));
  auto worker = store.Attach("w");
  // Two leases, the parents' released first: the children are the more recent.
  const auto head = *store.Put(worker, 1, 0, 3);
  const auto tail = *store.Put(worker, 1, 3, 3);
  ASSERT_TRUE(store.engine.ReleaseLease(worker.session, head.lease).ok());
  ASSERT_TRUE(store.engine.ReleaseLease(worker.session, tail.lease).ok());
  for (int left = 5; left >= 1; --left) {
    store.PutUnleased(worker, 10 + left, 0, 1);
    EXPECT_EQ(store.CountPrefix(1, 6), left);
    for (int i = left; i < 6; ++i) {
      EXPECT_FALSE(store.engine.GetBlock(store.cache, ChainKey(1, i)).ok());
    }
    // The newcomers are used again and again, so that the chain is always the oldest.
    for (int other = 5; other >= left; --other) {
      const auto found = store.Lookup(worker, 10 + other, 1);
      ASSERT_TRUE(store.engine.ReleaseLease(worker.session, found->lease).ok());
    }
  }
}

TEST(PressureTest, LookupMakesParentsMoreRecentThanTheirChildren) {
  StoreHarness store(Shape(4, 8));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 4);
  store.PutUnleased(worker, 2, 0, 2);
  EXPECT_TRUE(IsInDevice(store, 1, 0));
  EXPECT_TRUE(IsInDevice(store, 1, 1));
  EXPECT_FALSE(IsInDevice(store, 1, 2));
  EXPECT_FALSE(IsInDevice(store, 1, 3));
}

TEST(PressureTest, LeasedBlocksAreNeverTakenAndTheRefusalSaysWhoHoldsThem) {
  StoreHarness store(Shape(4, 4));
  auto a = store.Attach("worker-a");
  auto b = store.Attach("worker-b");
  const auto held_a = *store.Put(a, 1, 0, 3);
  const auto held_b = *store.Put(b, 2, 0, 1);
  const absl::Status full = store.Put(a, 3, 0, 1).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(full), "STORE_FULL");
  const std::string text(full.message());
  EXPECT_THAT(text, HasSubstr("4 of its 4 blocks are leased"));
  EXPECT_THAT(text, HasSubstr("worker-a: 3"));
  EXPECT_THAT(text, HasSubstr("worker-b: 1"));
  EXPECT_THAT(text, HasSubstr("backing_memory"));
  for (const BlockHandle& handle : held_a.blocks) EXPECT_TRUE(store.IsReadable(a, handle));
  EXPECT_TRUE(store.IsReadable(b, held_b.blocks[0]));
  EXPECT_EQ(store.engine.ReserveBlocks(a.session, 16)->size(), 16u) << "no staging slot is lost";
  // When the lease has expired, and not before, the slot may be used again.
  store.clock.AdvanceMs(30'000);
  EXPECT_TRUE(store.Put(b, 3, 0, 4).ok());
  EXPECT_FALSE(store.IsReadable(a, held_a.blocks[0]));
}

TEST(PressureTest, RefusedCallEvictsNothing) {
  StoreHarness store(Shape(4, 4));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  ASSERT_TRUE(store.Put(worker, 2, 0, 2).ok());
  EXPECT_EQ(ReasonOf(store.Put(worker, 3, 0, 3).status()), "STORE_FULL");
  EXPECT_EQ(store.CountPrefix(1, 2), 2);
}

TEST(PressureTest, PromotionThatFindsNoRoomIsRefusedAndHoldsNothing) {
  StoreHarness store(Shape(2, 8));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  ASSERT_TRUE(store.Put(worker, 2, 0, 2).ok());
  const absl::Status full = store.Lookup(worker, 1, 2).status();
  EXPECT_EQ(ReasonOf(full), "STORE_FULL");
  EXPECT_THAT(std::string(full.message()), HasSubstr("device_memory"));
  EXPECT_EQ(store.Info(1, 0).lease_count, 0);
  EXPECT_EQ(store.Info(1, 1).lease_count, 0);
  store.engine.CheckInvariants();
}

TEST(PressureTest, ParentOfABlockBeingSealedStays) {
  StoreHarness store(Shape(3, 3));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 1);
  store.PutUnleased(worker, 2, 0, 1);
  // Needs two slots, one of which must be made: not that of the parent.
  EXPECT_TRUE(store.Put(worker, 1, 1, 2).ok());
  EXPECT_EQ(store.CountPrefix(1, 3), 3);
  EXPECT_EQ(store.CountPrefix(2, 1), 0);
}

TEST(PressureTest, ConcurrentLookupsPromoteABlockOnce) {
  for (int round = 0; round < 20; ++round) {
    StoreHarness store(Shape(4, 12));
    auto a = store.Attach("a");
    auto b = store.Attach("b");
    store.PutUnleased(a, 1, 0, 4);
    store.PutUnleased(a, 2, 0, 4);
    absl::StatusOr<LeasedBlocks> found_b;
    std::thread other([&] { found_b = store.Lookup(b, 1, 4); });
    const auto found_a = store.Lookup(a, 1, 4);
    other.join();
    ASSERT_TRUE(found_a.ok()) << found_a.status();
    ASSERT_TRUE(found_b.ok()) << found_b.status();
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(found_a->blocks[i].device, found_b->blocks[i].device);
      EXPECT_TRUE(store.IsReadable(a, found_a->blocks[i]));
    }
    EXPECT_EQ(store.engine.GetStats().counters.blocks_promoted, 4);
    store.engine.CheckInvariants();
  }
}

TEST(PinTest, PinnedBlocksAndTheirParentsStay) {
  StoreHarness store(Shape(4, 4));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  ASSERT_TRUE(store.engine.PinBlocks(worker.session, {ChainKey(1, 1)}, true).ok());
  for (int chain = 2; chain < 8; ++chain) store.PutUnleased(worker, chain, 0, 2);
  EXPECT_EQ(store.CountPrefix(1, 2), 2);
  EXPECT_TRUE(store.Info(1, 1).pinned);
  ASSERT_TRUE(store.engine.PinBlocks(worker.session, {ChainKey(1, 1)}, false).ok());
  store.PutUnleased(worker, 9, 0, 4);
  EXPECT_EQ(store.CountPrefix(1, 2), 0);
}

TEST(PinTest, IsAllOrNothingAndLimited) {
  StoreHarness store(Shape(4, 4));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 4);
  EXPECT_EQ(
      ReasonOf(store.engine.PinBlocks(worker.session, {ChainKey(1, 0), ChainKey(2, 0)}, true)),
      "BLOCK_NOT_FOUND");
  EXPECT_EQ(ReasonOf(store.engine.PinBlocks(worker.session, ChainKeys(1, 3), true)), "PIN_LIMIT");
  EXPECT_EQ(store.engine.GetStats().caches[0].blocks_pinned, 0);
  EXPECT_TRUE(store.engine.PinBlocks(worker.session, ChainKeys(1, 2), true).ok());
  EXPECT_TRUE(store.engine.PinBlocks(worker.session, ChainKeys(1, 2), true).ok());
  EXPECT_EQ(store.engine.GetStats().caches[0].blocks_pinned, 2);
}

TEST(DropTest, TakesBlocksWithAllThatDependsOnThem) {
  StoreHarness store(Shape(8, 8));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 5);
  ASSERT_TRUE(store.engine.PinBlocks(worker.session, {ChainKey(1, 4)}, true).ok());
  const BlockHandle old = store.Info(1, 3).handle;
  const auto dropped =
      store.engine.DropBlocks(worker.session, {ChainKey(1, 3), ChainKey(1, 2), ChainKey(7, 7)});
  ASSERT_TRUE(dropped.ok()) << dropped.status();
  EXPECT_EQ(*dropped, 3);
  EXPECT_EQ(store.CountPrefix(1, 5), 2);
  EXPECT_FALSE(store.IsReadable(worker, old));
  EXPECT_EQ(store.engine.GetStats().caches[0].backing_slots_used, 2);
  store.engine.CheckInvariants();
}

TEST(DropTest, RefusesWhatIsLeasedAndDropsNothing) {
  StoreHarness store(Shape(8, 8));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  ASSERT_TRUE(store.Put(worker, 1, 2, 1).ok());
  const absl::Status status = store.engine.DropBlocks(worker.session, {ChainKey(1, 0)}).status();
  EXPECT_EQ(ReasonOf(status), "BLOCK_LEASED");
  EXPECT_EQ(store.CountPrefix(1, 3), 3);
}

TEST(ListTest, PagesShowEveryBlockOnce) {
  StoreHarness store(Shape(16, 32));
  auto worker = store.Attach("w");
  for (int chain = 0; chain < 5; ++chain) store.PutUnleased(worker, chain, 0, 5);
  const auto other = *store.engine.RegisterCache(TinySpec("other"));
  ASSERT_NE(other.cache, store.cache);
  std::set<BlockKey> seen;
  std::string token;
  int pages = 0;
  do {
    const auto page = store.engine.ListBlocks(CacheId{}, 4, token);
    ASSERT_TRUE(page.ok()) << page.status();
    ASSERT_LE(page->blocks.size(), 4u);
    for (const BlockInfo& info : page->blocks) {
      EXPECT_TRUE(seen.insert(info.handle.key).second);
      EXPECT_EQ(info.cache, store.cache);
      EXPECT_GT(info.original_bytes, info.device_bytes);
      EXPECT_EQ(info.device_bytes > 0, info.handle.device.present());
    }
    token = page->next_page_token;
    ++pages;
    // Blocks that come and go meanwhile don't disturb.
    if (pages == 2) store.PutUnleased(worker, 50, 0, 1);
  } while (!token.empty());
  EXPECT_GE(seen.size(), 25u);
  EXPECT_EQ(store.engine.ListBlocks(other.cache, 0, "")->blocks.size(), 0u);
  EXPECT_EQ(ReasonOf(store.engine.ListBlocks(CacheId{9}, 0, "").status()), "CACHE_NOT_FOUND");
  EXPECT_EQ(ReasonOf(store.engine.ListBlocks(CacheId{}, 1001, "").status()), "PAGE_SIZE_INVALID");
  for (const char* bad : {"x", "1", "1-", "-1-2", "1-2-3", "0-0", "99999999999999999999-1"}) {
    EXPECT_EQ(ReasonOf(store.engine.ListBlocks(CacheId{}, 0, bad).status()), "PAGE_TOKEN_INVALID")
        << bad;
  }
}

TEST(ListTest, GetBlockTellsWhereItIs) {
  StoreHarness store(Shape(2, 4));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  store.PutUnleased(worker, 2, 0, 1);
  EXPECT_EQ(store.Info(1, 1).device_bytes, 0) << "demoted";
  EXPECT_EQ(store.Info(1, 1).parent, ChainKey(1, 0));
  EXPECT_EQ(ReasonOf(store.engine.GetBlock(store.cache, ChainKey(9, 0)).status()),
            "BLOCK_NOT_FOUND");
  EXPECT_EQ(ReasonOf(store.engine.GetBlock(CacheId{1}, ChainKey(1, 0)).status()),
            "CACHE_NOT_FOUND");
}

// Shared memory of this process, each page counted once however often it is mapped.
int64_t SharedMemoryBytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    long kibibytes = 0;
    if (std::sscanf(line.c_str(), "Pss_Shmem: %ld kB", &kibibytes) == 1) return kibibytes << 10;
  }
  ADD_FAILURE() << "/proc/self/smaps_rollup has no Pss_Shmem";
  return 0;
}

TEST(PressureTest, MemoryStaysWithinWhatIsConfiguredHoweverMuchIsWritten) {
  constexpr int32_t kSlots = 256;
  const int64_t before = SharedMemoryBytes();
  StoreHarness store(Shape(kSlots, kSlots));
  auto worker = store.Attach("w", 16);
  const int64_t limit = store.device_layout.slab_bytes() + store.backing_layout.slab_bytes() +
                        worker.staging->layout().slab_bytes();
  int64_t most = 0;
  for (int32_t chain = 0; chain < 5 * kSlots / 16; ++chain) {
    store.PutUnleased(worker, chain, 0, 16);
    store.engine.Scrub(1 << 22);  // reads through the store's second map
    if (chain % 8 == 0) most = std::max(most, SharedMemoryBytes() - before);
  }
  EXPECT_GT(most, limit / 2) << "the test sees the memory at all";
  // Huge pages may round each of the three slabs up.
  EXPECT_LE(most, limit + 3 * (int64_t{2} << 20));
}

TEST(EventsTest, TellTheLifeOfABlock) {
  StoreHarness store(Shape(1, 2));
  auto worker = store.Attach("w");
  const auto watch = *store.engine.events()->Subscribe(store.cache, {}, [] {});
  store.PutUnleased(worker, 1, 0, 1);
  store.PutUnleased(worker, 2, 0, 1);  // demotes 1
  ASSERT_TRUE(
      store.engine.ReleaseLease(worker.session, store.Lookup(worker, 1, 1)->lease).ok());  // 2 down
  store.PutUnleased(worker, 3, 0, 1);  // evicts 2, demotes 1
  ASSERT_TRUE(store.engine.DropBlocks(worker.session, {ChainKey(3, 0)}).ok());
  std::vector<std::pair<BlockEventKind, BlockKey>> seen;
  for (auto event = *watch->Take(); event.has_value(); event = *watch->Take()) {
    seen.emplace_back(event->kind, event->key);
  }
  using Kind = BlockEventKind;
  EXPECT_EQ(seen, (std::vector<std::pair<Kind, BlockKey>>{{Kind::kSealed, ChainKey(1, 0)},
                                                          {Kind::kDemoted, ChainKey(1, 0)},
                                                          {Kind::kSealed, ChainKey(2, 0)},
                                                          {Kind::kDemoted, ChainKey(2, 0)},
                                                          {Kind::kPromoted, ChainKey(1, 0)},
                                                          {Kind::kEvicted, ChainKey(2, 0)},
                                                          {Kind::kDemoted, ChainKey(1, 0)},
                                                          {Kind::kSealed, ChainKey(3, 0)},
                                                          {Kind::kDropped, ChainKey(3, 0)}}));
}

}  // namespace
}  // namespace certkv::kvstore
