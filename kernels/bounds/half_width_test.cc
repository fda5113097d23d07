#include "kernels/bounds/half_width.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/bounds/rounding.h"
#include "tests/support/bound_checker.h"

namespace certkv {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr uint64_t kSeed = 31;

std::vector<float> RandomVector(size_t count, float scale, std::mt19937_64* random) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> x(count);
  for (float& value : x) value = normal(*random);
  return x;
}

long double Dot(const std::vector<float>& a, const std::vector<float>& b) {
  long double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<long double>(a[i]) * b[i];
  return sum;
}

TEST(ScaleHalfWidthTest, CoversEveryResidualInsideTheScalesAndIsReached) {
  std::mt19937_64 random(kSeed);
  for (const size_t d : {1u, 64u, 80u, 96u, 127u, 128u, 256u}) {
    const std::vector<float> query = RandomVector(d, 3, &random);
    std::vector<float> error(d);
    std::vector<float> worst(d);
    for (size_t i = 0; i < d; ++i) {
      error[i] = std::uniform_real_distribution<float>(0, 0.1f)(random);
      worst[i] = std::copysign(error[i], query[i]);
    }
    const double scale = 1 / std::sqrt(static_cast<double>(d));
    const double bound = ScaleHalfWidth(query, error, scale);
    // The residual that meets every channel's limit with the sign of q is legal.
    const auto exact = static_cast<double>(scale * Dot(query, worst));
    EXPECT_EQ(CheckBound({bound, exact, 0, exact * (1 + 0x1p-17)}), BoundViolation::kNone)
        << "seed " << kSeed << ", d " << d;
    EXPECT_EQ(CheckBound({bound / 2, exact, 0, kUnknownBound}), BoundViolation::kBelowExact);
  }
}

TEST(ScaleHalfWidthTest, IsInfiniteNotNanWhenAnErrorIsUnknownAndTheQueryIsZero) {
  EXPECT_EQ(ScaleHalfWidth({0.0f, 1.0f}, {kInf, 0.1f}, 0.1), kUnknownBound);
  EXPECT_EQ(ScaleHalfWidth({0.0f}, {kNan}, 0.1), kUnknownBound);
}

TEST(ScaleHalfWidthTest, UnknownInputIsInfinite) {
  EXPECT_EQ(ScaleHalfWidth({kNan}, {0.1f}, 0.1), kUnknownBound);
  EXPECT_EQ(ScaleHalfWidth({kInf}, {0.0f}, 0.1), kUnknownBound);
  EXPECT_EQ(ScaleHalfWidth({1.0f}, {-0.1f}, 0.1), kUnknownBound);
  EXPECT_EQ(ScaleHalfWidth({1.0f}, {0.1f}, -0.1), kUnknownBound);
  EXPECT_EQ(ScaleHalfWidth({1.0f}, {0.1f}, std::nan("")), kUnknownBound);
  EXPECT_EQ(ScaleHalfWidth({1.0f, 2.0f}, {0.1f}, 0.1), kUnknownBound);
}

TEST(ScaleHalfWidthTest, ExactChannelsCostNothing) {
  EXPECT_EQ(ScaleHalfWidth({5.0f, -3.0f}, {0.0f, 0.0f}, 0.125), 0);
}

TEST(NormRoundedUpTest, CoversTheNorm) {
  EXPECT_GE(NormRoundedUp({3.0f, 4.0f}), 5);
  EXPECT_LE(NormRoundedUp({3.0f, 4.0f}), 5 * (1 + 0x1p-17));
  EXPECT_EQ(NormRoundedUp({}), 0);
  EXPECT_GT(NormRoundedUp({1e-45f}), 1e-45);
  EXPECT_GE(NormRoundedUp({3e38f, 3e38f}), 4.2e38);
  EXPECT_EQ(NormRoundedUp({kNan}), kUnknownBound);
}

class BandTest : public ::testing::TestWithParam<BandSplit> {};

TEST_P(BandTest, KeepsRopePairsTogetherAndUsesEveryBand) {
  const BandSplit& split = GetParam();
  std::vector<int> channels(split.band_count);
  for (int32_t i = 0; i < split.channel_count; ++i) {
    const int32_t band = BandOfChannel(split, i);
    ASSERT_GE(band, 0);
    ASSERT_LT(band, split.band_count);
    ++channels[band];
  }
  for (const int count : channels) EXPECT_GT(count, 0);
  if (split.pairing == RopePairing::kNone) return;
  const int32_t half = split.rotary_dim / 2;
  for (int32_t pair = 0; pair < half; ++pair) {
    const bool interleaved = split.pairing == RopePairing::kInterleaved;
    const int32_t first = interleaved ? 2 * pair : pair;
    const int32_t second = interleaved ? 2 * pair + 1 : pair + half;
    EXPECT_EQ(BandOfChannel(split, first), BandOfChannel(split, second)) << pair;
  }
}

