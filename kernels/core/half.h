// Conversions between float and the 16- and 8-bit floating-point formats that caches use.
//
// fp16 is IEEE binary16; bf16 the upper half of binary32; e4m3 is the OCP FP8 E4M3FN format (no
// infinities, NaN = S.1111.111, largest finite 448). All widening conversions are exact. Narrowing
// conversions say their rounding. All need the default rounding mode and are then the same on each
// machine.
#ifndef CERTKV_KERNELS_CORE_HALF_H_
#define CERTKV_KERNELS_CORE_HALF_H_

#include <bit>
#include <cstdint>

namespace certkv {

// What an original 16-bit key or value is.
enum class OriginalDtype : uint8_t { kF16 = 1, kBf16 = 2 };

inline float Bf16ToFloat(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

// Exact; subnormals, infinities and NaN (payload kept) included.
float F16ToFloat(uint16_t bits);

// Round to nearest, ties to even; overflow gives infinity; NaN stays NaN (quiet).
uint16_t FloatToF16(float value);
uint16_t FloatToBf16(float value);

// The smallest fp16 that is >= value (toward +infinity). +infinity when value > 65504; NaN gives
// +infinity, because an unknown bound is infinite.
uint16_t FloatToF16RoundedUp(float value);
// The largest fp16 that is <= value (toward -infinity). NaN gives -infinity.
uint16_t FloatToF16RoundedDown(float value);

// e4m3: exact widening (0x7f and 0xff give NaN).
float E4m3ToFloat(uint8_t bits);
// Round to nearest, ties to even, saturating at +-448 (what engines do when they cast a cache).
// NaN gives NaN.
uint8_t FloatToE4m3(float value);

inline float OriginalToFloat(OriginalDtype dtype, uint16_t bits) {
  return dtype == OriginalDtype::kF16 ? F16ToFloat(bits) : Bf16ToFloat(bits);
}
inline uint16_t FloatToOriginal(OriginalDtype dtype, float value) {
  return dtype == OriginalDtype::kF16 ? FloatToF16(value) : FloatToBf16(value);
}
// Largest magnitude, as bits, of a key in an affine format, whose zeros are fp16: 65504, of BF16
// 65280, as the next is 65536.
inline uint16_t AffineKeyLimit(OriginalDtype dtype) {
  return dtype == OriginalDtype::kF16 ? 0x7bff : 0x477f;
}
// True when the 16 bits are neither an infinity nor a NaN.
inline bool IsFiniteOriginal(OriginalDtype dtype, uint16_t bits) {
  const uint16_t exponent = dtype == OriginalDtype::kF16 ? 0x7c00 : 0x7f80;
  return (bits & exponent) != exponent;
}

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_HALF_H_
