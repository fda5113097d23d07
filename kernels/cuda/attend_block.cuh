// What a block of the attention kernel works on: its shared memory, and the unit of 64 tokens that
// it reads at the moment.
#ifndef CERTKV_KERNELS_CUDA_ATTEND_BLOCK_CUH_
#define CERTKV_KERNELS_CUDA_ATTEND_BLOCK_CUH_

#include <cstdint>

#include "kernels/core/half_code.h"
#include "kernels/core/host_device.h"
#include "kernels/core/limits.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/device.h"

namespace certkv::cuda {

inline constexpr int kBlockThreads = 128;
inline constexpr int kWarps = kBlockThreads / 32;
inline constexpr int kParts = kBlockThreads / kTileTokens;  // threads that share a token's dot
static_assert(kWarps == kSubBlocksPerTile);  // a warp sums the values of one sub-block
inline constexpr float kRefNone = -0x1p120f;

CERTKV_HOST_DEVICE inline bool HasRotatedValues(const TileLayout& layout) {
  return layout.value_format == ValueFormat::kV4 || layout.value_format == ValueFormat::kV8;
}
CERTKV_HOST_DEVICE inline bool HasAffineKeys(const TileLayout& layout) {
  return layout.scale_bytes != 0;
}
CERTKV_HOST_DEVICE inline bool Has16BitKeys(const TileLayout& layout) {
  return layout.key_format == KeyFormat::kF16 || layout.key_format == KeyFormat::kBf16;
}

// Dynamic shared memory; G = group_size, d and d_v of the layout. Sums are relative to 2^ref.
struct BlockMemory {
  float* queries;         // [G][d] logit_scale * q
  float* key_scale;       // [d] of the tile
  float* key_zero;        // [d]
  float* scores;          // [kParts][G][64]
  float* weights;         // [G][64]
  float* value_scale;     // [64] of the tile's tokens
  float* value_zero;      // [64]
  float* row_key_norm;    // [kParts][64] norms of halves of keys read from rows, rounded up
  float* row_value_norm;  // [kParts][64] the same of values of the tail
  float* rotated;         // [kWarps][G][d_v] sum of weight * v^ of the warp's sub-blocks
  float* plain;           // [G][d_v] the same of values that aren't rotated
  float* query_norm;      // [G] >= logit_scale * ||q||
  float* band_norm;       // [G][4] the same of the witness's bands
  float* ref;             // [G] log2 units, an integer; kRefNone before the first token
  float* factor;          // [G] 2^(last ref - ref)
  float* mass;            // [G] sum of weights
  float* unknown;         // [G] not 0: a logit may be infinite or NaN
  float* eta;             // [G] sum of weight * eta, rounded up
  float* reach;           // [G] sum of weight * bound on ||v^||, rounded up
  float* radius;          // [1] largest bound on ||v||
  float* norm;            // [1] largest bound on ||v^||
  int64_t float_count;

  // A null base only counts.
  CERTKV_HOST_DEVICE BlockMemory(float* base, int32_t group_size, const TileLayout& layout) {
    float_count = 0;
    const auto take = [&](int64_t count) {
      float* const first = base == nullptr ? nullptr : base + float_count;
      float_count += (count + 3) / 4 * 4;  // 16-byte aligned
      return first;
    };
    const int64_t heads = group_size;
    queries = take(heads * layout.head_dim);
    key_scale = take(layout.head_dim);
    key_zero = take(layout.head_dim);
    scores = take(kParts * heads * kTileTokens);
    weights = take(heads * kTileTokens);
    value_scale = take(kTileTokens);
    value_zero = take(kTileTokens);
    row_key_norm = take(kParts * kTileTokens);
    row_value_norm = take(kParts * kTileTokens);
    rotated = take(HasRotatedValues(layout) ? kWarps * heads * layout.value_dim : 0);
    plain = take(heads * layout.value_dim);
    query_norm = take(heads);
    band_norm = take(heads * kWitnessBandsMax);
    ref = take(heads);
    factor = take(heads);
    mass = take(heads);
    unknown = take(heads);
    eta = take(heads);
    reach = take(heads);
    radius = take(1);
    norm = take(1);
  }
};

// 64 tokens: a tile, or a run of the tail.
struct Unit {
  int32_t tile;        // -1: of the tail
  int32_t first_atom;  // of the head's atoms
  int32_t begin;       // tokens of the range: begin <= t < end, in [0, 64]
  int32_t end;
  uint32_t sub_blocks;  // bit b: a head reads sub-block b
  const uint8_t* scan;  // null in the tail
  const uint8_t* detail;
  const uint16_t* key_rows;  // originals; null where a tile has none
  const uint16_t* value_rows;
  int64_t key_stride;  // elements
  int64_t value_stride;

