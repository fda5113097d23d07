// Who may have how much: quotas, priorities, pins that end, watermarks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "kernels/core/status.h"
#include "services/common/retry_delay.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/fake_spill_store.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using testing::HasSubstr;

const int64_t kDeviceSlot = SlabLayout::SlotBytes(TinySpec(), SlabKind::kDevice);
const int64_t kBackingSlot = SlabLayout::SlotBytes(TinySpec(), SlabKind::kBacking);

TenantQuota Quota(const std::string& tenant, int64_t guaranteed_slots, int64_t limit_slots) {
  return {tenant, guaranteed_slots * kDeviceSlot, limit_slots * kDeviceSlot,
          guaranteed_slots * kBackingSlot, limit_slots * kBackingSlot};
}

StoreShape Shape(int32_t slots, std::vector<TenantQuota> quotas) {
  StoreShape shape;
  shape.device_slots = slots;
  shape.backing_slots = slots;
  shape.config.tenant_quotas = std::move(quotas);
  return shape;
}

TenantUse UseOf(StoreHarness& store, const std::string& tenant) {
  const StoreStats stats = store.engine.GetStats();
  for (const TenantStats& one : stats.caches[0].tenants) {
    if (one.tenant == tenant) return one.use;
  }
  return {};
}

TEST(QuotaTest, GuaranteedShareIsNotTakenByOthersHoweverMuchTheyWrite) {
  StoreHarness store(Shape(8, {Quota("a", 4, 0)}));
  auto a = store.Attach("a", 16, "a");
  auto b = store.Attach("b", 16, "b");
  store.PutUnleased(a, 1, 0, 4);
  for (int chain = 10; chain < 40; ++chain) store.PutUnleased(b, chain, 0, 2);
  EXPECT_EQ(store.CountPrefix(1, 4), 4);
  EXPECT_TRUE(store.Info(1, 3).handle.device.present()) << "in the device tier too";
  EXPECT_EQ(UseOf(store, "a").backing.used, 4);
  EXPECT_EQ(UseOf(store, "b").backing.used, 4);
  store.engine.CheckInvariants();
}

TEST(QuotaTest, TenantAboveItsShareIsTheFirstToLose) {
  StoreHarness store(Shape(8, {Quota("a", 4, 0), Quota("b", 2, 0)}));
  auto a = store.Attach("a", 16, "a");
  auto b = store.Attach("b", 16, "b");
  store.PutUnleased(b, 2, 0, 2);  // the oldest, but within b's share
  store.PutUnleased(a, 1, 0, 6);
  store.PutUnleased(b, 3, 0, 2);
  EXPECT_EQ(store.CountPrefix(2, 2), 2);
  EXPECT_EQ(store.CountPrefix(1, 6), 4) << "a is back at its share";
  // Now nobody is above but b itself.
  store.PutUnleased(b, 4, 0, 2);
  EXPECT_EQ(store.CountPrefix(1, 6), 4);
  EXPECT_EQ(store.CountPrefix(2, 2), 0) << "b's oldest";
  store.engine.CheckInvariants();
}

TEST(QuotaTest, LimitIsKeptByEvictingTheTenantsOwnBlocksWhileOthersHaveRoom) {
  StoreHarness store(Shape(8, {Quota("a", 0, 3)}));
  auto a = store.Attach("a", 16, "a");
  auto b = store.Attach("b", 16, "b");
  store.PutUnleased(b, 2, 0, 2);
  for (int chain = 10; chain < 20; ++chain) {
    store.PutUnleased(a, chain, 0, 1);
    EXPECT_LE(UseOf(store, "a").backing.used, 3);
    EXPECT_LE(UseOf(store, "a").device.used, 3);
  }
  EXPECT_EQ(store.CountPrefix(2, 2), 2);
  EXPECT_EQ(UseOf(store, "a").backing.used, 3);
  store.engine.CheckInvariants();
}

