// Byte layout of a tile: 64 tokens of one layer and KV head. docs/formats.md is the document.
//
// A tile is two records, every plane 64-byte aligned, little-endian, one byte order for all
// backends, disk and wire:
//
//   scan record    header | scale fp16[d] | zero fp16[d] | witness | coarse planes of 4 sub-blocks
//   detail record  4 x ( fine plane | values ) | value scale u8[64] | value zero u8[64]
//
// Keys, one sub-block of 16 tokens:
//   coarse  [d/8][16 tokens] dwords; nibble n of a dword (bits 4n..4n+3) is channel 8j + n
//   fine    K8, K8D, FP8_E4M3: as coarse. K6: [d/16][16 tokens] dwords; byte b holds four 2-bit
//   codes,
//           bits 0-1 channel 16j+2b, 2-3 channel 16j+8+2b, 4-5 channel 16j+2b+1,
//           6-7 channel 16j+8+2b+1. K4: none.
//   code = coarse << 4 | fine (K8, K8D, FP8); coarse << 4 | fine << 2 (K6); coarse << 4 (K4)
//   F16, BF16: [d][16 tokens] 16-bit words in the place of the coarse plane; no scale, zero, fine
//   FP8_E4M3: the code is the e4m3 byte; no scale and zero planes (header.key_scale)
// Values, one sub-block:
//   V4  [8 token pairs][ceil(dv/32)][8 lanes] dwords; low word = even token, high word = odd token;
//       nibble n of a word is rotated channel 32z + 8n + lane; channels >= dv are code 0
//   V8  [8 token pairs][dv/16][8 lanes] dwords; byte b of a word is rotated channel 16z + 8b + lane
//   F16, BF16: [16 tokens][dv] 16-bit words; no scale
//   value scale and zero: a byte each for each token, see value_code.h
// Witness: [4 sub-blocks][bands][16 tokens] bytes, see EncodeWitness in witness.h.
#ifndef CERTKV_KERNELS_CORE_TILE_LAYOUT_H_
#define CERTKV_KERNELS_CORE_TILE_LAYOUT_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/limits.h"

namespace certkv {

inline constexpr uint16_t kTileMagic = 0xc47b;
inline constexpr uint8_t kTileFormatVersion = 3;
inline constexpr int64_t kPlaneAlignment = 64;

// First 64 bytes of a scan record. Host byte order must be little-endian (checked at build time).
struct TileHeader {
  uint16_t magic;                                 // kTileMagic
  uint8_t format_version;                         // kTileFormatVersion
  uint8_t key_format;                             // KeyFormat
  uint8_t value_format;                           // ValueFormat
  uint8_t witness_bands;                          // 0, 1 or 4
  int16_t witness_exponent;                       // see witness.h; 0 without a witness
  uint16_t value_error_bound[kSubBlocksPerTile];  // eta: fp16 >= max ||v - v^||_2 of 16 tokens
  float value_radius;          // R_v >= max ||v_t||_2 (centre: the origin); may be +infinity
  float key_norm;              // >= max_t ||k^_t||_2 of every reading depth; may be +infinity
  float key_scale;             // FP8_E4M3: the tensor's scale; 0 otherwise
  uint32_t key_check;          // K8D: DitherCheck of bounds/dither.h; with witness weights:
                               // WitnessWeightsCheck of ops/tile_checksum.h; 0 otherwise
  uint64_t identity_tag;       // TileIdentityTag of block_key.h
  uint64_t scan_checksum;      // XXH3-64 of the scan record with this field read as 0
  uint64_t detail_checksum;    // XXH3-64 of the detail record
  uint64_t original_checksum;  // XXH3-64 of the original keys, then continued over the values
};
static_assert(sizeof(TileHeader) == 64 && alignof(TileHeader) == 8);
static_assert(offsetof(TileHeader, value_error_bound) == 8);
static_assert(offsetof(TileHeader, value_radius) == 16);
static_assert(offsetof(TileHeader, identity_tag) == 32);
static_assert(offsetof(TileHeader, scan_checksum) == 40);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);

// Offsets and sizes in bytes, all multiples of 64. A plane that the format lacks has size 0.
struct TileLayout {
  KeyFormat key_format;
  ValueFormat value_format;
  int32_t head_dim;          // d
  int32_t value_dim;         // d_v
  int32_t witness_bands;     // 0, 1 or 4
  bool has_witness_weights;  // witnesses are of weighted channels (LayerSpec::witness_weights)
  RopePairing rope_pairing;  // with rotary_dim, decides the witness's bands
  int32_t rotary_dim;
  // K8D: what keys the dither, not 0 (bounds/dither.h). 0 in other formats.
  uint64_t dither_secret;
  // Scan record.
  int64_t scale_offset;
  int64_t zero_offset;
  int64_t scale_bytes;  // of each of the two planes, before padding: 2 d, or 0
  int64_t witness_offset;
  int64_t coarse_offset;
  int64_t coarse_bytes;  // of one sub-block
  int64_t scan_bytes;    // whole scan record
  // Detail record: the first offset is inside one sub-block, the second one in the record.
  int64_t fine_bytes;
  int64_t value_offset;
  int64_t value_bytes;
  int64_t sub_block_bytes;
  int64_t value_scale_offset;  // u8[64] scales, then u8[64] zeros; or 0 bytes
  int64_t detail_bytes;

  int64_t tile_bytes() const { return scan_bytes + detail_bytes; }
  // Tokens that share one half-width, and so one atom of the certificate: the tile, or, where
  // every token has its own witness, the sub-block.
  int32_t atom_tokens() const { return witness_bands == 0 ? kTileTokens : kSubBlockTokens; }
  int32_t atoms_per_tile() const { return kTileTokens / atom_tokens(); }
};

// Layout of one layer of a valid spec. `dither_secret` is the cache's; only K8D looks at it, and
// has no layout to read or write with while it is 0.
TileLayout MakeTileLayout(const CacheSpec& spec, int32_t layer, uint64_t dither_secret = 0);

// Bytes of the two original records of a tile, token-major: keys [64][d], values [64][d_v], 16-bit.
inline int64_t OriginalKeyBytes(const CacheSpec& spec) { return int64_t{128} * spec.head_dim; }
inline int64_t OriginalValueBytes(const CacheSpec& spec) { return int64_t{128} * spec.value_dim; }

bool IsAffine(KeyFormat format);     // K8, K8D, K6, K4
bool IsRotated(ValueFormat format);  // V4, V8

// How a code becomes a key: k^ = ((code & mask) + centre) * scale + zero, |k - k^| <= half_range *
// scale. The code is chosen from a quotient in float: code = rint((k - zero) * (1 / scale)).
// Difference, reciprocal and product each round by at most 2^-24 of a quotient <= 255, so the
// quotient is off by at most 255 * 3 * 2^-24 * (1 + 2^-20) < 4.6e-5 codes; half_range adds 2^-14
// = 6.1e-5 codes for it. K8D adds its dither to the quotient and takes it off again: the same
// holds.
struct AffineDepth {
  uint32_t mask;
  float centre;
  float half_range;  // in units of scale: K8 1/2, K6 2, K4 8, each + 2^-14
};
AffineDepth AffineDepthOf(KeyFormat format);  // of an affine one

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_TILE_LAYOUT_H_
