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

#include "kernels/cpu/attend_keys.h"
#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/attend_unit.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

inline constexpr float kByteTermMax = 127.0f;
inline constexpr float kCoarseHalfRange = 8 + 0x1p-14f;
// Weights may exceed the reference by this many powers of two before it is raised.
inline constexpr float kScanHeadroom = 40.0f;
// Tiles that the prefetch cursor is ahead.
inline constexpr int kScanAhead = 2;

// Makes head g's byte terms for a tile; returns its coarse half-width in nats, +infinity when the
// logits could be out of range.
template <typename V>
[[gnu::always_inline]] inline float FoldCoarse(AttendState& s, int g, float middle_norm) {
  constexpr int kVectors = 16 / V::kLanes;
  alignas(64) float folded[kRow];
  const FoldedRow<V> row = FoldRow<V>(s, g, folded);
  const float max_term = V::ReduceMax(row.max);
  // Below 2^-90 the reciprocal could overflow: terms are 0 then, and all of x is left out.
  const bool tiny = !(max_term > 0x1p-90f);
  const float unit = tiny ? 0.0f : max_term / kByteTermMax;
  const typename V::F inverses = V::Set(tiny ? 0.0f : kByteTermMax / max_term);
  const typename V::F units = V::Set(unit);
  typename V::I term_sum = V::ZeroI();
  typename V::F lost = V::Zero();
  int32_t* terms = s.terms + g * kTermRow;
  for (int i = 0; i < s.head_dim; i += 16) {
    typename V::I rounded[kVectors];
    Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      const typename V::F x = V::Load(folded + i + v * V::kLanes);
      rounded[v] = V::ToInt(V::Mul(x, inverses));
      term_sum = V::AddI(term_sum, rounded[v]);
      lost = V::Add(lost, V::Abs(V::NegMulAdd(V::ToFloat(rounded[v]), units, x)));
    });
    V::StoreByteTerms(terms + i / 4, rounded);
  }
  float reduced[4];
  V::ReduceAdd4(row.sum, row.middles, lost, lost, reduced);
  s.term_unit[g] = 8 * unit;
  s.term_base[g] = reduced[1];
  s.term_bias[g] = -15 * V::ReduceAddI(term_sum);

  const float sum = reduced[0];
  const float product = s.heads.query_norm[g] * middle_norm;
  if (!(product + 128.0f * sum <= kReachMax)) return __builtin_inff();
  const float d = static_cast<float>(s.head_dim);
  const float arithmetic =
      kUnitRoundoff * ((d * (1.0f / 16) + 16.0f) * product + 24.0f * 128.0f * sum);
  const float cap = s.args->soft_cap * kSoftCapSlack;
  return (sum * kCoarseHalfRange + 120.0f * reduced[2] + arithmetic + 2 * kWeightSlackNat + cap) *
         kHalfWidthInflation;
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

// Coarse logits of kHeads heads from `head`, of one sub-block.
template <typename V, int kHeads>
[[gnu::always_inline]] inline void ScanSubBlock(AttendState& s, const uint8_t* coarse, int b,
                                                int head, Prefetcher<V>& prefetch) {
  constexpr int kVectors = kSubBlockTokens / V::kLanes;
  typename V::I wide[kHeads * kVectors];
  Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) { wide[k] = V::ZeroI(); });
  const int groups = s.head_dim / 8;
  const int32_t* terms = s.terms + head * kTermRow;
  int j = 0;
  for (; j + 4 <= groups; j += 4) {
    prefetch.KeyStep();
    ScanGroups<V, kHeads, 4>(coarse + 64 * j, terms + 2 * j, wide);
  }
  if (j < groups) ScanGroups<V, kHeads, 2>(coarse + 64 * j, terms + 2 * j, wide);
  Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) {
    const int g = head + k / kVectors;
    const typename V::I twice = V::AddI(wide[k], wide[k]);
    const typename V::I sum = V::AddI(twice, V::SetI(s.term_bias[g]));
    V::Store(s.scores + g * kTileTokens + b * kSubBlockTokens + k % kVectors * V::kLanes,
             V::MulAdd(V::ToFloat(sum), V::Set(s.term_unit[g]), V::Set(s.term_base[g])));
  });
}

// From a tile's coarse logits to the bounds of its sub-blocks. `ref` is the head's running
// reference.
template <typename V>
[[gnu::always_inline]] inline void BoundSubBlocks(AttendState& s, const ScanState& scan, int g,
                                                  int tile, float width, float* ref) {
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
  typename V::F top = V::Load(scores);
  for (int t = V::kLanes; t < kTileTokens; t += V::kLanes) {
    top = V::Max(top, V::Load(scores + t));
  }
  const float shift = width * kLog2E;
  const float exponent = V::ReduceMax(top) * kLog2E + shift;
  if (__builtin_expect(exponent > *ref + kScanHeadroom, 0)) *ref = __builtin_ceilf(exponent);
  const typename V::F add = V::Set(shift - *ref);
  const typename V::F least = V::Set(kExponentMin);
  typename V::F sums[kSubBlocksPerTile];
  Unroll<kSubBlocksPerTile>([&](auto b) __attribute__((always_inline)) {
    Unroll<kPer>([&](auto v) __attribute__((always_inline)) {
      const typename V::F logits = V::Load(scores + b * kSubBlockTokens + v * V::kLanes);
      const typename V::F weights = Exp2<V>(V::Max(V::MulAdd(logits, V::Set(kLog2E), add), least));
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
  float refs[kGroupSizeMax];
  for (int g = 0; g < args.group_size; ++g) refs[g] = kRefNone;
  const int chunks = (args.group_size + V::kChunkHeads - 1) / V::kChunkHeads;
  const int steps = chunks * kSubBlocksPerTile * (layout.head_dim / 32);
  const int lines = static_cast<int>(layout.scan_bytes / 64 + steps - 1) / steps;
  for (int t = s.tile_begin; t < s.tile_end; ++t) {
    const AttendTile& tile = args.tiles[t];
    const uint8_t* next = args.tiles[t + kScanAhead < s.tile_end ? t + kScanAhead : t].scan;
    Prefetcher<V> prefetch = {next,
                              next + layout.scan_bytes,
                              next,
                              next + layout.scan_bytes,
                              lines < kPrefetchLinesMax ? lines : kPrefetchLinesMax,
                              0};
    const float radius = reinterpret_cast<const TileHeader*>(tile.scan)->value_radius;
    if (radius > s.value_radius) s.value_radius = radius;
    const float middle_norm = LoadScales<V>(s, tile.scan);
    float widths[kGroupSizeMax];
    for (int g = 0; g < args.group_size; ++g) widths[g] = FoldCoarse<V>(s, g, middle_norm);
    const uint8_t* coarse = tile.scan + layout.coarse_offset;
    for (int head = 0; head < args.group_size; head += V::kChunkHeads) {
      const int left = args.group_size - head;
      WithHeads<V>(
          left < V::kChunkHeads ? left : V::kChunkHeads, [&](auto n) __attribute__((
                                                             always_inline)) {
            for (int b = 0; b < kSubBlocksPerTile; ++b) {
              ScanSubBlock<V, decltype(n)::value>(s, coarse + b * layout.coarse_bytes, b, head,
                                                  prefetch);
            }
          });
    }
    for (int g = 0; g < args.group_size; ++g) {
      BoundSubBlocks<V>(s, *scan, g, t, widths[g], &refs[g]);
    }
  }
  s.code_centre = code_centre;
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_SCAN_H_