TEST(QuotaTest, RefusalNamesTenantLimitAndHoldersAndSaysWhenToAskAgain) {
  StoreHarness store(Shape(8, {Quota("a", 0, 3)}));
  auto a = store.Attach("worker-a", 16, "a");
  auto b = store.Attach("worker-b", 16, "b");
  ASSERT_TRUE(store.Put(b, 2, 0, 2).ok());
  ASSERT_TRUE(store.Put(a, 1, 0, 2).ok());
  const absl::Status full = store.Put(a, 3, 0, 2).status();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(full), "QUOTA_EXCEEDED");
  EXPECT_THAT(std::string(full.message()), HasSubstr("tenant \"a\" has 2 of its 3 slots"));
  EXPECT_THAT(std::string(full.message()), HasSubstr("worker-a: 2"));
  EXPECT_THAT(std::string(full.message()), testing::Not(HasSubstr("worker-b")));
  EXPECT_GE(RetryDelayMsOf(full), 20);
  EXPECT_LE(RetryDelayMsOf(full), 1000);
  const absl::Status never = store.Put(a, 3, 0, 4).status();
  EXPECT_EQ(ReasonOf(never), "QUOTA_EXCEEDED");
  EXPECT_EQ(RetryDelayMsOf(never), 0) << "no wait makes four fit into three";
  EXPECT_EQ(store.CountPrefix(1, 2), 2) << "nothing was evicted for it";
  store.engine.CheckInvariants();
}

TEST(QuotaTest, SlotsOfARunningOrFailedCallAreCountedOnce) {
  StoreHarness store(Shape(8, {Quota("a", 0, 4)}));
  auto a = store.Attach("a", 16, "a");
  const auto entries = store.Write(a, 1, 0, 2);
  // A key that is no number fails in the middle, after the slots were taken.
  const SlabLayout& staging = a.staging->layout();
  uint8_t* row = a.mapped_staging.data() + staging.key_offset(entries[1].staging_slot, 0, 0);
  row[0] = 0xff;
  row[1] = 0x7f;
  EXPECT_EQ(ReasonOf(store.engine.SealBlocks(a.session, entries, 0).status()), "NON_FINITE_KEY");
  EXPECT_EQ(UseOf(store, "a").backing.used, 0);
  EXPECT_TRUE(store.Put(a, 2, 0, 4).ok()) << "all of the limit can be used";
  store.engine.CheckInvariants();
}

TEST(QuotaTest, BlockThatATenantSharesCountsToWhoSealedItFirst) {
  StoreHarness store(Shape(8, {Quota("a", 0, 4), Quota("b", 0, 4)}));
  auto a = store.Attach("a", 16, "a");
  auto b = store.Attach("b", 16, "b");
  store.PutUnleased(a, 1, 0, 3);
  EXPECT_EQ(store.Put(b, 1, 0, 4)->shared_count, 3);
  EXPECT_EQ(UseOf(store, "a").backing.used, 3);
  EXPECT_EQ(UseOf(store, "b").backing.used, 1);
  EXPECT_EQ(store.Info(1, 0).tenant, "a");
  EXPECT_EQ(store.Info(1, 3).tenant, "b");
}

