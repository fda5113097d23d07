// The coarse scan of a progressive read: from the coarse planes alone, for every head and sub-block
// an upper bound on what its exact weights add up to (docs/bounds.md, section 9).
//
// With x_i = q_i * scale_i (q already times logit_scale), nibbles n_i and the middle key
// m_i = zero_i + 127.5 scale_i, the coarse logit is
//   l^ = sum_i q_i (zero_i + (16 n_i + 7.5) scale_i) = 16 sum_i x_i (n_i - 7.5) + q . m
//      ~ 8 unit (2 sum_i Q_i n_i - 15 sum_i Q_i) + q . m,   Q_i = rint(x_i / unit), one signed
//      byte,
// with unit = max |x_i| / 127. The integer is exact, below 2 * 127 * 15 * 256 < 2^20. Left out:
//   the half of the key: |k - k^| <= (8 + 2^-14) scale (AffineDepthOf), so c >= (8 + 2^-14) A with
//     A = sum |x_i|;
//   the query's rounding: 16 * 7.5 * sum |x_i - unit Q_i|, summed as it is, not at its worst;
//   float arithmetic, in units u: relative to ||q|| ||m||: (d / 16 + 16), as in attend_keys.h;
//     relative to 128 A: 10 as there, 3 for the sum above, and 4 for c's own share of the exponent
//     c log2(e), c < 2 * 128 A; 24 is taken.
// The weight 2^((l^ + c) log2(e) - ref): the exponent is clamped to -125 from below, which only
// raises it; above that its roundings and Exp2's are within 2 kWeightSlackNat (|exponent| <= 128
// twice, 2^-18 each, and 2^-20). The float sum of 16 weights is 16 u: choosing pays for it.
#ifndef CERTKV_KERNELS_CPU_ATTEND_SCAN_H_
#define CERTKV_KERNELS_CPU_ATTEND_SCAN_H_

#include <cstdint>
#include <type_traits>

#include "kernels/cpu/attend_keys.h"
#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_quad.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/attend_unit.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

inline constexpr float kByteTermMax = 127.0f;
inline constexpr float kCoarseHalfRange = 8 + 0x1p-14f;
// Weights may exceed the reference by this many powers of two before it is raised.
inline constexpr float kScanHeadroom = 40.0f;
// How many tiles ahead a scan asks for.
inline constexpr int kScanAhead = 2;

// What FoldCoarse sums over the channels of each head.
struct CoarseSums {
  Quad magnitudes;  // of |x_i|
  Quad middles;     // of q_i m_i
  Quad lost;        // of |x_i - unit Q_i|
};

template <typename V, typename Count>
[[gnu::always_inline]] inline CoarseSums SumsOfEach(const typename V::F* magnitudes,
                                                    const typename V::F* middles,
                                                    const typename V::F* lost, Count) {
  if constexpr (std::is_same_v<Count, OneHead>) {
    float sums[4];
    V::ReduceAdd4(magnitudes[0], middles[0], lost[0], lost[0], sums);
    return {Quad{sums[0]}, Quad{sums[1]}, Quad{sums[2]}};
  }
  return {SumOfEach<V>(magnitudes), SumOfEach<V>(middles), SumOfEach<V>(lost)};
}

// Rounds head g's x to byte terms; returns what that leaves out, in lanes.
template <typename V>
[[gnu::always_inline]] inline typename V::F RoundByteTerms(AttendState& s, int g,
                                                           const float* folded, float unit,
                                                           float inverse) {
  constexpr int kVectors = 16 / V::kLanes;
  const typename V::F inverses = V::Set(inverse);
  const typename V::F units = V::Set(unit);
  typename V::I term_sum = V::ZeroI();
  typename V::F lost = V::Zero();
  int32_t* terms = s.terms + g * kTermRow;
  ForChannels(
      s.head_dim, [&](int i) __attribute__((always_inline)) {
        typename V::I rounded[kVectors];
        Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          const typename V::F x = V::Load(folded + i + v * V::kLanes);
          rounded[v] = V::ToInt(V::Mul(x, inverses));
          term_sum = V::AddI(term_sum, rounded[v]);
          lost = V::Add(lost, V::Abs(V::NegMulAdd(V::ToFloat(rounded[v]), units, x)));
        });
        V::StoreByteTerms(terms + i / 4, rounded);
      });
  // Without sign, because terms of logits that overflow are arbitrary (their width is infinite).
  s.term_bias[g] = static_cast<int32_t>(-15u * static_cast<uint32_t>(V::ReduceAddI(term_sum)));
  return lost;
}

