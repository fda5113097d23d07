#include "kernels/bounds/risk_budget.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace certkv {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(UnionShareTest, SharesAddUpToTheWholeAndNoMore) {
  long double sum = 0;
  for (int64_t n = 0; n < 1'000'000; ++n) sum += UnionShare(0.01, n);
  EXPECT_LT(sum, 0.01L);
  EXPECT_GT(sum, 0.01L * (1 - 2e-6L)) << "1 / (N + 1) of it is for the reads after N";
  EXPECT_LE(UnionShare(0.01, 0), 0.005);
  EXPECT_GT(UnionShare(0.01, std::numeric_limits<int64_t>::max()), 0);
}

TEST(UnionShareTest, AllowsNothingWhenTheArgumentsMeanNothing) {
  EXPECT_EQ(UnionShare(kNan, 0), 0);
  EXPECT_EQ(UnionShare(0, 0), 0);
  EXPECT_EQ(UnionShare(1, 0), 0);
  EXPECT_EQ(UnionShare(-0.1, 0), 0);
  EXPECT_EQ(UnionShare(0.1, -1), 0);
}

TEST(AnytimeSumLimitTest, MeetsTheInequalityAndIsTight) {
  for (const double limit : {1e-3, 0.1, 1.0, 7.0, 100.0, 1e4, 1e6}) {
    for (const double delta : {0.5, 0.01, 1e-6, 1e-9}) {
      const auto left_side = [limit](long double sum) {
        return limit * std::log(limit / sum) - limit + sum;
      };
      const double sum = AnytimeSumLimit(limit, delta);
      const long double target = -std::log(static_cast<long double>(delta));
      ASSERT_LT(sum, limit);
      if (sum == 0) {  // the true one is below the smallest double
        EXPECT_LT(std::log(limit) - 1 - (target + 1) / limit, -700) << limit << " " << delta;
        continue;
      }
      EXPECT_GE(left_side(sum), target) << limit << " " << delta;
      // The next 2^-20 of the distance to the limit would break it.
      EXPECT_LT(left_side(sum * (1 + 1e-9L) + (limit - sum) * 0x1p-20L), target)
          << limit << " " << delta;
    }
  }
}

TEST(AnytimeSumLimitTest, AllowsNothingWhenTheArgumentsMeanNothing) {
  for (const double bad : {kNan, kInf, 0.0, -1.0}) EXPECT_EQ(AnytimeSumLimit(bad, 0.1), 0) << bad;
  for (const double bad : {kNan, 0.0, 1.0, -0.1}) EXPECT_EQ(AnytimeSumLimit(1, bad), 0) << bad;
  EXPECT_EQ(AnytimeSumLimit(1e-300, 1e-9), 0) << "no double is small enough";
}

TEST(AnytimeLossBoundTest, IsTheLimitWhereTheSumIsAndSmallerBefore) {
  const double sum = AnytimeSumLimit(50, 1e-6);
  EXPECT_GE(AnytimeLossBound(sum, 50, 1e-6), 50 * (1 - 1e-9));
  EXPECT_LE(AnytimeLossBound(sum, 50, 1e-6), 50 * (1 + 1e-4)) << "rounded up by RoundUp";
  EXPECT_LT(AnytimeLossBound(sum / 2, 50, 1e-6), 50);
  EXPECT_GT(AnytimeLossBound(0, 50, 1e-6), 0) << "ln(1 / delta) / lambda is paid in advance";
  EXPECT_GT(AnytimeLossBound(100, 50, 1e-6), 100) << "never below the sum itself";
  EXPECT_EQ(AnytimeLossBound(kNan, 50, 1e-6), kInf);
  EXPECT_EQ(AnytimeLossBound(1, kNan, 1e-6), kInf);
}

// How often losses reach `loss_limit` at some moment, in `trials` runs that spend up to
// `sum_limit`. The reads adapt to what was lost, which a fixed-time bound would not cover: as an
// adversary who wants to be caught, large reads while losses are ahead of their mean, small ones
// otherwise.
double FailureRate(double loss_limit, double sum_limit, int trials, uint32_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(0, 1);
  int failures = 0;
  for (int trial = 0; trial < trials; ++trial) {
    double sum = 0;
    double losses = 0;
    while (losses < loss_limit) {
      const double tv = losses > sum ? 0.5 : 0.05;
      if (sum + tv > sum_limit) break;
      sum += tv;
      if (uniform(random) < tv) losses += 1;
    }
    failures += losses >= loss_limit ? 1 : 0;
  }
  return static_cast<double>(failures) / trials;
}

TEST(AnytimeSumLimitTest, LossesReachTheLimitNoMoreOftenThanDelta) {
  constexpr int kTrials = 20'000;
  constexpr double kDelta = 0.05;
  constexpr double kLimit = 12;
  const double allowed = AnytimeSumLimit(kLimit, kDelta);
  // Hoeffding: the observed rate is below the true one + 0.0125 but for 2 exp(-2 n t^2) < 0.004.
  EXPECT_LE(FailureRate(kLimit, allowed, kTrials, 7), kDelta + 0.0125);
  EXPECT_GT(allowed, kLimit / 3) << "not vacuous";
  // The other side: with the limit itself as the budget, CUMULATIVE's, losses do reach it.
  EXPECT_GT(FailureRate(kLimit, kLimit, kTrials, 7), 5 * kDelta);
}

}  // namespace
}  // namespace certkv
