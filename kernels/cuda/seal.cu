#include "kernels/core/check.h"
#include "kernels/core/witness_code.h"
#include "kernels/cuda/seal.h"
#include "kernels/cuda/seal_block.cuh"

namespace certkv::cuda {
namespace {

// The dwords of the key planes (kernels/core/tile_layout.h).
__device__ void PackKeys(const TileLayout& layout, const SealTile& tile, const SealMemory& memory) {
  const int runs = layout.head_dim / 8;
  for (int n = ThreadIndex(); n < kTileTokens * runs; n += kBlockThreads) {
    const int sub_block = n / (runs * kSubBlockTokens);
    const int dword = n % (runs * kSubBlockTokens);
    const int t = sub_block * kSubBlockTokens + dword % kSubBlockTokens;
    const uint8_t* const codes =
        memory.key_codes + t * layout.head_dim + dword / kSubBlockTokens * 8;
    uint32_t coarse = 0;
    uint32_t fine = 0;
    for (int k = 0; k < 8; ++k) {
      coarse |= static_cast<uint32_t>(codes[k] >> 4) << (4 * k);
      fine |= static_cast<uint32_t>(codes[k] & 15) << (4 * k);
    }
    StoreDword(tile.scan + layout.coarse_offset + sub_block * layout.coarse_bytes + 4 * dword,
               coarse);
    if (layout.key_format != KeyFormat::kK4 && layout.key_format != KeyFormat::kK6) {
      StoreDword(tile.detail + sub_block * layout.sub_block_bytes + 4 * dword, fine);
    }
  }
  const int pairs = layout.key_format == KeyFormat::kK6 ? layout.head_dim / 16 : 0;
  for (int n = ThreadIndex(); n < kTileTokens * pairs; n += kBlockThreads) {
    const int sub_block = n / (pairs * kSubBlockTokens);
    const int dword = n % (pairs * kSubBlockTokens);
    const int t = sub_block * kSubBlockTokens + dword % kSubBlockTokens;
    const uint8_t* const codes =
        memory.key_codes + t * layout.head_dim + dword / kSubBlockTokens * 16;
    uint32_t fine = 0;
    for (int k = 0; k < 16; ++k) {
      const int shift = 8 * (k % 8 / 2) + 2 * (2 * (k % 2) + k / 8);
      fine |= static_cast<uint32_t>(codes[k] >> 2 & 3) << shift;
    }
    StoreDword(tile.detail + sub_block * layout.sub_block_bytes + 4 * dword, fine);
  }
}

__device__ void PackValues(const TileLayout& layout, const SealTile& tile,
                           const SealMemory& memory) {
  const bool is_v4 = layout.value_format == ValueFormat::kV4;
  const int per_word = is_v4 ? 4 : 2;  // channels in the 16 bits of a token
  const int zone_channels = 8 * per_word;
  const int zones = (layout.value_dim + zone_channels - 1) / zone_channels;
  const int dwords = kSubBlockTokens / 2 * zones * 8;  // of a sub-block
  for (int n = ThreadIndex(); n < kSubBlocksPerTile * dwords; n += kBlockThreads) {
    const int sub_block = n / dwords;
    const int dword = n % dwords;
    const int pair = dword / (zones * 8);
    const int channel = dword / 8 % zones * zone_channels + dword % 8;
    uint32_t packed = 0;
    for (int odd = 0; odd < 2; ++odd) {
      const int t = sub_block * kSubBlockTokens + 2 * pair + odd;
      for (int k = 0; k < per_word; ++k) {
        const int i = channel + 8 * k;
        if (i >= layout.value_dim) continue;
        packed |= static_cast<uint32_t>(memory.value_codes[t * layout.value_dim + i])
                  << (16 * odd + 16 / per_word * k);
      }
    }
    StoreDword(tile.detail + sub_block * layout.sub_block_bytes + layout.value_offset + 4 * dword,
               packed);
  }
}

// How coarsely a code may be read; as AffineDepthOf of kernels/core.
struct Depths {
  AffineDepth depth[3];
  int count;  // 0: keys aren't affine
};

// Norms of the decoded keys at every depth, and of their residuals by band. A warp takes a token.
__device__ void MeasureKeys(const SealFormat& format, const SealTile& tile,
                            const SealMemory& memory, const Depths& depths) {
  const TileLayout& layout = format.layout;
  const int lane = ThreadIndex() % 32;
  for (int t = ThreadIndex() / 32; t < kTileTokens; t += kWarps) {
    double squares[3] = {};
    double band_squares[kWitnessBandsMax] = {};
    for (int i = lane; i < layout.head_dim; i += 32) {
      const double key =
          code::OriginalToFloat(format.original_dtype, tile.keys[t * tile.key_stride + i]);
      double decoded = key;
      const uint8_t key_code = memory.key_codes[t * layout.head_dim + i];
      if (depths.count > 0) {
        const double scale = code::F16ToFloat(LoadWord(tile.scan + layout.scale_offset + 2 * i));
        const double zero = code::F16ToFloat(LoadWord(tile.scan + layout.zero_offset + 2 * i));
        for (int k = depths.count - 1; k >= 0; --k) {  // the stored depth last
          const double level = (key_code & depths.depth[k].mask) + depths.depth[k].centre;
          decoded = level * scale + zero;  // exact
          squares[k] += decoded * decoded;
        }
      } else {
        if (layout.key_format == KeyFormat::kFp8E4m3) {
          decoded = static_cast<double>(format.fp8_key_scale) * code::E4m3ToFloat(key_code);
        }
        squares[0] += decoded * decoded;
      }
      if (layout.witness_bands == 0) continue;
      const int own = code::WitnessBandOf(layout.head_dim, layout.rope_pairing, layout.rotary_dim,
                                          layout.witness_bands, i);
      const double weight = layout.has_witness_weights ? tile.witness_weights[i] : 1.0;
      const double residual = weight * (key - decoded);
      for (int b = 0; b < kWitnessBandsMax; ++b) {
        band_squares[b] += b == own ? residual * residual : 0;
      }
    }
    double square = 0;
    for (int k = 0; k == 0 || k < depths.count; ++k) {
      square = fmax(square, SumOfLanes(squares[k]));
    }
    for (int b = 0; b < layout.witness_bands; ++b) {
      const float norm = NormRoundedUp(SumOfLanes(band_squares[b]));
      if (lane == 0) memory.residual[t * kWitnessBandsMax + b] = norm;
    }
    if (lane == 0) memory.key_norm[t] = NormRoundedUp(square);
  }
}

__device__ int16_t EncodeWitnesses(const TileLayout& layout, const SealTile& tile,
                                   const SealMemory& memory) {
  const int bands = layout.witness_bands;
  float largest = 0;
  for (int n = 0; n < kTileTokens * bands; ++n) {
    largest = fmaxf(largest, memory.residual[n / bands * kWitnessBandsMax + n % bands]);
  }
  const int16_t exponent = code::WitnessExponentFor(largest);
  for (int n = ThreadIndex(); n < kTileTokens * bands; n += kBlockThreads) {
    const int t = n / bands;
    const int b = n % bands;
    tile.scan[layout.witness_offset + (t / kSubBlockTokens * bands + b) * kSubBlockTokens +
              t % kSubBlockTokens] =
        code::EncodeWitness(memory.residual[t * kWitnessBandsMax + b], exponent);
  }
  return exponent;
}

__device__ void WriteHeader(const SealFormat& format, const SealTile& tile,
                            const SealMemory& memory, int16_t witness_exponent) {
  const TileLayout& layout = format.layout;
  TileHeader header{};
  header.magic = kTileMagic;
  header.format_version = kTileFormatVersion;
  header.key_format = static_cast<uint8_t>(layout.key_format);
  header.value_format = static_cast<uint8_t>(layout.value_format);
  header.witness_bands = static_cast<uint8_t>(layout.witness_bands);
  header.witness_exponent = witness_exponent;
  header.identity_tag = tile.identity_tag;
  if (layout.key_format == KeyFormat::kFp8E4m3) header.key_scale = format.fp8_key_scale;
  for (int s = 0; s < kSubBlocksPerTile; ++s) {
    float error = 0;
    for (int t = s * kSubBlockTokens; t < (s + 1) * kSubBlockTokens; ++t) {
      error = fmaxf(error, memory.value_error[t]);
      header.value_radius = fmaxf(header.value_radius, memory.value_norm[t]);
      header.key_norm = fmaxf(header.key_norm, memory.key_norm[t]);
    }
    header.value_error_bound[s] = code::FloatToF16RoundedUp(error);
  }
  *reinterpret_cast<TileHeader*>(tile.scan) = header;
}

// Grid: (tiles).
__global__ void __launch_bounds__(kBlockThreads)
    Seal(SealFormat format, Depths depths, const SealTile* tiles) {
  CERTKV_DYNAMIC_SHARED(bytes);
  const TileLayout& layout = format.layout;
  const SealTile& tile = tiles[blockIdx.x];
  const SealMemory memory(bytes, layout);
  EncodeKeys(format, depths.depth[0], tile, memory);
  EncodeValues(format, tile, memory);
  __syncthreads();
  if (!Has16BitKeys(layout)) PackKeys(layout, tile, memory);
  if (HasRotatedValues(layout)) PackValues(layout, tile, memory);
  MeasureKeys(format, tile, memory, depths);
  __syncthreads();
  const int16_t exponent = layout.witness_bands > 0 ? EncodeWitnesses(layout, tile, memory) : 0;
  if (ThreadIndex() == 0) WriteHeader(format, tile, memory, exponent);
}

// Depths at which codes of the format can be read, its own first.
Depths DepthsOf(KeyFormat format) {
  Depths depths{};
  for (const KeyFormat depth : {KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4}) {
    const bool is_affine =
        format == KeyFormat::kK8 || format == KeyFormat::kK6 || format == KeyFormat::kK4;
    if (is_affine && depth >= format) depths.depth[depths.count++] = AffineDepthOf(depth);
  }
  return depths;
}

}  // namespace

int LaunchSeal(const SealFormat& format, const SealTile* tiles, int32_t tile_count,
               CUstream_st* stream) {
  CERTKV_CHECK(format.layout.key_format != KeyFormat::kK8D, "no dither is added here");
  const SealMemory memory(nullptr, format.layout);
  return LaunchKernel(Seal, dim3(tile_count), dim3(kBlockThreads), memory.size_bytes, stream,
                      format, DepthsOf(format.layout.key_format), tiles);
}

}  // namespace certkv::cuda
