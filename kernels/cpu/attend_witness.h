// Half-widths from the token witness: c_t <= sum_b ||q_b|| w_{t,b} (Cauchy-Schwarz by band).
#ifndef CERTKV_KERNELS_CPU_ATTEND_WITNESS_H_
#define CERTKV_KERNELS_CPU_ATTEND_WITNESS_H_

#include <cstdint>

#include "kernels/core/witness.h"
#include "kernels/cpu/attend_state.h"

namespace certkv::cpu {

// Decodes the tile's witness bytes at exponent 0 into s.witness, [band][64 tokens].
template <typename V>
void LoadWitness(AttendState& s, const uint8_t* scan) {
  const TileLayout& layout = *s.args->layout;
  const uint8_t* codes = scan + layout.witness_offset;
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    for (int band = 0; band < layout.witness_bands; ++band, codes += kSubBlockTokens) {
      float* out = s.witness + band * kTileTokens + b * kSubBlockTokens;
      for (int t = 0; t < kSubBlockTokens; ++t) out[t] = s.witness_table[codes[t]];
    }
  }
}

// Lowers residual[b] to the largest witness half-width of sub-block b's tokens.
template <typename V>
void ApplyWitness(AttendState& s, int g, int exponent, float* residual) {
  if (exponent == kWitnessExponentUnknown) return;
  // w(code) at an exponent is w(code) at 0 times 2^exponent. Clamped upward below the floats; above
  // 2^100 it is no use.
  if (exponent > 100) return;
  const float scale = __builtin_ldexpf(1.0f, exponent < -100 ? -100 : exponent);
  const int bands = s.args->layout->witness_bands;
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    typename V::F max = V::Zero();
    for (int t = 0; t < kSubBlockTokens; t += V::kLanes) {
      typename V::F sum = V::Zero();
      for (int band = 0; band < bands; ++band) {
        const float* w = s.witness + band * kTileTokens + b * kSubBlockTokens + t;
        sum = V::MulAdd(V::Load(w), V::Set(s.heads[g].band_norm[band]), sum);
      }
      max = V::Max(max, sum);
    }
    const float width = V::ReduceMax(max) * scale;
    if (width < residual[b]) residual[b] = width;  // a NaN changes nothing
  }
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_WITNESS_H_
