#include "kernels/bounds/output_bound.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/bounds/rounding.h"
#include "kernels/bounds/worst_case_tv.h"
#include "tests/support/bound_checker.h"

namespace certkv {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(ValueTermTest, IsTheMeanErrorRoundedUp) {
  const double term = ValueTerm({1, 3}, {0.4, 0.8});
  EXPECT_GE(term, 0.7);
  EXPECT_LE(term, 0.7 * (1 + 0x1p-17));
  EXPECT_EQ(ValueTerm({1, 3}, {0, 0}), 0);
}

TEST(ValueTermTest, UnknownIsInfinite) {
  EXPECT_EQ(ValueTerm({1, 0}, {0.1, kUnknownBound}), kUnknownBound);
  EXPECT_EQ(ValueTerm({1, 1}, {0.1, kNan}), kUnknownBound);
  EXPECT_EQ(ValueTerm({1, 1}, {0.1, -0.1}), kUnknownBound);
  EXPECT_EQ(ValueTerm({1, kNan}, {0.1, 0.1}), kUnknownBound);
  EXPECT_EQ(ValueTerm({1, -0.5}, {0.1, 0.1}), kUnknownBound);
  EXPECT_EQ(ValueTerm({0, 0}, {0.1, 0.1}), kUnknownBound);
  EXPECT_EQ(ValueTerm({}, {}), kUnknownBound);
  EXPECT_EQ(ValueTerm({1, 1}, {0.1}), kUnknownBound);
}

TEST(OutputErrorBoundTest, AddsItsTermsAndRoundsUp) {
  const double bound = OutputErrorBound({0.1, 0.2, 3, 0.05});
  EXPECT_GE(bound, 0.1 + 2 * 0.2 * 3 + 0.05 - 1e-15);
  EXPECT_LE(bound, 1.35 + 1e-15);
}

TEST(OutputErrorBoundTest, UnknownIsInfinite) {
  EXPECT_EQ(OutputErrorBound({kNan, 0, 1, 0}), kUnknownBound);
  EXPECT_EQ(OutputErrorBound({0, kNan, 1, 0}), kUnknownBound);
  EXPECT_EQ(OutputErrorBound({0, -0.1, 1, 0}), kUnknownBound);
  EXPECT_EQ(OutputErrorBound({0, 0, kUnknownBound, 0}), kUnknownBound);
  EXPECT_EQ(OutputErrorBound({0, 0, 1, kNan}), kUnknownBound);
}

TEST(OutputRoundingTermTest, GrowsWithTheCount) {
  EXPECT_EQ(OutputRoundingTerm(0, 5), 0);
  EXPECT_GE(OutputRoundingTerm(100, 5), 100 * 0x1p-24 * 5);
  EXPECT_EQ(OutputRoundingTerm(10, kNan), kUnknownBound);
}

// Real softmaxes, real residuals: o from exact logits and values, o^ from perturbed ones.
TEST(OutputErrorBoundTest, CoversTheOutputOfPerturbedAttention) {
  constexpr uint64_t kSeed = 5;
  constexpr size_t kDim = 8;
  std::mt19937_64 random(kSeed);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform(-1, 1);
  WorstCaseTvWorkspace workspace;
  double largest_share = 0;
  for (int trial = 0; trial < 500; ++trial) {
    const size_t count = 1 + trial % 40;
    std::vector<double> served(count);
    std::vector<double> exact(count);
    std::vector<double> half_width(count);
    std::vector<double> eta(count);
    std::vector<std::vector<double>> value(count, std::vector<double>(kDim));
    std::vector<std::vector<double>> decoded = value;
    double radius = 0;
    double served_sum = 0;
    double exact_sum = 0;
    for (size_t t = 0; t < count; ++t) {
      const double logit = 2 * normal(random);
      half_width[t] = 0.3 * std::fabs(uniform(random));
      served[t] = std::exp(logit);
      exact[t] = std::exp(logit + half_width[t] * (uniform(random) > 0 ? 1 : -1));
      served_sum += served[t];
      exact_sum += exact[t];
      double square = 0;
      double error = 0;
      for (size_t i = 0; i < kDim; ++i) {
        value[t][i] = normal(random);
        decoded[t][i] = value[t][i] + 0.02 * uniform(random);
        square += value[t][i] * value[t][i];
        error += std::pow(value[t][i] - decoded[t][i], 2);
      }
      eta[t] = RoundUp(std::sqrt(error));
      radius = std::max(radius, RoundUp(std::sqrt(square)));
    }
    double distance = 0;
    for (size_t i = 0; i < kDim; ++i) {
      double o = 0;
      double o_served = 0;
      for (size_t t = 0; t < count; ++t) {
        o += exact[t] / exact_sum * value[t][i];
        o_served += served[t] / served_sum * decoded[t][i];
      }
      distance += (o - o_served) * (o - o_served);
    }
    distance = std::sqrt(distance);
    const double tv =
        WorstCaseTv(TvAtoms<double, double>{served, half_width, {}}, {}, &workspace).worst_case_tv;
    const double bound = OutputErrorBound({ValueTerm(served, eta), tv, radius, 0});
    // The test computes both outputs in double: 40 roundings of values under 10.
    ASSERT_EQ(CheckBound({bound, distance, 1e-13, 2 * radius + 0.02 * kDim}), BoundViolation::kNone)
        << "seed " << kSeed << ", trial " << trial;
    largest_share = std::max(largest_share, distance / bound);
  }
  EXPECT_GT(largest_share, 0.2);
}

// Why R_v needs one centre for all tokens: two blocks with radius 0 around their own centres.
TEST(OutputErrorBoundTest, RadiusAroundTheCentreOfEachBlockWouldBeUnsound) {
  const std::vector<double> mass = {0.5, 0.5};
  const std::vector<double> half_width = {0.4, 0.4};
  const double tv = WorstCaseTv(TvAtoms<double, double>{mass, half_width, {}}).worst_case_tv;
  // Values +1 and -1; logits move by +-0.4.
  const double served = 0;
  const double up = std::exp(0.4);
  const double down = std::exp(-0.4);
  const double distance = std::fabs((up - down) / (up + down) - served);
  EXPECT_EQ(CheckBound({OutputErrorBound({0, tv, 0, 0}), distance, 0, 2}),
            BoundViolation::kBelowExact);
  EXPECT_EQ(CheckBound({OutputErrorBound({0, tv, 1, 0}), distance, 0, 2}), BoundViolation::kNone);
}

}  // namespace
}  // namespace certkv
