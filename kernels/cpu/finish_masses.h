// From one query head's atoms as reported to masses and widened half-widths, in vectors.
//
// mass = e^(lse - L), L the largest lse, by Exp2 of a float exponent. Its errors, as errors of the
// logarithm: the exponent rounds three times (difference, product, log2(e)), under 2^-22 |lse - L|;
// Exp2 is off by less than 2^-20 of its value, 2^-19.9 nats. With what was reported itself
// (BlockLseSlackNat) and one more 2^-19.9 for the roundings here,
//   delta = 2^-14 + 2^-18 + 2^-22 (max(|lse|, |max_logit|) + L - lse) >= |log mass - log m|.
// Where lse < L - kDistanceMax the mass is raised to that of kDistanceMax (kClampedShare of
// finish_certificate.cc pays for it), so that only an empty atom has mass 0.
#ifndef CERTKV_KERNELS_CPU_FINISH_MASSES_H_
#define CERTKV_KERNELS_CPU_FINISH_MASSES_H_

#include <cstdint>

#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/finish_state.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

// Exponents of Exp2InRange end at 125 log(2) = 86.6 nats.
inline constexpr float kDistanceMax = 86.0f;
// delta, and the factor on all that is summed.
inline constexpr float kWidening = 1 + 0x1p-21f;
inline constexpr float kDeltaPerNat = 0x1p-22f * kWidening;
inline constexpr float kDeltaMin = (0x1p-14f + 0x1p-18f) * kWidening;

// Folds atoms [begin, begin + kFinishChunk) of padded arrays. Magnitudes are compared as bits,
// where a NaN is above every number.
template <typename V>
struct MassChunk {
  typename V::F total = V::Zero();        // sum of masses
  typename V::F slack = V::Zero();        // sum of mass * delta
  typename V::I magnitude = V::ZeroI();   // largest of max(|lse|, |max_logit|)
  typename V::I size = V::ZeroI();        // the same of atoms that aren't empty
  typename V::I width_bits = V::ZeroI();  // largest of the half-widths' as given

  [[gnu::always_inline]] void Add(const FinishMasses& m, const float* lse, const float* max,
                                  const float* half_width, int64_t at) {
    const typename V::F minus_max = V::Set(-kFloatMax);
    const typename V::F largest = V::Set(m.largest_lse);
    typename V::F mass_max = V::Zero();
    typename V::F width_max = V::Zero();
    typename V::F width_min = V::Set(kFloatMax);
    for (int i = 0; i < kFinishChunk; i += V::kLanes) {
      const typename V::F l = V::Load(lse + i);
      const typename V::F width = V::Load(half_width + i);
      const typename V::I either =
          V::MaxUnsigned(V::AsInt(V::Abs(l)), V::AsInt(V::Abs(V::Load(max + i))));
      magnitude = V::MaxUnsigned(magnitude, either);
      // 0 for an infinite lse: an empty atom has no error.
      const typename V::F of_atom = V::WhereAtLeast(l, minus_max, V::AsFloat(either));
      size = V::MaxUnsigned(size, V::AsInt(of_atom));
      width_bits = V::MaxUnsigned(width_bits, V::AsInt(width));
      const typename V::F below = V::Max(V::Sub(l, largest), V::Set(-kDistanceMax));
      const typename V::F power = Exp2InRange<V>(V::Mul(below, V::Set(kLog2E)));
      const typename V::F mass = V::WhereAtLeast(l, minus_max, power);
      // The factor covers the roundings of delta and of the sum.
      const typename V::F delta =
          V::MulAdd(V::Sub(of_atom, below), V::Set(kDeltaPerNat), V::Set(kDeltaMin));
      const typename V::F widened = V::MulAdd(width, V::Set(kWidening), delta);
      total = V::Add(total, mass);
      slack = V::MulAdd(mass, delta, slack);
      mass_max = V::Max(mass_max, mass);
      width_max = V::Max(width_max, widened);
      width_min = V::Min(width_min, widened);
      V::Store(m.mass + at + i, mass);
      V::Store(m.half_width + at + i, widened);
    }
    m.chunk_mass_max[at / kFinishChunk] = V::ReduceMax(mass_max);
    m.chunk_half_width_max[at / kFinishChunk] = V::ReduceMax(width_max);
    m.chunk_half_width_min[at / kFinishChunk] = -V::ReduceMax(V::Sub(V::Zero(), width_min));
  }
};

template <typename V>
float LargestLse(const FinishMasses& m) {
  typename V::F largest = V::Set(-__builtin_inff());
  int64_t i = 0;
  for (; i + V::kLanes <= m.count; i += V::kLanes) largest = V::Max(largest, V::Load(m.lse + i));
  float result = V::ReduceMax(largest);
  for (; i < m.count; ++i) result = m.lse[i] > result ? m.lse[i] : result;
  return result;
}

// A NaN among the lse makes `largest_lse` meaningless and `valid` false.
template <typename V>
void ComputeFinishMasses(FinishMasses* masses) {
  FinishMasses& m = *masses;
  m.valid = false;
  m.largest_lse = LargestLse<V>(m);
  if (!(m.largest_lse > -kFloatMax && m.largest_lse <= kFloatMax)) return;
  MassChunk<V> sums;
  int64_t at = 0;
  for (; at + kFinishChunk <= m.count; at += kFinishChunk) {
    sums.Add(m, m.lse + at, m.max_logit + at, m.reported_half_width + at, at);
  }
  if (at < m.count) {
    float lse[kFinishChunk];
    float max[kFinishChunk];
    float half_width[kFinishChunk] = {};
    for (int i = 0; i < kFinishChunk; ++i) {
      const bool inside = at + i < m.count;
      lse[i] = inside ? m.lse[at + i] : -__builtin_inff();
      max[i] = inside ? m.max_logit[at + i] : -__builtin_inff();
      half_width[i] = inside ? m.reported_half_width[at + i] : 0.0f;
    }
    sums.Add(m, lse, max, half_width, at);
  }
  m.total = V::ReduceAdd(sums.total);
  m.slack = V::ReduceAdd(sums.slack);
  const uint32_t size = ReduceMaxUnsigned<V>(sums.size);
  m.delta_max = (__builtin_bit_cast(float, size) + kDistanceMax) * kDeltaPerNat + kDeltaMin;
  // A negative half-width has larger bits than infinity, as a NaN has. (So has -0, which is no
  // error: then the caller takes the way of doubles.)
  m.valid = size < kInfinityBits && ReduceMaxUnsigned<V>(sums.magnitude) <= kInfinityBits &&
            ReduceMaxUnsigned<V>(sums.width_bits) <= kInfinityBits;
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_FINISH_MASSES_H_
