// Blocks that go from one engine to another, here by memcpy in place of a network: they are there
// as a whole, or not at all, or certified without their originals until those have come.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "kernels/core/status.h"
#include "services/common/retry_delay.h"
#include "services/kvstore/block_payload.h"
#include "services/kvstore/store_engine.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

class StoreEnginePullTest : public testing::Test {
 protected:
  StoreEnginePullTest() {
    reader_ = source_.Attach("peer", 0);
    source_worker_ = source_.Attach("writer");
    worker_ = target_.Attach("worker");
  }

  // What another store would be sent of the chain's block.
  SharedBlock Shared(int32_t chain, int32_t index) {
    const auto leased = source_.engine.LookupAndLease(reader_.session, {ChainKey(chain, index)}, 0);
    EXPECT_TRUE(leased.ok() && leased->blocks.size() == 1) << leased.status();
    const auto shared = source_.engine.ShareLeased(reader_.session, leased->lease);
    EXPECT_TRUE(shared.ok()) << shared.status();
    from_ = shared->cache;
    return shared->blocks.at(0);
  }
  // Copies a block into slots of the pull.
  PulledBlock Fetch(const Pull& pull, const SharedBlock& block, bool planes, bool originals) {
    const auto writes = target_.engine.ClaimForPull(pull, 1);
    EXPECT_TRUE(writes.ok()) << writes.status();
    PulledBlock pulled{writes->at(0), block.parent, block.seal_time_ms, !originals};
    pulled.write.key = block.key;
    pulled.write.originals_digest = block.originals_digest;
    Copy(pull, block, pulled.write, planes, originals);
    return pulled;
  }
  void Copy(const Pull& pull, const SharedBlock& block, const BlockWrite& write, bool planes,
            bool originals) {
    const auto from = PayloadSpans(*from_, block.slots, planes, originals);
    const auto to = PayloadSpans(*pull.cache, write, planes, originals);
    std::vector<uint8_t> bytes;
    for (const auto& span : from) bytes.insert(bytes.end(), span.begin(), span.end());
    size_t at = 0;
    for (const auto& span : to) {
      std::memcpy(span.data(), bytes.data() + at, span.size());
      at += span.size();
    }
    EXPECT_EQ(at, bytes.size());
    if (planes) pull.cache->device_memory()->CopyToDevice({write.device_slot});
  }
  Pull Begin(int32_t chain, int32_t count) {
    auto pull = target_.engine.BeginPull(worker_.session, ChainKeys(chain, count));
    EXPECT_TRUE(pull.ok()) << pull.status();
    return *std::move(pull);
  }
  BlockHandle FindOne(int32_t chain, int32_t count) {
    const auto leased = target_.Lookup(worker_, chain, count);
    EXPECT_TRUE(leased.ok() && static_cast<int32_t>(leased->blocks.size()) == count)
        << leased.status();
    lease_ = leased->lease;
    return leased->blocks.at(static_cast<size_t>(count) - 1);
  }

  StoreHarness source_;
  StoreHarness target_;
  StoreHarness::Worker reader_;
  StoreHarness::Worker source_worker_;
  StoreHarness::Worker worker_;
  std::shared_ptr<const Cache> from_;
  LeaseId lease_{};
};

TEST_F(StoreEnginePullTest, ChainArrivesByteForByte) {
  source_.PutUnleased(source_worker_, 1, 0, 3);
  Pull pull = Begin(1, 3);
  EXPECT_TRUE(pull.held.empty());
  for (int32_t i = 0; i < 3; ++i) {
    const PulledBlock block = Fetch(pull, Shared(1, i), true, true);
    EXPECT_EQ(target_.CountPrefix(1, 3), i) << "a block that is being written is not found";
    ASSERT_TRUE(ArePlanesOf(*pull.cache, block.write));
    ASSERT_TRUE(AreOriginalsOf(*pull.cache, block.write));
    const auto published = target_.engine.PublishPulled(&pull, block);
    ASSERT_TRUE(published.ok()) << published.status();
    EXPECT_TRUE(published->is_new);
  }
  target_.engine.EndPull(&pull);
  EXPECT_TRUE(target_.IsReadable(worker_, FindOne(1, 3)));
  EXPECT_EQ(target_.engine.GetStats().counters.blocks_pulled, 3);
  EXPECT_EQ(target_.Info(1, 2).seal_time_ms, source_.Info(1, 2).seal_time_ms);
  target_.engine.CheckInvariants();
}

