// Token witness: an upper bound on a residual norm, one byte, logarithmic in steps of 1/32 octave.
//
//   w(code) = 0                                      for code 0
//           = 2^(exponent + (code - 255) / 32)       for code 1 .. 255, rounded up to float
//                                                    (2^-149 at least, +infinity from 2^128)
//
// `exponent` is one integer per tile (TileHeader.witness_exponent), so that code 255 covers the
// tile's largest norm and code 1 lies 7.9 octaves below it.
#ifndef CERTKV_KERNELS_CORE_WITNESS_H_
#define CERTKV_KERNELS_CORE_WITNESS_H_

#include <cstdint>

#include "kernels/core/cache_spec.h"
#include "kernels/core/tile_layout.h"

namespace certkv {

inline constexpr int kWitnessStepBits = 5;
inline constexpr int kWitnessSteps = 1 << kWitnessStepBits;  // of an octave

// Smallest exponent with w(255) >= norm_max; 0 when norm_max is 0. A NaN or infinite norm_max gives
// kWitnessExponentUnknown, for which every non-zero code decodes to +infinity.
int16_t WitnessExponentFor(float norm_max);
inline constexpr int16_t kWitnessExponentUnknown = 32767;

// Smallest code with w(code) >= norm. Requires 0 <= norm <= w(255); NaN or more gives 255 (callers
// choose the exponent from the maximum, so this is only reached with an unknown exponent).
uint8_t EncodeWitness(float norm, int16_t exponent);

// w(code), rounded up.
float DecodeWitness(uint8_t code, int16_t exponent);

// Band of a channel: every band is a union of RoPE frequency pairs, so that a rotation does not
// move norm between bands. Channels past rotary_dim are banded by position. bands is 1 or 4.
int32_t WitnessBandOf(const CacheSpec& spec, int32_t bands, int32_t channel);
// The same for the layout's own bands (at least 1), for readers, which have no spec.
int32_t WitnessBandOf(const TileLayout& layout, int32_t channel);

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_WITNESS_H_
