// The tier on disk without a disk: limits, errors, what depends on what.
#include "services/kvstore/spill_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/core/status.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_spill_store.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

class SpillTierTest : public testing::Test {
 protected:
  std::unique_ptr<SpillTier> Open(const SpillLimits& limits) {
    auto tier =
        std::make_unique<SpillTier>(std::make_unique<FakeSpillStore>(&disk_), limits, &clock_);
    EXPECT_TRUE(tier->Load([](int64_t) {}).ok());
    return tier;
  }
  absl::Status Write(SpillTier& tier, int32_t chain, int32_t index, size_t bytes = 100) {
    SpilledBlock block;
    block.key = ChainKey(chain, index);
    block.parent = ChainParent(chain, index);
    return tier.Write(spec_, block, std::vector<uint8_t>(bytes));
  }
  bool Has(const SpillTier& tier, int32_t chain, int32_t index) {
    return tier.Contains(spec_, ChainKey(chain, index));
  }

  const SpecDigest spec_ = DigestCacheSpec(TinySpec());
  FakeClock clock_;
  FakeDisk disk_;
};

TEST_F(SpillTierTest, TheOldestGoWhenTheSizeLimitIsReached) {
  const auto tier = Open({.size_bytes = 300});
  for (int32_t i = 0; i < 4; ++i) ASSERT_TRUE(Write(*tier, i, 0).ok());
  EXPECT_FALSE(Has(*tier, 0, 0));
  EXPECT_TRUE(Has(*tier, 1, 0));
  ASSERT_TRUE(Write(*tier, 1, 0).ok()) << "written again, it is the newest";
  ASSERT_TRUE(Write(*tier, 9, 0).ok());
  EXPECT_TRUE(Has(*tier, 1, 0));
  EXPECT_FALSE(Has(*tier, 2, 0));
  const SpillStats stats = tier->GetStats();
  EXPECT_EQ(stats.blocks, 3);
  EXPECT_EQ(stats.bytes, 300);
  EXPECT_EQ(disk_.files.size(), 3u) << "and from the disk";
}