// The RoPE lemma itself: rotating a residual to another position leaves the norm of each band, so
// the witness half-width of a block covers it wherever the block is used.
TEST_P(BandTest, RotationLeavesBandNorms) {
  const BandSplit& split = GetParam();
  std::mt19937_64 random(kSeed);
  const std::vector<float> residual = RandomVector(split.channel_count, 0.01f, &random);
  std::vector<double> before(split.band_count);
  BandNorms(split, residual, {}, absl::MakeSpan(before));
  std::vector<float> rotated = residual;
  if (split.pairing != RopePairing::kNone) {
    const int32_t half = split.rotary_dim / 2;
    for (int32_t pair = 0; pair < half; ++pair) {
      const bool interleaved = split.pairing == RopePairing::kInterleaved;
      const int32_t a = interleaved ? 2 * pair : pair;
      const int32_t b = interleaved ? 2 * pair + 1 : pair + half;
      const double angle = 137 * std::pow(10000.0, -static_cast<double>(pair) / half);
      rotated[a] =
          static_cast<float>(std::cos(angle) * residual[a] - std::sin(angle) * residual[b]);
      rotated[b] =
          static_cast<float>(std::sin(angle) * residual[a] + std::cos(angle) * residual[b]);
    }
  }
  std::vector<double> after(split.band_count);
  BandNorms(split, rotated, {}, absl::MakeSpan(after));
  // The test rotates in float: one rounding per element.
  for (int32_t b = 0; b < split.band_count; ++b) {
    EXPECT_NEAR(after[b], before[b], before[b] * 0x1p-23) << "band " << b;
  }
}

TEST_P(BandTest, WitnessCoversTheLogitErrorAndIsAtMostTheWholeNorm) {
  const BandSplit& split = GetParam();
  std::mt19937_64 random(kSeed);
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<float> query = RandomVector(split.channel_count, 2, &random);
    const std::vector<float> residual = RandomVector(split.channel_count, 0.01f, &random);
    std::vector<double> query_norm(split.band_count);
    std::vector<double> residual_norm(split.band_count);
    BandNorms(split, query, {}, absl::MakeSpan(query_norm));
    BandNorms(split, residual, {}, absl::MakeSpan(residual_norm));
    std::vector<float> witness;
    for (const double norm : residual_norm) witness.push_back(ToFloatRoundedUp(norm));
    const double bound = WitnessHalfWidth(query_norm, witness, 0.125);
    const auto exact = static_cast<double>(std::fabs(0.125L * Dot(query, residual)));
    const double whole = 0.125 * NormRoundedUp(query) * NormRoundedUp(residual);
    ASSERT_EQ(CheckBound({bound, exact, 0, whole * (1 + 0x1p-15)}), BoundViolation::kNone)
        << "seed " << kSeed << ", trial " << trial;
  }
}

INSTANTIATE_TEST_SUITE_P(Splits, BandTest,
                         ::testing::Values(BandSplit{64, 64, RopePairing::kInterleaved, 4},
                                           BandSplit{64, 64, RopePairing::kHalfSplit, 4},
                                           BandSplit{80, 32, RopePairing::kHalfSplit, 4},
                                           BandSplit{80, 32, RopePairing::kInterleaved, 4},
                                           BandSplit{96, 48, RopePairing::kHalfSplit, 4},
                                           BandSplit{128, 128, RopePairing::kHalfSplit, 1},
                                           BandSplit{256, 64, RopePairing::kInterleaved, 4},
                                           BandSplit{128, 0, RopePairing::kNone, 4}));

TEST(BandNormsTest, AreNotBelowTheNorm) {
  std::mt19937_64 random(kSeed);
  const BandSplit split = {96, 48, RopePairing::kHalfSplit, 4};
  for (int trial = 0; trial < 200; ++trial) {
    const std::vector<float> query = RandomVector(96, 2, &random);
    std::vector<double> norm(4);
    BandNorms(split, query, {}, absl::MakeSpan(norm));
    std::vector<long double> square(4);
    for (int32_t i = 0; i < 96; ++i) {
      square[BandOfChannel(split, i)] += static_cast<long double>(query[i]) * query[i];
    }
    for (int32_t b = 0; b < 4; ++b) {
      const long double exact = std::sqrt(square[b]);
      ASSERT_GE(static_cast<long double>(norm[b]), exact) << "seed " << kSeed;
      ASSERT_LE(static_cast<long double>(norm[b]), exact * (1 + 0x1p-17L));
    }
  }
}

