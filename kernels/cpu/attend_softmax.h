// From one head's logits of a tile to weights, and the sums that its atoms report.
#ifndef CERTKV_KERNELS_CPU_ATTEND_SOFTMAX_H_
#define CERTKV_KERNELS_CPU_ATTEND_SOFTMAX_H_

#include <cstdint>

#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

// One step of the read: a tile, or up to 64 tokens of the tail.
struct Unit {
  int32_t tile;        // -1 in the tail
  int32_t first_atom;  // of the read
  int32_t atoms;       // 1 or 4
  int32_t first;       // tokens in the range: first <= t < last, in [0, 64]
  int32_t last;
  // Where values are quantized.
  alignas(64) float value_scale[kTileTokens];
  alignas(64) float value_zero[kTileTokens];
  float eta[kSubBlocksPerTile];
  float rotated_reach;  // levels * largest scale + largest |zero|
  float plain_reach;    // bound on ||v|| of values read as 16-bit floats
};

// Moves the head to a larger reference. The factor is a power of two; below 2^-1000 it is 0, which
// the vanished-weight term of the rounding covers.
template <typename V>
__attribute__((noinline)) void RaiseReference(AttendState& s, int g, float ref) {
  HeadState& head = s.heads[g];
  const float shift = head.ref - ref;  // < 0
  const double factor = shift < -1000.0f ? 0.0 : __builtin_ldexp(1.0, static_cast<int>(shift));
  head.ref = ref;
  head.mass *= factor;
  head.zero *= factor;
  head.weight_error *= factor;
  head.skipped *= factor;
  head.rotated_reach *= factor;
  head.plain_reach *= factor;
  head.eta *= factor;
  const typename V::F factors = V::Set(static_cast<float>(factor));
  for (int i = 0; i < kRow; i += V::kLanes) {
    float* rotated = s.rotated + g * kRow + i;
    float* plain = s.plain + g * kRow + i;
    V::Store(rotated, V::Mul(V::Load(rotated), factors));
    V::Store(plain, V::Mul(V::Load(plain), factors));
  }
}

// What Exponentiate leaves: weights of the tile in p, and per sub-block their sums.
template <typename V>
struct TileWeights {
  static constexpr int kPerSubBlock = kSubBlockTokens / V::kLanes;
  static constexpr int kVectors = kTileTokens / V::kLanes;
  typename V::F p[kVectors];
  float mass[kSubBlocksPerTile];
};

template <typename V>
[[gnu::always_inline]] inline void Exponentiate(const float* scores, const float* refs,
                                                TileWeights<V>& w) {
  constexpr int kPer = TileWeights<V>::kPerSubBlock;
  typename V::F sums[kSubBlocksPerTile];
  Unroll<kSubBlocksPerTile>([&](auto b) __attribute__((always_inline)) {
    const typename V::F minus_ref = V::Set(-refs[b]);
    Unroll<kPer>([&](auto v) __attribute__((always_inline)) {
      constexpr int k = decltype(b)::value * kPer + decltype(v)::value;
      const typename V::F logits = V::Load(scores + k * V::kLanes);
      w.p[k] = Exp2<V>(V::MulAdd(logits, V::Set(kLog2E), minus_ref));
      sums[b] = v == 0 ? w.p[k] : V::Add(sums[b], w.p[k]);
    });
  });
  V::ReduceAdd4(sums[0], sums[1], sums[2], sums[3], w.mass);
}

[[gnu::always_inline]] inline float MaxOf4(const float* x) {
  const float a = x[0] > x[1] ? x[0] : x[1];
  const float b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}

