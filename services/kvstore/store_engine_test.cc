// Caches, sessions and leases.
#include "services/kvstore/store_engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/core/status.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using testing::HasSubstr;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST(StoreEngineTest, RegisterCacheIsIdempotentAndRefusesABadSpec) {
  StoreHarness store;
  const auto again = store.engine.RegisterCache(store.spec);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->cache, store.cache);
  EXPECT_EQ(again->digest, DigestCacheSpec(store.spec));
  CacheSpec bad = store.spec;
  bad.head_dim = 63;
  EXPECT_EQ(ReasonOf(store.engine.RegisterCache(bad).status()), "CACHE_SPEC_INVALID");
}

TEST(StoreEngineTest, SlabTooSmallNamesTheSizes) {
  StoreHarness store;
  CacheSpec large = TinySpec("large");
  large.layers.resize(200);
  const absl::Status status = store.engine.RegisterCache(large).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "SLAB_TOO_SMALL");
  EXPECT_THAT(Text(status), HasSubstr("backing_memory"));
  EXPECT_THAT(Text(status),
              HasSubstr(std::to_string(SlabLayout(large, SlabKind::kBacking, 1).slab_bytes())));
}

TEST(StoreEngineTest, DeviceSlabHasNoMoreSlotsThanBackingSlab) {
  KvStoreConfig config;
  config.device_memory_bytes = 64 << 20;
  config.backing_memory_bytes = 1 << 20;
  FakeClock clock;
  ComputePool pool(1, 4);
  StoreEngine engine(config, &clock, &pool);
  const auto cache = engine.RegisterCache(TinySpec());
  ASSERT_TRUE(cache.ok());
  EXPECT_EQ(cache->device_slot_count, cache->backing_slot_count);
  EXPECT_LE(SlabLayout(TinySpec(), SlabKind::kBacking, cache->backing_slot_count).slab_bytes(),
            config.backing_memory_bytes);
}

TEST(StoreEngineTest, CacheWithoutSessionsMakesRoomForAnother) {
  StoreShape shape;
  shape.config.cache_limit = 1;
  StoreHarness store(shape);
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  const absl::Status full = store.engine.RegisterCache(TinySpec("b")).status();
  EXPECT_EQ(ReasonOf(full), "CACHE_LIMIT");
  store.engine.EndSession(worker.session, "test");
  const auto second = store.engine.RegisterCache(TinySpec("b"));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(ReasonOf(store.engine.GetBlock(store.cache, ChainKey(1, 0)).status()),
            "CACHE_NOT_FOUND");
  EXPECT_EQ(store.engine.GetStats().counters.blocks_evicted, 2);
}