// Makes the byte terms of heads [head, head + count) for a tile, count <= kQuadHeads, and writes
// their coarse half-widths in nats, +infinity where the logits could be out of range.
template <typename V, typename Count>
[[gnu::always_inline]] inline void FoldCoarse(AttendState& s, int head, Count count,
                                              float middle_norm, float* widths) {
  alignas(64) float folded[kQuadHeads * kRow];
  typename V::F maxima[kQuadHeads];
  typename V::F magnitudes[kQuadHeads];
  typename V::F middles[kQuadHeads];
  typename V::F lost[kQuadHeads];
  ClearFrom(count, maxima);
  ClearFrom(count, magnitudes);
  ClearFrom(count, middles);
  ClearFrom(count, lost);
  for (int h = 0; h < count; ++h) {
    const FoldedRow<V> row = FoldRow<V>(s, head + h, folded + h * kRow);
    maxima[h] = row.max;
    magnitudes[h] = row.sum;
    middles[h] = row.middles;
  }
  const Quad max_term = MaxOfEach<V>(maxima, count);
  // Below 2^-90 the reciprocal could overflow: terms are 0 then, and all of x is left out.
  const QuadInt usable = max_term > 0x1p-90f;
  const Quad none = {};
  const Quad unit = usable ? max_term / kByteTermMax : none;
  const Quad inverse = usable ? kByteTermMax / max_term : none;
  for (int h = 0; h < count; ++h) {
    lost[h] = RoundByteTerms<V>(s, head + h, folded + h * kRow, unit[h], inverse[h]);
  }
  const CoarseSums sums = SumsOfEach<V>(magnitudes, middles, lost, count);
  StoreQuad(s.term_unit + head, 8 * unit);
  StoreQuad(s.term_base + head, sums.middles);

  const Quad product = LoadQuad(s.heads.query_norm + head) * middle_norm;
  const auto d = static_cast<float>(s.head_dim);
  const Quad arithmetic =
      kUnitRoundoff * ((d * (1.0f / 16) + 16.0f) * product + 24.0f * 128.0f * sums.magnitudes);
  const float cap = s.args->soft_cap * kSoftCapSlack;
  const Quad width = (sums.magnitudes * kCoarseHalfRange + 120.0f * sums.lost + arithmetic +
                      2 * kWeightSlackNat + cap) *
                     kHalfWidthInflation;
  const QuadInt finite = product + 128.0f * sums.magnitudes <= kReachMax;
  StoreQuad(widths + head, finite ? width : SplatQuad(__builtin_inff()));
}

// Adds the products of kGroups groups of 8 channels to the sums of kHeads heads.
template <typename V, int kHeads, int kGroups>
[[gnu::always_inline]] inline void ScanGroups(const uint8_t* coarse, const int32_t* terms,
                                              typename V::I* wide) {
  constexpr int kVectors = kSubBlockTokens / V::kLanes;
  const typename V::I low = V::SetI(0x0f0f0f0f);
  typename V::I sums[kHeads * kVectors];
  Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) { sums[k] = V::ZeroI(); });
  Unroll<kGroups>([&](auto j) __attribute__((always_inline)) {
    typename V::I codes[kVectors];
    Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      codes[v] = V::LoadI(coarse + 64 * j + 4 * V::kLanes * v);
    });
    Unroll<2>([&](auto odd) __attribute__((always_inline)) {
      typename V::I nibbles[kVectors];
      Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        nibbles[v] = V::AndI(odd == 1 ? V::template ShiftRight16<4>(codes[v]) : codes[v], low);
      });
      Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) {
        sums[k] = V::AddNibbles(sums[k], nibbles[k % kVectors],
                                terms[k / kVectors * kTermRow + 2 * j + odd]);
      });
    });
  });
  Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) {
    wide[k] = V::AddI(wide[k], V::WidenNibbleSums(sums[k]));
  });
}

// Coarse logits of kHeads heads from `head`, of sub-block b, whose coarse plane is at `coarse`.
// Asks for as many bytes at `ahead`, unless it is null.
template <typename V, int kHeads>
[[gnu::always_inline]] inline void ScanSubBlock(AttendState& s, const uint8_t* coarse, int b,
                                                int head, const uint8_t* ahead) {
  constexpr int kVectors = kSubBlockTokens / V::kLanes;
  typename V::I wide[kHeads * kVectors];
  Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) { wide[k] = V::ZeroI(); });
  const int groups = s.head_dim / 8;
  const int32_t* terms = s.terms + head * kTermRow;
  int j = 0;
  for (; j + 4 <= groups; j += 4) {
    if (ahead != nullptr) {
      Unroll<4>([&](auto i) __attribute__((always_inline)) { V::Prefetch(ahead + 64 * (j + i)); });
    }
    ScanGroups<V, kHeads, 4>(coarse + 64 * j, terms + 2 * j, wide);
  }
  if (j < groups) {
    if (ahead != nullptr) V::Prefetch(ahead + 64 * j);
    ScanGroups<V, kHeads, 2>(coarse + 64 * j, terms + 2 * j, wide);
  }
  Unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
    const int g = head + h;
    float* scores = s.scores + g * kTileTokens + b * kSubBlockTokens;
    const typename V::I bias = V::SetI(s.term_bias[g]);
    const typename V::F unit = V::Set(s.term_unit[g]);
    const typename V::F base = V::Set(s.term_base[g]);
    Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      const typename V::I half = wide[h * kVectors + v];
      const typename V::I sum = V::AddI(V::AddI(half, half), bias);
      V::Store(scores + v * V::kLanes, V::MulAdd(V::ToFloat(sum), unit, base));
    });
  });
}

