// What one QuantizeTile of the CPU backend works on, with originals turned to [channel][64 tokens]:
// lanes of vectors are tokens, so that codes, planes and rotations need no shuffles.
//
// Read by translation units of different instruction sets: no inline functions (attend_state.h).
#ifndef CERTKV_KERNELS_CPU_QUANTIZE_STATE_H_
#define CERTKV_KERNELS_CPU_QUANTIZE_STATE_H_

#include <cstdint>

#include "kernels/core/limits.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::cpu {

struct QuantizeState {
  const QuantizeTileArgs* args;
  bool bf16;                                  // originals are BF16
  float code_centre;                          // AffineDepth of an affine key format
  float code_level_max;                       // its mask
  uint8_t band_of[kHeadDimMax];               // witness band of each key channel
  uint16_t key_limit;                         // largest magnitude of a key, as bits
  alignas(64) uint16_t key_min[kHeadDimMax];  // of each key channel, in its own dtype
  alignas(64) uint16_t key_max[kHeadDimMax];
  alignas(64) uint16_t words[kHeadDimMax][kTileTokens];  // originals of the plane being encoded
  alignas(64) uint8_t codes[kHeadDimMax][kTileTokens];   // FP8 codes
  // Largest ||k^_t|| over tokens and depths, up to rounding (2^-15 of it).
  float key_norm;
  float witness_weight[kHeadDimMax];  // w of each key channel, 1 where the layout has none
  // With a witness, up to rounding: ||w (k - k^)||^2 of each band and token, and ||w scale|| of
  // each band.
  alignas(64) float residual_square[kWitnessBandsMax][kTileTokens];
  float scale_norm[kWitnessBandsMax];
  // Per token, up to rounding: ||v|| and ||rotated - stored||.
  alignas(64) float value_norm[kTileTokens];
  alignas(64) float value_error[kTileTokens];
};

struct QuantizeKernels {
  // key_min and key_max, from the rows of the arguments. False when a key is not finite or beyond
  // key_limit.
  bool (*find_key_ranges)(QuantizeState* state);
  // From those and `words`: the scale, zero, coarse and fine planes of K8, K6 or K4.
  void (*encode_affine_keys)(QuantizeState* state);
  // Values, value scales and zeros of V4 or V8: from the rows of the arguments where
  // `values_by_rows`, else from `words`. False when a value is not finite.
  bool (*encode_rotated_values)(QuantizeState* state);
  bool values_by_rows;
};

extern const QuantizeKernels kQuantizePortable;
extern const QuantizeKernels kQuantizeAvx2;
extern const QuantizeKernels kQuantizeAvx512;

// QuantizeTile with given kernels; `QuantizeTile` of cpu.h chooses them.
bool QuantizeTileWith(const QuantizeKernels& kernels, const QuantizeTileArgs& args);

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_QUANTIZE_STATE_H_