TEST(QuotaTest, NonsenseIsRefusedByNameWithItsRemedy) {
  const QuotaTiers tiers{1000, 2000, 3000};
  const auto refusal = [&](std::vector<TenantQuota> quotas) {
    const absl::Status status = CheckTenantQuotas(quotas, tiers);
    EXPECT_FALSE(status.ok());
    return absl::StrCat(ReasonOf(status), " ", status.message());
  };
  EXPECT_THAT(refusal({{"a", 600, 500, 0, 0}}),
              HasSubstr("QUOTA_INVALID kvstore_tenants: tenant \"a\" has device_guaranteed 600"));
  EXPECT_THAT(refusal({{"a", 0, 0, 0, 2001}}), HasSubstr("backing_limit 2001"));
  EXPECT_THAT(refusal({{"a", 600, 0, 0, 0}, {"b", 401, 0, 0, 0}}),
              HasSubstr("tenant \"b\" has device_guaranteed 401 bytes, which makes 1001"));
  EXPECT_THAT(refusal({{"*", 1, 0, 0, 0}}), HasSubstr("guarantee to tenants by name"));
  EXPECT_THAT(refusal({{"a", 0, 0, 0, 0}, {"a", 0, 0, 0, 0}}), HasSubstr("comes twice"));
  EXPECT_THAT(refusal({{"a b", 0, 0, 0, 0}}), HasSubstr("TENANT_INVALID"));
  EXPECT_THAT(refusal({{.tenant = "a", .spill_limit_bytes = 3001}}),
              HasSubstr("QUOTA_INVALID kvstore_tenants: tenant \"a\" has spill_limit 3001 bytes, "
                        "kvstore.spill_size is 3000; lower the one, or raise the other"));
  EXPECT_TRUE(CheckTenantQuotas({{.tenant = "*", .spill_limit_bytes = 3000}}, tiers).ok());
  EXPECT_TRUE(CheckTenantQuotas(
                  {{"a", 600, 600, 0, 0}, {"b", 400, 0, 2000, 2000}, {"*", 0, 9, 0, 9}}, tiers)
                  .ok());
}

TEST(QuotaTest, OnDiskATenantTakesNothingFromOthersBeyondItsLimit) {
  FakeClock clock;
  FakeDisk disk;
  const int64_t limit_bytes = 3 * (kDeviceSlot + kBackingSlot);  // a few blocks
  const std::vector<TenantQuota> quotas = {{.tenant = "a", .spill_limit_bytes = limit_bytes}};
  SpillTier tier(std::make_unique<FakeSpillStore>(&disk),
                 SpillLimits{.size_bytes = int64_t{1} << 30, .ttl_ms = 0, .quotas = quotas},
                 &clock);
  ASSERT_TRUE(tier.Load().ok());
  StoreShape shape = Shape(8, quotas);
  shape.spill = &tier;
  StoreHarness store(shape);
  auto a = store.Attach("a", 16, "a");
  auto b = store.Attach("b", 16, "b");
  store.PutUnleased(b, 1, 0, 4);
  for (int chain = 10; chain < 40; ++chain) {
    store.PutUnleased(a, chain, 0, 2);
    for (const TenantSpill& tenant : tier.GetStats().tenants) {
      if (tenant.tenant != "a") continue;
      EXPECT_LE(tenant.bytes, limit_bytes);
    }
  }
  const SpillStats stats = tier.GetStats();
  EXPECT_GT(stats.blocks_over_quota, 0);
  ASSERT_EQ(stats.tenants.size(), 2u);
  EXPECT_EQ(stats.tenants[0].tenant, "a");
  EXPECT_GT(stats.tenants[0].blocks, 0);
  EXPECT_EQ(stats.tenants[1].tenant, "b");
  EXPECT_EQ(stats.tenants[1].blocks, 4) << "all that b had";
  const auto found = store.engine.LookupAndLease(b.session, ChainKeys(1, 4), 0);
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->blocks.size(), 4u);
  EXPECT_EQ(store.engine.GetStats().spill.write_errors, 0);
  store.engine.CheckInvariants();
}

TEST(QuotaTest, ABlockThatItsTenantsDiskLimitCannotHoldIsNotTried) {
  FakeClock clock;
  FakeDisk disk;
  const std::vector<TenantQuota> quotas = {{.tenant = "a", .spill_limit_bytes = 1000}};
  SpillTier tier(std::make_unique<FakeSpillStore>(&disk),
                 SpillLimits{.size_bytes = int64_t{1} << 30, .ttl_ms = 0, .quotas = quotas},
                 &clock);
  ASSERT_TRUE(tier.Load().ok());
  StoreShape shape = Shape(4, quotas);
  shape.spill = &tier;
  StoreHarness store(shape);
  auto a = store.Attach("a", 16, "a");
  for (int chain = 0; chain < 6; ++chain) store.PutUnleased(a, chain, 0, 2);
  EXPECT_EQ(disk.files.size(), 0u);
  EXPECT_EQ(tier.GetStats().blocks_refused, 0);
  EXPECT_EQ(store.engine.GetStats().counters.blocks_evicted, 8);
}

