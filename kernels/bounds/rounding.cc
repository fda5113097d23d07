#include "kernels/bounds/rounding.h"

#include <cmath>

namespace certkv {

double RoundUp(double bound) {
  if (!(bound >= 0)) return kUnknownBound;
  if (bound == 0) return 0;
  const double raised = bound * kRoundUpFactor;
  // The product of a subnormal rounds back to itself.
  return raised > bound ? raised : std::nextafter(bound, kUnknownBound);
}

float ToFloatRoundedUp(double bound) {
  constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
  if (!(bound >= 0 && bound <= std::numeric_limits<float>::max())) return kFloatInfinity;
  const auto nearest = static_cast<float>(bound);
  return nearest >= bound ? nearest : std::nextafter(nearest, kFloatInfinity);
}

double AddRoundedUp(double a, double b) {
  if (!(a >= 0 && b >= 0)) return kUnknownBound;
  const double sum = a + b;
  if (!(sum <= std::numeric_limits<double>::max())) return kUnknownBound;
  // Knuth's TwoSum: sum + error is exactly a + b.
  const double b_part = sum - a;
  const double error = (a - (sum - b_part)) + (b - b_part);
  return error > 0 ? std::nextafter(sum, kUnknownBound) : sum;
}

double MultiplyRoundedUp(double a, double b) {
  if (!(a >= 0 && b >= 0)) return kUnknownBound;
  const double product = a * b;
  if (std::isnan(product)) return kUnknownBound;
  if (a == 0 || b == 0 || product == kUnknownBound) return product;
  return std::nextafter(product, kUnknownBound);
}

double FloatRoundingFactor(int64_t rounding_count) {
  if (rounding_count <= 0) return 0;
  const double total = static_cast<double>(rounding_count) * 0x1p-24;
  if (!(total < 1)) return kUnknownBound;
  return RoundUp(total / (1 - total));
}

}  // namespace certkv