TEST(StoreEngineTest, ReadersThatLeaseNothingKeepNoCache) {
  StoreShape shape;
  shape.config.cache_limit = 1;
  StoreHarness store(shape);
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  const auto reader =
      *store.engine.AttachWorker({store.cache, "certifier", SessionRole::kReader, 0});
  int ended = 0;
  ASSERT_TRUE(
      store.engine.ConnectSession(reader.fd_token, [&ended](absl::string_view) { ++ended; }).ok());
  const auto found = store.engine.LookupAndLease(reader.session, ChainKeys(1, 2), 60'000);
  ASSERT_TRUE(found.ok()) << found.status();
  store.engine.EndSession(worker.session, "test");
  EXPECT_EQ(ReasonOf(store.engine.RegisterCache(TinySpec("b")).status()), "CACHE_LIMIT")
      << "the reader holds a lease";
  ASSERT_TRUE(store.engine.ReleaseLease(reader.session, found->lease).ok());
  EXPECT_EQ(ended, 0);
  const auto second = store.engine.RegisterCache(TinySpec("b"));
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(ended, 1) << "its connection is closed, so that it lets go of the memory";
  const absl::Status late =
      store.engine.LookupAndLease(reader.session, ChainKeys(1, 2), 0).status();
  EXPECT_EQ(ReasonOf(late), "SESSION_NOT_FOUND");
  EXPECT_THAT(Text(late), HasSubstr("made room for another"));
  EXPECT_EQ(store.engine.GetStats().session_count, 0);
}

TEST(StoreEngineTest, AttachChecksItsArgumentsAndLimits) {
  StoreShape shape;
  shape.config.session_limit = 2;
  StoreHarness store(shape);
  const auto attach = [&](CacheId cache, const std::string& name, int32_t slots) {
    return store.engine.AttachWorker({cache, name, SessionRole::kWorker, slots});
  };
  EXPECT_EQ(ReasonOf(attach(CacheId{5}, "w", 1).status()), "CACHE_NOT_FOUND");
  EXPECT_EQ(ReasonOf(attach(store.cache, "", 1).status()), "WORKER_NAME_INVALID");
  EXPECT_EQ(ReasonOf(attach(store.cache, std::string(129, 'x'), 1).status()),
            "WORKER_NAME_INVALID");
  EXPECT_EQ(ReasonOf(attach(store.cache, "w", 4097).status()), "STAGING_SLOTS_INVALID");
  EXPECT_EQ(ReasonOf(attach(store.cache, "w", -1).status()), "STAGING_SLOTS_INVALID");
  EXPECT_EQ(attach(store.cache, "w", 0)->staging_slot_count, 64);
  EXPECT_TRUE(attach(store.cache, "w", 1).ok());
  EXPECT_EQ(ReasonOf(attach(store.cache, "w", 1).status()), "SESSION_LIMIT");
}

TEST(StoreEngineTest, StagingMemoryIsLimitedOverAllSessions) {
  StoreShape shape;
  shape.config.staging_memory_bytes =
      2 * SlabLayout(TinySpec(), SlabKind::kStaging, 4).slab_bytes();
  StoreHarness store(shape);
  store.Attach("a", 4);
  const auto rest = store.engine.AttachWorker({store.cache, "b", SessionRole::kWorker, 0});
  ASSERT_TRUE(rest.ok());
  EXPECT_EQ(rest->staging_slot_count, 4) << "the default shrinks to what is left";
  const absl::Status full =
      store.engine.AttachWorker({store.cache, "c", SessionRole::kWorker, 1}).status();
  EXPECT_EQ(ReasonOf(full), "STAGING_MEMORY_FULL");
  store.engine.EndSession(rest->session, "test");
  EXPECT_TRUE(store.engine.AttachWorker({store.cache, "c", SessionRole::kWorker, 1}).ok());
}

TEST(StoreEngineTest, TokenOpensItsSessionOnce) {
  StoreHarness store;
  const auto worker = store.Attach("w");
  EXPECT_EQ(ReasonOf(store.engine.ConnectSession(worker.fd_token).status()), "FD_TOKEN_INVALID");
  EXPECT_EQ(ReasonOf(store.engine.ConnectSession(std::string(16, 'x')).status()),
            "FD_TOKEN_INVALID");
  EXPECT_EQ(ReasonOf(store.engine.ConnectSession("").status()), "FD_TOKEN_INVALID");
}

TEST(StoreEngineTest, SessionThatNeverConnectsIsDropped) {
  StoreHarness store;
  const auto attached = *store.engine.AttachWorker({store.cache, "w", SessionRole::kWorker, 4});
  const auto connected = store.Attach("v");
  store.clock.AdvanceMs(9'999);
  store.engine.Tick();
  EXPECT_TRUE(store.engine.ReserveBlocks(attached.session, 1).ok());
  store.clock.AdvanceMs(1);
  store.engine.Tick();
  const absl::Status gone = store.engine.ReserveBlocks(attached.session, 1).status();
  EXPECT_EQ(ReasonOf(gone), "SESSION_NOT_FOUND");
  EXPECT_THAT(Text(gone), HasSubstr("did not connect"));
  EXPECT_TRUE(store.engine.ReserveBlocks(connected.session, 1).ok());
}

TEST(StoreEngineTest, ReaderMayReadStagingMemoryOfItsCacheAndWriteNothing) {
  StoreHarness store;
  auto worker = store.Attach("w");
  const auto reader = store.Attach("r", 0);
  ASSERT_TRUE(store.engine.FindStaging(reader.session, worker.staging_id).ok());
  EXPECT_EQ(ReasonOf(store.engine.FindStaging(reader.session, worker.staging_id + 1).status()),
            "STAGING_NOT_FOUND");
  EXPECT_EQ(ReasonOf(store.engine.FindStaging(worker.session, worker.staging_id).status()),
            "ROLE_FORBIDS");
  const auto other = *store.engine.RegisterCache(TinySpec("other"));
  const auto stranger = *store.engine.AttachWorker({other.cache, "s", SessionRole::kReader, 0});
  EXPECT_EQ(ReasonOf(store.engine.FindStaging(stranger.session, worker.staging_id).status()),
            "STAGING_NOT_FOUND");
  for (const absl::Status& status :
       {store.engine.ReserveBlocks(reader.session, 1).status(),
        store.engine.SealBlocks(reader.session, {SealEntry{0, ChainKey(1, 0), {}}}, 0).status(),
        store.engine.AbortBlocks(reader.session, {0}),
        store.engine.PinBlocks(reader.session, {ChainKey(1, 0)}, true),
        store.engine.DropBlocks(reader.session, {ChainKey(1, 0)}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_EQ(ReasonOf(status), "ROLE_FORBIDS");
  }
}

TEST(LeaseTest, LookupLeasesTheLongestSealedPrefix) {
  StoreHarness store;
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 3);
  const auto found = store.Lookup(worker, 1, 5);
  ASSERT_TRUE(found.ok()) << found.status();
  ASSERT_EQ(found->blocks.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(found->blocks[i].key, ChainKey(1, i));
    EXPECT_TRUE(store.IsReadable(worker, found->blocks[i]));
    EXPECT_EQ(store.Info(1, i).lease_count, 1);
  }
  EXPECT_EQ(found->expire_time_ms, store.clock.NowMs() + 30'000);
  const auto none = store.Lookup(worker, 2, 5);
  ASSERT_TRUE(none.ok());
  EXPECT_TRUE(none->blocks.empty());
  EXPECT_EQ(none->lease, LeaseId{});
  const StoreStats stats = store.engine.GetStats();
  EXPECT_EQ(stats.counters.lookups, 2);
  EXPECT_EQ(stats.counters.lookup_blocks_asked, 10);
  EXPECT_EQ(stats.counters.lookup_blocks_found, 3);
}

TEST(LeaseTest, TwoWorkersShareABlockUntilBothLetGo) {
  StoreHarness store;
  auto a = store.Attach("a");
  auto b = store.Attach("b");
  const auto sealed = *store.Put(a, 1, 0, 2);
  const auto found = *store.Lookup(b, 1, 2);
  EXPECT_EQ(found.blocks[1].device, sealed.blocks[1].device) << "the same slot";
  EXPECT_EQ(store.Info(1, 0).lease_count, 2);
  ASSERT_TRUE(store.engine.ReleaseLease(a.session, sealed.lease).ok());
  EXPECT_EQ(store.Info(1, 0).lease_count, 1);
  store.engine.EndSession(b.session, "test");
  EXPECT_EQ(store.Info(1, 0).lease_count, 0);
  store.engine.CheckInvariants();
}

TEST(LeaseTest, ExpiresAtItsDeadlineAndNotBefore) {
  StoreHarness store;
  auto worker = store.Attach("w");
  const auto sealed = *store.Put(worker, 1, 0, 1, 500);
  store.clock.AdvanceMs(499);
  EXPECT_EQ(store.Info(1, 0).lease_count, 1);
  store.clock.AdvanceMs(1);
  EXPECT_EQ(store.Info(1, 0).lease_count, 0) << "every use sees it, without a timer";
  EXPECT_EQ(ReasonOf(store.engine.RenewLease(worker.session, sealed.lease, 0).status()),
            "LEASE_NOT_FOUND");
  EXPECT_EQ(store.engine.GetStats().counters.leases_expired, 1);
}

TEST(LeaseTest, RenewalMovesTheDeadline) {
  StoreHarness store;
  auto worker = store.Attach("w");
  const auto sealed = *store.Put(worker, 1, 0, 1, 500);
  store.clock.AdvanceMs(400);
  const auto renewed = store.engine.RenewLease(worker.session, sealed.lease, 1000);
  ASSERT_TRUE(renewed.ok());
  EXPECT_EQ(*renewed, store.clock.NowMs() + 1000);
  store.clock.AdvanceMs(999);
  EXPECT_EQ(store.Info(1, 0).lease_count, 1);
  store.clock.AdvanceMs(1);
  EXPECT_EQ(store.Info(1, 0).lease_count, 0);
}

TEST(LeaseTest, ForgedAndForeignLeasesAreNotFound) {
  StoreHarness store;
  auto a = store.Attach("a");
  auto b = store.Attach("b");
  const auto sealed = *store.Put(a, 1, 0, 1);
  const LeaseId forged{static_cast<int64_t>(sealed.lease) + 1};
  for (const auto& [session, lease] :
       {std::pair{a.session, forged}, std::pair{b.session, sealed.lease},
        std::pair{a.session, LeaseId{0}}, std::pair{a.session, LeaseId{-1}}}) {
    EXPECT_EQ(ReasonOf(store.engine.RenewLease(session, lease, 0).status()), "LEASE_NOT_FOUND");
    EXPECT_EQ(ReasonOf(store.engine.FetchOriginals(session, lease, {ChainKey(1, 0)}).status()),
              "LEASE_NOT_FOUND");
    EXPECT_TRUE(store.engine.ReleaseLease(session, lease).ok()) << "idempotent";
  }
  EXPECT_EQ(store.Info(1, 0).lease_count, 1) << "nobody else released it";
}

TEST(LeaseTest, DurationAndBatchAreChecked) {
  StoreHarness store;
  auto worker = store.Attach("w");
  const std::vector<BlockKey> one = ChainKeys(1, 1);
  for (const int64_t bad : {int64_t{1}, int64_t{99}, int64_t{3'600'001}, int64_t{-1}}) {
    EXPECT_EQ(ReasonOf(store.engine.LookupAndLease(worker.session, one, bad).status()),
              "LEASE_DURATION_INVALID");
  }
  EXPECT_EQ(ReasonOf(store.engine.LookupAndLease(worker.session, {}, 0).status()), "BATCH_SIZE");
  const std::vector<BlockKey> many(4097);
  EXPECT_EQ(ReasonOf(store.engine.LookupAndLease(worker.session, many, 0).status()), "BATCH_SIZE");
  EXPECT_EQ(ReasonOf(store.engine.LookupAndLease(SessionId{3}, one, 0).status()),
            "SESSION_NOT_FOUND");
}

TEST(LeaseTest, LeasesOfOneSessionAreLimited) {
  StoreShape shape;
  shape.config.lease_limit = 2;
  StoreHarness store(shape);
  auto worker = store.Attach("w");
  ASSERT_TRUE(store.Put(worker, 1, 0, 1).ok());
  ASSERT_TRUE(store.Lookup(worker, 1, 1).ok());
  EXPECT_EQ(ReasonOf(store.Lookup(worker, 1, 1).status()), "LEASE_LIMIT");
  EXPECT_EQ(ReasonOf(store.Put(worker, 2, 0, 1).status()), "LEASE_LIMIT");
  EXPECT_EQ(store.CountPrefix(2, 1), 0);
}

TEST(LeaseTest, BlockNamedTwiceInOneLookupIsLetGoTwice) {
  StoreHarness store;
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 1);
  const std::vector<BlockKey> keys = {ChainKey(1, 0), ChainKey(1, 0)};
  const auto found = *store.engine.LookupAndLease(worker.session, keys, 0);
  EXPECT_EQ(found.blocks.size(), 2u);
  ASSERT_TRUE(store.engine.ReleaseLease(worker.session, found.lease).ok());
  EXPECT_EQ(store.Info(1, 0).lease_count, 0);
  store.engine.CheckInvariants();
}

TEST(SessionTest, EndReleasesEverythingItHeld) {
  StoreHarness store;
  auto worker = store.Attach("w", 8);
  ASSERT_TRUE(store.Put(worker, 1, 0, 3).ok());
  ASSERT_TRUE(store.engine.ReserveBlocks(worker.session, 2).ok());
  store.engine.EndSession(worker.session, "its socket closed");
  const StoreStats stats = store.engine.GetStats();
  EXPECT_EQ(stats.session_count, 0);
  EXPECT_EQ(stats.lease_count, 0);
  EXPECT_EQ(stats.caches[0].blocks_leased, 0);
  EXPECT_EQ(stats.counters.blocks_aborted, 2);
  EXPECT_EQ(store.CountPrefix(1, 3), 3) << "sealed blocks stay";
  const absl::Status late = store.Lookup(worker, 1, 1).status();
  EXPECT_EQ(ReasonOf(late), "SESSION_NOT_FOUND");
  EXPECT_THAT(Text(late), HasSubstr("its socket closed"));
  store.engine.EndSession(worker.session, "again");
  store.engine.CheckInvariants();
}

TEST(FetchOriginalsTest, GivesHandlesOfLeasedBlocksOnly) {
  StoreHarness store;
  auto worker = store.Attach("w");
  const auto sealed = *store.Put(worker, 1, 0, 2);
  const auto handles = store.engine.FetchOriginals(worker.session, sealed.lease, ChainKeys(1, 2));
  ASSERT_TRUE(handles.ok()) << handles.status();
  EXPECT_EQ((*handles)[1].backing, sealed.blocks[1].backing);
  store.PutUnleased(worker, 2, 0, 1);
  EXPECT_EQ(
      ReasonOf(store.engine.FetchOriginals(worker.session, sealed.lease, ChainKeys(2, 1)).status()),
      "BLOCK_NOT_FOUND");
}

TEST(FetchOriginalsTest, FlippedBitIsDataLossAndTheBlockVanishesUntilSealedAgain) {
  StoreHarness store;
  auto worker = store.Attach("w");
  const auto sealed = *store.Put(worker, 1, 0, 3);
  // The store's own mapping is the only writable one.
  const auto slabs = *store.engine.ConnectSession(
      store.engine.AttachWorker({store.cache, "x", SessionRole::kReader, 0})->fd_token);
  const int64_t offset = store.backing_layout.value_offset(sealed.blocks[1].backing.slot, 1, 0);
  slabs.backing->base()[offset + 33] ^= 4;
  const absl::Status lost =
      store.engine.FetchOriginals(worker.session, sealed.lease, ChainKeys(1, 3)).status();
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReasonOf(lost), "ORIGINAL_LOST");
  EXPECT_THAT(Text(lost), HasSubstr(ToHex(ChainKey(1, 1).view(), 8)));
  EXPECT_EQ(store.Lookup(worker, 1, 3)->blocks.size(), 1u);
  EXPECT_EQ(ReasonOf(store.Put(worker, 1, 1, 1).status()), "BLOCK_DAMAGED") << "still leased";
  ASSERT_TRUE(store.engine.ReleaseLease(worker.session, sealed.lease).ok());
  const auto healed = store.Put(worker, 1, 1, 1);
  ASSERT_TRUE(healed.ok()) << healed.status();
  EXPECT_EQ(healed->shared_count, 0);
  EXPECT_TRUE(store.IsReadable(worker, healed->blocks[0]));
  EXPECT_EQ(store.Lookup(worker, 1, 3)->blocks.size(), 3u);
  store.engine.CheckInvariants();
}

}  // namespace
}  // namespace certkv::kvstore