// Whatever the weights are; and only with the same weights on both sides.
TEST(WitnessHalfWidthTest, CoversTheLogitErrorUnderEveryWeight) {
  std::mt19937_64 random(kSeed);
  const BandSplit split = {64, 64, RopePairing::kHalfSplit, 4};
  int below_with_one_side_unweighted = 0;
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<float> weights;
    for (const float x : RandomVector(64, 2, &random)) weights.push_back(std::exp2(x));
    const std::vector<float> query = RandomVector(64, 2, &random);
    // Parallel to the query where both are weighted.
    std::vector<float> residual;
    std::vector<float> weighted;
    for (int i = 0; i < 64; ++i) {
      residual.push_back(0x1p-7f * query[i] / (weights[i] * weights[i]));
      weighted.push_back(residual[i] * weights[i]);
    }
    std::vector<double> query_norm(4);
    std::vector<double> residual_norm(4);
    BandNorms(split, weighted, {}, absl::MakeSpan(residual_norm));
    std::vector<float> witness;
    for (const double norm : residual_norm)
      witness.push_back(ToFloatRoundedUp(norm * (1 + 0x1p-20)));
    BandNorms(split, query, weights, absl::MakeSpan(query_norm));
    const double bound = WitnessHalfWidth(query_norm, witness, 0.125);
    const auto exact = static_cast<double>(0.125L * Dot(query, residual));
    EXPECT_EQ(CheckBound({bound, exact, 0, exact * (1 + 0x1p-15)}), BoundViolation::kNone)
        << "seed " << kSeed << ", trial " << trial;
    BandNorms(split, query, {}, absl::MakeSpan(query_norm));
    below_with_one_side_unweighted += WitnessHalfWidth(query_norm, witness, 0.125) < exact ? 1 : 0;
  }
  EXPECT_GT(below_with_one_side_unweighted, 20);
}

TEST(WitnessHalfWidthTest, IsReachedByAParallelResidual) {
  std::mt19937_64 random(kSeed);
  const BandSplit split = {64, 64, RopePairing::kHalfSplit, 4};
  const std::vector<float> query = RandomVector(64, 2, &random);
  std::vector<float> residual = query;
  for (float& r : residual) r *= 0x1p-7f;  // exact
  std::vector<double> query_norm(4);
  std::vector<double> residual_norm(4);
  BandNorms(split, query, {}, absl::MakeSpan(query_norm));
  BandNorms(split, residual, {}, absl::MakeSpan(residual_norm));
  std::vector<float> witness;
  for (const double norm : residual_norm) witness.push_back(ToFloatRoundedUp(norm));
  const double bound = WitnessHalfWidth(query_norm, witness, 0.125);
  const auto exact = static_cast<double>(0.125L * Dot(query, residual));
  EXPECT_EQ(CheckBound({bound, exact, 0, exact * (1 + 0x1p-15)}), BoundViolation::kNone);
  EXPECT_EQ(CheckBound({bound / 2, exact, 0, kUnknownBound}), BoundViolation::kBelowExact);
}

TEST(WitnessHalfWidthTest, UnknownInputIsInfinite) {
  EXPECT_EQ(WitnessHalfWidth({1.0, 0.0}, {0.1f, kInf}, 0.1), kUnknownBound);
  EXPECT_EQ(WitnessHalfWidth({1.0}, {kNan}, 0.1), kUnknownBound);
  EXPECT_EQ(WitnessHalfWidth({1.0}, {-0.1f}, 0.1), kUnknownBound);
  EXPECT_EQ(WitnessHalfWidth({-1.0}, {0.1f}, 0.1), kUnknownBound);
  EXPECT_EQ(WitnessHalfWidth({1.0}, {}, 0.1), kUnknownBound);
  std::vector<double> norms(3);
  BandNorms({8, 8, RopePairing::kHalfSplit, 4}, std::vector<float>(8, 1.0f), {},
            absl::MakeSpan(norms));
  for (const double norm : norms) EXPECT_EQ(norm, kUnknownBound);
  std::vector<double> one(1);
  for (const std::vector<float>& weights : {std::vector<float>{1, 0}, std::vector<float>{1, -1},
                                            std::vector<float>{1, kNan}, std::vector<float>{1}}) {
    BandNorms({2, 2, RopePairing::kHalfSplit, 1}, {1.0f, 1.0f}, weights, absl::MakeSpan(one));
    EXPECT_EQ(one[0], kUnknownBound) << weights[1];
  }
}