TEST_F(SpillTierTest, SlowDiskIsDegradedForAWhileAndStillServes) {
  const auto tier = Open({.size_bytes = 1 << 20});
  ASSERT_TRUE(Write(*tier, 0, 0).ok());
  EXPECT_FALSE(tier->GetStats().degraded);
  disk_.on_put = [this] { clock_.AdvanceMs(1500); };
  ASSERT_TRUE(Write(*tier, 1, 0).ok());
  EXPECT_TRUE(tier->GetStats().degraded);
  EXPECT_EQ(tier->GetStats().slow_calls, 1);
  EXPECT_EQ(tier->GetStats().error, "");
  disk_.on_put = [] {};
  ASSERT_TRUE(Write(*tier, 2, 0).ok());
  clock_.AdvanceMs(10'001);
  EXPECT_FALSE(tier->GetStats().degraded);
  disk_.on_get = [this] { clock_.AdvanceMs(1500); };
  std::vector<uint8_t> payload(100);
  ASSERT_TRUE(tier->Read(spec_, *tier->Find(spec_, ChainKey(1, 0)), absl::MakeSpan(payload)).ok());
  EXPECT_TRUE(tier->GetStats().degraded);
}

TEST_F(SpillTierTest, FailingDiskIsDegradedUntilAWriteSucceeds) {
  const auto tier = Open({.size_bytes = 1 << 20});
  disk_.is_full = true;
  EXPECT_FALSE(Write(*tier, 0, 0).ok());
  EXPECT_TRUE(tier->GetStats().degraded);
  disk_.is_full = false;
  clock_.AdvanceMs(10'001);
  EXPECT_TRUE(Write(*tier, 0, 0).ok());
  EXPECT_FALSE(tier->GetStats().degraded);
}

TEST_F(SpillTierTest, BlocksGoByTimeToLive) {
  const auto tier = Open({.size_bytes = 1 << 20, .ttl_ms = 1000});
  ASSERT_TRUE(Write(*tier, 0, 0).ok());
  clock_.AdvanceMs(600);
  ASSERT_TRUE(Write(*tier, 1, 0).ok());
  clock_.AdvanceMs(399);
  tier->Expire();
  EXPECT_TRUE(Has(*tier, 0, 0));
  clock_.AdvanceMs(1);
  tier->Expire();
  EXPECT_FALSE(Has(*tier, 0, 0));
  EXPECT_TRUE(Has(*tier, 1, 0));
  EXPECT_EQ(tier->GetStats().blocks_expired, 1);
  EXPECT_EQ(disk_.files.size(), 1u);
}

TEST_F(SpillTierTest, AnotherOpeningFindsWhatWasWrittenInOrder) {
  auto tier = Open({.size_bytes = 1 << 20});
  for (int32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(Write(*tier, i, 0).ok());
    clock_.AdvanceMs(5);
  }
  tier = Open({.size_bytes = 300});
  EXPECT_EQ(tier->GetStats().blocks, 3);
  ASSERT_TRUE(Write(*tier, 3, 0).ok());
  EXPECT_FALSE(Has(*tier, 0, 0)) << "the oldest write of the process before";
}

TEST_F(SpillTierTest, AFullDiskIsSaidAndTriedAgainLater) {
  const auto tier = Open({.size_bytes = 1 << 20});
  ASSERT_TRUE(Write(*tier, 0, 0).ok());
  disk_.is_full = true;
  EXPECT_EQ(ReasonOf(Write(*tier, 1, 0)), "SPILL_FAILED");
  EXPECT_FALSE(tier->CanWrite());
  EXPECT_THAT(tier->GetStats().error, HasSubstr("no space left"));
  EXPECT_TRUE(Has(*tier, 0, 0)) << "reads go on";
  EXPECT_FALSE(Has(*tier, 1, 0));
  disk_.is_full = false;
  EXPECT_FALSE(Write(*tier, 1, 0).ok()) << "not tried yet";
  clock_.AdvanceMs(10'000);
  EXPECT_TRUE(tier->CanWrite());
  EXPECT_TRUE(Write(*tier, 1, 0).ok());
  EXPECT_EQ(disk_.recover_count, 1);
  EXPECT_EQ(tier->GetStats().error, "");
  EXPECT_EQ(tier->GetStats().write_errors, 1);
}

TEST_F(SpillTierTest, ADamagedBlockIsForgotten) {
  const auto tier = Open({.size_bytes = 1 << 20});
  ASSERT_TRUE(Write(*tier, 0, 0).ok());
  disk_.files.begin()->second.payload.pop_back();
  std::vector<uint8_t> payload(100);
  const auto block = tier->Find(spec_, ChainKey(0, 0));
  EXPECT_EQ(ReasonOf(tier->Read(spec_, *block, absl::MakeSpan(payload))), "SPILL_DAMAGED");
  EXPECT_FALSE(Has(*tier, 0, 0));
  EXPECT_EQ(tier->GetStats().blocks_damaged, 1);
  EXPECT_EQ(disk_.files.size(), 0u);
}

TEST_F(SpillTierTest, WhatDependsOnAForgottenBlockGoesWithIt) {
  const auto tier = Open({.size_bytes = 1 << 20});
  for (int32_t i = 0; i < 4; ++i) ASSERT_TRUE(Write(*tier, 0, i).ok());
  ASSERT_TRUE(Write(*tier, 1, 0).ok());
  const auto forgotten = tier->Forget(spec_, {ChainKey(0, 1)});
  EXPECT_THAT(forgotten, UnorderedElementsAre(ChainKey(0, 1), ChainKey(0, 2), ChainKey(0, 3)));
  EXPECT_TRUE(Has(*tier, 0, 0));
  EXPECT_TRUE(Has(*tier, 1, 0));
  EXPECT_EQ(tier->GetStats().bytes, 200);
}

TEST_F(SpillTierTest, ADiskThatCouldNotBeOpenedIsOff) {
  SpillTier tier(nullptr, {.size_bytes = 100}, &clock_,
                 MakeError(absl::StatusCode::kDataLoss, "SPILL_DAMAGED", "bad block 7"));
  EXPECT_TRUE(tier.Load([](int64_t) {}).ok());
  EXPECT_FALSE(tier.CanWrite());
  EXPECT_FALSE(Write(tier, 0, 0).ok());
  EXPECT_TRUE(tier.GetStats().enabled);
  EXPECT_EQ(tier.GetStats().error, "bad block 7");
}

}  // namespace
}  // namespace certkv::kvstore
