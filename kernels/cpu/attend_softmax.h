// From one head's logits of a tile to weights, and the sums that its atoms report.
#ifndef CERTKV_KERNELS_CPU_ATTEND_SOFTMAX_H_
#define CERTKV_KERNELS_CPU_ATTEND_SOFTMAX_H_

#include <cstdint>

#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_quad.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/certificate_parts.h"
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

// Moves head g to a larger reference. The factor is a power of two; below 2^-1000 it is 0, which
// the vanished-weight term of the rounding covers.
template <typename V>
__attribute__((noinline)) void RaiseReference(AttendState& s, int g, float ref) {
  HeadStates& heads = s.heads;
  const float shift = heads.ref[g] - ref;  // < 0
  const double factor = shift < -1000.0f ? 0.0 : __builtin_ldexp(1.0, static_cast<int>(shift));
  heads.ref[g] = ref;
  heads.mass[g] *= factor;
  heads.zero[g] *= factor;
  heads.weight_error[g] *= factor;
  heads.skipped[g] *= factor;
  heads.rotated_reach[g] *= factor;
  heads.plain_reach[g] *= factor;
  heads.eta[g] *= factor;
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
  Quad mass;  // lanes are sub-blocks
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
  w.mass = SumOfEach<V>(sums);
}

// The largest logits of a unit's sub-blocks, of up to kQuadHeads heads.
struct QuadTops {
  QuadRows by_head;       // lanes are sub-blocks
  QuadRows by_sub_block;  // lanes are heads
};

// Of heads [head, head + count), from s.scores.
template <typename V, typename Count>
[[gnu::always_inline]] inline QuadTops TopLogits(const AttendState& s, int head, Count count) {
  constexpr int kPer = TileWeights<V>::kPerSubBlock;
  QuadTops tops;
  ClearFrom(count, tops.by_head.row);
  for (int h = 0; h < count; ++h) {
    const float* scores = s.scores + (head + h) * kTileTokens;
    typename V::F maxima[kSubBlocksPerTile];
    Unroll<kSubBlocksPerTile>([&](auto b) __attribute__((always_inline)) {
      Unroll<kPer>([&](auto v) __attribute__((always_inline)) {
        const typename V::F x = V::Load(scores + b * kSubBlockTokens + v * V::kLanes);
        maxima[b] = v == 0 ? x : V::Max(maxima[b], x);
      });
    });
    tops.by_head.row[h] = MaxOfEach<V>(maxima);
  }
  tops.by_sub_block = Transpose(tops.by_head);
  return tops;
}

// Over the sub-blocks, of each head.
[[gnu::always_inline]] inline Quad LargestOf(const QuadRows& by_sub_block) {
  return MaxQuad(MaxQuad(by_sub_block.row[0], by_sub_block.row[1]),
                 MaxQuad(by_sub_block.row[2], by_sub_block.row[3]));
}
[[gnu::always_inline]] inline Quad SmallestOf(const QuadRows& by_sub_block) {
  return MinQuad(MinQuad(by_sub_block.row[0], by_sub_block.row[1]),
                 MinQuad(by_sub_block.row[2], by_sub_block.row[3]));
}
[[gnu::always_inline]] inline Quad SumOf(const QuadRows& by_sub_block) {
  return (by_sub_block.row[0] + by_sub_block.row[1]) + (by_sub_block.row[2] + by_sub_block.row[3]);
}

// What ExponentiateFaint leaves beside weights.
struct FaintSums {
  Quad refs;       // of the sub-blocks' masses
  double skipped;  // mass of faint atoms, relative to the head's reference
  double eta;      // sum of that mass * eta
};