  __device__ const TileHeader& header() const { return *reinterpret_cast<const TileHeader*>(scan); }
};

__device__ inline int32_t ClampToken(int64_t token) {
  if (token < 0) return 0;
  return token > kTileTokens ? kTileTokens : static_cast<int32_t>(token);
}

inline constexpr uint32_t kAllSubBlocks = (1u << kSubBlocksPerTile) - 1;

// Bit b: head g reads sub-block b of the tile.
__device__ inline uint32_t SubBlocksOf(const AttendRead& read, int32_t tile, int g) {
  if (tile < 0 || read.sub_blocks == nullptr) return kAllSubBlocks;
  return read.sub_blocks[int64_t{g} * read.args.tile_count + tile];
}

// Unit `index` of the read: its tiles, then the runs of its tail.
__device__ inline Unit UnitOf(const AttendRead& read, int32_t index) {
  const AttendArgs& args = read.args;
  Unit unit{};
  const int32_t tiles = read.tile_end - read.tile_begin;
  int64_t first_token = 0;
  if (index < tiles) {
    unit.tile = read.tile_begin + index;
    unit.first_atom =
        read.first_tile_atom + unit.tile * (read.has_sub_block_atoms ? kSubBlocksPerTile : 1);
    first_token = int64_t{unit.tile} * kTileTokens;
    const AttendTile& tile = args.tiles[unit.tile];
    unit.scan = tile.scan;
    unit.detail = tile.detail;
    unit.key_rows = tile.original_keys;
    unit.value_rows = tile.original_values;
    unit.key_stride = read.layout.head_dim;
    unit.value_stride = read.layout.value_dim;
  } else {
    const int32_t chunk = read.chunk_begin + index - tiles;
    unit.tile = -1;
    unit.first_atom = read.first_tail_atom + chunk;
    first_token = (int64_t{args.tile_count} + chunk) * kTileTokens;
    unit.key_rows = args.tail_keys + int64_t{chunk} * kTileTokens * args.tail_key_stride;
    unit.value_rows = args.tail_values + int64_t{chunk} * kTileTokens * args.tail_value_stride;
    unit.key_stride = args.tail_key_stride;
    unit.value_stride = args.tail_value_stride;
  }
  for (int g = 0; g < args.group_size; ++g) unit.sub_blocks |= SubBlocksOf(read, unit.tile, g);
  unit.begin = ClampToken(args.token_begin - first_token);
  unit.end = ClampToken(args.token_end - first_token);
  return unit;
}

// kSource bits of a head in a unit; the tail is original.
__device__ inline uint32_t SourceOf(const AttendRead& read, const Unit& unit, int g) {
  if (unit.tile < 0) return kSourceOriginalKeys | kSourceOriginalValues;
  if (read.args.tile_sources == nullptr) return kSourceQuantized;
  return read.args.tile_sources[int64_t{g} * read.args.tile_count + unit.tile];
}

// Bit g: head g reads the unit's originals for what `source` says.
__device__ inline uint32_t HeadsOfSource(const AttendRead& read, const Unit& unit,
                                         uint32_t source) {
  uint32_t heads = 0;
  for (int g = 0; g < read.args.group_size; ++g) {
    if ((SourceOf(read, unit, g) & source) != 0) heads |= 1u << g;
  }
  return heads;
}

// Element n of the queries, before the logit scale.
__device__ inline float QueryAt(const AttendRead& read, int n) {
  if (read.queries.bits == nullptr) return read.args.queries[n];
  return code::OriginalToFloat(read.queries.dtype, read.queries.bits[n]);
}

__device__ inline uint32_t LoadDword(const uint8_t* address) {
  return *reinterpret_cast<const uint32_t*>(address);
}
__device__ inline uint16_t LoadWord(const uint8_t* address) {
  return *reinterpret_cast<const uint16_t*>(address);
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_ATTEND_BLOCK_CUH_
