// The arithmetic of half.h, which says what each function does, for code that also runs on a GPU.
#ifndef CERTKV_KERNELS_CORE_HALF_CODE_H_
#define CERTKV_KERNELS_CORE_HALF_CODE_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/core/half.h"
#include "kernels/core/host_device.h"

namespace certkv::code {

CERTKV_HOST_DEVICE inline float F16ToFloat(uint16_t bits) {
#if defined(__CUDA_ARCH__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  const uint32_t sign = uint32_t{bits} >> 15 << 31;
  const uint32_t exponent = (bits >> 10) & 0x1f;
  const uint32_t mantissa = bits & 0x3ff;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // exact
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
#endif
}

CERTKV_HOST_DEVICE inline uint16_t FloatToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00;   // NaN
  if (magnitude >= 0x477ff000) return sign | 0x7c00;  // >= 65520 rounds to infinity
  if (magnitude < 0x33000001) return sign;            // <= 2^-25 ties to even: zero
  if (magnitude < 0x38800000) {                       // subnormal result
    const uint32_t shift = 126 - (magnitude >> 23);   // 14 .. 24
    const uint32_t mantissa = (magnitude & 0x7fffff) | 0x800000;
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    const uint32_t half = 1u << (shift - 1);
    const uint32_t up = rest > half || (rest == half && (kept & 1)) ? 1 : 0;
    return static_cast<uint16_t>(sign | (kept + up));
  }
  const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
}

CERTKV_HOST_DEVICE inline uint16_t FloatToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

CERTKV_HOST_DEVICE inline uint16_t FloatToF16RoundedUp(float value) {
  if (std::isnan(value)) return 0x7c00;
  const uint16_t nearest = FloatToF16(value);
  if (F16ToFloat(nearest) >= value) return nearest;
  // One step toward +infinity: away from zero for a positive value, toward it for a negative one.
  // The nearest has the sign of `value`, and here it is not the infinity of that sign's side.
  return static_cast<uint16_t>(value > 0 ? nearest + 1 : nearest - 1);
}

CERTKV_HOST_DEVICE inline uint16_t FloatToF16RoundedDown(float value) {
  if (std::isnan(value)) return 0xfc00;
  return FloatToF16RoundedUp(-value) ^ 0x8000;
}

CERTKV_HOST_DEVICE inline float E4m3ToFloat(uint8_t bits) {
  const uint32_t exponent = (bits >> 3) & 0xf;
  const uint32_t mantissa = bits & 7;
  if (exponent == 0xf && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  const float magnitude =
      exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                    : std::ldexp(static_cast<float>(8 + mantissa), static_cast<int>(exponent) - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

CERTKV_HOST_DEVICE inline uint8_t FloatToE4m3(float value) {
  const auto sign = static_cast<uint8_t>(std::signbit(value) ? 0x80 : 0);
  if (std::isnan(value)) return sign | 0x7f;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448.0f) return sign | 0x7e;
  if (magnitude < 0x1p-6f) {  // subnormal result: steps of 2^-9; 8 steps is the first normal
    return sign | static_cast<uint8_t>(std::nearbyint(magnitude * 0x1p9f));
  }
  int exponent = 0;
  const float fraction = std::frexp(magnitude, &exponent);  // [0.5, 1)
  // 8 .. 16; 16 carries into the exponent in the sum below.
  const auto mantissa = static_cast<int>(std::nearbyint(fraction * 16.0f));
  return static_cast<uint8_t>(sign | ((exponent + 6) * 8 + (mantissa - 8)));
}

CERTKV_HOST_DEVICE inline float OriginalToFloat(OriginalDtype dtype, uint16_t bits) {
  return dtype == OriginalDtype::kF16 ? F16ToFloat(bits)
                                      : std::bit_cast<float>(uint32_t{bits} << 16);
}

}  // namespace certkv::code

#endif  // CERTKV_KERNELS_CORE_HALF_CODE_H_
