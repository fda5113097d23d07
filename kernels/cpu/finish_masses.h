// From one query head's atoms as reported to masses and widened half-widths, in vectors.
//
// mass = e^(lse - L), L the largest lse, by Exp2 of a float exponent. Its errors, as errors of the
// logarithm: the exponent rounds three times (difference, product, log2(e)), under 2^-22 |lse - L|;
// Exp2 is off by less than 2^-20 of its value, 2^-19.9 nats. With what was reported itself
// (BlockLseSlackNat) and one more 2^-19.9 for the roundings here,
//   delta = 2^-14 + 2^-18 + 2^-22 (max(|lse|, |max_logit|) + L - lse) >= |log mass - log m|.
// Exp2 gives 0 below 2^-125; such masses are raised to 2^-126 (kClampedShare of
// finish_certificate.cc pays for it), so that only an empty atom has mass 0.
#ifndef CERTKV_KERNELS_CPU_FINISH_MASSES_H_
#define CERTKV_KERNELS_CPU_FINISH_MASSES_H_

#include <cstdint>

#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/finish_state.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

// Folds atoms [begin, begin + kFinishChunk) of padded arrays.
template <typename V>
struct MassChunk {
  typename V::F total = V::Zero();  // sum of masses
  typename V::F slack = V::Zero();  // sum of mass * delta
  typename V::F delta_max = V::Zero();
  typename V::F valid = V::Set(1.0f);  // 0 where an input is NaN, +infinity or a negative width

  [[gnu::always_inline]] void Add(const FinishMasses& m, const float* lse, const float* max,
                                  const float* half_width, int64_t at) {
    const typename V::F finite_max = V::Set(kFloatMax);
    const typename V::F one = V::Set(1.0f);
    const typename V::F largest = V::Set(m.largest_lse);
    typename V::F chunk_max = V::Zero();
    for (int i = 0; i < kFinishChunk; i += V::kLanes) {
      const typename V::F l = V::Load(lse + i);
      const typename V::F top = V::Load(max + i);
      const typename V::F width = V::Load(half_width + i);
      const typename V::F minus_max = V::Set(-kFloatMax);
      valid = V::Min(valid, V::WhereAtLeast(finite_max, l, one));
      valid = V::Min(valid, V::WhereAtLeast(finite_max, top, one));
      valid = V::Min(valid, V::WhereAtLeast(width, V::Zero(), one));
      const typename V::F below = V::Sub(l, largest);
      const typename V::F least = V::WhereAtLeast(l, minus_max, V::Set(0x1p-126f));
      const typename V::F mass = V::Max(Exp2<V>(V::Mul(below, V::Set(kLog2E))), least);
      // 0 for an infinite one: an empty atom has no error.
      const typename V::F size = V::Max(V::WhereAtLeast(l, minus_max, V::Abs(l)),
                                        V::WhereAtLeast(top, minus_max, V::Abs(top)));
      const typename V::F distance = V::WhereAtLeast(l, minus_max, V::Abs(below));
      const typename V::F delta =
          V::MulAdd(V::Add(size, distance), V::Set(0x1p-22f), V::Set(0x1p-14f + 0x1p-18f));
      total = V::Add(total, mass);
      slack = V::MulAdd(mass, delta, slack);
      delta_max = V::Max(delta_max, delta);
      chunk_max = V::Max(chunk_max, mass);
      V::Store(m.mass + at + i, mass);
      // The factor covers the roundings of delta and of the sum.
      V::Store(m.half_width + at + i, V::Mul(V::Add(width, delta), V::Set(1 + 0x1p-21f)));
    }
    m.chunk_mass_max[at / kFinishChunk] = V::ReduceMax(chunk_max);
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
  m.delta_max = V::ReduceMax(sums.delta_max);
  m.valid = V::ReduceMax(V::Sub(V::Zero(), sums.valid)) == -1.0f;
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_FINISH_MASSES_H_
