// Scales and zeros of rotated values, a byte each, for code that also runs on a GPU.
// docs/formats.md, section 3, is the document.
#ifndef CERTKV_KERNELS_CORE_VALUE_CODE_H_
#define CERTKV_KERNELS_CORE_VALUE_CODE_H_

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/core/host_device.h"

namespace certkv::code {

// A scale code, moved to the exponent and the upper mantissa bits of a float, is the scale times
// 2^-108. Scales are 0, 2^-21, 2 * 2^-21, ... 2^-18, and from there 8 per octave up to 7680.
inline constexpr int kValueScaleShift = 20;
inline constexpr float kValueScaleUnit = 0x1p108f;
// Half of the smallest scale: rows of a span that small are read as zeros, which errs less.
inline constexpr float kValueSpanMin = 0x1p-22f;
// A row takes at most this share of its codes' span, so that a zero in 1/256 of the span leaves no
// code to clip; the 2^-12 are for roundings.
inline constexpr float kValueSpanShare = 255.0f / 256 * (1 - 0x1p-12f);

CERTKV_HOST_DEVICE inline float DecodeValueScale(uint8_t scale_code) {
  return std::bit_cast<float>(uint32_t{scale_code} << kValueScaleShift) * kValueScaleUnit;
}

// v^ = (code - offset) * scale, exact in float; offsets lie in [-1/2, level_max + 1/2).
CERTKV_HOST_DEVICE inline float DecodeValueOffset(uint8_t zero_code, float level_max) {
  return static_cast<float>(zero_code) * ((level_max + 1) / 256) - 0.5f;
}

struct ValueCoding {
  uint8_t scale_code;
  uint8_t zero_code;
  float scale;
  float inverse;  // 1 / scale; 0 for scale 0
  float offset;
  bool is_encodable;
};

// For codes 0 .. level_max, 15 or 255, of a row whose elements and 0 lie in [min, max]. A row that
// can't be encoded is to be encoded as zeros.
CERTKV_HOST_DEVICE inline ValueCoding ChooseValueCoding(float min, float max, float level_max) {
  const float levels = level_max + 1;
  const float span = max - min;
  const float least = span * (1 / (levels * kValueSpanShare) / kValueScaleUnit);
  const uint32_t up = std::bit_cast<uint32_t>(least) + ((1u << kValueScaleShift) - 1);
  const uint32_t scale_code = up >> kValueScaleShift;
  ValueCoding coding{};
  coding.is_encodable = scale_code <= 255;
  if (coding.is_encodable && span > kValueSpanMin) {
    coding.scale_code = static_cast<uint8_t>(scale_code);
    coding.scale = DecodeValueScale(coding.scale_code);
    coding.inverse = 1 / coding.scale;
  }
  // The middle of the row at the middle of the codes. Rows of zeros get 128.
  const float middle = coding.is_encodable ? min + max : 0.0f;
  const float zero = (levels - middle * coding.inverse) * (128 / levels);
  coding.zero_code = static_cast<uint8_t>(rintf(fminf(zero, 255.0f)));
  coding.offset = DecodeValueOffset(coding.zero_code, level_max);
  return coding;
}

// What is rounded to the nearest integer, ties to even: the code. In [0, level_max] then.
CERTKV_HOST_DEVICE inline float ValueLevel(const ValueCoding& coding, float y) {
  return y * coding.inverse + coding.offset;
}

}  // namespace certkv::code

#endif  // CERTKV_KERNELS_CORE_VALUE_CODE_H_