// The tile as seen by one head when some atom is faint: such an atom is summed relative to its own
// largest logit, its weights become 0 and its mass is added to `skipped`.
template <typename V>
__attribute__((noinline)) void ExponentiateFaint(const AttendState& s, int g, const Unit& unit,
                                                 const float* tops, TileWeights<V>& w, float* refs,
                                                 double* skipped, double* eta) {
  const float head_ref = s.heads[g].ref;
  bool faint[kSubBlocksPerTile];
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    const float top = unit.atoms == 1 ? MaxOf4(tops) : tops[b];
    const float exponent = top * kLog2E;
    faint[b] = exponent < head_ref + kFaintExponent && exponent > kRefNone;
    refs[b] = faint[b] ? __builtin_ceilf(exponent) : head_ref;
  }
  Exponentiate<V>(s.scores + g * kTileTokens, refs, w);
  *skipped = 0;
  *eta = 0;
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    if (!faint[b]) continue;
    const float shift = refs[b] - head_ref;
    // An upper bound, so never 0.
    const double mass =
        w.mass[b] * __builtin_ldexp(1.0, shift < -1000.0f ? -1000 : static_cast<int>(shift));
    *skipped += mass;
    *eta += mass * unit.eta[b];
    constexpr int kPer = TileWeights<V>::kPerSubBlock;
    for (int v = 0; v < kPer; ++v) w.p[b * kPer + v] = V::Zero();
  }
}

// sum of mass * eta over the tile's sub-blocks. A weight that vanished must not hide an eta: 2^-120
// times the smallest eta is a float above 0. Positive terms in float, 4 roundings each, within what
// FinishHead allows for.
[[gnu::always_inline]] inline float EtaOf(const Unit& unit, const float* mass) {
  constexpr float kLeast = 0x1p-120f;
  const float lower = (mass[0] + kLeast) * unit.eta[0] + (mass[1] + kLeast) * unit.eta[1];
  const float upper = (mass[2] + kLeast) * unit.eta[2] + (mass[3] + kLeast) * unit.eta[3];
  return lower + upper;
}

// Writes the atoms of the unit for one head.
[[gnu::always_inline]] inline void WriteAtoms(AttendState& s, int g, const Unit& unit,
                                              const float* tops, const float* mass,
                                              const float* refs) {
  const int64_t at = int64_t{g} * s.atom_count + unit.first_atom;
  if (unit.atoms == 1) {
    s.result->block_lse[at] = (mass[0] + mass[1]) + (mass[2] + mass[3]);
    s.result->block_max_logit[at] = MaxOf4(tops);
    s.atom_ref[at] = refs[0];
    return;
  }
  for (int a = 0; a < kSubBlocksPerTile; ++a) {
    s.result->block_lse[at + a] = mass[a];
    s.result->block_max_logit[at + a] = tops[a];
    s.atom_ref[at + a] = refs[a];
  }
}

// 15-bit weights of quantized values. What their rounding takes from the weights' sum is put back
// at the middle code, so that only |code - middle| <= levels / 2 meets the error of a weight.
template <typename V>
[[gnu::always_inline]] inline void RoundWeights(AttendState& s, int g, const Unit& unit,
                                                const TileWeights<V>& w) {
  constexpr int kVectors = TileWeights<V>::kVectors;
  HeadState& head = s.heads[g];
  typename V::F weights[kVectors];
  typename V::F zeros = V::Zero();
  typename V::F max = V::Zero();
  Unroll<kVectors>([&](auto k) __attribute__((always_inline)) {
    zeros = V::MulAdd(w.p[k], V::Load(unit.value_zero + k * V::kLanes), zeros);
    weights[k] = V::Mul(w.p[k], V::Load(unit.value_scale + k * V::kLanes));
    max = V::Max(max, weights[k]);
  });
  const float max_weight = V::ReduceMax(max);
  const bool tiny = !(max_weight > 0x1p-90f);
  const float unit_weight = tiny ? 0.0f : max_weight * (1.0f / kWeightMax);
  const typename V::F inverse = V::Set(tiny ? 0.0f : kWeightMax / max_weight);
  const typename V::F units = V::Set(unit_weight);
  typename V::F lost = V::Zero();
  typename V::F error = V::Zero();
  constexpr int kPer = TileWeights<V>::kPerSubBlock;
  Unroll<kSubBlocksPerTile>([&](auto b) __attribute__((always_inline)) {
    typename V::I rounded[kPer];
    Unroll<kPer>([&](auto v) __attribute__((always_inline)) {
      constexpr int k = decltype(b)::value * kPer + decltype(v)::value;
      rounded[v] = V::ToInt(V::Mul(weights[k], inverse));
      const typename V::F left = V::NegMulAdd(V::ToFloat(rounded[v]), units, weights[k]);
      lost = V::Add(lost, left);
      if constexpr (V::kCertified) error = V::Add(error, V::Abs(left));
    });
    V::StoreWords(s.weights + g * kTileTokens + b * kSubBlockTokens, rounded);
  });
  zeros = V::MulAdd(lost, V::Set(0.5f * s.value_levels), zeros);
  float sums[4];
  V::ReduceAdd4(zeros, error, zeros, error, sums);
  s.weight_unit[g] = unit_weight;
  head.zero += sums[0];
  if constexpr (!V::kCertified) return;
  head.weight_error +=
      double{sums[1]} * (1 + 0x1p-16) + double{unit_weight} * (kTileTokens * kWeightErrorSlack);
}

