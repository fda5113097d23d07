// Tenants in the store's engine: what one has, another neither finds, reads, probes nor evicts.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/kvstore/store_engine.h"
#include "services/kvstore/tenant_pool.h"
#include "tests/support/fake_spill_store.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(TenantPoolTest, ATenantIsInItsDeclaredPoolOrAlone) {
  const std::vector<PoolConfig> pools = {{"shared", "a, b"}};
  EXPECT_EQ(PoolOf(pools, "a").id, PoolOf(pools, "b").id);
  EXPECT_THAT(PoolOf(pools, "a").tenants, ElementsAre("a", "b"));
  EXPECT_NE(PoolOf(pools, "c").id, PoolOf(pools, "d").id);
  EXPECT_EQ(PoolOf(pools, "").id, "");
  // A tenant with the name of a pool is not in it.
  EXPECT_NE(PoolOf(pools, "shared").id, PoolOf(pools, "a").id);
  EXPECT_NE(PoolKeySalt("tenant/a"), PoolKeySalt("tenant/b"));
  EXPECT_EQ(PoolKeySalt(""), "");
  SpecDigest spec;
  EXPECT_EQ(PoolCacheDigest(spec, ""), spec);
  EXPECT_NE(PoolCacheDigest(spec, "tenant/a"), PoolCacheDigest(spec, "tenant/b"));
}

TEST(TenantPoolTest, PoolsThatContradictAreRefused) {
  EXPECT_TRUE(CheckPools({{"p", "a"}, {"q", "b"}}).ok());
  for (const std::vector<PoolConfig>& bad :
       std::vector<std::vector<PoolConfig>>{{{"p", "a"}, {"q", "a"}},
                                            {{"p", "a"}, {"p", "b"}},
                                            {{"", "a"}},
                                            {{"p", ""}},
                                            {{"p", "a/b"}}}) {
    EXPECT_EQ(ReasonOf(CheckPools(bad)), "CONFIG_INVALID");
  }
}

// A store with a tier on disk and a cache each for tenants a and b.
class TenantEngineTest : public ::testing::Test {
 protected:
  TenantEngineTest() { Open({}); }

  void Open(const std::vector<PoolConfig>& pools) {
    store_.reset();
    tier_ = std::make_unique<SpillTier>(std::make_unique<FakeSpillStore>(&disk_),
                                        SpillLimits{int64_t{1} << 30, 0}, &clock_);
    EXPECT_TRUE(tier_->Load().ok());
    StoreShape shape;
    shape.config.pools = pools;
    shape.config.cache_limit = 3;
    shape.spill = tier_.get();
    store_ = std::make_unique<StoreHarness>(shape);
  }
  // The harness's worker in the tenant's cache.
  StoreHarness::Worker Attach(const std::string& tenant, int32_t staging_slots = 4) {
    const auto cache = store_->engine.RegisterCache(store_->spec, tenant);
    EXPECT_TRUE(cache.ok()) << cache.status();
    const auto role = staging_slots > 0 ? SessionRole::kWorker : SessionRole::kReader;
    const auto attached =
        store_->engine.AttachWorker({cache->cache, tenant, role, staging_slots, tenant});
    EXPECT_TRUE(attached.ok()) << attached.status();
    const auto slabs = store_->engine.ConnectSession(attached->fd_token);
    StoreHarness::Worker worker;
    worker.session = attached->session;
    worker.staging_id = attached->staging_id;
    worker.device_memory = slabs->device;
    worker.backing_memory = slabs->backing;
    if (staging_slots > 0) {
      worker.staging = slabs->staging;
      worker.mapped_staging =
          *Mapping::Map(slabs->staging->export_fd(), Mapping::Access::kReadWrite);
    }
    return worker;
  }

  FakeClock clock_;
  FakeDisk disk_;
  std::unique_ptr<SpillTier> tier_;
  std::unique_ptr<StoreHarness> store_;
};

TEST_F(TenantEngineTest, AKeyOfAnotherTenantIsNotFound) {
  auto a = Attach("a");
  auto b = Attach("b");
  store_->PutUnleased(a, 1, 0, 3);
  EXPECT_EQ(store_->Lookup(a, 1, 3)->blocks.size(), 3u);
  EXPECT_THAT(store_->Lookup(b, 1, 3)->blocks, IsEmpty());
  EXPECT_EQ(*store_->engine.DropBlocks(b.session, ChainKeys(1, 3)), 0);
  EXPECT_EQ(ReasonOf(store_->engine.PinBlocks(b.session, ChainKeys(1, 3), true)),
            "BLOCK_NOT_FOUND");
  EXPECT_EQ(store_->Lookup(a, 1, 3)->blocks.size(), 3u);
}

TEST_F(TenantEngineTest, SlabsOfAnotherTenantAreOtherMemory) {
  auto a = Attach("a");
  auto b = Attach("b");
  EXPECT_NE(a.device_memory, b.device_memory);
  EXPECT_NE(a.backing_memory, b.backing_memory);
  // A reader of b's can't have a's staging memory either, whatever it knows.
  const auto reader = Attach("b", 0);
  EXPECT_EQ(ReasonOf(store_->engine.FindStaging(reader.session, a.staging_id).status()),
            "STAGING_NOT_FOUND");
  EXPECT_TRUE(store_->engine.FindStaging(reader.session, b.staging_id).ok());
}

