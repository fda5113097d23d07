#include "kernels/bounds/risk_budget.h"

#include <cmath>

#include "kernels/bounds/rounding.h"

namespace certkv {
namespace {

// Enough to leave no double between the ends: each halves the interval of exponents or digits.
constexpr int kBisections = 200;
// What the computed inequality may be off by, relative to its largest term: log and four operations
// of a unit in the last place each, with room.
constexpr double kComputedError = 0x1p-48;

bool IsProbability(double p) { return p > 0 && p < 1; }
bool IsLimit(double limit) { return limit > 0 && std::isfinite(limit); }

// Is limit ln(limit / sum) - limit + sum >= ln(1 / delta), with the error of computing it against?
bool Allows(double limit, double sum, double log_inverse_delta) {
  const double logarithm = limit * std::log(limit / sum);
  const double size = logarithm + limit + log_inverse_delta;
  return logarithm - limit + sum - log_inverse_delta >= kComputedError * size;
}

}  // namespace

double UnionShare(double failure_probability, int64_t index) {
  if (!IsProbability(failure_probability) || index < 0) return 0;
  const double n = static_cast<double>(index);
  // Four roundings of 2^-53, repaid by 2^-50 of the result.
  return failure_probability / ((n + 1) * (n + 2)) * (1 - 0x1p-50);
}

double AnytimeSumLimit(double loss_limit, double failure_probability) {
  if (!IsLimit(loss_limit) || !IsProbability(failure_probability)) return 0;
  const double target = -std::log(failure_probability);
  // In logarithms, because the sum may be many orders below a small limit. The inequality's left
  // side falls in the sum from infinity to 0 at sum = limit.
  double low = std::log(loss_limit) - 1 - (target + 1) / loss_limit;
  double high = std::log(loss_limit);
  if (!(std::exp(low) > 0)) return 0;  // below the smallest double: no read fits
  for (int i = 0; i < kBisections; ++i) {
    const double middle = low + (high - low) / 2;
    (Allows(loss_limit, std::exp(middle), target) ? low : high) = middle;
  }
  const double sum = std::exp(low);
  return sum < loss_limit && Allows(loss_limit, sum, target) ? sum : 0;
}

double AnytimeLossBound(double tv_sum, double loss_limit, double failure_probability) {
  const double best_at = AnytimeSumLimit(loss_limit, failure_probability);
  if (!(best_at > 0) || !(tv_sum >= 0)) return kUnknownBound;
  // Any lambda > 0 is sound; this one is the best at `best_at`, and e^lambda is the quotient.
  const double quotient = loss_limit / best_at;
  const double lambda = std::log(quotient);
  if (!(lambda > 0)) return kUnknownBound;
  return RoundUp(((quotient - 1) * tv_sum - std::log(failure_probability)) / lambda);
}

}  // namespace certkv
