// Logits of one tile and their half-widths.
//
// Affine keys (K8, K6, K4). With x_i = q_i * scale_i (q already times logit_scale) and the middle
// key m_i = zero_i + (128 + centre) * scale_i,
//   logit = sum_i q_i k^_i = sum_i x_i (code_i - 128) + q . m
//         ~ unit * (sum_i Q_i code_i - 128 sum_i Q_i) + q . m,   Q_i = rint(x_i / unit),
// where unit = max |x_i| / kQueryTermMax, so that the sum of products is exact in 32 bits:
// 32767 * 128 * 256 < 2^31 (partial sums may wrap). What is left out:
//   rounding of the query  |x_i / unit - Q_i| <= 1/2 + 3u * 32767 < 0.507, times |code - 128| <=
//   128
//                          and d channels: < 65 d unit;
//   float arithmetic, with A = sum |x_i|, in units u: relative to ||q|| ||m||: the sum of q . m in
//     lanes d/16 + 7, m, the last addition, q itself and the weight's exponent 5; relative to
//     128 A: the sum's conversion, times unit, the last addition, x, q, m's product, exponent 8.
// K8D: the logit less sum_i x_i u_i, |u_i| < 1/2, summed in double of x in float: in units u, of A,
//   x 2 * 1/2, and the new score's rounding, of ||q|| ||m|| + 128.5 A: 130 A and ||q|| ||m||.
// 16-bit and FP8 keys: a float dot product, at most d additions in a lane:
//   (d + 8) u ||q|| ||k^||  with product, q, key_scale, exponent; rows of originals are summed in
//   at least 8 lanes, d/8 + 16.
#ifndef CERTKV_KERNELS_CPU_ATTEND_KEYS_H_
#define CERTKV_KERNELS_CPU_ATTEND_KEYS_H_

#include <cstdint>
#include <type_traits>

#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_quad.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/certificate_parts.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

// Sub-blocks that a loop over 16-bit keys and `heads` heads takes at once: as many as fit its
// accumulators.
template <typename V>
constexpr int FloatSubBlocks(int heads) {
  const int fit = V::kAccumulators / (heads * (kSubBlockTokens / V::kLanes));
  return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

// Vectors of tokens that a loop over key codes and `heads` heads takes at once: whole sub-blocks as
// long as their dots fit, else one vector.
template <typename V>
constexpr int CodeVectors(int heads) {
  constexpr int kPerSubBlock = kSubBlockTokens / V::kLanes;
  if (heads > V::kChunkHeads) return 1;
  const int fit = V::kDotAccumulators / (heads * V::kDotRegisters * kPerSubBlock);
  return kPerSubBlock * (fit >= 4 ? 4 : fit >= 2 ? 2 : 1);
}

// Calls body(i) for every 16th channel, two at a time.
template <typename Body>
[[gnu::always_inline]] inline void ForChannels(int head_dim, const Body& body) {
  int i = 0;
  for (; i + 32 <= head_dim; i += 32) {
    body(i);
    body(i + 16);
  }
  if (i < head_dim) body(i);
}

// Widens the tile's scales and middle keys. Returns an upper bound on ||m||, up to rounding.
template <typename V>
float LoadScales(AttendState& s, const uint8_t* scan) {
  const TileLayout& layout = *s.args->layout;
  const auto* scale = reinterpret_cast<const uint16_t*>(scan + layout.scale_offset);
  const auto* zero = reinterpret_cast<const uint16_t*>(scan + layout.zero_offset);
  const typename V::F centre = V::Set(128.0f + s.code_centre);
  constexpr int kVectors = 16 / V::kLanes;
  typename V::F sums[kVectors];
  for (typename V::F& sum : sums) sum = V::Zero();
  for (int i = 0; i < s.head_dim; i += 16) {
    Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      const int at = i + v * V::kLanes;
      const typename V::F scales = V::LoadF16(scale + at);
      const typename V::F middle = V::MulAdd(scales, centre, V::LoadF16(zero + at));
      V::Store(s.tile_scale + at, scales);
      V::Store(s.tile_middle + at, middle);
      if constexpr (Computes<V>(kHalfWidthPart)) sums[v] = V::MulAdd(middle, middle, sums[v]);
    });
  }
  for (int v = 1; v < kVectors; ++v) sums[0] = V::Add(sums[0], sums[v]);
  return __builtin_sqrtf(V::ReduceAdd(sums[0]));
}

