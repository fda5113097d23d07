// Encodes 64 tokens of one layer and KV head into a tile (scan and detail record), and back.
//
// The bytes are the same on every backend: codes, scales and zeros are defined by IEEE float
// operations without contraction (docs/formats.md), so that equal originals give equal planes and
// checksums of the originals. value_error_bound, value_radius, key_norm and the witness are upper
// bounds, rounded up; they may differ between backends by their rounding (at most 2^-8 of the
// value, one code of the witness), each >= the exact value of what is stored.
#ifndef CERTKV_KERNELS_OPS_QUANTIZE_TILE_H_
#define CERTKV_KERNELS_OPS_QUANTIZE_TILE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/backend.h"

namespace certkv {

// d = layout->head_dim, d_v = layout->value_dim. Memory is borrowed until the call returns; inputs
// and outputs don't overlap. Outputs are 64-byte aligned.
struct QuantizeTileArgs {
  const CacheSpec* spec;  // for the witness's bands and fp8_key_scale
  int32_t layer;
  const TileLayout* layout;  // MakeTileLayout(*spec, layer, the cache's dither_secret)
  const uint16_t* keys;      // [64][d] in, fp16 or bf16 by spec->original_dtype, token-major
  const uint16_t* values;    // [64][d_v] in
  // [d], LayerSpec::witness_weights of the KV head. Not null exactly when the layout has weights.
  const float* witness_weights;
  int64_t key_stride;     // elements from one token to the next, >= d
  int64_t value_stride;   // >= d_v
  uint64_t identity_tag;  // goes into the header
  uint8_t* scan;          // [layout->scan_bytes] out, header included
  uint8_t* detail;        // [layout->detail_bytes] out
};

// The header's checksums are written too (XXH3-64), original_checksum over the originals given.
// Errors: InvalidArgument [NON_FINITE_KEY | NON_FINITE_VALUE] naming token and channel;
//         [KEY_OUT_OF_RANGE], a bf16 key beyond +-65504 in an affine format; Aborted
//         [ORIGINALS_CHANGED], somebody wrote to them meanwhile and it was seen. What `scan` and
//         `detail` then hold is unspecified and must not be published.
// Threads: concurrent calls are safe when their outputs differ. Blocks until done.
absl::Status QuantizeTile(Backend backend, const QuantizeTileArgs& args);

// What QuantizeTile does before and after the records are encoded, for who has that done elsewhere
// (seal_on_device.h). Neither looks at more of `args` than it needs: the first at the originals,
// the second at all.
// Errors: as QuantizeTile.
absl::Status CheckTileOriginals(const QuantizeTileArgs& args);
// Writes the header's checksums and, with witness weights, key_check.
void WriteTileChecksums(const QuantizeTileArgs& args);

// k^ [64][d] and v^ [64][d_v] (un-rotated) of a tile, as float rounded to nearest from the exact
// values. Either output may be null. Reference only: nothing on a decode path calls it.
// Errors: as CheckTile.
absl::Status DequantizeTile(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail,
                            float* keys, float* values);

// Is this a tile of that layout? Checks magic, version, formats, witness bands, that no bound is
// NaN or negative, of K8D that it was made with the layout's dither_secret, and of a layout with
// witness weights that it was made with some (CheckTileWeights: with which). O(1).
// Errors: DataLoss [TILE_FORMAT_MISMATCH], naming the field, the value seen and the expected one.
absl::Status CheckTile(const TileLayout& layout, const uint8_t* scan);

// Was a tile of a layout with witness weights made with those of which WitnessWeightsCheck is
// `weights_check`? With others its witnesses prove nothing. O(1).
// Errors: as CheckTile.
absl::Status CheckTileWeights(const uint8_t* scan, uint32_t weights_check);

// Recomputes the checksums and compares them with the header. `keys` and `values` are the originals
// [64][d], [64][d_v], contiguous; null skips their check.
// Errors: DataLoss [SCAN_CHECKSUM | DETAIL_CHECKSUM | ORIGINAL_CHECKSUM_MISMATCH]; as CheckTile.
absl::Status VerifyTile(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail,
                        const uint16_t* keys, const uint16_t* values);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_QUANTIZE_TILE_H_