// The largest logit of head g in each sub-block, from s.scores.
template <typename V>
[[gnu::always_inline]] inline void TopLogits(const AttendState& s, int g, float* tops) {
  constexpr int kPer = TileWeights<V>::kPerSubBlock;
  const float* scores = s.scores + g * kTileTokens;
  typename V::F maxima[kSubBlocksPerTile];
  Unroll<kSubBlocksPerTile>([&](auto b) __attribute__((always_inline)) {
    Unroll<kPer>([&](auto v) __attribute__((always_inline)) {
      const typename V::F x = V::Load(scores + b * kSubBlockTokens + v * V::kLanes);
      maxima[b] = v == 0 ? x : V::Max(maxima[b], x);
    });
  });
  V::ReduceMax4(maxima[0], maxima[1], maxima[2], maxima[3], tops);
}

// Logits of head g in s.scores (-infinity outside the range), `tops` the largest of each sub-block,
// become weights: in s.weights where `quantized_values`, in s.scores otherwise. Returns false when
// every weight is 0, so that no value needs to be read.
template <typename V>
[[gnu::always_inline]] inline bool WeighHead(AttendState& s, int g, const Unit& unit,
                                             const float* tops, bool quantized_values) {
  float* scores = s.scores + g * kTileTokens;
  HeadState& head = s.heads[g];
  const float exponent = MaxOf4(tops) * kLog2E;
  if (__builtin_expect(exponent > head.ref, 0)) {
    RaiseReference<V>(s, g, __builtin_ceilf(exponent));
  }
  const float faint_below = head.ref + kFaintExponent;
  bool faint = exponent < faint_below;
  if (unit.atoms != 1) {
    for (int a = 0; a < kSubBlocksPerTile; ++a) faint |= tops[a] * kLog2E < faint_below;
  }
  TileWeights<V> w;
  float refs[kSubBlocksPerTile] = {head.ref, head.ref, head.ref, head.ref};
  double skipped = 0;
  double eta = 0;
  if (__builtin_expect(!faint, 1)) {
    Exponentiate<V>(scores, refs, w);
  } else {
    ExponentiateFaint<V>(s, g, unit, tops, w, refs, &skipped, &eta);
  }
  if constexpr (V::kCertified) WriteAtoms(s, g, unit, tops, w.mass, refs);

  float read_mass[kSubBlocksPerTile];
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    read_mass[b] = refs[b] == head.ref ? w.mass[b] : 0.0f;
  }
  const float total = (read_mass[0] + read_mass[1]) + (read_mass[2] + read_mass[3]);
  head.mass += total + skipped;
  head.skipped += skipped;
  if (quantized_values) {
    if constexpr (V::kCertified) {
      eta += EtaOf(unit, read_mass);
      head.rotated_reach += double{total} * unit.rotated_reach;
    }
    RoundWeights<V>(s, g, unit, w);
  } else {
    eta = 0;
    if constexpr (V::kCertified) head.plain_reach += double{total} * unit.plain_reach;
    Unroll<TileWeights<V>::kVectors>([&](auto k) __attribute__((always_inline)) {
      V::Store(scores + k * V::kLanes, w.p[k]);
    });
  }
  head.eta += eta;
  if (V::kCertified && unit.tile >= 0) {
    const int64_t at = int64_t{g} * s.args->tile_count + unit.tile;
    s.result->tile_value_error[at] = static_cast<float>(eta > 0 ? eta + 0x1p-126 : 0.0);
    s.tile_ref[at] = head.ref;
  }
  return total > 0;
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_SOFTMAX_H_