// The tile as seen by head g when some atom is faint: such an atom is summed relative to its own
// largest logit and its weights become 0.
template <typename V>
__attribute__((noinline)) FaintSums ExponentiateFaint(const AttendState& s, int g, const Unit& unit,
                                                      const QuadTops& tops, int lane,
                                                      TileWeights<V>& w) {
  const float head_ref = s.heads.ref[g];
  const float top = LargestOf(tops.by_sub_block)[lane];
  float refs[kSubBlocksPerTile];
  bool faint[kSubBlocksPerTile];
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    const float exponent = (unit.atoms == 1 ? top : tops.by_head.row[lane][b]) * kLog2E;
    faint[b] = exponent < head_ref + kFaintExponent && exponent > kRefNone;
    refs[b] = faint[b] ? __builtin_ceilf(exponent) : head_ref;
  }
  Exponentiate<V>(s.scores + g * kTileTokens, refs, w);
  FaintSums sums = {LoadQuad(refs), 0, 0};
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    if (!faint[b]) continue;
    const float shift = refs[b] - head_ref;
    // An upper bound, so never 0.
    const double mass =
        w.mass[b] * __builtin_ldexp(1.0, shift < -1000.0f ? -1000 : static_cast<int>(shift));
    sums.skipped += mass;
    sums.eta += mass * unit.eta[b];
    constexpr int kPer = TileWeights<V>::kPerSubBlock;
    for (int v = 0; v < kPer; ++v) w.p[b * kPer + v] = V::Zero();
  }
  return sums;
}

// sum of mass * eta over the tile's sub-blocks. A weight that vanished must not hide an eta: 2^-120
// times the smallest eta is a float above 0. Positive terms in float, 4 roundings each, within what
// FinishHead allows for.
[[gnu::always_inline]] inline Quad EtaOf(const Unit& unit, const QuadRows& mass) {
  constexpr float kLeast = 0x1p-120f;
  const Quad lower = (mass.row[0] + kLeast) * unit.eta[0] + (mass.row[1] + kLeast) * unit.eta[1];
  const Quad upper = (mass.row[2] + kLeast) * unit.eta[2] + (mass.row[3] + kLeast) * unit.eta[3];
  return lower + upper;
}

// What weights of quantized values leave behind: the largest weight * scale, and sums of weight *
// value zero, in lanes.
template <typename V>
struct ScaledWeights {
  typename V::F max;
  typename V::F zeros;
};

// Writes weight * value scale to `scaled`.
template <typename V>
[[gnu::always_inline]] inline ScaledWeights<V> ScaleWeights(const Unit& unit,
                                                            const TileWeights<V>& w,
                                                            float* scaled) {
  ScaledWeights<V> sums = {V::Zero(), V::Zero()};
  Unroll<TileWeights<V>::kVectors>([&](auto k) __attribute__((always_inline)) {
    sums.zeros = V::MulAdd(w.p[k], V::Load(unit.value_zero + k * V::kLanes), sums.zeros);
    const typename V::F weight = V::Mul(w.p[k], V::Load(unit.value_scale + k * V::kLanes));
    V::Store(scaled + k * V::kLanes, weight);
    sums.max = V::Max(sums.max, weight);
  });
  return sums;
}

// What rounding takes from a head's scaled weights, and its magnitude, in lanes.
template <typename V>
struct RoundingSums {
  typename V::F lost;
  typename V::F error;
};

// Rounds a head's scaled weights to multiples of `unit_weight`.
template <typename V>
[[gnu::always_inline]] inline RoundingSums<V> RoundWeights(const float* scaled, float unit_weight,
                                                           float inverse, int16_t* weights) {
  constexpr int kPer = TileWeights<V>::kPerSubBlock;
  const typename V::F inverses = V::Set(inverse);
  const typename V::F units = V::Set(unit_weight);
  RoundingSums<V> sums = {V::Zero(), V::Zero()};
  Unroll<kSubBlocksPerTile>([&](auto b) __attribute__((always_inline)) {
    typename V::I rounded[kPer];
    Unroll<kPer>([&](auto v) __attribute__((always_inline)) {
      constexpr int k = decltype(b)::value * kPer + decltype(v)::value;
      const typename V::F weight = V::Load(scaled + k * V::kLanes);
      rounded[v] = V::ToInt(V::Mul(weight, inverses));
      const typename V::F left = V::NegMulAdd(V::ToFloat(rounded[v]), units, weight);
      sums.lost = V::Add(sums.lost, left);
      if constexpr (Computes<V>(kWeightErrorPart)) sums.error = V::Add(sums.error, V::Abs(left));
    });
    V::StoreWeights(weights + b * kSubBlockTokens, rounded);
  });
  return sums;
}

