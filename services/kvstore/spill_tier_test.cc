// The tier on disk without a disk: limits, errors, what depends on what.
#include "services/kvstore/spill_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "absl/synchronization/notification.h"
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
    EXPECT_TRUE(tier->Load().ok());
    return tier;
  }
  absl::Status WriteFor(SpillTier& tier, const std::string& tenant, int32_t chain,
                        size_t bytes = 100) {
    SpilledBlock block;
    block.key = ChainKey(chain, 0);
    block.tenant = tenant;
    return tier.Write(spec_, block, std::vector<uint8_t>(bytes));
  }
  static TenantSpill SpillOf(const SpillTier& tier, const std::string& tenant) {
    for (const TenantSpill& one : tier.GetStats().tenants) {
      if (one.tenant == tenant) return one;
    }
    return {};
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

TEST_F(SpillTierTest, OpeningTellsHowFarItIsAndFindsNothingMeanwhile) {
  constexpr int32_t kBlocks = 10'000;
  auto tier = Open({.size_bytes = 1 << 20});
  for (int32_t i = 0; i < kBlocks; ++i) ASSERT_TRUE(Write(*tier, i, 0, 10).ok());
  tier = std::make_unique<SpillTier>(std::make_unique<FakeSpillStore>(&disk_),
                                     SpillLimits{.size_bytes = 1 << 20}, &clock_);
  EXPECT_TRUE(tier->GetStats().opening);
  std::vector<int64_t> seen;
  ASSERT_TRUE(tier->Load([&](const SpillProgress& progress) {
                    EXPECT_EQ(progress.bytes, 10 * progress.blocks);
                    EXPECT_EQ(tier->GetStats().progress.blocks, progress.blocks);
                    EXPECT_TRUE(tier->GetStats().opening);
                    EXPECT_FALSE(Has(*tier, 0, 0));
                    EXPECT_FALSE(tier->CanWrite());
                    EXPECT_EQ(ReasonOf(tier->Write(spec_, {}, {})), "SPILL_FAILED");
                    seen.push_back(progress.blocks);
                    return true;
                  })
                  .ok());
  EXPECT_EQ(seen, (std::vector<int64_t>{1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192, 9216}));
  EXPECT_FALSE(tier->GetStats().opening);
  EXPECT_EQ(tier->GetStats().blocks, kBlocks);
  EXPECT_EQ(tier->GetStats().bytes, 10 * kBlocks);
  EXPECT_TRUE(Has(*tier, kBlocks - 1, 0));
}

TEST_F(SpillTierTest, OpeningThatIsStoppedLeavesTheDiskAlone) {
  auto tier = Open({.size_bytes = 1 << 20});
  for (int32_t i = 0; i < 3000; ++i) ASSERT_TRUE(Write(*tier, i, 0, 10).ok());
  tier = std::make_unique<SpillTier>(std::make_unique<FakeSpillStore>(&disk_),
                                     SpillLimits{.size_bytes = 1000}, &clock_);
  int calls = 0;
  const absl::Status status = tier->Load([&](const SpillProgress&) { return ++calls < 2; });
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  EXPECT_EQ(calls, 2);
  EXPECT_FALSE(Write(*tier, 9000, 0).ok()) << "it would be the only one that is known";
  EXPECT_EQ(disk_.files.size(), 3000u);
}

SpillLimits QuotaLimits(int64_t size_bytes, int64_t a_bytes, int64_t others_bytes = 0) {
  return {.size_bytes = size_bytes,
          .ttl_ms = 0,
          .quotas = {{.tenant = "a", .spill_limit_bytes = a_bytes},
                     {.tenant = "*", .spill_limit_bytes = others_bytes}}};
}

TEST_F(SpillTierTest, ATenantOverItsLimitLosesItsOwnOldestAndNobodyElses) {
  const auto tier = Open(QuotaLimits(10'000, 300));
  ASSERT_TRUE(WriteFor(*tier, "b", 100).ok());  // the oldest of all
  for (int32_t i = 0; i < 3; ++i) ASSERT_TRUE(WriteFor(*tier, "a", i).ok());
  ASSERT_TRUE(WriteFor(*tier, "", 200).ok());
  EXPECT_EQ(SpillOf(*tier, "a").bytes, 300);
  ASSERT_TRUE(WriteFor(*tier, "a", 3, 150).ok());
  EXPECT_FALSE(Has(*tier, 0, 0));
  EXPECT_FALSE(Has(*tier, 1, 0));
  EXPECT_TRUE(Has(*tier, 2, 0));
  EXPECT_TRUE(Has(*tier, 3, 0));
  EXPECT_TRUE(Has(*tier, 100, 0));
  EXPECT_TRUE(Has(*tier, 200, 0));
  const TenantSpill a = SpillOf(*tier, "a");
  EXPECT_EQ(a.bytes, 250);
  EXPECT_EQ(a.blocks, 2);
  EXPECT_EQ(a.limit_bytes, 300);
  EXPECT_EQ(SpillOf(*tier, "b").bytes, 100);
  EXPECT_EQ(SpillOf(*tier, "b").limit_bytes, 0);
  EXPECT_EQ(tier->GetStats().blocks_over_quota, 2);
  EXPECT_EQ(tier->GetStats().blocks_expired, 0);
  EXPECT_EQ(disk_.files.size(), 4u) << "and from the disk";
}

TEST_F(SpillTierTest, ABlockThatIsOverALimitAloneTakesNobodysRoom) {
  const auto tier = Open(QuotaLimits(500, 300));
  ASSERT_TRUE(WriteFor(*tier, "a", 0).ok());
  ASSERT_TRUE(WriteFor(*tier, "b", 1).ok());
  const absl::Status status = WriteFor(*tier, "a", 2, 301);
  EXPECT_EQ(ReasonOf(status), "QUOTA_EXCEEDED");
  EXPECT_THAT(std::string(status.message()), HasSubstr("tenant \"a\" may have 300 bytes"));
  EXPECT_EQ(ReasonOf(WriteFor(*tier, "b", 3, 501)), "QUOTA_EXCEEDED");
  EXPECT_FALSE(tier->Admits("a", 301));
  EXPECT_TRUE(tier->Admits("b", 301));
  EXPECT_TRUE(Has(*tier, 0, 0));
  EXPECT_TRUE(Has(*tier, 1, 0));
  EXPECT_EQ(tier->GetStats().blocks_refused, 2);
  EXPECT_TRUE(WriteFor(*tier, "a", 2, 300).ok());
  EXPECT_TRUE(tier->CanWrite()) << "it is not the disk's fault";
}

TEST_F(SpillTierTest, TheLimitOfEachOtherTenantIsItsOwn) {
  const auto tier = Open(QuotaLimits(10'000, 1000, 200));
  for (int32_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(WriteFor(*tier, "b", i).ok());
    ASSERT_TRUE(WriteFor(*tier, "c", 10 + i).ok());
  }
  EXPECT_EQ(SpillOf(*tier, "b").bytes, 200);
  EXPECT_EQ(SpillOf(*tier, "c").bytes, 200);
  EXPECT_FALSE(Has(*tier, 0, 0));
  EXPECT_TRUE(Has(*tier, 1, 0));
  EXPECT_FALSE(Has(*tier, 10, 0));
}

TEST_F(SpillTierTest, WhatATenantHadIsItsOwnAfterARestartAndOverALowerLimitItGoes) {
  auto tier = Open(QuotaLimits(10'000, 1000));
  ASSERT_TRUE(WriteFor(*tier, "b", 100).ok());
  for (int32_t i = 0; i < 5; ++i) {
    clock_.AdvanceMs(1);
    ASSERT_TRUE(WriteFor(*tier, "a", i).ok());
  }
  tier = Open(QuotaLimits(10'000, 300));
  EXPECT_EQ(SpillOf(*tier, "a").bytes, 500);
  tier->Expire();
  EXPECT_EQ(SpillOf(*tier, "a").bytes, 300);
  EXPECT_FALSE(Has(*tier, 1, 0));
  EXPECT_TRUE(Has(*tier, 2, 0));
  EXPECT_TRUE(Has(*tier, 100, 0));
  EXPECT_EQ(disk_.files.size(), 4u);
}

TEST_F(SpillTierTest, WritesThatRunTogetherStayWithinTheLimit) {
  const auto tier = Open(QuotaLimits(10'000, 250));
  absl::Notification first_is_in;
  absl::Notification may_end;
  disk_.before_put = [&] {
    if (first_is_in.HasBeenNotified()) return;
    first_is_in.Notify();
    may_end.WaitForNotification();
  };
  std::thread first([&] { EXPECT_TRUE(WriteFor(*tier, "a", 0, 200).ok()); });
  first_is_in.WaitForNotification();
  EXPECT_EQ(ReasonOf(WriteFor(*tier, "a", 1, 200)), "QUOTA_EXCEEDED");
  EXPECT_TRUE(WriteFor(*tier, "b", 2, 200).ok());
  may_end.Notify();
  first.join();
  EXPECT_EQ(SpillOf(*tier, "a").bytes, 200);
  EXPECT_TRUE(WriteFor(*tier, "a", 1, 200).ok()) << "now that the first can go";
  EXPECT_EQ(SpillOf(*tier, "a").blocks, 1);
}

TEST_F(SpillTierTest, DamageOfAnEarlierWriteDoesNotTakeTheLaterOne) {
  const auto tier = Open({.size_bytes = 1 << 20});
  ASSERT_TRUE(Write(*tier, 0, 0).ok());
  const SpilledBlock before = *tier->Find(spec_, ChainKey(0, 0));
  ASSERT_TRUE(Write(*tier, 0, 0).ok());  // in the same millisecond
  EXPECT_FALSE(tier->ForgetDamaged(spec_, before));
  EXPECT_TRUE(Has(*tier, 0, 0));
  EXPECT_EQ(disk_.files.size(), 1u);
  EXPECT_TRUE(tier->ForgetDamaged(spec_, *tier->Find(spec_, ChainKey(0, 0))));
  EXPECT_FALSE(Has(*tier, 0, 0));
  EXPECT_EQ(disk_.files.size(), 0u);
  EXPECT_EQ(tier->GetStats().blocks_damaged, 1);
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
  EXPECT_TRUE(tier.Load().ok());
  EXPECT_FALSE(tier.CanWrite());
  EXPECT_FALSE(Write(tier, 0, 0).ok());
  EXPECT_TRUE(tier.GetStats().enabled);
  EXPECT_EQ(tier.GetStats().error, "bad block 7");
}

}  // namespace
}  // namespace certkv::kvstore