// What a lookup of somebody else's block does, in memory or on disk, is what one of a block that
// nobody has does: so its time tells nothing.
TEST_F(TenantEngineTest, ALookupDoesTheSameWorkWhetherAnotherTenantHasTheBlockOrNobody) {
  auto a = Attach("a");
  auto b = Attach("b");
  store_->PutUnleased(a, 1, 0, 3);
  store_->engine.SpillAll();
  ASSERT_GT(tier_->GetStats().blocks, 0) << "a's blocks are on disk too";
  const int64_t read_before = tier_->GetStats().blocks_read;
  for (const int32_t chain : {1, 99}) {  // a's, and nobody's
    const auto found = store_->engine.TryLookupAndLease(b.session, ChainKeys(chain, 3), 0);
    ASSERT_TRUE(found.has_value()) << "it goes neither to disk nor to promotion";
    ASSERT_TRUE(found->ok());
    EXPECT_THAT((*found)->blocks, IsEmpty());
  }
  EXPECT_EQ(tier_->GetStats().blocks_read, read_before);
}

TEST_F(TenantEngineTest, BlocksOnDiskComeBackToTheirTenantOnly) {
  {
    auto a = Attach("a");
    store_->PutUnleased(a, 1, 0, 3);
    store_->engine.SpillAll();
  }
  // Another engine on the same disk.
  StoreShape shape;
  shape.spill = tier_.get();
  store_ = std::make_unique<StoreHarness>(shape);
  auto b = Attach("b");
  EXPECT_THAT(store_->Lookup(b, 1, 3)->blocks, IsEmpty());
  auto nobody = store_->Attach("nobody");
  EXPECT_THAT(store_->Lookup(nobody, 1, 3)->blocks, IsEmpty());
  auto a = Attach("a");
  EXPECT_EQ(store_->Lookup(a, 1, 3)->blocks.size(), 3u);
}

TEST_F(TenantEngineTest, FillingOnesCacheEvictsNothingOfAnothers) {
  auto a = Attach("a");
  auto b = Attach("b");
  store_->PutUnleased(a, 1, 0, 3);
  for (int32_t chain = 10; chain < 40; ++chain) store_->PutUnleased(b, chain, 0, 2);
  EXPECT_EQ(store_->Lookup(a, 1, 3)->blocks.size(), 3u);
}

TEST_F(TenantEngineTest, ANewCacheForgetsNoCacheOfAnotherTenant) {
  const auto a = store_->engine.RegisterCache(store_->spec, "a");
  ASSERT_TRUE(a.ok());  // idle: it has no session
  ASSERT_TRUE(store_->engine.RegisterCache(store_->spec, "b").ok());
  // The limit is reached; b's next cache takes the place of b's idle one.
  ASSERT_TRUE(store_->engine.RegisterCache(TinySpec("other"), "b").ok());
  EXPECT_TRUE(store_->engine.CheckCache(a->cache).ok());
  // c has none to give up.
  EXPECT_EQ(ReasonOf(store_->engine.RegisterCache(store_->spec, "c").status()), "CACHE_LIMIT");
}

TEST_F(TenantEngineTest, ADeclaredPoolIsShared) {
  Open({{"team", "a, b"}});
  auto a = Attach("a");
  auto b = Attach("b");
  auto c = Attach("c");
  store_->PutUnleased(a, 1, 0, 3);
  EXPECT_EQ(store_->Lookup(b, 1, 3)->blocks.size(), 3u);
  EXPECT_EQ(a.device_memory, b.device_memory);
  EXPECT_THAT(store_->Lookup(c, 1, 3)->blocks, IsEmpty());
  EXPECT_EQ(store_->engine.RegisterCache(store_->spec, "a")->key_salt,
            store_->engine.RegisterCache(store_->spec, "b")->key_salt);
  // What is not sealed yet is its writer's own, in a pool too.
  const auto reader = Attach("b", 0);
  EXPECT_EQ(ReasonOf(store_->engine.FindStaging(reader.session, a.staging_id).status()),
            "STAGING_NOT_FOUND");
}

TEST_F(TenantEngineTest, ACacheIsAttachedToByItsTenantsOnly) {
  const auto cache = store_->engine.RegisterCache(store_->spec, "a");
  ASSERT_TRUE(cache.ok());
  for (const char* tenant : {"b", ""}) {
    EXPECT_EQ(
        ReasonOf(store_->engine.AttachWorker({cache->cache, "w", SessionRole::kReader, 0, tenant})
                     .status()),
        "CACHE_NOT_FOUND");
  }
  EXPECT_EQ(ReasonOf(store_->engine.RegisterCache(store_->spec, "a/b").status()), "TENANT_INVALID");
  const auto nobody = [](absl::string_view) { return false; };
  EXPECT_EQ(ReasonOf(store_->engine.CheckCacheTenant(cache->cache, nobody)), "CACHE_NOT_FOUND");
  const auto worker = Attach("a");
  EXPECT_EQ(ReasonOf(store_->engine.CheckSessionTenant(worker.session, nobody)),
            "SESSION_NOT_FOUND");
}

}  // namespace
}  // namespace certkv::kvstore