// 15-bit weights of quantized values, of the lanes in `quantized`, from s.scores. What their
// rounding takes from the weights' sum is put back at the middle code, so that only |code - middle|
// <= levels / 2 meets the error of a weight.
template <typename V, typename Count>
[[gnu::always_inline]] inline void RoundQuad(AttendState& s, int head, Count count,
                                             uint32_t quantized, const typename V::F* maxima,
                                             typename V::F* zeros) {
  const Quad max_weight = MaxOfEach<V>(maxima, count);
  const QuadInt usable = max_weight > 0x1p-90f;
  const Quad none = {};
  const Quad unit_weight = usable ? max_weight * (1.0f / kWeightMax) : none;
  const Quad inverse = usable ? kWeightMax / max_weight : none;
  StoreQuad(s.weight_unit + head, unit_weight);
  typename V::F errors[kQuadHeads];
  const typename V::F middle = V::Set(0.5f * s.value_levels);
  ClearFrom(count, errors);
  for (int h = 0; h < count; ++h) {
    errors[h] = V::Zero();
    if ((quantized >> h & 1) == 0) continue;
    const int row = (head + h) * kTileTokens;
    const RoundingSums<V> sums =
        RoundWeights<V>(s.scores + row, unit_weight[h], inverse[h], s.weights + row);
    zeros[h] = V::MulAdd(sums.lost, middle, zeros[h]);
    errors[h] = sums.error;
  }
  AddTo(s.heads.zero + head, Widen(SumOfEach<V>(zeros, count)));
  if constexpr (!Computes<V>(kWeightErrorPart)) return;
  AddTo(s.heads.weight_error + head,
        Widen(SumOfEach<V>(errors, count)) * (1 + 0x1p-16) +
            Widen(unit_weight) * (kTileTokens * double{kWeightErrorSlack}));
}

// Writes the atoms of a unit: `mass` by head, relative to 2^refs.
template <typename Count>
[[gnu::always_inline]] inline void WriteAtoms(AttendState& s, int head, Count count,
                                              const Unit& unit, const QuadTops& tops,
                                              const QuadRows& mass, const QuadRows& refs) {
  const AttendResult& result = *s.result;
  const int64_t at = int64_t{head} * s.atom_count + unit.first_atom;
  if (unit.atoms == 1) {
    const Quad sums = SumOf(Transpose(mass));
    const Quad maxima = LargestOf(tops.by_sub_block);
    for (int h = 0; h < count; ++h) {
      const int64_t atom = at + int64_t{h} * s.atom_count;
      result.block_lse[atom] = sums[h];
      result.block_max_logit[atom] = maxima[h];
      s.atom_ref[atom] = refs.row[h][0];
    }
    return;
  }
  for (int h = 0; h < count; ++h) {
    const int64_t atom = at + int64_t{h} * s.atom_count;
    StoreQuad(result.block_lse + atom, mass.row[h]);
    StoreQuad(result.block_max_logit + atom, tops.by_head.row[h]);
    StoreQuad(s.atom_ref + atom, refs.row[h]);
  }
}

// What a unit adds to the sums that bound errors; `mass`, by sub-block, is that of the values read,
// `total` its sum, `eta` what faint atoms add to the sum of mass * eta.
template <typename Count>
[[gnu::always_inline]] inline void AddErrorSums(AttendState& s, int head, Count count,
                                                const Unit& unit, uint32_t quantized,
                                                const QuadRows& mass, Quad total, DoubleQuad eta) {
  HeadStates& heads = s.heads;
  const Quad read_eta = EtaOf(unit, mass);
  if (quantized == (1u << kQuadHeads) - 1) {
    AddTo(heads.rotated_reach + head, Widen(total) * unit.rotated_reach);
    eta += Widen(read_eta);
  } else {  // reaches may be infinite, and lanes of mass 0 those of other heads
    for (int h = 0; h < count; ++h) {
      if ((quantized >> h & 1) != 0) {
        heads.rotated_reach[head + h] += double{total[h]} * unit.rotated_reach;
        eta[h] += read_eta[h];
      } else {
        heads.plain_reach[head + h] += double{total[h]} * unit.plain_reach;
        eta[h] = 0;
      }
    }
  }
  AddTo(heads.eta + head, eta);
  if (unit.tile < 0) return;
  const DoubleQuad none = {};
  const Quad errors = __builtin_convertvector(eta > 0 ? eta + 0x1p-126 : none, Quad);
  const int64_t at = int64_t{head} * s.args->tile_count + unit.tile;
  for (int h = 0; h < count; ++h) {
    s.result->tile_value_error[at + int64_t{h} * s.args->tile_count] = errors[h];
    s.tile_ref[at + int64_t{h} * s.args->tile_count] = heads.ref[head + h];
  }
}