TEST_F(StoreEnginePullTest, EveryBitOfAPlaneOrAnOriginalIsChecked) {
  source_.PutUnleased(source_worker_, 1, 0, 1);
  Pull pull = Begin(1, 1);
  const PulledBlock block = Fetch(pull, Shared(1, 0), true, true);
  for (const bool is_plane : {true, false}) {
    for (const auto& span : PayloadSpans(*pull.cache, block.write, is_plane, !is_plane)) {
      for (size_t at = 0; at < span.size(); at += 37) {
        span[at] ^= 4;
        EXPECT_FALSE(ArePlanesOf(*pull.cache, block.write) &&
                     AreOriginalsOf(*pull.cache, block.write))
            << at;
        span[at] ^= 4;
      }
    }
  }
  EXPECT_TRUE(ArePlanesOf(*pull.cache, block.write));
  EXPECT_TRUE(AreOriginalsOf(*pull.cache, block.write));
  target_.engine.ReturnPulled(pull, {block.write});
  target_.engine.EndPull(&pull);
  EXPECT_EQ(target_.CountPrefix(1, 1), 0);
  target_.engine.CheckInvariants();
}

TEST_F(StoreEnginePullTest, AnotherBlocksPlanesAreRefused) {
  source_.PutUnleased(source_worker_, 1, 0, 2);
  Pull pull = Begin(1, 2);
  PulledBlock block = Fetch(pull, Shared(1, 1), true, true);
  block.write.key = ChainKey(1, 0);
  EXPECT_FALSE(ArePlanesOf(*pull.cache, block.write)) << "their tiles name another block";
  target_.engine.ReturnPulled(pull, {block.write});
  target_.engine.EndPull(&pull);
}

TEST_F(StoreEnginePullTest, BlockWithoutOriginalsIsFoundButNothingReadsThem) {
  source_.PutUnleased(source_worker_, 1, 0, 1);
  const SharedBlock shared = Shared(1, 0);
  Pull pull = Begin(1, 1);
  const PulledBlock block = Fetch(pull, shared, true, false);
  ASSERT_TRUE(ArePlanesOf(*pull.cache, block.write));
  const auto published = target_.engine.PublishPulled(&pull, block);
  ASSERT_TRUE(published.ok()) << published.status();
  const BlockHandle handle = FindOne(1, 1);
  EXPECT_TRUE(handle.device.present());
  EXPECT_FALSE(handle.backing.present()) << "a reader that needs originals gets an error";
  const auto fetched = target_.engine.FetchOriginals(worker_.session, lease_, {ChainKey(1, 0)});
  EXPECT_EQ(ReasonOf(fetched.status()), "ORIGINALS_PENDING");
  EXPECT_GT(RetryDelayMsOf(fetched.status()), 0);
  EXPECT_EQ(ReasonOf(target_.engine.ShareLeased(worker_.session, lease_).status()),
            "ORIGINALS_PENDING");
  while (target_.engine.Scrub(1 << 30) > 0) {
  }
  EXPECT_EQ(target_.CountPrefix(1, 1), 1) << "the scrub leaves it alone";
  target_.engine.CheckInvariants();

  Copy(pull, shared, block.write, false, true);
  ASSERT_TRUE(AreOriginalsOf(*pull.cache, block.write));
  target_.engine.CompletePulled(pull, published->id);
  target_.engine.EndPull(&pull);
  EXPECT_TRUE(target_.IsReadable(worker_, FindOne(1, 1)));
  const auto handles = target_.engine.FetchOriginals(worker_.session, lease_, {ChainKey(1, 0)});
  ASSERT_TRUE(handles.ok()) << handles.status();
  EXPECT_TRUE(handles->at(0).backing.present());
  target_.engine.CheckInvariants();
}

TEST_F(StoreEnginePullTest, BlockWhoseOriginalsNeverComeIsLost) {
  source_.PutUnleased(source_worker_, 1, 0, 1);
  Pull pull = Begin(1, 1);
  const PulledBlock block = Fetch(pull, Shared(1, 0), true, false);
  const auto published = target_.engine.PublishPulled(&pull, block);
  ASSERT_TRUE(published.ok()) << published.status();
  FindOne(1, 1);
  target_.engine.AbandonPulled(pull, published->id);
  target_.engine.EndPull(&pull);
  EXPECT_EQ(target_.Lookup(worker_, 1, 1)->blocks.size(), 0u);
  EXPECT_EQ(
      ReasonOf(target_.engine.FetchOriginals(worker_.session, lease_, {ChainKey(1, 0)}).status()),
      "ORIGINAL_LOST");
  target_.engine.CheckInvariants();
  // Whoever has the originals seals it anew, once nobody reads what was there.
  ASSERT_TRUE(target_.engine.ReleaseLease(worker_.session, lease_).ok());
  target_.PutUnleased(worker_, 1, 0, 1);
  EXPECT_TRUE(target_.IsReadable(worker_, FindOne(1, 1)));
  target_.engine.CheckInvariants();
}

