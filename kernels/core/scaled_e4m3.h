// What an FP8 cache with one scale per tensor holds, as originals: code * scale, exact or refused.
//
// A certificate is about the numbers that an engine's own attention would read. With e4m3 codes
// these are products, and an original that is a rounded product would be another number, by a
// difference that no bound knows of. So a scale is taken only when every product is a number of
// the 16-bit format.
#ifndef CERTKV_KERNELS_CORE_SCALED_E4M3_H_
#define CERTKV_KERNELS_CORE_SCALED_E4M3_H_

#include <array>
#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/core/half.h"

namespace certkv {

// The 16 bits of code * scale, by code. Codes 0x7f and 0xff, which are NaN, give NaN.
using E4m3Originals = std::array<uint16_t, 256>;

// Powers of two from 2^-15 to 2^7 (fp16) or 2^-124 to 2^119 (bf16) are always exact, and so is
// every scale that lies far enough inside and has at most 7 (bf16: 4) significant bits.
// Errors: InvalidArgument [FP8_SCALE_INVALID], the scale isn't finite and > 0;
//         InvalidArgument [FP8_SCALE_INEXACT], some product isn't a number of `dtype`; the message
//         names one, and the next power of two that is exact.
absl::StatusOr<E4m3Originals> ScaleE4m3(float scale, OriginalDtype dtype);

// The smallest power of two that is >= scale and exact for `dtype`, or the largest that is exact
// when there is none. `scale` is finite and > 0.
float ExactScaleAbove(float scale, OriginalDtype dtype);

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_SCALED_E4M3_H_
