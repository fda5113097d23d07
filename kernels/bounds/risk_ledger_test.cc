#include "kernels/bounds/risk_ledger.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <random>

namespace certkv {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

RiskLedger Cumulative(double tolerance, double budget) {
  return RiskLedger({4, 8, RiskMode::kCumulative, tolerance, budget});
}

TEST(TvBucketOfTest, BucketsAreHalfOpenFromBelow) {
  EXPECT_EQ(TvBucketOf(0), 0);
  EXPECT_EQ(TvBucketOf(0x1p-11), 0);
  EXPECT_EQ(TvBucketOf(std::nextafter(0x1p-11, 1)), 1);
  EXPECT_EQ(TvBucketOf(0.2), 9);
  EXPECT_EQ(TvBucketOf(0.5), 10);
  EXPECT_EQ(TvBucketOf(1), 11);
  for (const double bad : {kNan, -0.1, 1.5, kInf}) EXPECT_EQ(TvBucketOf(bad), 11) << bad;
}

TEST(RiskLedgerTest, SumIsNeverBelowTheExactSum) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> exponent(-50, -1);
  RiskLedger ledger({1, 1, RiskMode::kThreshold, 1, 0});
  long double exact = 0;
  double nearest = 0;
  for (int i = 0; i < 100000; ++i) {
    const double tv = std::exp2(exponent(random));
    ledger.Record(0, 0, tv);
    exact += tv;
    nearest += tv;
  }
  // The long double sum is itself off by 1e5 roundings of 2^-64 of it.
  EXPECT_GE(ledger.total().tv_sum, static_cast<double>(exact) * (1 - 1e-14));
  EXPECT_LE(ledger.total().tv_sum, nearest * (1 + 1e5 * 0x1p-52));
}

TEST(RiskLedgerTest, ManyTinyReadsAreNotLostNextToALargeSum) {
  RiskLedger ledger({1, 1, RiskMode::kThreshold, 1, 0});
  for (int i = 0; i < 10; ++i) ledger.Record(0, 0, 1);
  for (int i = 0; i < 1000; ++i) ledger.Record(0, 0, 1e-18);
  EXPECT_GT(ledger.total().tv_sum, 10 + 1000 * 1e-18);
}

TEST(RiskLedgerTest, UnknownCountsAsOne) {
  RiskLedger ledger({1, 1, RiskMode::kThreshold, 1, 0});
  for (const double bad : {kNan, -0.5, 7.0, kInf}) ledger.Record(0, 0, bad);
  EXPECT_EQ(ledger.total().tv_sum, 4);
  EXPECT_EQ(ledger.total().tv_max, 1);
  EXPECT_EQ(ledger.total().histogram[kTvBucketCount - 1], 4);
  EXPECT_TRUE(ledger.exceeded());
}

TEST(RiskLedgerTest, KeepsHeadsApartAndHistogramsAddUp) {
  RiskLedger ledger({2, 3, RiskMode::kThreshold, 1, 0});
  ledger.Record(0, 2, 0.25);
  ledger.Record(1, 0, 0.001);
  ledger.Record(1, 0, 0.125);
  EXPECT_EQ(ledger.head(0, 2).read_count, 1);
  EXPECT_EQ(ledger.head(0, 2).tv_max, 0.25);
  EXPECT_EQ(ledger.head(1, 0).read_count, 2);
  EXPECT_EQ(ledger.head(1, 0).tv_max, 0.125);
  EXPECT_EQ(ledger.head(1, 2).read_count, 0);
  EXPECT_EQ(ledger.total().read_count, 3);
  const auto& histogram = ledger.total().histogram;
  EXPECT_EQ(std::accumulate(histogram.begin(), histogram.end(), int64_t{0}), 3);
}

TEST(RiskLedgerTest, ThresholdRefusesAReadAboveTheTolerance) {
  RiskLedger ledger({1, 1, RiskMode::kThreshold, 0.2, 0});
  EXPECT_TRUE(ledger.CanSpend(0.2));
  EXPECT_FALSE(ledger.CanSpend(std::nextafter(0.2, 1)));
  EXPECT_FALSE(ledger.CanSpend(kNan));
  EXPECT_FALSE(ledger.CanSpend(-0.1));
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(ledger.Spend(0, 0, 0.2));
  EXPECT_EQ(ledger.BudgetLeft(), kInf);
  EXPECT_FALSE(ledger.exceeded());
}