TEST_F(StoreEnginePullTest, BlockThatWasSealedMeanwhileIsShared) {
  source_.PutUnleased(source_worker_, 1, 0, 1);
  Pull pull = Begin(1, 1);
  const PulledBlock block = Fetch(pull, Shared(1, 0), true, true);
  target_.PutUnleased(worker_, 1, 0, 1);
  const auto published = target_.engine.PublishPulled(&pull, block);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_FALSE(published->is_new);
  target_.engine.EndPull(&pull);
  EXPECT_EQ(target_.engine.GetStats().caches[0].backing_slots_used, 1);
  target_.engine.CheckInvariants();
}

TEST_F(StoreEnginePullTest, BlockWithoutItsParentIsRefused) {
  source_.PutUnleased(source_worker_, 1, 0, 2);
  Pull pull = Begin(1, 2);
  const PulledBlock block = Fetch(pull, Shared(1, 1), true, true);
  EXPECT_EQ(ReasonOf(target_.engine.PublishPulled(&pull, block).status()), "PARENT_NOT_FOUND");
  target_.engine.EndPull(&pull);
  EXPECT_EQ(target_.engine.GetStats().caches[0].backing_slots_used, 0);
  target_.engine.CheckInvariants();
}

TEST_F(StoreEnginePullTest, PullOfASessionThatEndedPublishesNothing) {
  source_.PutUnleased(source_worker_, 1, 0, 1);
  Pull pull = Begin(1, 1);
  const PulledBlock block = Fetch(pull, Shared(1, 0), true, true);
  target_.engine.EndSession(worker_.session, "its process ended");
  EXPECT_EQ(ReasonOf(target_.engine.PublishPulled(&pull, block).status()), "SESSION_NOT_FOUND");
  target_.engine.EndPull(&pull);
  EXPECT_EQ(target_.CountPrefix(1, 1), 0);
  EXPECT_EQ(target_.engine.GetStats().caches[0].backing_slots_used, 0);
  target_.engine.CheckInvariants();
}

TEST_F(StoreEnginePullTest, HeldBlocksStayUnderPressure) {
  source_.PutUnleased(source_worker_, 1, 0, 1);
  Pull pull = Begin(1, 1);
  const auto published =
      target_.engine.PublishPulled(&pull, Fetch(pull, Shared(1, 0), true, false));
  ASSERT_TRUE(published.ok()) << published.status();
  // 16 backing slots and 8 device slots; many more blocks come and go.
  for (int32_t chain = 2; chain < 20; ++chain) target_.PutUnleased(worker_, chain, 0, 4);
  EXPECT_EQ(target_.CountPrefix(1, 1), 1);
  EXPECT_TRUE(FindOne(1, 1).device.present());
  target_.engine.AbandonPulled(pull, published->id);
  target_.engine.EndPull(&pull);
  ASSERT_TRUE(target_.engine.ReleaseLease(worker_.session, lease_).ok());
  for (int32_t chain = 20; chain < 30; ++chain) target_.PutUnleased(worker_, chain, 0, 4);
  EXPECT_EQ(target_.CountPrefix(1, 1), 0) << "a lost block goes like any other";
  target_.engine.CheckInvariants();
}

TEST_F(StoreEnginePullTest, FullStoreRefusesWithADelay) {
  for (int32_t chain = 2; chain < 4; ++chain) {
    ASSERT_TRUE(target_.Put(worker_, chain, 0, 4).ok());
  }
  Pull pull = Begin(1, 1);
  const auto refused = target_.engine.ClaimForPull(pull, 1);
  EXPECT_EQ(ReasonOf(refused.status()), "STORE_FULL");
  EXPECT_GT(RetryDelayMsOf(refused.status()), 0);
  target_.engine.EndPull(&pull);
}

TEST_F(StoreEnginePullTest, CacheIsFoundForItsPoolOnly) {
  const auto found = source_.engine.FindCacheOf(DigestCacheSpec(TinySpec()), "");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, source_.cache);
  EXPECT_EQ(ReasonOf(source_.engine.FindCacheOf(DigestCacheSpec(TinySpec()), "other").status()),
            "CACHE_NOT_FOUND");
  EXPECT_EQ(ReasonOf(source_.engine.FindCacheOf(DigestCacheSpec(TinySpec("else")), "").status()),
            "CACHE_NOT_FOUND");
}

}  // namespace
}  // namespace certkv::kvstore
