// What a block of the attention kernel does with its split: it begins, reads its units one after
// the other, and writes its sums.
#ifndef CERTKV_KERNELS_CUDA_ATTEND_SPLIT_CUH_
#define CERTKV_KERNELS_CUDA_ATTEND_SPLIT_CUH_

#include "kernels/core/value_code.h"
#include "kernels/cuda/attend_values.cuh"
#include "kernels/cuda/attend_weights.cuh"

namespace certkv::cuda {

// A bound on logit_scale times the norm of what all lanes have summed.
__device__ inline float QueryNorm(double square, float logit_scale) {
  for (int bits = 16; bits > 0; bits /= 2) square += __shfl_xor_sync(~0u, square, bits);
  return __fmul_ru(NormRoundedUp(square), logit_scale);
}

// A warp does one head.
__device__ inline void BeginHead(const AttendRead& read, const BlockMemory& memory, int g) {
  const TileLayout& layout = read.layout;
  const int bands = layout.witness_bands;
  const int lane = ThreadIndex() % 32;
  double square = 0;
  double band_square[kWitnessBandsMax] = {};
  for (int i = lane; i < layout.head_dim; i += 32) {
    const double q = QueryAt(read, g * layout.head_dim + i);
    square += q * q;
    if (bands == 0) continue;
    const int own =
        code::WitnessBandOf(layout.head_dim, layout.rope_pairing, layout.rotary_dim, bands, i);
    const double entry = q / (layout.has_witness_weights ? read.args.witness_weights[i] : 1.0);
    for (int b = 0; b < kWitnessBandsMax; ++b) band_square[b] += b == own ? entry * entry : 0;
  }
  const float norm = QueryNorm(square, read.args.logit_scale);
  for (int b = 0; b < bands; ++b) {
    const float band_norm = QueryNorm(band_square[b], read.args.logit_scale);
    if (lane == 0) memory.band_norm[g * kWitnessBandsMax + b] = band_norm;
  }
  if (lane != 0) return;
  memory.query_norm[g] = norm;
  memory.ref[g] = kRefNone;
  memory.mass[g] = memory.unknown[g] = memory.eta[g] = memory.reach[g] = 0;
}

// The first work of a block: scaled queries, their norms, and sums of nothing.
__device__ inline void BeginBlock(const AttendRead& read, const BlockMemory& memory) {
  const AttendArgs& args = read.args;
  const TileLayout& layout = read.layout;
  const int heads = args.group_size;
  for (int n = ThreadIndex(); n < heads * layout.head_dim; n += kBlockThreads) {
    memory.queries[n] = QueryAt(read, n) * args.logit_scale;
  }
  const int rotated_count = HasRotatedValues(layout) ? kWarps * heads * layout.value_dim : 0;
  for (int n = ThreadIndex(); n < rotated_count; n += kBlockThreads) memory.rotated[n] = 0;
  for (int n = ThreadIndex(); n < heads * layout.value_dim; n += kBlockThreads) memory.plain[n] = 0;
  for (int g = ThreadIndex() / 32; g < heads; g += kWarps) BeginHead(read, memory, g);
  if (ThreadIndex() == 0) memory.radius[0] = memory.norm[0] = 0;
}

__device__ inline void LoadKeyScales(const AttendRead& read, const BlockMemory& memory,
                                     const Unit& unit) {
  const TileLayout& layout = read.layout;
  if (unit.tile < 0 || !HasAffineKeys(layout)) return;
  for (int i = ThreadIndex(); i < layout.head_dim; i += kBlockThreads) {
    memory.key_scale[i] = code::F16ToFloat(LoadWord(unit.scan + layout.scale_offset + 2 * i));
    memory.key_zero[i] = code::F16ToFloat(LoadWord(unit.scan + layout.zero_offset + 2 * i));
  }
}

__device__ inline void LoadValueScales(const AttendRead& read, const BlockMemory& memory,
                                       const Unit& unit) {
  const TileLayout& layout = read.layout;
  if (unit.tile < 0 || !HasRotatedValues(layout) || ThreadIndex() >= kTileTokens) return;
  const float level_max = layout.value_format == ValueFormat::kV4 ? 15.0f : 255.0f;
  const uint8_t* const codes = unit.detail + layout.value_scale_offset + ThreadIndex();
  const float scale = code::DecodeValueScale(codes[0]);
  memory.value_scale[ThreadIndex()] = scale;
  memory.value_zero[ThreadIndex()] =
      -code::DecodeValueOffset(codes[kTileTokens], level_max) * scale;  // exact
}

// Between two units no barrier is needed: key scales are last read before the third, and what the
// sums of values read (weights, value scales) is written again after the next unit's first or
// second.
template <int kHeads>
__device__ void ReadUnit(const AttendRead& read, const BlockMemory& memory, const Unit& unit) {
  LoadKeyScales(read, memory, unit);
  __syncthreads();
  LoadValueScales(read, memory, unit);
  ScoreUnit<kHeads>(read, memory, unit);
  __syncthreads();
  for (int g = ThreadIndex() / 32; g < read.args.group_size; g += kWarps) {
    WeighUnit(read, memory, unit, g);
  }
  __syncthreads();
  SumValues(read, memory, unit);
}

__device__ inline void WriteSplit(const AttendRead& read, const BlockMemory& memory, int split) {
  const int heads = read.args.group_size;
  const int64_t first = int64_t{split} * heads;
  for (int g = ThreadIndex(); g < heads; g += kBlockThreads) {
    read.split_ref[first + g] = memory.ref[g];
    read.split_mass[first + g] = memory.unknown[g] != 0 ? kInfinity : memory.mass[g];
    read.split_eta[first + g] = memory.eta[g];
    read.split_reach[first + g] = memory.reach[g];
  }
  if (ThreadIndex() == 0) {
    read.split_radius[split] = memory.radius[0];
    read.split_norm[split] = memory.norm[0];
  }
  const int width = heads * read.layout.value_dim;
  for (int n = ThreadIndex(); n < width; n += kBlockThreads) {
    read.split_plain[int64_t{split} * width + n] = memory.plain[n];
    if (!HasRotatedValues(read.layout)) continue;
    const float* const sums = memory.rotated + n;
    static_assert(kWarps == 4);
    read.split_rotated[int64_t{split} * width + n] =
        (sums[0] + sums[width]) + (sums[2 * width] + sums[3 * width]);
  }
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_ATTEND_SPLIT_CUH_
