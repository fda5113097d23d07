// CUDA's float operations with a direction of rounding, by software: the result is the one that
// IEEE 754 defines, subnormals and overflow included. Nothing here depends on the rounding mode,
// which must be the default.
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_DIRECTED_ROUNDING_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_DIRECTED_ROUNDING_H_

#include <cmath>
#include <limits>

namespace certkv::cuda_on_cpu {

// The smallest float >= the exact value + error, where value is the double nearest to their sum.
//
// Rounding to nearest is monotone: the float nearest to `value` is at most one step below the
// answer, and never above it by more than the step that the answer rounds.
inline float RoundUpFrom(double value, double error) {
  const auto nearest = static_cast<float>(value);
  const auto wide = static_cast<double>(nearest);
  // Also false for NaN, which stays.
  const bool is_below = wide < value || (wide == value && error > 0);
  return is_below ? std::nextafterf(nearest, std::numeric_limits<float>::infinity()) : nearest;
}

// Of a sum of two doubles that are exact themselves: Knuth's TwoSum.
inline float AddRoundedUp(double a, double b) {
  const double sum = a + b;
  const double b_part = sum - a;
  return RoundUpFrom(sum, (a - (sum - b_part)) + (b - b_part));
}

}  // namespace certkv::cuda_on_cpu

inline float __fadd_ru(float a, float b) {
  return certkv::cuda_on_cpu::AddRoundedUp(static_cast<double>(a), static_cast<double>(b));
}
// Products of floats are exact in double.
inline float __fmul_ru(float a, float b) {
  return certkv::cuda_on_cpu::RoundUpFrom(static_cast<double>(a) * static_cast<double>(b), 0);
}
inline float __fmaf_ru(float a, float b, float c) {
  return certkv::cuda_on_cpu::AddRoundedUp(static_cast<double>(a) * static_cast<double>(b),
                                           static_cast<double>(c));
}
inline float __fdiv_ru(float a, float b) {
  const float nearest = a / b;
  if (!(std::fabs(nearest) <= std::numeric_limits<float>::max()) || b == 0) {
    // The largest negative float, where the quotient is finite and below it.
    const bool overflows = nearest == -std::numeric_limits<float>::infinity() && b != 0 &&
                           std::fabs(a) <= std::numeric_limits<float>::max();
    return overflows ? -std::numeric_limits<float>::max() : nearest;
  }
  // a - nearest * b has the sign of the error times that of b; the product is exact in double.
  const double product = static_cast<double>(nearest) * static_cast<double>(b);
  const bool is_below = b > 0 ? product < a : product > a;
  return is_below ? std::nextafterf(nearest, std::numeric_limits<float>::infinity()) : nearest;
}
inline float __fsqrt_ru(float a) {
  const float nearest = std::sqrt(a);
  const bool is_below = static_cast<double>(nearest) * nearest < a;
  return is_below ? std::nextafterf(nearest, std::numeric_limits<float>::infinity()) : nearest;
}
inline float __double2float_ru(double value) { return certkv::cuda_on_cpu::RoundUpFrom(value, 0); }

// Downward, by symmetry.
inline float __fadd_rd(float a, float b) { return -__fadd_ru(-a, -b); }
inline float __fmul_rd(float a, float b) { return -__fmul_ru(-a, b); }
inline float __double2float_rd(double value) { return -__double2float_ru(-value); }

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_DIRECTED_ROUNDING_H_