TEST(MinHalfWidthTest, IgnoresWhatIsUnknown) {
  EXPECT_EQ(MinHalfWidth({0.3, 0.2, kUnknownBound}), 0.2);
  EXPECT_EQ(MinHalfWidth({std::nan(""), 0.2}), 0.2);
  EXPECT_EQ(MinHalfWidth({-1.0, 0.2}), 0.2);
  EXPECT_EQ(MinHalfWidth({std::nan(""), -1.0}), kUnknownBound);
  EXPECT_EQ(MinHalfWidth({}), kUnknownBound);
}

TEST(DotRoundingSlackTest, CoversFloatDotProductsInAnyOrder) {
  std::mt19937_64 random(kSeed);
  double largest_share = 0;
  for (const size_t d : {1u, 7u, 64u, 96u, 128u, 256u}) {
    for (int trial = 0; trial < 200; ++trial) {
      const std::vector<float> query = RandomVector(d, 4, &random);
      const std::vector<float> key = RandomVector(d, 4, &random);
      const float scale = 0.0883883f;
      float forward = 0;
      float backward = 0;
      for (size_t i = 0; i < d; ++i) forward += query[i] * key[i];
      for (size_t i = d; i > 0; --i) backward += query[i - 1] * key[i - 1];
      const long double exact = static_cast<long double>(scale) * Dot(query, key);
      const double error = std::max(std::fabs(static_cast<double>(scale * forward - exact)),
                                    std::fabs(static_cast<double>(scale * backward - exact)));
      const double slack = DotRoundingSlack(
          {static_cast<int64_t>(d), scale, NormRoundedUp(query), NormRoundedUp(key)});
      ASSERT_LE(error, slack) << "seed " << kSeed << ", d " << d;
      largest_share = std::max(largest_share, error / slack);
    }
  }
  EXPECT_GT(largest_share, 0.02);  // not vacuous
}

TEST(DotRoundingSlackTest, CoversUnderflowAndUnknowns) {
  EXPECT_GT(DotRoundingSlack({64, 0.125, 0, 0}), 0);
  EXPECT_EQ(DotRoundingSlack({64, 0.125, std::nan(""), 1}), kUnknownBound);
  EXPECT_EQ(DotRoundingSlack({64, 0.125, 0, kUnknownBound}), kUnknownBound);
  EXPECT_EQ(DotRoundingSlack({64, -0.125, 1, 1}), kUnknownBound);
  EXPECT_EQ(DotRoundingSlack({-1, 0.125, 1, 1}), kUnknownBound);
  EXPECT_EQ(DotRoundingSlack({1 << 24, 0.125, 1, 1}), kUnknownBound);
}

TEST(QueryRoundingSlackTest, CoversTheErrorOfARoundedQueryAndIsReached) {
  std::mt19937_64 random(kSeed);
  const std::vector<float> query = RandomVector(64, 2, &random);
  std::vector<float> rounded = query;
  for (float& q : rounded) q = std::round(q * 16) / 16;
  std::vector<float> key_max(64, 0.5f);
  std::vector<float> key(64);
  for (size_t i = 0; i < 64; ++i) key[i] = std::copysign(0.5f, query[i] - rounded[i]);
  const double bound = QueryRoundingSlack(query, rounded, key_max, 0.125);
  const auto exact = static_cast<double>(0.125L * (Dot(query, key) - Dot(rounded, key)));
  EXPECT_EQ(CheckBound({bound, exact, 0, exact * (1 + 0x1p-17)}), BoundViolation::kNone);
  EXPECT_EQ(QueryRoundingSlack(query, query, key_max, 0.125), 0);
  EXPECT_EQ(QueryRoundingSlack({kInf}, {kInf}, {1.0f}, 0.125), kUnknownBound);
  EXPECT_EQ(QueryRoundingSlack({1.0f}, {1.0f}, {kInf}, 0.125), kUnknownBound);
  EXPECT_EQ(QueryRoundingSlack({1.0f}, {1.0f}, {}, 0.125), kUnknownBound);
}

}  // namespace
}  // namespace certkv