TEST(QuotaTest, ConfigFileWithNonsenseIsRefusedWithTheTenantsName) {
  const auto read = [](const std::string& text) {
    KvStoreConfig config;
    ConfigReader reader;
    reader.AddSection(KvStoreConfigSection(&config));
    reader.AddList(KvStoreTenantsList(&config));
    return reader.ReadText("kvstore.yaml", text);
  };
  const std::string tiers = "kvstore:\n  backing_memory: 64MiB\n";
  EXPECT_TRUE(
      read(tiers + "kvstore_tenants:\n  - tenant: a\n    backing_guaranteed: 32MiB\n").ok());
  const absl::Status status =
      read(tiers + "kvstore_tenants:\n  - tenant: a\n    backing_guaranteed: 65MiB\n");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("tenant \"a\" has backing_guaranteed"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("raise kvstore.backing_memory"));
  EXPECT_FALSE(read("kvstore:\n  watermark_high_percent: 50\n").ok()) << "below the low mark";
  EXPECT_FALSE(read("kvstore_tenants:\n  - tenant: a\n    backing_limit: -1\n").ok());
}

TEST(TenantTest, NamesAreCheckedAndIdleTenantsMakeRoom) {
  StoreShape shape = Shape(8, {Quota("*", 0, 2)});
  shape.config.tenant_limit = 3;
  StoreHarness store(shape);
  const auto attach = [&](const std::string& tenant) {
    return store.engine.AttachWorker({store.cache, "w", SessionRole::kWorker, 1, tenant});
  };
  EXPECT_EQ(ReasonOf(attach("no space").status()), "TENANT_INVALID");
  EXPECT_EQ(ReasonOf(attach(std::string(65, 'x')).status()), "TENANT_INVALID");
  auto a = store.Attach("a", 4, "a");
  const auto b = attach("b");
  ASSERT_TRUE(b.ok()) << b.status();
  EXPECT_EQ(ReasonOf(attach("c").status()), "TENANT_LIMIT");
  store.engine.EndSession(b->session, "test");
  store.PutUnleased(a, 1, 0, 2);
  store.engine.EndSession(a.session, "test");
  ASSERT_TRUE(attach("c").ok()) << "in b's place: a has blocks";
  EXPECT_EQ(ReasonOf(attach("d").status()), "TENANT_LIMIT");
  EXPECT_EQ(UseOf(store, "a").backing.used, 2);
}

TEST(PriorityTest, LowerPriorityLeavesFirstHoweverLatelyItWasUsed) {
  StoreHarness store(Shape(4, {}));
  auto worker = store.Attach("w");
  const auto put = [&](int32_t chain, BlockPriority priority) {
    const auto sealed =
        store.engine.SealBlocks(worker.session, store.Write(worker, chain, 0, 1),
                                SealOptions{.lease_duration_ms = 0, .priority = priority});
    ASSERT_TRUE(sealed.ok()) << sealed.status();
    ASSERT_TRUE(store.engine.ReleaseLease(worker.session, sealed->lease).ok());
  };
  put(1, BlockPriority::kHigh);
  put(2, BlockPriority::kNormal);
  put(3, BlockPriority::kNormal);
  put(4, BlockPriority::kLow);
  put(5, BlockPriority::kNormal);
  EXPECT_EQ(store.CountPrefix(4, 1), 0) << "low, though the youngest";
  put(6, BlockPriority::kNormal);
  EXPECT_EQ(store.CountPrefix(2, 1), 0);
  put(7, BlockPriority::kNormal);
  put(8, BlockPriority::kNormal);
  EXPECT_EQ(store.CountPrefix(1, 1), 1) << "high, though the oldest";
  store.engine.CheckInvariants();
}

