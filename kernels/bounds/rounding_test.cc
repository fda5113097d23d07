#include "kernels/bounds/rounding.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace certkv {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kTiny = std::numeric_limits<double>::denorm_min();
constexpr double kHuge = std::numeric_limits<double>::max();

TEST(RoundUpTest, RaisesEveryPositiveNumberByLittle) {
  for (const double x : {kTiny, 3 * kTiny, 1e-310, 1e-20, 0.1, 1.0, 1e20, 1e308}) {
    EXPECT_GT(RoundUp(x), x);
    EXPECT_LE(RoundUp(x), x * (1 + 0x1p-17) + kTiny);
  }
  EXPECT_EQ(RoundUp(0), 0);
  EXPECT_EQ(RoundUp(-0.0), 0);
}

TEST(RoundUpTest, UnknownIsInfinite) {
  EXPECT_EQ(RoundUp(kNan), kUnknownBound);
  EXPECT_EQ(RoundUp(-kTiny), kUnknownBound);
  EXPECT_EQ(RoundUp(kUnknownBound), kUnknownBound);
  EXPECT_EQ(RoundUp(kHuge), kUnknownBound);
}

TEST(ToFloatRoundedUpTest, IsTheSmallestFloatThatIsNotBelow) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponent(-160, 130);
  for (int trial = 0; trial < 10000; ++trial) {
    const double x = std::exp2(exponent(random));
    const float up = ToFloatRoundedUp(x);
    ASSERT_GE(double{up}, x);
    ASSERT_LT(double{std::nextafter(up, 0.0f)}, x) << "seed 7, " << x;
  }
  EXPECT_EQ(ToFloatRoundedUp(0.25), 0.25f);
  EXPECT_EQ(ToFloatRoundedUp(0), 0.0f);
  EXPECT_EQ(ToFloatRoundedUp(kTiny), std::numeric_limits<float>::denorm_min());
}

TEST(ToFloatRoundedUpTest, UnknownAndTooLargeAreInfinite) {
  for (const double x : {kNan, -1.0, -kTiny, kUnknownBound, 1e39, kHuge}) {
    EXPECT_EQ(ToFloatRoundedUp(x), std::numeric_limits<float>::infinity()) << x;
  }
  // Between the largest float and infinity.
  EXPECT_EQ(ToFloatRoundedUp(0x1.ffffffp127), std::numeric_limits<float>::infinity());
  EXPECT_EQ(ToFloatRoundedUp(0x1.fffffep127), std::numeric_limits<float>::max());
}

TEST(AddRoundedUpTest, IsTheSmallestDoubleThatIsNotBelow) {
  std::mt19937_64 random(8);
  std::uniform_real_distribution<double> exponent(-60, 60);
  for (int trial = 0; trial < 10000; ++trial) {
    const double a = std::exp2(exponent(random));
    const double b = std::exp2(exponent(random));
    const double sum = AddRoundedUp(a, b);
    // 64 bits of mantissa are not enough for the exact sum, so compare what is left of it.
    ASSERT_GE((static_cast<long double>(sum) - std::max(a, b)), std::min(a, b)) << "seed 8";
    ASSERT_LE(sum, std::nextafter(a + b, kUnknownBound));
  }
  EXPECT_EQ(AddRoundedUp(1, 2), 3);
  EXPECT_EQ(AddRoundedUp(1, kTiny), std::nextafter(1.0, 2.0));
  EXPECT_EQ(AddRoundedUp(0, 0), 0);
}

TEST(AddRoundedUpTest, NeverLosesWhatIsAddedToALargeSum) {
  double sum = 1;
  for (int i = 0; i < 1000; ++i) sum = AddRoundedUp(sum, 1e-20);
  EXPECT_GE(sum, 1 + 1000 * 0x1p-52);
}

TEST(AddRoundedUpTest, UnknownIsInfinite) {
  EXPECT_EQ(AddRoundedUp(kNan, 1), kUnknownBound);
  EXPECT_EQ(AddRoundedUp(1, -1), kUnknownBound);
  EXPECT_EQ(AddRoundedUp(kUnknownBound, 1), kUnknownBound);
  EXPECT_EQ(AddRoundedUp(kHuge, kHuge), kUnknownBound);
}

TEST(MultiplyRoundedUpTest, IsNotBelowAndAtMostTwoStepsAbove) {
  std::mt19937_64 random(9);
  std::uniform_real_distribution<double> exponent(-30, 30);
  for (int trial = 0; trial < 10000; ++trial) {
    const double a = std::exp2(exponent(random));
    const double b = std::exp2(exponent(random));
    const double product = MultiplyRoundedUp(a, b);
    ASSERT_GE(std::fma(-a, b, product), 0) << "seed 9";
    ASSERT_LE(product, a * b * (1 + 0x1p-51));
  }
  EXPECT_GT(MultiplyRoundedUp(1e-300, 1e-300), 0);  // underflow
}

TEST(MultiplyRoundedUpTest, UnknownIsInfiniteEvenTimesZero) {
  EXPECT_EQ(MultiplyRoundedUp(0, kUnknownBound), kUnknownBound);
  EXPECT_EQ(MultiplyRoundedUp(kNan, 0), kUnknownBound);
  EXPECT_EQ(MultiplyRoundedUp(-1, 1), kUnknownBound);
  EXPECT_EQ(MultiplyRoundedUp(0, 5), 0);
  EXPECT_EQ(MultiplyRoundedUp(kHuge, 2), kUnknownBound);
}

TEST(FloatRoundingFactorTest, CoversSuccessiveRoundings) {
  EXPECT_EQ(FloatRoundingFactor(0), 0);
  EXPECT_EQ(FloatRoundingFactor(-5), 0);
  EXPECT_EQ(FloatRoundingFactor(1 << 24), kUnknownBound);
  for (const int64_t n : {1, 10, 1000, 1000000}) {
    // (1 + u)^n - 1 is what n roundings up do.
    const double grown = std::expm1(static_cast<double>(n) * std::log1p(0x1p-24));
    EXPECT_GE(FloatRoundingFactor(n), grown);
    EXPECT_LE(FloatRoundingFactor(n), grown * 1.1);
  }
}

}  // namespace
}  // namespace certkv
