// Dot products of the queries with the keys of one unit. Thread t + 64 p takes the p-th half of the
// channels of token t: dwords of 16 tokens lie side by side, so a half-warp loads 64 bytes in
// order.
//
// Rounding of logit_scale * q . k^, u = 2^-24: the scaled query once, the decoded key once (a fused
// multiplication and addition; 16-bit keys are exact), at most d / 2 fused additions in a half, one
// addition of the halves: under (d + 8) u of sum |logit_scale q_i k^_i|. Where something underflows
// it is off by less than 2^-149 in each of at most 256 terms, times the other factor.
#ifndef CERTKV_KERNELS_CUDA_ATTEND_SCORES_CUH_
#define CERTKV_KERNELS_CUDA_ATTEND_SCORES_CUH_

#include "kernels/cuda/attend_block.cuh"
#include "kernels/cuda/float_math.cuh"

namespace certkv::cuda {

inline constexpr int kKeyRun = 8;  // channels that are decoded together

// A bound on the error of a score, nats, from bounds on logit_scale * ||q|| and on ||k^||.
__device__ inline float ScoreSlackNat(int32_t head_dim, float query_norm, float key_norm) {
  const float reach = __fmul_ru(query_norm, key_norm);
  const float rounding = static_cast<float>(head_dim + 8) * 0x1p-24f;  // exact
  const float underflow = __fmaf_ru(0x1p-120f, __fadd_ru(query_norm, key_norm), 0x1p-120f);
  return __fmaf_ru(rounding, reach, underflow);
}

// The stored keys of one token.
struct StoredKeys {
  const AttendRead& read;
  const BlockMemory& memory;
  const Unit& unit;
  int sub_block;
  int token;  // in the sub-block

  // Channels 8 run .. 8 run + 7.
  __device__ void Decode(int run, float* key) const {
    const TileLayout& layout = read.layout;
    const uint8_t* const coarse =
        unit.scan + layout.coarse_offset + sub_block * layout.coarse_bytes;
    if (Has16BitKeys(layout)) {
      for (int n = 0; n < kKeyRun; ++n) {
        const int channel = kKeyRun * run + n;
        const uint16_t bits = LoadWord(coarse + 2 * (channel * kSubBlockTokens + token));
        key[n] = code::OriginalToFloat(
            layout.key_format == KeyFormat::kF16 ? OriginalDtype::kF16 : OriginalDtype::kBf16,
            bits);
      }
      return;
    }
    const int dword = run * kSubBlockTokens + token;
    const uint32_t high = LoadDword(coarse + 4 * dword);
    const uint8_t* const fine = unit.detail + sub_block * layout.sub_block_bytes;
    uint32_t low = 0;  // nibble n: the lower four bits of channel n's code
    if (layout.key_format == KeyFormat::kK6) {
      low = SpreadPairs(LoadDword(fine + 4 * (run / 2 * kSubBlockTokens + token)), run % 2);
    } else if (layout.key_format != KeyFormat::kK4) {
      low = LoadDword(fine + 4 * dword);
    }
    const float key_scale = unit.header().key_scale;
    for (int n = 0; n < kKeyRun; ++n) {
      const uint32_t key_code = (high >> (4 * n) & 15) << 4 | (low >> (4 * n) & 15);
      if (layout.key_format == KeyFormat::kFp8E4m3) {
        key[n] = key_scale * code::E4m3ToFloat(static_cast<uint8_t>(key_code));
        continue;
      }
      const float level = static_cast<float>(key_code) + read.depth.centre;  // exact
      const int channel = kKeyRun * run + n;
      key[n] = fmaf(level, memory.key_scale[channel], memory.key_zero[channel]);
    }
  }

  // K6's dword of 2-bit codes of 16 channels to nibbles of its lower or upper 8, times 4: channel
  // 8 upper + 2 b + odd is in byte b at bit 4 odd + 2 upper (kernels/core/tile_layout.h).
  __device__ static uint32_t SpreadPairs(uint32_t pairs, int upper) {
    return (pairs >> (2 * upper) & 0x33333333u) << 2;
  }
};

// Keys of one token in their original 16-bit form.
struct RowKeys {
  OriginalDtype dtype;
  const uint16_t* row;  // null: a token that isn't there

  __device__ void Decode(int run, float* key) const {
    for (int n = 0; n < kKeyRun; ++n) {
      key[n] = row == nullptr ? 0.0f : code::OriginalToFloat(dtype, row[kKeyRun * run + n]);
    }
  }
};

// Scores of `heads`; kHeads of them share what was decoded.
template <int kHeads, typename Keys>
__device__ void AddScores(const AttendRead& read, const BlockMemory& memory, const Unit& unit,
                          uint32_t heads, const Keys& keys) {
  const int token = ThreadIndex() % kTileTokens;
  const int part = ThreadIndex() / kTileTokens;
  // Nobody looks at the scores of a sub-block that nobody reads.
  if ((unit.sub_blocks >> token / kSubBlockTokens & 1) == 0) return;
  const int group_size = read.args.group_size;
  const int head_dim = read.layout.head_dim;
  for (int first = 0; first < group_size; first += kHeads) {
    float sums[kHeads] = {};
    for (int run = part; run < head_dim / kKeyRun; run += kParts) {
      float key[kKeyRun];
      keys.Decode(run, key);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (first + h >= group_size) break;
        const float* const query = memory.queries + (first + h) * head_dim + kKeyRun * run;
#pragma unroll
        for (int n = 0; n < kKeyRun; ++n) sums[h] = fmaf(query[n], key[n], sums[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int g = first + h;
      if (g >= group_size || (heads >> g & 1) == 0) continue;
      memory.scores[(part * group_size + g) * kTileTokens + token] = sums[h];
    }
  }
}

// Norm of this thread's half of the row, rounded up. In double, where squares of floats are exact
// and don't leave the range.
__device__ inline float NormOfPart(OriginalDtype dtype, const uint16_t* row, int32_t width) {
  double square = 0;
  for (int i = ThreadIndex() / kTileTokens; i < width; i += kParts) {
    const double x = code::OriginalToFloat(dtype, row[i]);
    square += x * x;
  }
  return NormRoundedUp(square);
}

// Scores of every head with every token of the unit, and the norms of rows that are read.
template <int kHeads>
__device__ void ScoreUnit(const AttendRead& read, const BlockMemory& memory, const Unit& unit) {
  const int token = ThreadIndex() % kTileTokens;
  const uint32_t all = (1u << read.args.group_size) - 1;
  const uint32_t from_rows = HeadsOfSource(read, unit, kSourceOriginalKeys);
  if (from_rows != all) {
    const StoredKeys keys{read, memory, unit, token / kSubBlockTokens, token % kSubBlockTokens};
    AddScores<kHeads>(read, memory, unit, all & ~from_rows, keys);
  }
  const bool is_in_range = token >= unit.begin && token < unit.end;
  const OriginalDtype dtype = read.args.original_dtype;
  if (from_rows != 0) {
    const uint16_t* const row = is_in_range ? unit.key_rows + token * unit.key_stride : nullptr;
    AddScores<kHeads>(read, memory, unit, from_rows, RowKeys{dtype, row});
    memory.row_key_norm[ThreadIndex()] =
        is_in_range ? NormOfPart(dtype, row, read.layout.head_dim) : 0.0f;
  }
  if (unit.tile < 0) {
    memory.row_value_norm[ThreadIndex()] =
        is_in_range
            ? NormOfPart(dtype, unit.value_rows + token * unit.value_stride, read.layout.value_dim)
            : 0.0f;
  }
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_ATTEND_SCORES_CUH_