TEST(PriorityTest, ParentsHaveAtLeastTheirChildrensPriority) {
  StoreHarness store(Shape(6, {}));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  const auto child = store.engine.SealBlocks(worker.session, store.Write(worker, 1, 2, 1),
                                             SealOptions{.priority = BlockPriority::kHigh});
  ASSERT_TRUE(child.ok());
  EXPECT_EQ(store.Info(1, 0).priority, BlockPriority::kHigh);
  // Sealed again with less, it keeps what it has.
  EXPECT_EQ(store.Put(worker, 1, 0, 2)->shared_count, 2);
  EXPECT_EQ(store.Info(1, 1).priority, BlockPriority::kHigh);
  store.engine.CheckInvariants();
}

TEST(PinTtlTest, PinEndsByItselfAndCanBeProlonged) {
  StoreHarness store(Shape(4, {}));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 2);
  ASSERT_TRUE(store.engine.PinBlocks(worker.session, ChainKeys(1, 2), true, 1000).ok());
  EXPECT_EQ(store.Info(1, 1).pin_expire_time_ms, store.clock.NowMs() + 1000);
  store.clock.AdvanceMs(900);
  ASSERT_TRUE(store.engine.PinBlocks(worker.session, ChainKeys(1, 1), true, 1000).ok());
  store.clock.AdvanceMs(100);
  store.engine.Tick();
  EXPECT_TRUE(store.Info(1, 0).pinned);
  EXPECT_FALSE(store.Info(1, 1).pinned);
  store.clock.AdvanceMs(900);
  store.engine.Tick();
  EXPECT_FALSE(store.Info(1, 0).pinned);
  EXPECT_EQ(ReasonOf(store.engine.PinBlocks(worker.session, ChainKeys(1, 1), true, -1)),
            "PIN_TTL_INVALID");
  store.engine.CheckInvariants();
}

TEST(PinTtlTest, EndOfAPinThatIsGoneDoesNotReachTheBlockInItsPlace) {
  StoreHarness store(Shape(4, {}));
  auto worker = store.Attach("w");
  store.PutUnleased(worker, 1, 0, 1);
  ASSERT_TRUE(store.engine.PinBlocks(worker.session, ChainKeys(1, 1), true, 1000).ok());
  ASSERT_TRUE(store.engine.DropBlocks(worker.session, ChainKeys(1, 1)).ok());
  store.PutUnleased(worker, 2, 0, 1);
  ASSERT_TRUE(store.engine.PinBlocks(worker.session, ChainKeys(2, 1), true).ok());
  store.clock.AdvanceMs(2000);
  store.engine.Tick();
  EXPECT_TRUE(store.Info(2, 0).pinned);
}

TEST(PinTtlTest, TenantMayPinAShareOfItsOwnLimitOnly) {
  StoreHarness store(Shape(16, {Quota("a", 0, 4)}));
  auto a = store.Attach("a", 16, "a");
  store.PutUnleased(a, 1, 0, 4);
  const absl::Status status = store.engine.PinBlocks(a.session, ChainKeys(1, 3), true);
  EXPECT_EQ(ReasonOf(status), "PIN_LIMIT");
  EXPECT_THAT(std::string(status.message()), HasSubstr("tenant \"a\""));
  EXPECT_TRUE(store.engine.PinBlocks(a.session, ChainKeys(1, 2), true).ok());
}

TEST(WatermarkTest, DeviceTierIsEmptiedToTheLowMarkInTheBackground) {
  StoreShape shape = Shape(10, {});
  shape.config.watermark_high_percent = 80;
  shape.config.watermark_low_percent = 50;
  StoreHarness store(shape);
  auto worker = store.Attach("w");
  for (int chain = 0; chain < 8; ++chain) store.PutUnleased(worker, chain, 0, 1);
  store.engine.KeepWatermarks();
  EXPECT_EQ(store.engine.GetStats().caches[0].device_slots_used, 8) << "at the mark, not above it";
  store.PutUnleased(worker, 8, 0, 1);
  store.engine.KeepWatermarks();
  const CacheStats stats = store.engine.GetStats().caches[0];
  EXPECT_EQ(stats.device_slots_used, 5);
  EXPECT_EQ(stats.backing_slots_used, 9) << "without a disk nothing leaves memory for the mark";
  EXPECT_FALSE(store.Info(0, 0).handle.device.present());
  EXPECT_TRUE(store.Info(8, 0).handle.device.present());
  store.engine.CheckInvariants();
}

