// Half-widths from the token witness: c_t <= sum_b ||q_b|| w_{t,b} (Cauchy-Schwarz by band).
#ifndef CERTKV_KERNELS_CPU_ATTEND_WITNESS_H_
#define CERTKV_KERNELS_CPU_ATTEND_WITNESS_H_

#include <cstdint>

#include "kernels/core/witness.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/attend_unit.h"

namespace certkv::cpu {

// The largest of 16 bytes.
template <typename V>
[[gnu::always_inline]] inline uint8_t MaxByte(const uint8_t* p) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  Bytes x;
  __builtin_memcpy(&x, p, sizeof(x));
  const auto fold = [&](Bytes y) __attribute__((always_inline)) { x = x > y ? x : y; };
  fold(__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  fold(__builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  fold(__builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return x[0] > x[1] ? x[0] : x[1];
}

// Decodes the tile's witness bytes at exponent 0 into s.witness: [band][64 tokens]; with one band,
// where the widest token is the one of the largest code, [4 sub-blocks].
template <typename V>
void LoadWitness(AttendState& s, const uint8_t* scan) {
  const TileLayout& layout = *s.args->layout;
  const uint8_t* codes = scan + layout.witness_offset;
  if (layout.witness_bands == 1) {
    for (int b = 0; b < kSubBlocksPerTile; ++b) {
      s.witness[b] = s.witness_table[MaxByte<V>(codes + b * kSubBlockTokens)];
    }
    return;
  }
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    for (int band = 0; band < layout.witness_bands; ++band, codes += kSubBlockTokens) {
      float* out = s.witness + band * kTileTokens + b * kSubBlockTokens;
      for (int t = 0; t < kSubBlockTokens; ++t) out[t] = s.witness_table[codes[t]];
    }
  }
}

// w(code) at an exponent is w(code) at 0 times this. Clamped upward below the floats; 0 where
// witnesses are of no use: at an unknown exponent, and above 2^100.
[[gnu::always_inline]] inline float WitnessScale(int exponent) {
  if (exponent == kWitnessExponentUnknown || exponent > 100) return 0.0f;
  const uint32_t bits = static_cast<uint32_t>((exponent < -100 ? -100 : exponent) + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof(scale));
  return scale;
}

// Lowers residual[b] to the largest witness half-width of sub-block b's tokens.
template <typename V, typename Count>
[[gnu::always_inline]] inline void ApplyWitness(const AttendState& s, int head, Count count,
                                                int exponent, Quad* residual) {
  const float scale = WitnessScale(exponent);
  if (scale == 0.0f) return;
  const int bands = s.args->layout->witness_bands;
  QuadRows widths;  // by sub-block
  if (bands == 1) {
    const Quad norm = LoadQuad(s.heads.band_norm[0] + head);
    for (int b = 0; b < kSubBlocksPerTile; ++b) widths.row[b] = s.witness[b] * norm;
  } else {
    for (int h = 0; h < count; ++h) {
      typename V::F max[kSubBlocksPerTile];
      for (int b = 0; b < kSubBlocksPerTile; ++b) {
        max[b] = V::Zero();
        for (int t = 0; t < kSubBlockTokens; t += V::kLanes) {
          typename V::F sum = V::Zero();
          for (int band = 0; band < bands; ++band) {
            const float* w = s.witness + band * kTileTokens + b * kSubBlockTokens + t;
            sum = V::MulAdd(V::Load(w), V::Set(s.heads.band_norm[band][head + h]), sum);
          }
          max[b] = V::Max(max[b], sum);
        }
      }
      widths.row[h] = MaxOfEach<V>(max);
    }
    ClearFrom(count, widths.row);
    widths = Transpose(widths);
  }
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    const Quad width = widths.row[b] * scale;
    residual[b] = width < residual[b] ? width : residual[b];  // a NaN changes nothing
  }
}

// A heavy token has 1/64 of the mass. What the head has already is a part of it, so a token below
// 1/64 of that is not worth a half-width of its own: few are, once a few tiles were read.
inline constexpr int kTopExponent = -6;

// Largest integers <= log2 x of normal floats x; -127 of smaller ones, x >= 0.
[[gnu::always_inline]] inline Quad FloorLog2(Quad x) {
  const QuadInt exponents = (reinterpret_cast<QuadInt>(x) >> 23) - 127;
  return __builtin_convertvector(exponents, Quad);
}

// After BoundHeads: lowers the half-width of the token that has the largest logit of its sub-block
// to what its own witness says, where the token may turn out heavy. For the lanes in `stored`.
template <typename V>
[[gnu::always_inline]] inline void BoundTopTokens(AttendState& s, int head, const Unit& unit,
                                                  const uint8_t* scan, const QuadWidths& widths,
                                                  const QuadTops& tops, uint32_t stored) {
  const float scale = WitnessScale(reinterpret_cast<const TileHeader*>(scan)->witness_exponent);
  if (scale == 0.0f) return;
  const TileLayout& layout = *s.args->layout;
  DoubleQuad mass;
  __builtin_memcpy(&mass, s.heads.mass + head, sizeof(mass));
  const Quad heavy_from =
      LoadQuad(s.heads.ref + head) + FloorLog2(__builtin_convertvector(mass, Quad)) + kTopExponent;
  const Quad slack = SlackOf(*s.args, widths);
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    const Quad top = tops.by_sub_block.row[b];
    uint32_t heavy = LaneBits(top * kLog2E >= heavy_from) & stored;
    for (; __builtin_expect(heavy != 0, 0); heavy &= heavy - 1) {
      const int h = __builtin_ctz(heavy);
      const int g = head + h;
      const float* scores = s.scores + g * kTileTokens + b * kSubBlockTokens;
      int t = 0;
      while (t < kSubBlockTokens && scores[t] != top[h]) ++t;
      if (t == kSubBlockTokens) continue;  // NaN
      const uint8_t* codes =
          scan + layout.witness_offset + b * layout.witness_bands * kSubBlockTokens + t;
      float sum = 0;
      for (int band = 0; band < layout.witness_bands; ++band) {
        sum += s.witness_table[codes[band * kSubBlockTokens]] * s.heads.band_norm[band][g];
      }
      const float residual = sum * scale;
      const float own = HalfWidthOf(
          SplatQuad(residual < widths.tile[h] ? residual : widths.tile[h]), SplatQuad(slack[h]))[0];
      float* half_width =
          s.result->top_half_width + int64_t{g} * s.atom_count + unit.first_atom + b;
      if (own < *half_width) *half_width = own;
    }
  }
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_WITNESS_H_