// One head's query times the tile's scales, x_i = q_i scale_i, and sums over its channels, still in
// lanes.
template <typename V>
struct FoldedRow {
  typename V::F max;      // of |x_i|
  typename V::F sum;      // of |x_i|; 0 without half-widths
  typename V::F middles;  // of q_i middle_i
};

// Writes x to `folded`.
template <typename V>
[[gnu::always_inline]] inline FoldedRow<V> FoldRow(const AttendState& s, int g, float* folded) {
  constexpr int kVectors = 16 / V::kLanes;
  const float* query = s.queries + g * kRow;
  typename V::F max = V::Zero();
  typename V::F sums[kVectors];
  typename V::F middles[kVectors];
  for (int v = 0; v < kVectors; ++v) sums[v] = middles[v] = V::Zero();
  ForChannels(
      s.head_dim, [&](int i) __attribute__((always_inline)) {
        Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          const int at = i + v * V::kLanes;
          const typename V::F q = V::Load(query + at);
          const typename V::F x = V::Mul(q, V::Load(s.tile_scale + at));
          const typename V::F magnitude = V::Abs(x);
          V::Store(folded + at, x);
          max = V::Max(max, magnitude);
          if constexpr (Computes<V>(kHalfWidthPart)) sums[v] = V::Add(sums[v], magnitude);
          middles[v] = V::MulAdd(q, V::Load(s.tile_middle + at), middles[v]);
        });
      });
  for (int v = 1; v < kVectors; ++v) {
    sums[0] = V::Add(sums[0], sums[v]);
    middles[0] = V::Add(middles[0], middles[v]);
  }
  return {max, sums[0], middles[0]};
}

// What FoldQueries knows of each head and a tile, nats.
struct FoldedWidths {
  Quad residual;  // sum |q_i| half_range scale_i, or the dither's narrower bound
  Quad slack;     // everything else
};

// What the dither says of head g's residuals, never above `sure`, which the scales say; `folded` is
// x, `sum` that of |x|. Squares below 2^-126 may vanish, 2^-56 nats of all, which is inside
// kWeightSlackNat.
template <typename V>
[[gnu::always_inline]] inline float DitherHalfWidth(const AttendState& s, int g,
                                                    const float* folded, float sum, float sure) {
  const float factor = s.heads.dither_factor[g];
  if (factor == 0.0f) return sure;
  typename V::F squares = V::Zero();
  for (int i = 0; i < s.head_dim; i += V::kLanes) {
    const typename V::F x = V::Load(folded + i);
    squares = V::MulAdd(x, x, squares);
  }
  const float probable =
      __builtin_sqrtf(V::ReduceAdd(squares)) * factor + kDitherLatticeFloat * sum;
  return probable < sure ? probable : sure;
}

// Rounds head g's x to query terms; returns their sums in lanes.
template <typename V>
[[gnu::always_inline]] inline typename V::I RoundTerms(AttendState& s, int g, const float* folded,
                                                       float inverse) {
  constexpr int kVectors = 16 / V::kLanes;
  typename V::I term_sum = V::ZeroI();
  const typename V::F inverses = V::Set(inverse);
  int32_t* terms = s.terms + g * kTermRow;
  ForChannels(
      s.head_dim, [&](int i) __attribute__((always_inline)) {
        typename V::I rounded[kVectors];
        Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          rounded[v] = V::ToInt(V::Mul(V::Load(folded + i + v * V::kLanes), inverses));
          term_sum = V::AddI(term_sum, rounded[v]);
        });
        V::StoreTerms(terms + i / 2, rounded);
      });
  return term_sum;
}

