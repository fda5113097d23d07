#include "kernels/core/half.h"

#include "kernels/core/half_code.h"

namespace certkv {

float F16ToFloat(uint16_t bits) { return code::F16ToFloat(bits); }
uint16_t FloatToF16(float value) { return code::FloatToF16(value); }
uint16_t FloatToBf16(float value) { return code::FloatToBf16(value); }
uint16_t FloatToF16RoundedUp(float value) { return code::FloatToF16RoundedUp(value); }
uint16_t FloatToF16RoundedDown(float value) { return code::FloatToF16RoundedDown(value); }
float E4m3ToFloat(uint8_t bits) { return code::E4m3ToFloat(bits); }
uint8_t FloatToE4m3(float value) { return code::FloatToE4m3(value); }

}  // namespace certkv