TEST(RiskLedgerTest, RefusesAStepThatWouldExceedTheBudget) {
  RiskLedger ledger = Cumulative(0.2, 0.5);
  EXPECT_TRUE(ledger.Spend(0, 0, 0.2));
  EXPECT_TRUE(ledger.Spend(1, 3, 0.2));
  EXPECT_FALSE(ledger.Spend(2, 0, 0.15));
  EXPECT_EQ(ledger.total().read_count, 2);
  EXPECT_EQ(ledger.head(2, 0).read_count, 0);
  EXPECT_EQ(ledger.total().tv_sum, 0.4);
  EXPECT_LE(ledger.BudgetLeft(), 0.1);
  EXPECT_NEAR(ledger.BudgetLeft(), 0.1, 1e-15);
  EXPECT_TRUE(ledger.Spend(2, 0, 0.0625));
  EXPECT_FALSE(ledger.exceeded());
  ledger.Record(3, 7, 0.2);
  EXPECT_TRUE(ledger.exceeded());
  EXPECT_EQ(ledger.BudgetLeft(), 0);
}

TEST(RiskLedgerTest, WhatIsLeftCanAlwaysBeSpent) {
  std::mt19937_64 random(4);
  std::uniform_real_distribution<double> uniform(0, 0.01);
  for (int trial = 0; trial < 1000; ++trial) {
    RiskLedger ledger = Cumulative(1, 1);
    for (int i = 0; i < 50; ++i) ASSERT_TRUE(ledger.Spend(0, 0, uniform(random)));
    ASSERT_TRUE(ledger.CanSpend(ledger.BudgetLeft())) << "seed 4 " << trial;
  }
}

TEST(RiskLedgerTest, UnionGivesEachReadItsShareAndDeterministicReadsNeedNone) {
  RiskLedger ledger({1, 1, RiskMode::kUnion, 0.2, 0, 0.01});
  EXPECT_FALSE(ledger.CanSpend(0.1, 0.0051)) << "the first share is a half";
  EXPECT_TRUE(ledger.Spend(0, 0, 0.1, 0.0049));
  EXPECT_FALSE(ledger.CanSpend(0.1, 0.0017)) << "the second is a sixth";
  EXPECT_FALSE(ledger.CanSpend(0.1, kNan));
  EXPECT_TRUE(ledger.Spend(0, 0, 0.1, 0.0016));
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(ledger.Spend(0, 0, 0.1));
  EXPECT_GE(ledger.failure_probability_sum(), 0.0065);
  EXPECT_LE(ledger.failure_probability_sum(), 0.00650001);
  EXPECT_FALSE(ledger.exceeded());
  ledger.Record(0, 0, 0.1, 0.5);
  EXPECT_TRUE(ledger.exceeded());
}

TEST(RiskLedgerTest, OutsideUnionAReadThatMayFailNeverFits) {
  for (const RiskMode mode : {RiskMode::kThreshold, RiskMode::kCumulative, RiskMode::kAnytime}) {
    const RiskLedger ledger({1, 1, mode, 1, 100, 0.01});
    EXPECT_TRUE(ledger.CanSpend(0.1, 0)) << RiskModeName(mode);
    EXPECT_FALSE(ledger.CanSpend(0.1, 1e-9)) << RiskModeName(mode);
  }
}

TEST(RiskLedgerTest, AnytimeStopsTheSumBelowTheLossLimit) {
  RiskLedger ledger({1, 1, RiskMode::kAnytime, 1, 10, 0.01});
  while (ledger.Spend(0, 0, 0.125)) {
  }
  EXPECT_LE(ledger.total().tv_sum, 10 * std::exp(-0.5)) << "P(Poisson(6) >= 10) is over 0.01";
  EXPECT_GT(ledger.total().tv_sum, 2.5);
  EXPECT_LT(ledger.BudgetLeft(), 0.125);
  EXPECT_FALSE(ledger.exceeded());
}

TEST(RiskLedgerTest, NanLimitsAdmitNothing) {
  EXPECT_FALSE(RiskLedger({1, 1, RiskMode::kAnytime, 1, kNan, 0.01}).CanSpend(0.1));
  EXPECT_FALSE(RiskLedger({1, 1, RiskMode::kAnytime, 1, 10, kNan}).CanSpend(0.1));
  EXPECT_FALSE(RiskLedger({1, 1, RiskMode::kThreshold, kNan, 0}).CanSpend(0));
  EXPECT_FALSE(Cumulative(1, kNan).CanSpend(0));
  EXPECT_EQ(Cumulative(1, kNan).BudgetLeft(), 0);
}

TEST(RiskLedgerDeathTest, AnIndexOutsideTheLedgerIsAProgrammerError) {
  RiskLedger ledger = Cumulative(1, 1);
  EXPECT_DEATH(ledger.Record(4, 0, 0.1), "layer is outside");
  EXPECT_DEATH(ledger.Record(0, 8, 0.1), "query head is outside");
  EXPECT_DEATH(ledger.Record(-1, 0, 0.1), "layer is outside");
  EXPECT_DEATH(RiskLedger({0, 8, RiskMode::kThreshold, 1, 0}), "at least one layer");
}

}  // namespace
}  // namespace certkv