// Makes the query terms of heads [head, head + count) for a tile, count <= kQuadHeads.
template <typename V, typename Count>
[[gnu::always_inline]] inline FoldedWidths FoldQueries(AttendState& s, int head, Count count,
                                                       float middle_norm) {
  alignas(64) float folded[kQuadHeads * kRow];
  typename V::F maxima[kQuadHeads];
  typename V::F magnitudes[kQuadHeads];
  typename V::F middles[kQuadHeads];
  ClearFrom(count, maxima);
  ClearFrom(count, magnitudes);
  ClearFrom(count, middles);
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
  const Quad inverse = usable ? V::kQueryTermMax / max_term : none;
  const Quad unit = usable ? max_term / V::kQueryTermMax : none;
  StoreQuad(s.term_unit + head, unit);
  StoreQuad(s.term_base + head, SumOfEach<V>(middles, count));
  typename V::I term_sums[kQuadHeads];
  ClearFrom(count, term_sums);
  for (int h = 0; h < count; ++h) {
    term_sums[h] = RoundTerms<V>(s, head + h, folded + h * kRow, inverse[h]);
  }
  // Without sign, because terms of logits that overflow are arbitrary (their width is infinite).
  int32_t sums[kQuadHeads];
  if constexpr (std::is_same_v<Count, OneHead>) {
    sums[0] = V::ReduceAddI(term_sums[0]);
  } else {
    V::ReduceAddI4(term_sums[0], term_sums[1], term_sums[2], term_sums[3], sums);
  }
  for (int h = 0; h < count; ++h) {
    s.term_bias[head + h] = static_cast<int32_t>(-128u * static_cast<uint32_t>(sums[h]));
  }
  if constexpr (!Computes<V>(kHalfWidthPart)) return {none, none};

  const Quad sum = SumOfEach<V>(magnitudes, count);
  const auto d = static_cast<float>(s.head_dim);
  const Quad rounding = usable ? 65.0f * d * unit : 128.0f * sum;
  const Quad product = LoadQuad(s.heads.query_norm + head) * middle_norm;
  FoldedWidths widths;
  widths.residual = sum * s.code_half_range;
  widths.slack =
      rounding + kUnitRoundoff * ((d * (1.0f / 16) + 16.0f) * product + 10.0f * 128.0f * sum);
  if (s.args->layout->key_format == KeyFormat::kK8D) {
    widths.slack += kUnitRoundoff * (product + 130.0f * sum);
    for (int h = 0; h < count; ++h) {
      widths.residual[h] =
          DitherHalfWidth<V>(s, head + h, folded + h * kRow, sum[h], widths.residual[h]);
    }
  }
  const QuadInt finite = product + 128.0f * sum <= kReachMax;
  widths.slack = finite ? widths.slack : SplatQuad(__builtin_inff());
  return widths;
}

// The planes of one tile that a score loop reads.
struct KeyPlanes {
  const uint8_t* coarse;  // of sub-block 0
  const uint8_t* fine;
  int64_t coarse_step;  // bytes from one sub-block to the next
  int64_t fine_step;
};