TEST(WatermarkTest, BackingTierIsEmptiedOnToDisk) {
  FakeClock clock;
  FakeDisk disk;
  SpillTier tier(std::make_unique<FakeSpillStore>(&disk),
                 SpillLimits{.size_bytes = int64_t{1} << 30}, &clock);
  ASSERT_TRUE(tier.Load().ok());
  StoreShape shape = Shape(10, {});
  shape.config.watermark_high_percent = 80;
  shape.config.watermark_low_percent = 50;
  shape.config.spill_ahead_percent = 60;
  shape.spill = &tier;
  StoreHarness store(shape);
  auto worker = store.Attach("w");
  for (int chain = 0; chain < 9; ++chain) store.PutUnleased(worker, chain, 0, 1);
  store.engine.SpillAhead();
  store.engine.KeepWatermarks();
  EXPECT_EQ(store.engine.GetStats().caches[0].backing_slots_used, 5);
  EXPECT_EQ(store.engine.GetStats().counters.blocks_evicted, 0) << "none was lost";
  for (int chain = 0; chain < 9; ++chain) {
    const auto found = store.Lookup(worker, chain, 1);
    ASSERT_TRUE(found.ok()) << found.status();
    ASSERT_EQ(found->blocks.size(), 1u) << chain;
    ASSERT_TRUE(store.engine.ReleaseLease(worker.session, found->lease).ok());
  }
  store.engine.CheckInvariants();
}

TEST(BackPressureTest, RefusedSealKeepsItsSlotsWhereTheCallerComesBack) {
  StoreHarness store(Shape(2, {}));
  auto worker = store.Attach("w", 2);
  const auto held = store.Put(worker, 1, 0, 2);
  ASSERT_TRUE(held.ok());
  const auto entries = store.Write(worker, 2, 0, 2);
  const SealOptions options{.keep_slots_for_retry = true};
  const absl::Status full = store.engine.SealBlocks(worker.session, entries, options).status();
  EXPECT_EQ(ReasonOf(full), "STORE_FULL");
  EXPECT_GT(RetryDelayMsOf(full), 0);
  ASSERT_TRUE(store.engine.ReleaseLease(worker.session, held->lease).ok());
  EXPECT_TRUE(store.engine.SealBlocks(worker.session, entries, options).ok()) << "the same call";
  EXPECT_TRUE(store.engine.ReserveBlocks(worker.session, 2).ok()) << "the slots are free now";
}

TEST(MemoryLimitTest, CachesAndStagingStayWithinItTogether) {
  StoreShape shape = Shape(8, {});
  const CacheSpec spec = TinySpec();
  const int64_t cache_bytes = SlabLayout(spec, SlabKind::kDevice, 8).slab_bytes() +
                              SlabLayout(spec, SlabKind::kBacking, 8).slab_bytes();
  const int64_t staging_bytes = SlabLayout(spec, SlabKind::kStaging, 4).slab_bytes();
  shape.config.memory_limit_bytes = cache_bytes + staging_bytes;
  StoreHarness store(shape);
  auto worker = store.Attach("w", 4);
  EXPECT_EQ(
      ReasonOf(store.engine.AttachWorker({store.cache, "x", SessionRole::kWorker, 1}).status()),
      "STAGING_MEMORY_FULL");
  EXPECT_EQ(ReasonOf(store.engine.RegisterCache(TinySpec("other")).status()), "MEMORY_LIMIT");
  EXPECT_EQ(store.engine.GetStats().memory_bytes, cache_bytes + staging_bytes);
  store.engine.EndSession(worker.session, "test");
  EXPECT_TRUE(store.engine.RegisterCache(TinySpec("other")).ok()) << "in the place of the idle one";
}

}  // namespace
}  // namespace certkv::kvstore
