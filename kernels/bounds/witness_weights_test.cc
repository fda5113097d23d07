#include "kernels/bounds/witness_weights.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/bounds/half_width.h"

namespace certkv {
namespace {

constexpr int kDim = 64;

// Channels of queries and residuals are of very different sizes.
struct Model {
  explicit Model(uint64_t seed) : random(seed) {
    for (int i = 0; i < kDim; ++i) {
      query_rms.push_back(std::exp(normal(random)));
      residual_rms.push_back(0.01 * std::exp(0.5 * normal(random)));
    }
  }
  std::vector<float> Vector(const std::vector<double>& rms, const std::vector<float>& weights,
                            bool divide) {
    std::vector<float> x;
    for (int i = 0; i < kDim; ++i) {
      const double one = rms[i] * normal(random);
      x.push_back(static_cast<float>(divide ? one / weights[i] : one * weights[i]));
    }
    return x;
  }
  std::mt19937_64 random;
  std::normal_distribution<double> normal;
  std::vector<double> query_rms;
  std::vector<double> residual_rms;
};

double MeanHalfWidth(const std::vector<float>& weights, uint64_t seed) {
  Model model(seed);
  double sum = 0;
  for (int n = 0; n < 200; ++n) {
    sum += NormRoundedUp(model.Vector(model.query_rms, weights, true)) *
           NormRoundedUp(model.Vector(model.residual_rms, weights, false));
  }
  return sum;
}

TEST(WitnessWeightsTest, MakeHalfWidthsOfSuchQueriesSmaller) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const Model model(seed);
    const std::vector<float> weights = ChooseWitnessWeights(model.query_rms, model.residual_rms);
    EXPECT_LT(MeanHalfWidth(weights, seed), 0.85 * MeanHalfWidth(std::vector<float>(kDim, 1), seed))
        << "seed " << seed;
  }
}

TEST(WitnessWeightsTest, DoNotDependOnUnitsAndHaveAMeanOfOne) {
  const Model model(1);
  const std::vector<float> weights = ChooseWitnessWeights(model.query_rms, model.residual_rms);
  std::vector<double> larger = model.residual_rms;
  for (double& x : larger) x *= 1000;
  const std::vector<float> others = ChooseWitnessWeights(model.query_rms, larger);
  double log_sum = 0;
  for (int i = 0; i < kDim; ++i) {
    EXPECT_NEAR(others[i], weights[i], 1e-5f * weights[i]);
    log_sum += std::log(weights[i]);
  }
  EXPECT_NEAR(log_sum, 0, 1e-4);
}

TEST(WitnessWeightsTest, StayInsideTheirLimitsWhateverTheyAreMadeFrom) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::vector<double> odd = {0, kNan, kInf, -1, 1e300, 1e-300, 1, 2};
  for (const auto& query_rms : {odd, std::vector<double>(8, 0), std::vector<double>(8, kNan)}) {
    std::vector<double> residual_rms = odd;
    std::reverse(residual_rms.begin(), residual_rms.end());
    const std::vector<float> weights = ChooseWitnessWeights(query_rms, residual_rms);
    ASSERT_EQ(weights.size(), 8u);
    for (const float weight : weights) {
      EXPECT_GE(weight, 0.125f);
      EXPECT_LE(weight, 8.0f);
    }
  }
  EXPECT_TRUE(ChooseWitnessWeights({}, {}).empty());
  EXPECT_TRUE(ChooseWitnessWeights({1.0}, {1.0, 2.0}).empty());
}

}  // namespace
}  // namespace certkv
