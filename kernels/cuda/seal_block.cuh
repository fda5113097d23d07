// Encoding of one tile by one block: codes go to shared memory first, a byte each, and are packed
// from there. The steps are those of kernels/reference/quantize_tile.cc, operation by operation.
#ifndef CERTKV_KERNELS_CUDA_SEAL_BLOCK_CUH_
#define CERTKV_KERNELS_CUDA_SEAL_BLOCK_CUH_

#include "kernels/core/affine_code.h"
#include "kernels/core/value_code.h"
#include "kernels/cuda/attend_block.cuh"
#include "kernels/cuda/float_math.cuh"
#include "kernels/cuda/seal.h"

namespace certkv::cuda {

// Above this a float butterfly of 8 stages could overflow later on.
inline constexpr float kRotationInputMax = 0x1p100f;

struct SealMemory {
  uint8_t* key_codes;    // [64][d]
  uint8_t* value_codes;  // [64][d_v]
  float* row;            // [kWarps][256] a token's values
  float* key_norm;       // [64] >= ||k^|| at every reading depth
  float* value_norm;     // [64] >= ||v||
  float* value_error;    // [64] >= ||v - v^||
  float* residual;       // [64][4] >= ||k - k^|| in each band of the witness
  int64_t size_bytes;

  // A null base only counts.
  CERTKV_HOST_DEVICE SealMemory(uint8_t* base, const TileLayout& layout) {
    size_bytes = 0;
    const auto take = [&](int64_t count) {
      uint8_t* const first = base == nullptr ? nullptr : base + size_bytes;
      size_bytes += (count + 15) / 16 * 16;
      return first;
    };
    const auto take_floats = [&](int64_t count) {
      return reinterpret_cast<float*>(take(count * static_cast<int64_t>(sizeof(float))));
    };
    key_codes = take(kTileTokens * layout.head_dim);
    value_codes = take(kTileTokens * layout.value_dim);
    row = take_floats(kWarps * kHeadDimMax);
    key_norm = take_floats(kTileTokens);
    value_norm = take_floats(kTileTokens);
    value_error = take_floats(kTileTokens);
    residual = take_floats(kTileTokens * kWitnessBandsMax);
  }
};

__device__ inline void StoreWord(uint8_t* address, uint16_t word) {
  *reinterpret_cast<uint16_t*>(address) = word;
}
__device__ inline void StoreDword(uint8_t* address, uint32_t dword) {
  *reinterpret_cast<uint32_t*>(address) = dword;
}

__device__ inline uint8_t ChooseCode(const code::AffineCoding& coding, float x) {
  return static_cast<uint8_t>(rintf((x - coding.zero_value) * coding.inverse));
}

__device__ inline double SumOfLanes(double value) {
  for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(~0u, value, bits);
  return value;
}

// ---- Keys. A thread takes a channel. `depth` is that of an affine key format.
__device__ inline void EncodeKeys(const SealFormat& format, const AffineDepth& depth,
                                  const SealTile& tile, const SealMemory& memory) {
  const TileLayout& layout = format.layout;
  const auto key = [&](int t, int i) {
    return code::OriginalToFloat(format.original_dtype, tile.keys[t * tile.key_stride + i]);
  };
  const int padded = static_cast<int>(layout.zero_offset - layout.scale_offset) / 2;
  for (int i = layout.head_dim + ThreadIndex(); i < padded; i += kBlockThreads) {
    StoreWord(tile.scan + layout.scale_offset + 2 * i, 0);
    StoreWord(tile.scan + layout.zero_offset + 2 * i, 0);
  }
  for (int i = ThreadIndex(); i < layout.head_dim; i += kBlockThreads) {
    if (HasAffineKeys(layout)) {
      float min = key(0, i);
      float max = min;
      for (int t = 1; t < kTileTokens; ++t) {
        min = fminf(min, key(t, i));
        max = fmaxf(max, key(t, i));
      }
      const code::AffineCoding coding = code::ChooseKeyCoding(min, max, depth);
      StoreWord(tile.scan + layout.scale_offset + 2 * i, coding.scale);
      StoreWord(tile.scan + layout.zero_offset + 2 * i, coding.zero);
      for (int t = 0; t < kTileTokens; ++t) {
        memory.key_codes[t * layout.head_dim + i] = ChooseCode(coding, key(t, i));
      }
      continue;
    }
    for (int t = 0; t < kTileTokens; ++t) {
      if (Has16BitKeys(layout)) {
        StoreWord(tile.scan + layout.coarse_offset + t / kSubBlockTokens * layout.coarse_bytes +
                      2 * (i * kSubBlockTokens + t % kSubBlockTokens),
                  tile.keys[t * tile.key_stride + i]);
      } else {
        memory.key_codes[t * layout.head_dim + i] =
            code::FloatToE4m3(key(t, i) / format.fp8_key_scale);
      }
    }
  }
}

// ---- Values. A warp takes a token.
// The format's rotation of a row in shared memory, by the warp's lanes.
__device__ inline void RotateRow(float* row, int dim) {
  const int lane = ThreadIndex() % 32;
  for (int begin = 0; begin < dim;) {
    int n = 16;
    while (2 * n <= dim - begin) n *= 2;
    float* const block = row + begin;
    for (int h = 1; h < n; h *= 2) {
      for (int pair = lane; pair < n / 2; pair += 32) {
        const int i = pair / h * 2 * h + pair % h;
        const float a = block[i];
        const float b = block[i + h];
        block[i] = a + b;
        block[i + h] = a - b;
      }
      __syncwarp();
    }
    const float factor = static_cast<float>(1.0 / sqrt(static_cast<double>(n)));
    for (int i = lane; i < n; i += 32) block[i] *= factor;
    __syncwarp();
    begin += n;
  }
}

// Codes of a token whose rotated values are in `row`; a bound on ||v - v^||.
//
// The float rotation is off by at most 10 u of the norm (8 stages, the factor and its rounding),
// and where the factor makes subnormals by 2^-150 an element. Sums of squares are in double.
__device__ inline float EncodeRotatedRow(const SealFormat& format, const SealTile& tile,
                                         const SealMemory& memory, const float* row, int t,
                                         float norm) {
  const TileLayout& layout = format.layout;
  const int lane = ThreadIndex() % 32;
  const bool is_v4 = layout.value_format == ValueFormat::kV4;
  const float level_max = is_v4 ? 15.0f : 255.0f;
  float min = 0;
  float max = 0;
  for (int i = lane; i < layout.value_dim; i += 32) {
    min = fminf(min, row[i]);
    max = fmaxf(max, row[i]);
  }
  const code::ValueCoding coding =
      code::ChooseValueCoding(-WarpMax(-min, 32), WarpMax(max, 32), level_max);
  if (lane == 0) {
    tile.detail[layout.value_scale_offset + t] = coding.scale_code;
    tile.detail[layout.value_scale_offset + kTileTokens + t] = coding.zero_code;
  }
  const double scale = coding.scale;
  const double offset = coding.offset;
  double square = 0;
  for (int i = lane; i < layout.value_dim; i += 32) {
    const float y = coding.is_encodable ? row[i] : 0.0f;
    const auto value_code = static_cast<uint8_t>(rintf(code::ValueLevel(coding, y)));
    memory.value_codes[t * layout.value_dim + i] = value_code;
    const double error = row[i] - (value_code - offset) * scale;
    square += error * error;
  }
  if (!coding.is_encodable || norm == 0) return norm;
  const float rotation = __fmaf_ru(norm, 11 * 0x1p-24f, 0x1p-140f);
  return __fadd_ru(NormRoundedUp(SumOfLanes(square)), rotation);
}

__device__ inline void EncodeValues(const SealFormat& format, const SealTile& tile,
                                    const SealMemory& memory) {
  const TileLayout& layout = format.layout;
  const int lane = ThreadIndex() % 32;
  const int warp = ThreadIndex() / 32;
  float* const row = memory.row + warp * kHeadDimMax;
  for (int t = warp; t < kTileTokens; t += kWarps) {
    double square = 0;
    float magnitude = 0;
    for (int i = lane; i < layout.value_dim; i += 32) {
      const uint16_t bits = tile.values[t * tile.value_stride + i];
      const float value = code::OriginalToFloat(format.original_dtype, bits);
      row[i] = value;
      magnitude = fmaxf(magnitude, fabsf(value));
      square += static_cast<double>(value) * value;
      if (HasRotatedValues(layout)) continue;
      StoreWord(tile.detail + t / kSubBlockTokens * layout.sub_block_bytes + layout.value_offset +
                    2 * (t % kSubBlockTokens * layout.value_dim + i),
                bits);
    }
    const float norm = NormRoundedUp(SumOfLanes(square));
    float error = 0;
    __syncwarp();
    if (HasRotatedValues(layout)) {
      // Too large to rotate: rows of zeros are encoded, and the error is the whole norm.
      const bool fits = WarpMax(magnitude, 32) <= kRotationInputMax;
      if (!fits) {
        for (int i = lane; i < layout.value_dim; i += 32) row[i] = 0;
        __syncwarp();
      } else {
        RotateRow(row, layout.value_dim);
      }
      error = EncodeRotatedRow(format, tile, memory, row, t, norm);
      if (!fits) error = norm;
      __syncwarp();  // the next token's values go into the row
    }
    if (lane == 0) {
      memory.value_norm[t] = norm;
      memory.value_error[t] = error;
    }
  }
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_SEAL_BLOCK_CUH_
