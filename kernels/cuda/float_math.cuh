// Small functions of the attention kernels, with the errors that half-widths and rounding terms
// allow for; u = 2^-24 is the rounding of one float operation. They use no function of a math
// library, so that a GPU and on_cpu give the same bits.
#ifndef CERTKV_KERNELS_CUDA_FLOAT_MATH_CUH_
#define CERTKV_KERNELS_CUDA_FLOAT_MATH_CUH_

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/cuda/device.h"

namespace certkv::cuda {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLog2E = 0x1.715476p0f;  // off by less than 2^-26 of itself
inline constexpr float kLn2 = 0x1.62e43p-1f;    // off by less than 2^-25 of itself

// Weights below 2^-125 of their atom's largest are 0: they would leave the normal floats.
inline constexpr float kExponentMin = -125.0f;

// Rounding of a weight as an error of its logit, nats: its exponent lies in [-125, 2] and is
// rounded once, by at most 2^-18, which is 0.7 * 2^-18 nats; Exp2 is off by less than 2^-20.
inline constexpr float kWeightSlackNat = 0x1p-17f;
// Of log2(e), per nat of the logit.
inline constexpr float kLog2ESlack = 0x1p-26f;
// Rounding of cap * tanh(l / cap) per nat of cap: arguments 4u (tanh' |y| <= 0.45), Exp2 2^-21
// (d tanh = d e / 2 at most), quotient, difference and product 4u: under 2^-19 = 32u.
inline constexpr float kSoftCapSlack = 0x1p-19f;

// 2^x for x in [-125, 126], 0 below and for NaN. The polynomial is a minimax fit of 2^r on
// [-1/2, 1/2] (relative error 2e-7); Horner adds at most 4u.
__device__ inline float Exp2(float x) {
  if (!(x >= kExponentMin)) return 0;
  const float n = rintf(x);
  const float r = x - n;  // exact
  float p = 1.339086336e-03f;
  p = fmaf(p, r, 9.676031918e-03f);
  p = fmaf(p, r, 5.550357114e-02f);
  p = fmaf(p, r, 2.402210749e-01f);
  p = fmaf(p, r, 6.931471880e-01f);
  p = fmaf(p, r, 1.000000075e+00f);
  return __uint_as_float(__float_as_uint(p) + (static_cast<uint32_t>(static_cast<int>(n)) << 23));
}

// ln(x) for a normal x or +infinity; -infinity for 0. x = m * 2^e with m in [sqrt(1/2), sqrt(2));
// ln m = 2 atanh(t), t = (m - 1) / (m + 1), whose series after t^7 is below 4e-8. Off by less than
// 2^-22 + 3u of its magnitude.
__device__ inline float LogNat(float x) {
  if (x == 0) return -kInfinity;
  if (!(x < kInfinity)) return kInfinity;
  constexpr uint32_t kSqrtHalf = 0x3f3504f3;  // bits of the float
  const uint32_t offset = __float_as_uint(x) + (0x3f800000 - kSqrtHalf);
  const float exponent = static_cast<float>(static_cast<int>(offset >> 23) - 127);
  const float m = __uint_as_float((offset & 0x007fffff) + kSqrtHalf);
  const float t = (m - 1) / (m + 1);
  const float square = t * t;
  float p = 2.0f / 7.0f;
  p = fmaf(p, square, 2.0f / 5.0f);
  p = fmaf(p, square, 2.0f / 3.0f);
  p = fmaf(p, square, 2.0f);
  return fmaf(exponent, kLn2, p * t);
}

// cap * tanh(x / cap) = cap * (1 - 2 / (e^{2y} + 1)), y = x / cap clamped to +-20, beyond which
// tanh is 1 in float.
__device__ inline float SoftCap(float x, float cap) {
  const float y = fmaxf(fminf(x * (1.0f / cap), 20.0f), -20.0f);
  return cap * (1 - 2 / (Exp2(y * (2 * kLog2E)) + 1));
}

// 2^k for an integer k <= 127; 0 below -126, so that multiplying by it is exact or gives 0.
__device__ inline float PowerOfTwo(float k) {
  if (!(k >= -126)) return 0;
  return __uint_as_float(static_cast<uint32_t>(static_cast<int>(k) + 127) << 23);
}

// Rounded up; an unknown bound (+infinity) stays unknown whatever the factor.
__device__ inline float ScaleBound(float bound, float factor) {
  return bound < kInfinity ? __fmul_ru(bound, factor) : kInfinity;
}

// >= the root of a sum of at most 256 squares of floats that was computed in double.
__device__ inline float NormRoundedUp(double square) {
  return __double2float_ru(sqrt(square) * (1 + 0x1p-40));
}
// >= sqrt(a^2 + b^2), for a, b >= 0, without leaving the range.
__device__ inline float JoinNorms(float a, float b) {
  const float large = fmaxf(a, b);
  if (large == 0 || !(large < kInfinity)) return large;
  const float ratio = __fdiv_ru(fminf(a, b), large);
  return __fmul_ru(large, __fsqrt_ru(__fmaf_ru(ratio, ratio, 1)));
}

__device__ inline float WarpMax(float value, int width) {
  for (int bits = width / 2; bits > 0; bits /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, bits));
  }
  return value;
}
__device__ inline float WarpSum(float value, int width) {
  for (int bits = width / 2; bits > 0; bits /= 2) value += __shfl_xor_sync(~0u, value, bits);
  return value;
}
__device__ inline float WarpSumUp(float value, int width) {
  for (int bits = width / 2; bits > 0; bits /= 2) {
    value = __fadd_ru(value, __shfl_xor_sync(~0u, value, bits));
  }
  return value;
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_FLOAT_MATH_CUH_