// Logits of heads [head, head + count) in s.scores (-infinity outside the range) become weights: in
// s.weights for the lanes in `quantized` (bit h), whose values are quantized, in s.scores for the
// others. Bit h of the result is 0 where every weight is 0, so that no value needs to be read.
template <typename V, typename Count>
[[gnu::always_inline]] inline uint32_t WeighHeads(AttendState& s, int head, Count count,
                                                  const Unit& unit, const QuadTops& tops,
                                                  uint32_t quantized) {
  HeadStates& heads = s.heads;
  const QuadInt active = LanesBelow(count);
  const Quad exponent = LargestOf(tops.by_sub_block) * kLog2E;
  uint32_t raised = LaneBits((exponent > LoadQuad(heads.ref + head)) & active);
  for (; __builtin_expect(raised != 0, 0); raised &= raised - 1) {
    const int h = __builtin_ctz(raised);
    RaiseReference<V>(s, head + h, __builtin_ceilf(exponent[h]));
  }
  const Quad lowest = unit.atoms == 1 ? exponent : SmallestOf(tops.by_sub_block) * kLog2E;
  const uint32_t faint = LaneBits((lowest < LoadQuad(heads.ref + head) + kFaintExponent) & active);

  QuadRows mass;  // by head
  QuadRows read;  // the same without what is skipped
  QuadRows refs;
  DoubleQuad faint_eta = {};
  typename V::F maxima[kQuadHeads];
  typename V::F zeros[kQuadHeads];
  ClearFrom(count, mass.row);
  ClearFrom(count, read.row);
  for (int h = 0; h < count; ++h) {
    const int g = head + h;
    float* scores = s.scores + g * kTileTokens;
    TileWeights<V> w;
    refs.row[h] = SplatQuad(heads.ref[g]);
    if (__builtin_expect((faint >> h & 1) == 0, 1)) {
      float same[kSubBlocksPerTile];
      StoreQuad(same, refs.row[h]);
      Exponentiate<V>(scores, same, w);
      read.row[h] = w.mass;
    } else {
      const FaintSums sums = ExponentiateFaint<V>(s, g, unit, tops, h, w);
      read.row[h] = sums.refs == refs.row[h] ? w.mass : Quad{};
      refs.row[h] = sums.refs;
      heads.mass[g] += sums.skipped;
      heads.skipped[g] += sums.skipped;
      faint_eta[h] = sums.eta;
    }
    mass.row[h] = w.mass;
    maxima[h] = zeros[h] = V::Zero();
    if ((quantized >> h & 1) != 0) {
      const ScaledWeights<V> sums = ScaleWeights<V>(unit, w, scores);
      maxima[h] = sums.max;
      zeros[h] = sums.zeros;
    } else {
      Unroll<TileWeights<V>::kVectors>([&](auto k) __attribute__((always_inline)) {
        V::Store(scores + k * V::kLanes, w.p[k]);
      });
    }
  }
  if constexpr (Computes<V>(kAtomPart)) {
    WriteAtoms(s, head, count, unit, tops, mass, refs);
  }
  const QuadRows by_sub_block = Transpose(read);
  const Quad total = SumOf(by_sub_block);
  AddTo(heads.mass + head, Widen(total));
  if constexpr (Computes<V>(kValueErrorPart)) {
    AddErrorSums(s, head, count, unit, quantized, by_sub_block, total, faint_eta);
  }
  if (quantized != 0) {
    ClearFrom(count, maxima);
    ClearFrom(count, zeros);
    RoundQuad<V>(s, head, count, quantized, maxima, zeros);
  }
  return LaneBits((total > 0.0f) & active);
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_SOFTMAX_H_
