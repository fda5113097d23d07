// Keys in one signed byte per channel with subtractive dither: the definition (docs/bounds.md,
// section 10). Nothing stores them.
//
//   code = rint((key - zero) / scale + u),   decoded = zero + (code - u) scale
//
// where u is DitherOf the place: so decoded - key, in steps, is uniform in [-1/2, 1/2] and
// independent of the key, when no code is clipped.
#ifndef CERTKV_KERNELS_REFERENCE_DITHER_KEY_H_
#define CERTKV_KERNELS_REFERENCE_DITHER_KEY_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/bounds/dither.h"

namespace certkv::reference {

inline constexpr int32_t kDitherCodeMax = 127;

// A zero further than this many steps from 0 would make arithmetic count.
inline constexpr double kDitherZeroStepsMax = 0x1p24;

// All spans have one size, [d]. False, and `codes` says nothing, when a code would have to be
// clipped, a key is not finite, a scale is not above 0 or a zero is too far: such a key has no
// dithered code.
bool QuantizeDitheredKey(absl::Span<const float> key, absl::Span<const float> zero,
                         absl::Span<const float> scale, const DitherPlace& place,
                         absl::Span<int8_t> codes);

void DecodeDitheredKey(absl::Span<const int8_t> codes, absl::Span<const float> zero,
                       absl::Span<const float> scale, const DitherPlace& place,
                       absl::Span<double> key);

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_DITHER_KEY_H_
