// Weighted sums of the values of one unit.
//
// Rotated values: a warp takes one sub-block, a lane a column of dwords, 16 tokens of 2 or 4
// channels each, decoded once for all heads. 16-bit values: a thread takes a channel, 16 tokens at
// a time.
//
// An element of the sums in a split of U units sees at most, in roundings of what it has summed:
// its decoding 1, 16 products and additions, 4 U additions to what was there, 3 additions of warps.
#ifndef CERTKV_KERNELS_CUDA_ATTEND_VALUES_CUH_
#define CERTKV_KERNELS_CUDA_ATTEND_VALUES_CUH_

#include "kernels/cuda/attend_block.cuh"

namespace certkv::cuda {

// V4: kChannels = 4 nibbles of a dword's words. V8: 2 bytes.
template <int kChannels>
__device__ void AddRotatedColumn(const AttendRead& read, const BlockMemory& memory,
                                 const Unit& unit, uint32_t heads, int column) {
  constexpr int kBits = 16 / kChannels;
  constexpr int kLanes = 8;
  constexpr int kZoneChannels = kLanes * kChannels;
  const int sub_block = ThreadIndex() / 32;
  const int value_dim = read.layout.value_dim;
  const int zones = (value_dim + kZoneChannels - 1) / kZoneChannels;
  const uint8_t* const codes =
      unit.detail + sub_block * read.layout.sub_block_bytes + read.layout.value_offset;
  float value[kSubBlockTokens][kChannels];
#pragma unroll
  for (int pair = 0; pair < kSubBlockTokens / 2; ++pair) {
    const uint32_t dword = LoadDword(codes + 4 * (pair * zones * kLanes + column));
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int token = 2 * pair + odd;
      const float scale = memory.value_scale[sub_block * kSubBlockTokens + token];
      const float zero = memory.value_zero[sub_block * kSubBlockTokens + token];
#pragma unroll
      for (int n = 0; n < kChannels; ++n) {
        const uint32_t value_code = dword >> (16 * odd + kBits * n) & ((1u << kBits) - 1);
        value[token][n] = fmaf(static_cast<float>(value_code), scale, zero);
      }
    }
  }
  const int first_channel = column / kLanes * kZoneChannels + column % kLanes;
  const int group_size = read.args.group_size;
  for (int g = 0; g < group_size; ++g) {
    const float* const weights = memory.weights + g * kTileTokens + sub_block * kSubBlockTokens;
    const bool is_read = (heads >> g & 1) != 0;
    float sums[kChannels] = {};
#pragma unroll
    for (int token = 0; token < kSubBlockTokens; ++token) {
      const float weight = is_read ? weights[token] : 0.0f;
#pragma unroll
      for (int n = 0; n < kChannels; ++n) sums[n] = fmaf(weight, value[token][n], sums[n]);
    }
    float* const rotated =
        memory.rotated + (static_cast<int64_t>(sub_block) * group_size + g) * value_dim;
#pragma unroll
    for (int n = 0; n < kChannels; ++n) {
      const int channel = first_channel + kLanes * n;
      if (channel >= value_dim) continue;
      rotated[channel] = fmaf(rotated[channel], memory.factor[g], sums[n]);
    }
  }
}

// Only the reference has changed.
__device__ inline void RescaleRotated(const AttendRead& read, const BlockMemory& memory) {
  const int value_dim = read.layout.value_dim;
  const int group_size = read.args.group_size;
  for (int g = 0; g < group_size; ++g) {
    const float factor = memory.factor[g];
    if (factor == 1) continue;
    float* const rotated =
        memory.rotated + (int64_t{ThreadIndex() / 32} * group_size + g) * value_dim;
    for (int i = ThreadIndex() % 32; i < value_dim; i += 32) rotated[i] *= factor;
  }
}

// 16-bit values of `heads`, from rows or, where there are none, from the tile; other heads' sums
// are rescaled.
__device__ inline void AddPlain(const AttendRead& read, const BlockMemory& memory, const Unit& unit,
                                uint32_t heads, bool from_rows) {
  const TileLayout& layout = read.layout;
  const OriginalDtype dtype = from_rows                                  ? read.args.original_dtype
                              : layout.value_format == ValueFormat::kF16 ? OriginalDtype::kF16
                                                                         : OriginalDtype::kBf16;
  for (int channel = ThreadIndex(); channel < layout.value_dim; channel += kBlockThreads) {
    for (int first = 0; first < kTileTokens; first += kSubBlockTokens) {
      float value[kSubBlockTokens];
#pragma unroll
      for (int n = 0; n < kSubBlockTokens; ++n) {
        const int token = first + n;
        const bool is_read = heads != 0 && token >= unit.begin && token < unit.end &&
                             (unit.sub_blocks >> first / kSubBlockTokens & 1) != 0;
        const int64_t stored = first / kSubBlockTokens * layout.sub_block_bytes +
                               layout.value_offset + 2 * (n * layout.value_dim + channel);
        const uint16_t bits = !is_read    ? uint16_t{0}
                              : from_rows ? unit.value_rows[token * unit.value_stride + channel]
                                          : LoadWord(unit.detail + stored);
        value[n] = code::OriginalToFloat(dtype, bits);
      }
      for (int g = 0; g < read.args.group_size; ++g) {
        const float* const weights = memory.weights + g * kTileTokens + first;
        const bool is_read = (heads >> g & 1) != 0;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kSubBlockTokens; ++n) {
          sum = fmaf(is_read ? weights[n] : 0.0f, value[n], sum);
        }
        float* const plain = memory.plain + g * layout.value_dim + channel;
        *plain = fmaf(*plain, first == 0 ? memory.factor[g] : 1.0f, sum);
      }
    }
  }
}

__device__ inline void SumValues(const AttendRead& read, const BlockMemory& memory,
                                 const Unit& unit) {
  const uint32_t all = (1u << read.args.group_size) - 1;
  const uint32_t from_rows = HeadsOfSource(read, unit, kSourceOriginalValues);
  const TileLayout& layout = read.layout;
  if (!HasRotatedValues(layout)) {
    // Originals of a tile are what it stores, bit for bit.
    AddPlain(read, memory, unit, all, unit.tile < 0);
    return;
  }
  const uint32_t rotated = all & ~from_rows;
  const bool is_v4 = layout.value_format == ValueFormat::kV4;
  const int columns = is_v4 ? (layout.value_dim + 31) / 32 * 8 : layout.value_dim / 2;
  // A warp's sub-block.
  const bool is_read = rotated != 0 && (unit.sub_blocks >> ThreadIndex() / 32 & 1) != 0;
  if (!is_read) RescaleRotated(read, memory);
  for (int column = ThreadIndex() % 32; is_read && column < columns; column += 32) {
    if (is_v4) {
      AddRotatedColumn<4>(read, memory, unit, rotated, column);
    } else {
      AddRotatedColumn<2>(read, memory, unit, rotated, column);
    }
  }
  AddPlain(read, memory, unit, from_rows, true);
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_ATTEND_VALUES_CUH_