// Codes of one vector of tokens and 8 channels: quad kOdd holds the even or the odd channels of the
// group, one token in each dword. kGroup says which half of K6's fine plane the group has.
template <typename V, KeyFormat kFormat, int kGroup, bool kOdd>
[[gnu::always_inline]] inline typename V::I QuadCodes(const uint8_t* coarse, const uint8_t* fine) {
  const typename V::I upper_mask = V::SetI(static_cast<int32_t>(0xf0f0f0f0));
  const typename V::I coarse_codes = V::LoadI(coarse);
  const typename V::I upper = kOdd ? coarse_codes : V::template ShiftLeft16<4>(coarse_codes);
  if constexpr (kFormat == KeyFormat::kK4) return V::AndI(upper, upper_mask);
  const typename V::I fine_codes = V::LoadI(fine);
  if constexpr (kFormat == KeyFormat::kK6) {
    // 2-bit codes at bits 0, 2, 4, 6 of a byte: (group 0, even), (1, even), (0, odd), (1, odd).
    constexpr int kBit = 4 * kOdd + 2 * kGroup;
    typename V::I pair;
    if constexpr (kBit == 0) {
      pair = V::template ShiftLeft16<2>(fine_codes);
    } else {
      pair = V::template ShiftRight16<kBit - 2>(fine_codes);
    }
    return V::OrI(V::AndI(upper, upper_mask), V::AndI(pair, V::SetI(0x0c0c0c0c)));
  }
  const typename V::I lower = kOdd ? V::template ShiftRight16<4>(fine_codes) : fine_codes;
  return V::Select(upper_mask, upper, lower);
}

// Bytes of the fine plane that 16 channels of a sub-block take.
template <KeyFormat kFormat>
inline constexpr int kFineStepBytes = kFormat == KeyFormat::kK6   ? 64
                                      : kFormat == KeyFormat::kK4 ? 0
                                                                  : 128;

// Adds the products of one group of 8 channels to the dots of kHeads heads and kVectors vectors of
// tokens. `coarse` and `fine` point at the group in the first vector's sub-block; `terms` at those
// of the first head.
template <typename V, KeyFormat kFormat, int kGroup, int kHeads, int kVectors>
[[gnu::always_inline]] inline void ScoreGroup(const KeyPlanes& planes, const uint8_t* coarse,
                                              const uint8_t* fine, const int32_t* terms,
                                              typename V::Dot* dots) {
  constexpr int kPerSubBlock = kSubBlockTokens / V::kLanes;
  Unroll<2>([&](auto odd) __attribute__((always_inline)) {
    constexpr bool kOdd = decltype(odd)::value == 1;
    typename V::I quads[kVectors];
    Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      constexpr int kSub = decltype(v)::value / kPerSubBlock;
      constexpr int kBytes = decltype(v)::value % kPerSubBlock * (4 * V::kLanes);
      quads[v] = QuadCodes<V, kFormat, kGroup, kOdd>(coarse + kSub * planes.coarse_step + kBytes,
                                                     fine + kSub * planes.fine_step + kBytes);
    });
    Unroll<V::kQuadParts>([&](auto part) __attribute__((always_inline)) {
      typename V::I parts[kVectors];
      Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        parts[v] = V::template QuadPart<decltype(part)::value>(quads[v]);
      });
      Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) {
        constexpr int kHead = decltype(k)::value / kVectors;
        V::template Accumulate<decltype(part)::value>(dots[k], parts[k % kVectors],
                                                      terms + kHead * kTermRow + 2 * kOdd);
      });
    });
  });
}