// From a tile's coarse logits to the bounds of its sub-blocks. `ref` and `top` are the head's
// running reference and its largest exponent.
template <typename V>
[[gnu::always_inline]] inline void BoundSubBlocks(AttendState& s, const ScanState& scan, int g,
                                                  int tile, float width, float* ref, float* top) {
  constexpr int kPer = kSubBlockTokens / V::kLanes;
  float* scores = s.scores + g * kTileTokens;
  float* upper = scan.upper + (int64_t{g} * s.args->tile_count + tile) * kSubBlocksPerTile;
  const int64_t at = int64_t{g} * s.args->tile_count + tile;
  if (__builtin_expect(!(width < __builtin_inff()), 0)) {
    for (int b = 0; b < kSubBlocksPerTile; ++b) upper[b] = __builtin_inff();
    scan.shrink[at] = 0;
    scan.tile_ref[at] = kRefNone;
    return;
  }
  if (s.args->soft_cap > 0) {
    for (int t = 0; t < kTileTokens; t += V::kLanes) {
      V::Store(scores + t, SoftCap<V>(V::Load(scores + t), s.args->soft_cap));
    }
  }
  typename V::F largest = V::Load(scores);
  Unroll<kTileTokens / V::kLanes - 1>([&](auto k) __attribute__((always_inline)) {
    largest = V::Max(largest, V::Load(scores + (k + 1) * V::kLanes));
  });
  const float shift = width * kLog2E;
  const float exponent = V::ReduceMax(largest) * kLog2E + shift;
  *top = exponent > *top ? exponent : *top;
  if (__builtin_expect(exponent > *ref + kScanHeadroom, 0)) *ref = __builtin_ceilf(exponent);
  const typename V::F add = V::Set(shift - *ref);
  const typename V::F least = V::Set(kExponentMin);
  typename V::F sums[kSubBlocksPerTile];
  Unroll<kSubBlocksPerTile>([&](auto b) __attribute__((always_inline)) {
    Unroll<kPer>([&](auto v) __attribute__((always_inline)) {
      const typename V::F logits = V::Load(scores + b * kSubBlockTokens + v * V::kLanes);
      const typename V::F exponents = V::Max(V::MulAdd(logits, V::Set(kLog2E), add), least);
      const typename V::F weights = Exp2InRange<V>(exponents);
      sums[b] = v == 0 ? weights : V::Add(sums[b], weights);
    });
  });
  V::ReduceAdd4(sums[0], sums[1], sums[2], sums[3], upper);
  scan.tile_ref[at] = *ref;
  float shrink[V::kLanes];
  V::Store(shrink, Exp2<V>(V::Set(-shift)));
  scan.shrink[at] = shrink[0];
}

template <typename V>
void ScanTiles(AttendState* state, const ScanState* scan) {
  AttendState& s = *state;
  const AttendArgs& args = *s.args;
  const TileLayout& layout = *args.layout;
  const float code_centre = s.code_centre;
  s.code_centre = -0.5f;  // the middle key is the one at code 127.5
  float widths[kHeadLanes];
  for (int g = 0; g < args.group_size; ++g) scan->ref[g] = scan->top[g] = kRefNone;
  for (int t = s.tile_begin; t < s.tile_end; ++t) {
    const AttendTile& tile = args.tiles[t];
    const uint8_t* ahead = args.tiles[t + kScanAhead < s.tile_end ? t + kScanAhead : t].scan;
    for (int64_t at = 0; at < layout.coarse_offset; at += 64) V::Prefetch(ahead + at);
    const float radius = reinterpret_cast<const TileHeader*>(tile.scan)->value_radius;
    if (radius > s.value_radius) s.value_radius = radius;
    const float middle_norm = LoadScales<V>(s, tile.scan);
    ForQuads(
        args.group_size, [&](int head, auto count) __attribute__((always_inline)) {
          FoldCoarse<V>(s, head, count, middle_norm, widths);
        });
    for (int head = 0; head < args.group_size; head += V::kChunkHeads) {
      const int left = args.group_size - head;
      WithHeads<V>(
          left < V::kChunkHeads ? left : V::kChunkHeads, [&](auto n) __attribute__((
                                                             always_inline)) {
            for (int b = 0; b < kSubBlocksPerTile; ++b) {
              const int64_t plane = layout.coarse_offset + b * layout.coarse_bytes;
              ScanSubBlock<V, decltype(n)::value>(s, tile.scan + plane, b, head,
                                                  head == 0 ? ahead + plane : nullptr);
            }
          });
    }
    for (int g = 0; g < args.group_size; ++g) {
      BoundSubBlocks<V>(s, *scan, g, t, widths[g], &scan->ref[g], &scan->top[g]);
    }
  }
  s.code_centre = code_centre;
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_SCAN_H_
