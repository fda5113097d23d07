#include "clients/cpp/slice_account.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <thread>
#include <vector>

namespace certkv::client {
namespace {

PolicyLease Lease(RiskMode mode, double slice) {
  PolicyLease lease;
  lease.lease_id = 7;
  lease.risk_mode = mode;
  lease.budget_slice = slice;
  return lease;
}

ReadCertificate Certified(float tv) {
  ReadCertificate certificate;
  certificate.worst_case_tv = tv;
  certificate.outcome = Outcome::kCertified;
  return certificate;
}

TEST(SliceAccountTest, TakesAReadWholeOrNotAtAll) {
  for (const RiskMode mode : {RiskMode::kCumulative, RiskMode::kAnytime}) {
    const PolicyLease lease = Lease(mode, 1);
    SliceAccount account(lease);
    EXPECT_TRUE(account.Spend(lease, {Certified(0.25f), Certified(0.5f)}));
    EXPECT_FALSE(account.Spend(lease, {Certified(0.125f), Certified(0.25f)}));
    EXPECT_TRUE(account.Spend(lease, {Certified(0.25f)}));
    EXPECT_FALSE(account.Spend(lease, {Certified(0x1p-30f)}));
    EXPECT_EQ(account.Close(), 1);
  }
}

TEST(SliceAccountTest, ExactHeadsCostNothing) {
  const PolicyLease lease = Lease(RiskMode::kCumulative, 0.25);
  SliceAccount account(lease);
  ReadCertificate exact = Certified(1e-6f);
  exact.outcome = Outcome::kExact;
  EXPECT_TRUE(account.Spend(lease, std::vector<ReadCertificate>(1000, exact)));
  EXPECT_EQ(account.Close(), 0);
}

TEST(SliceAccountTest, NothingIsTakenAfterClose) {
  const PolicyLease lease = Lease(RiskMode::kCumulative, 1);
  SliceAccount account(lease);
  EXPECT_EQ(account.Close(), 0);
  EXPECT_FALSE(account.Spend(lease, {Certified(0.1f)}));
  EXPECT_EQ(account.Close(), 0);
}

TEST(SliceAccountTest, ThresholdAndObserveKeepNoAccount) {
  PolicyLease lease = Lease(RiskMode::kThreshold, 0);
  SliceAccount threshold(lease);
  EXPECT_TRUE(threshold.Spend(lease, {Certified(1)}));
  EXPECT_FALSE(threshold.has_slice());
  lease = Lease(RiskMode::kCumulative, 0);
  lease.read_mode = ReadMode::kObserve;
  SliceAccount observe(lease);
  EXPECT_TRUE(observe.Spend(lease, {Certified(1)}));
  lease.read_mode = ReadMode::kEnforce;
  EXPECT_FALSE(observe.Spend(lease, {Certified(0.1f)})) << "a slice of nothing, once it enforces";
}

TEST(SliceAccountTest, UnionSpendsFailureProbability) {
  const PolicyLease lease = Lease(RiskMode::kUnion, 1e-6);
  SliceAccount account(lease);
  EXPECT_TRUE(account.Spend(lease, std::vector<ReadCertificate>(1000, Certified(0.2f))));
  ReadCertificate may_fail = Certified(0.2f);
  may_fail.failure_probability = 6e-7f;
  EXPECT_TRUE(account.Spend(lease, {may_fail}));
  EXPECT_FALSE(account.Spend(lease, {may_fail}));
}

TEST(SliceAccountTest, UnionSpendsWhatExactAndFailedReadsHadTaken) {
  const PolicyLease lease = Lease(RiskMode::kUnion, 0.25);
  SliceAccount account(lease);
  ReadCertificate exact = Certified(1e-6f);
  exact.outcome = Outcome::kExact;
  EXPECT_TRUE(account.Spend(lease, {exact}));
  exact.failure_probability = FailureShare(0.25);
  EXPECT_TRUE(account.Spend(lease, {exact, exact}));
  account.SpendFailed(lease, 3);
  EXPECT_EQ(account.Close(), 5 * 0x1p-18);
  account.SpendFailed(lease, 1);
  EXPECT_EQ(account.Close(), 5 * 0x1p-18);

  SliceAccount small(lease);
  small.SpendFailed(lease, int64_t{1} << 30);
  EXPECT_EQ(small.Close(), 0.25) << "never more than the slice";
  SliceAccount other(Lease(RiskMode::kCumulative, 0.25));
  other.SpendFailed(Lease(RiskMode::kCumulative, 0.25), 3);
  EXPECT_EQ(other.Close(), 0);
}

TEST(SliceAccountTest, UnknownAmountsCountAsOne) {
  const PolicyLease lease = Lease(RiskMode::kCumulative, 1.5);
  SliceAccount account(lease);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(account.Spend(lease, {Certified(nan)}));
  EXPECT_FALSE(account.Spend(lease, {Certified(-1)}));
  EXPECT_FALSE(SliceAccount(Lease(RiskMode::kCumulative, nan)).has_slice());
}

TEST(SliceAccountTest, ThreadsNeverOverspendTogether) {
  const PolicyLease lease = Lease(RiskMode::kCumulative, 100);
  SliceAccount account(lease);
  std::vector<std::thread> threads;
  std::vector<int> taken(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) taken[t] += account.Spend(lease, {Certified(0.0625f)}) ? 1 : 0;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(taken[0] + taken[1] + taken[2] + taken[3], 1600);
  EXPECT_EQ(account.Close(), 100);
}

}  // namespace
}  // namespace certkv::client