// Logits of kHeads heads from `head`, all tokens.
template <typename V, KeyFormat kFormat, int kHeads>
void ScoreAffine(AttendState& s, const KeyPlanes& planes, int head, Prefetcher<V>& cursor) {
  Prefetcher<V> prefetch = cursor;  // in registers
  constexpr int kVectors = CodeVectors<V>(kHeads);
  constexpr int kTokens = kVectors * V::kLanes;
  const int32_t* head_terms = s.terms + head * kTermRow;
  const int steps = s.head_dim / 16;
  for (int t = 0; t < kTileTokens; t += kTokens) {
    const int b = t / kSubBlockTokens;
    const int bytes_before = 4 * (t % kSubBlockTokens);
    const uint8_t* coarse = planes.coarse + b * planes.coarse_step + bytes_before;
    const uint8_t* fine = planes.fine + b * planes.fine_step + bytes_before;
    typename V::Dot dots[kHeads * kVectors];
    Unroll<kHeads * kVectors>([&](auto k)
                                  __attribute__((always_inline)) { dots[k] = V::ZeroDot(); });
    const int32_t* terms = head_terms;
    for (int j = 0; j < steps; ++j) {
      prefetch.KeyStep();
      ScoreGroup<V, kFormat, 0, kHeads, kVectors>(planes, coarse, fine, terms, dots);
      prefetch.KeyStep();
      constexpr int kNext = kFormat == KeyFormat::kK6 ? 0 : kFineStepBytes<kFormat> / 2;
      ScoreGroup<V, kFormat, 1, kHeads, kVectors>(planes, coarse + 64, fine + kNext, terms + 4,
                                                  dots);
      coarse += 128;
      fine += kFineStepBytes<kFormat>;
      terms += 8;
    }
    Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) {
      const int g = head + k / kVectors;
      const typename V::I sum = V::AddI(V::Total(dots[k]), V::SetI(s.term_bias[g]));
      V::Store(s.scores + g * kTileTokens + t + k % kVectors * V::kLanes,
               V::MulAdd(V::ToFloat(sum), V::Set(s.term_unit[g]), V::Set(s.term_base[g])));
    });
  }
  cursor = prefetch;
}

// FP8_E4M3: a code's bits, moved to an fp16's place, are the key times 2^-8 (the exponent biases
// are 7 and 15), exactly, subnormals included. Words hold two channels of a token side by side, so
// sums of a token lie in two neighbouring lanes.
template <typename V, int kHeads>
void ScoreFp8(AttendState& s, const KeyPlanes& planes, int head, float key_scale,
              Prefetcher<V>& prefetch) {
  constexpr int kPerSubBlock = kSubBlockTokens / V::kLanes;
  const float* queries = s.pair_queries + head * kRow;
  const typename V::F factor = V::Set(256.0f * key_scale);
  const typename V::I magnitude_mask = V::SetI(0x3f803f80);
  const typename V::I sign_mask = V::SetI(static_cast<int32_t>(0x80008000));
  for (int n = 0; n < kSubBlocksPerTile * kPerSubBlock; ++n) {
    const int b = n / kPerSubBlock;
    typename V::F low[kHeads];
    typename V::F high[kHeads];
    Unroll<kHeads>([&](auto h) __attribute__((always_inline)) { low[h] = high[h] = V::Zero(); });
    const int64_t bytes_before = n % kPerSubBlock * (4 * V::kLanes);
    const uint8_t* coarse = planes.coarse + b * planes.coarse_step + bytes_before;
    const uint8_t* fine = planes.fine + b * planes.fine_step + bytes_before;
    for (int j = 0; j < s.head_dim / 16; ++j) {
      prefetch.KeyStep();
      Unroll<8>([&](auto half) __attribute__((always_inline)) {
        constexpr int kQuad = decltype(half)::value / 2;
        const int64_t at = int64_t{128} * j + 64 * (kQuad / 2);
        const typename V::I bytes =
            QuadCodes<V, KeyFormat::kFp8E4m3, 0, kQuad % 2 == 1>(coarse + at, fine + at);
        const typename V::I words = half % 2 == 0 ? V::AndI(bytes, V::SetI(0x00ff00ff))
                                                  : V::template ShiftRight16<8>(bytes);
        const typename V::I f16 = V::OrI(V::AndI(V::template ShiftLeft16<7>(words), magnitude_mask),
                                         V::AndI(V::template ShiftLeft16<8>(words), sign_mask));
        const typename V::F key_low = V::WidenF16Low(f16);
        const typename V::F key_high = V::WidenF16High(f16);
        Unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
          const typename V::F q = V::SetPair(queries + h * kRow + 16 * j + 2 * half);
          low[h] = V::MulAdd(key_low, q, low[h]);
          high[h] = V::MulAdd(key_high, q, high[h]);
        });
      });
    }
    Unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
      V::Store(s.scores + (head + h) * kTileTokens + n * V::kLanes,
               V::Mul(V::AddNeighbours(low[h], high[h]), factor));
    });
  }
}

