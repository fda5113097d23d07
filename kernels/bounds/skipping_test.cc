// The rule of certified skipping: sound in every direction of rounding, and as tight as it can be.
#include "kernels/bounds/skipping.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace certkv {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(MixWithSkippedTest, IsNeverBelowTheFormula) {
  std::mt19937_64 random(12);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int trial = 0; trial < 20000; ++trial) {
    const double u = uniform(random);
    const double tv = uniform(random);
    const long double exact = u + (1 - static_cast<long double>(u)) * tv;
    // The exact value has 106 bits: long double rounds it by up to 2^-65.
    ASSERT_GE(static_cast<long double>(MixWithSkipped(u, tv)), exact - 0x1p-64L) << "seed 12";
    ASSERT_LE(MixWithSkipped(u, tv), static_cast<double>(exact) + 0x1p-50);
  }
}

TEST(MixWithSkippedTest, RoundsUpAndStaysInRange) {
  EXPECT_EQ(MixWithSkipped(0, 0.25), std::nextafter(0.25, 1.0));
  EXPECT_EQ(MixWithSkipped(0, 0), 0);
  EXPECT_EQ(MixWithSkipped(1, 0.3), 1);
  EXPECT_NEAR(MixWithSkipped(0.1, 0.2), 0.28, 1e-15);
  EXPECT_GE(MixWithSkipped(0.1, 0.2), 0.1 + 0.9 * 0.2);
  for (const double bad : {kNan, -0.1, 1.1, kInf}) {
    EXPECT_EQ(MixWithSkipped(bad, 0), 1) << bad;
    EXPECT_EQ(MixWithSkipped(0.5, bad), 1) << bad;
  }
}

TEST(SkippedShareTest, IsTheShareRoundedUp) {
  EXPECT_GE(SkippedShare(0, 0), 0.5);
  EXPECT_LE(SkippedShare(0, 0), 0.5 * (1 + 0x1p-17));
  EXPECT_EQ(SkippedShare(-kInf, 0), 0);
  EXPECT_EQ(SkippedShare(-kInf, -kInf), 0);
  EXPECT_EQ(SkippedShare(0, -kInf), 1);
  EXPECT_EQ(SkippedShare(kInf, kInf), 1);
  EXPECT_EQ(SkippedShare(kNan, 0), 1);
  EXPECT_EQ(SkippedShare(0, kNan), 1);
  EXPECT_GT(SkippedShare(-2000, 2000), 0);  // not 0: something was skipped
  EXPECT_GE(SkippedShare(-2, 3), 1 / (1 + std::exp(5.0)));
}

TEST(TvLeftBySkippingTest, IsTheLargestThatFits) {
  std::mt19937_64 random(13);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int trial = 0; trial < 20000; ++trial) {
    const double u = uniform(random);
    const double tolerance = uniform(random);
    const double left = TvLeftBySkipping(tolerance, u);
    if (u >= tolerance) {
      EXPECT_EQ(left, 0);
      continue;
    }
    ASSERT_LE(MixWithSkipped(u, left), tolerance + 0x1p-50);
    ASSERT_GT(MixWithSkipped(u, left), tolerance * (1 - 0x1p-30));
  }
  EXPECT_EQ(TvLeftBySkipping(0.2, kNan), 0);
  EXPECT_EQ(TvLeftBySkipping(kNan, 0.1), 0);
}

TEST(UsableSkipToleranceTest, LeavesHalfForWhatIsRead) {
  EXPECT_EQ(UsableSkipTolerance(0.05f, 0.2f), 0.05f);
  EXPECT_EQ(UsableSkipTolerance(0.15f, 0.2f), 0.1f);
  EXPECT_EQ(UsableSkipTolerance(0.0f, 0.2f), 0.0f);
  EXPECT_EQ(UsableSkipTolerance(0.1f, 0.0f), 0.0f);
  EXPECT_EQ(UsableSkipTolerance(std::nanf(""), 0.2f), 0.0f);
  EXPECT_EQ(UsableSkipTolerance(0.1f, std::nanf("")), 0.0f);
}

TEST(SkipRatioTest, SaysWhenTheShareIsWithinTheTolerance) {
  for (const double tolerance : {0.001, 0.05, 0.1, 0.5, 0.9}) {
    const double ratio = SkipRatio(tolerance);
    EXPECT_LE(SkippedShare(std::log(ratio), 0), tolerance * (1 + 0x1p-16));
    EXPECT_GT(SkippedShare(std::log(ratio * (1 + 0x1p-12)), 0), tolerance);
  }
  for (const double bad : {0.0, -0.1, 1.0, 2.0, kNan, kInf}) EXPECT_EQ(SkipRatio(bad), 0) << bad;
}

// Skipped tokens, and an error of every logit inside its box: the exact total variation is never
// above the rule, and the rule's worst case is met by the corner of the box up to TV* of what was
// read.
TEST(SkippingTest, HoldsForEveryErrorInTheBoxAndIsMetByItsCorner) {
  std::mt19937_64 random(14);
  std::uniform_real_distribution<double> uniform(-1, 1);
  for (int trial = 0; trial < 2000; ++trial) {
    const int kept = 1 + trial % 5;
    const int skipped = 1 + trial % 3;
    const double c = 0.1 * (trial % 7);
    std::vector<double> logit(kept + skipped);
    for (double& l : logit) l = 3 * uniform(random);
    double upper = 0;
    double lower = 0;
    for (int t = 0; t < kept; ++t) lower += std::exp(logit[t]);  // read exactly
    for (int t = kept; t < kept + skipped; ++t) upper += std::exp(logit[t] + c);
    const double share = SkippedShare(std::log(upper), std::log(lower));
    for (const bool corner : {true, false}) {
      double exact_skipped = 0;
      for (int t = kept; t < kept + skipped; ++t) {
        exact_skipped += std::exp(logit[t] + (corner ? c : c * uniform(random)));
      }
      // p^ is the softmax over what was kept, exactly; so TV is the skipped probability.
      const double tv = exact_skipped / (exact_skipped + lower);
      ASSERT_LE(tv, MixWithSkipped(share, 0));
      if (corner) {
        ASSERT_GE(tv, MixWithSkipped(share, 0) * (1 - 0x1p-16));
      }
    }
  }
}

}  // namespace
}  // namespace certkv
