// Scale and zero of affine codes, for code that also runs on a GPU: single float operations, in the
// order of docs/formats.md, section 3.
#ifndef CERTKV_KERNELS_CORE_AFFINE_CODE_H_
#define CERTKV_KERNELS_CORE_AFFINE_CODE_H_

#include <cstdint>

#include "kernels/core/half_code.h"
#include "kernels/core/host_device.h"
#include "kernels/core/tile_layout.h"

namespace certkv::code {

struct AffineCoding {
  uint16_t scale;  // fp16 bits
  uint16_t zero;
  float zero_value;
  float inverse;
};

// L(n) of docs/formats.md.
CERTKV_HOST_DEVICE inline float LevelInverse(float level_max) {
  return static_cast<float>((1 + 0x1p-22) / level_max);
}

// For codes 0 .. level_max.
CERTKV_HOST_DEVICE inline AffineCoding ChooseCoding(float min, float max, float level_max) {
  AffineCoding coding;
  coding.zero = FloatToF16RoundedDown(min);
  if (coding.zero == 0x8000) coding.zero = 0;
  coding.zero_value = F16ToFloat(coding.zero);
  const float range = max - coding.zero_value;
  coding.scale = range > 0 ? FloatToF16RoundedUp(range * LevelInverse(level_max)) : uint16_t{0};
  coding.inverse = coding.scale != 0 ? 1.0f / F16ToFloat(coding.scale) : 0.0f;
  return coding;
}

// For keys that are read at that depth: where it has a centre, min and max are read as they are.
CERTKV_HOST_DEVICE inline AffineCoding ChooseKeyCoding(float min, float max,
                                                       const AffineDepth& depth) {
  const AffineCoding plain = ChooseCoding(min, max, 255);
  if (depth.centre == 0) return plain;
  const auto level_max = static_cast<float>(depth.mask);
  const float range = max - plain.zero_value;
  const float step = range * LevelInverse(level_max);
  const float margin = depth.centre * step;
  const AffineCoding moved = ChooseCoding(min - margin, max, level_max + depth.centre);
  const float product = (max - moved.zero_value) * LevelInverse(level_max + depth.centre);
  return product <= range * LevelInverse(level_max - depth.centre) ? moved : plain;
}

}  // namespace certkv::code

#endif  // CERTKV_KERNELS_CORE_AFFINE_CODE_H_