template <typename V, bool kBf16>
[[gnu::always_inline]] inline typename V::F Load16(const uint16_t* p) {
  if constexpr (kBf16) return V::LoadBf16(p);
  return V::LoadF16(p);
}

// F16 and BF16 tiles: [d][16 tokens] words per sub-block.
template <typename V, bool kBf16, int kHeads>
void Score16Bit(AttendState& s, const KeyPlanes& planes, int head, Prefetcher<V>& cursor) {
  Prefetcher<V> prefetch = cursor;  // in registers
  constexpr int kSubBlocks = FloatSubBlocks<V>(kHeads);
  constexpr int kPerSubBlock = kSubBlockTokens / V::kLanes;
  constexpr int kVectors = kSubBlocks * kPerSubBlock;
  const float* queries = s.queries + head * kRow;
  for (int b = 0; b < kSubBlocksPerTile; b += kSubBlocks) {
    const uint8_t* plane = planes.coarse + b * planes.coarse_step;
    typename V::F sums[kHeads * kVectors];
    Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) { sums[k] = V::Zero(); });
    for (int i = 0; i < s.head_dim; i += 2) {
      prefetch.KeyStep();
      Unroll<2>([&](auto u) __attribute__((always_inline)) {
        typename V::F keys[kVectors];
        Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          constexpr int kSub = decltype(v)::value / kPerSubBlock;
          const uint8_t* words =
              plane + kSub * planes.coarse_step + (i + u) * 32 + v % kPerSubBlock * (2 * V::kLanes);
          keys[v] = Load16<V, kBf16>(reinterpret_cast<const uint16_t*>(words));
        });
        Unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
          const typename V::F q = V::Set(queries[h * kRow + i + u]);
          Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
            typename V::F& sum = sums[h * kVectors + v];
            sum = V::MulAdd(keys[v], q, sum);
          });
        });
      });
    }
    Unroll<kHeads * kVectors>([&](auto k) __attribute__((always_inline)) {
      V::Store(s.scores + (head + k / kVectors) * kTileTokens + b * kSubBlockTokens +
                   k % kVectors * V::kLanes,
               sums[k]);
    });
  }
  cursor = prefetch;
}

// Rows of originals, token-major: logits of tokens [0, count), and the largest ||k||, up to
// rounding. Other entries of the scores are left alone.
template <typename V, bool kBf16>
float ScoreRows(AttendState& s, const uint16_t* rows, int64_t stride, int count, int g) {
  const float* query = s.queries + g * kRow;
  float* scores = s.scores + g * kTileTokens;
  float norm_max = 0;
  float norm_sum = 0;  // keeps an infinity or a NaN, which a maximum would lose
  for (int t = 0; t < count; t += 2) {
    const uint16_t* row[2] = {rows + t * stride, rows + (t + 1 < count ? t + 1 : t) * stride};
    typename V::F dots[2] = {V::Zero(), V::Zero()};
    typename V::F norms[2] = {V::Zero(), V::Zero()};
    for (int i = 0; i < s.head_dim; i += V::kLanes) {
      const typename V::F q = V::Load(query + i);
      Unroll<2>([&](auto u) __attribute__((always_inline)) {
        const typename V::F key = Load16<V, kBf16>(row[u] + i);
        dots[u] = V::MulAdd(key, q, dots[u]);
        norms[u] = V::MulAdd(key, key, norms[u]);
      });
    }
    float sums[4];
    V::ReduceAdd4(dots[0], dots[1], norms[0], norms[1], sums);
    scores[t] = sums[0];
    if (t + 1 < count) scores[t + 1] = sums[1];
    norm_sum += sums[2] + sums[3];
    if (sums[2] > norm_max) norm_max = sums[2];
    if (sums[3] > norm_max) norm_max = sums[3];
  }
  return norm_sum <= kSquareMax ? __builtin_sqrtf(norm_max) : __builtin_inff();
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_KEYS_H_
