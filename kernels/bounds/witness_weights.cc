#include "kernels/bounds/witness_weights.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace certkv {
namespace {

constexpr double kExponent = 0.4;
constexpr double kSpread = 8;

bool IsKnown(double x) { return x >= 0 && x <= std::numeric_limits<double>::max(); }

// log of each entry, which is at least 1e-3 of the largest.
std::vector<double> Logarithms(absl::Span<const double> rms) {
  double largest = 0;
  for (const double x : rms) largest = std::max(largest, IsKnown(x) ? x : 0);
  const double least = largest > 0 ? 1e-3 * largest : 1;
  std::vector<double> logarithms;
  for (const double x : rms)
    logarithms.push_back(std::log(IsKnown(x) ? std::max(x, least) : least));
  return logarithms;
}

}  // namespace

std::vector<float> ChooseWitnessWeights(absl::Span<const double> query_rms,
                                        absl::Span<const double> residual_rms) {
  if (query_rms.size() != residual_rms.size() || query_rms.empty()) return {};
  std::vector<double> exponents = Logarithms(query_rms);
  const std::vector<double> residuals = Logarithms(residual_rms);
  double sum = 0;
  for (size_t i = 0; i < exponents.size(); ++i) {
    exponents[i] = kExponent * (exponents[i] - residuals[i]);
    sum += exponents[i];
  }
  const double mean = sum / static_cast<double>(exponents.size());
  std::vector<float> weights;
  for (const double exponent : exponents) {
    weights.push_back(
        static_cast<float>(std::clamp(std::exp(exponent - mean), 1 / kSpread, kSpread)));
  }
  return weights;
}

}  // namespace certkv
