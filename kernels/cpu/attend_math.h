// Constants and small vector functions of the attention kernels, with the errors that the
// half-widths and the rounding term allow for. u = 2^-24 is the rounding of one float operation.
#ifndef CERTKV_KERNELS_CPU_ATTEND_MATH_H_
#define CERTKV_KERNELS_CPU_ATTEND_MATH_H_

#include <cstdint>

namespace certkv::cpu {

inline constexpr float kUnitRoundoff = 0x1p-24f;
inline constexpr float kLog2E = 0x1.715476p0f;  // off by less than 2^-26 of itself
inline constexpr float kLn2 = 0x1.62e43p-1f;    // off by less than 2^-25 of itself

// Weights below 2^-125 of the reference are 0: they would leave the normal floats.
inline constexpr float kExponentMin = -125.0f;
// An atom whose largest weight is below 2^-60 of the reference is summed apart, relative to its own
// largest logit, and its values are not read: its mass goes into `skipped` instead.
inline constexpr float kFaintExponent = -60.0f;

// Rounding of a weight as an error of its logit, nats. The exponent l * log2(e) - ref lies in
// [-125, 0] and is rounded by at most 2^-18 (half the spacing of floats from 64 to 128), which is
// 0.7 * 2^-18 nats; Exp2 is off by less than 2^-20 of its value (ExpTest measures every float). The
// rounding of the product and of log2(e) grow with |l| and are in the slacks of the scores.
inline constexpr float kWeightSlackNat = 0x1p-17f;
// Rounding of cap * tanh(l / cap) per nat of cap: arguments 4u (tanh' |y| <= 0.45), Exp2 2^-21
// (d tanh = d e / 2 at most), quotient, difference and product 4u, and 2u in the exponent of the
// weight, which is at most cap: together under 2^-19 = 32u.
inline constexpr float kSoftCapSlack = 0x1p-19f;
// Factor on every half-width: sums of at most 256 non-negative floats in lanes of at least 8 and
// the factors' own rounding lose at most 48u = 2^-18.4 of it.
inline constexpr float kHalfWidthInflation = 1 + 0x1p-16f;
// Bound on |logit| up to which logits are computed. Above it the arithmetic slacks exceed
// kLogitHalfWidthMaxNat in any case (at least 20 u), and a logit could be infinite or NaN.
inline constexpr float kReachMax = 0x1p24f;
// Bound on a sum of squares: above it, or when it is NaN, a norm is reported as +infinity.
inline constexpr float kSquareMax = 0x1p120f;

// A 15-bit weight w is rounded from fl(w * fl(32767 / max)) and stands for unit * integer, unit =
// fl(max / 32767): the difference is computed, and its own rounding is at most 2u of w <= 32767
// units, under 0.004 units.
inline constexpr float kWeightMax = 32767.0f;
inline constexpr float kWeightErrorSlack = 0.004f;

// Magnitudes of floats compare as their bits, where infinity and NaN are above every number.
inline constexpr uint32_t kInfinityBits = 0x7f800000;

template <typename V>
[[gnu::always_inline]] inline uint32_t ReduceMaxUnsigned(typename V::I x) {
  uint32_t lanes[V::kLanes];
  V::StoreI(lanes, x);
  uint32_t largest = 0;
  for (const uint32_t lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

// 2^x for x in [-125, 126], anything elsewhere. The polynomial's coefficients are a minimax fit of
// 2^r on [-1/2, 1/2] (relative error 2e-7); Horner adds at most 4u with or without FMA.
template <typename V>
[[gnu::always_inline]] inline typename V::F Exp2InRange(typename V::F x) {
  const typename V::I n = V::ToInt(x);
  const typename V::F r = V::Sub(x, V::ToFloat(n));
  typename V::F p = V::Set(1.339086336e-03f);
  p = V::MulAdd(p, r, V::Set(9.676031918e-03f));
  p = V::MulAdd(p, r, V::Set(5.550357114e-02f));
  p = V::MulAdd(p, r, V::Set(2.402210749e-01f));
  p = V::MulAdd(p, r, V::Set(6.931471880e-01f));
  p = V::MulAdd(p, r, V::Set(1.000000075e+00f));
  return V::AsFloat(V::AddI(V::AsInt(p), V::template ShiftLeft32<23>(n)));
}

// The same, and 0 below -125 and for NaN.
template <typename V>
[[gnu::always_inline]] inline typename V::F Exp2(typename V::F x) {
  return V::WhereAtLeast(x, V::Set(kExponentMin), Exp2InRange<V>(x));
}

// ln(x * 2^exponent) for x = 0, normal or +infinity. x = m * 2^e with m in [sqrt(1/2), sqrt(2));
// ln m = 2 atanh(t), t = (m - 1) / (m + 1), |t| < 0.172, whose series after t^7 is below
// 2 t^9 / 9 < 4e-8. Off by less than 2^-22 + 3u of its magnitude.
template <typename V>
[[gnu::always_inline]] inline typename V::F LogNat(typename V::F x, typename V::F exponent) {
  constexpr int32_t kSqrtHalf = 0x3f3504f3;  // bits of the float
  const typename V::I offset = V::AddI(V::AsInt(x), V::SetI(0x3f800000 - kSqrtHalf));
  const typename V::F e = V::Sub(V::ToFloat(V::template ShiftRight32<23>(offset)), V::Set(127.0f));
  const typename V::I mantissa = V::AndI(offset, V::SetI(0x007fffff));
  const typename V::F m = V::AsFloat(V::AddI(mantissa, V::SetI(kSqrtHalf)));
  const typename V::F one = V::Set(1.0f);
  const typename V::F t = V::Div(V::Sub(m, one), V::Add(m, one));
  const typename V::F t2 = V::Mul(t, t);
  typename V::F p = V::Set(2.0f / 7.0f);
  p = V::MulAdd(p, t2, V::Set(2.0f / 5.0f));
  p = V::MulAdd(p, t2, V::Set(2.0f / 3.0f));
  p = V::MulAdd(p, t2, V::Set(2.0f));
  const typename V::F log = V::MulAdd(V::Add(e, exponent), V::Set(kLn2), V::Mul(p, t));
  // Exactly one of these is not 0 where x is 0 or infinite.
  const typename V::F infinity = V::Set(__builtin_inff());
  const typename V::F above = V::WhereAtLeast(x, infinity, infinity);
  const typename V::F below =
      V::WhereAtLeast(V::Sub(V::Zero(), x), V::Zero(), V::Sub(V::Zero(), infinity));
  return V::Add(log, V::Add(above, below));
}

// cap * tanh(x / cap): 1 - 2 / (e^{2y} + 1), y = x / cap clamped to +-20, beyond which tanh is 1.
template <typename V>
[[gnu::always_inline]] inline typename V::F SoftCap(typename V::F x, float cap) {
  typename V::F y = V::Mul(x, V::Set(1.0f / cap));
  y = V::Max(V::Min(y, V::Set(20.0f)), V::Set(-20.0f));
  const typename V::F e = Exp2<V>(V::Mul(y, V::Set(2 * kLog2E)));
  const typename V::F one = V::Set(1.0f);
  return V::Mul(V::Set(cap), V::Sub(one, V::Div(V::Set(2.0f), V::Add(e, one))));
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_MATH_H_
