#include "kernels/core/witness.h"

#include <cmath>
#include <limits>

namespace certkv {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

}  // namespace

int16_t WitnessExponentFor(float norm_max) {
  if (!(norm_max <= std::numeric_limits<float>::max())) return kWitnessExponentUnknown;
  if (norm_max <= 0) return 0;
  int exponent = 0;
  const float fraction = std::frexp(norm_max, &exponent);  // norm_max = fraction * 2^exponent
  return static_cast<int16_t>(fraction == 0.5f ? exponent - 1 : exponent);
}

float DecodeWitness(uint8_t code, int16_t exponent) {
  if (code == 0) return 0.0f;
  if (exponent == kWitnessExponentUnknown) return kInfinity;
  const int steps = code - 255;  // in (-255, 0]
  if (steps % 16 == 0) return std::ldexp(1.0f, exponent + steps / 16);
  // exp2 in double is off by less than 2^-50 of the value; the next float above covers it.
  const double value = std::exp2(exponent + steps / 16.0);
  const auto rounded = static_cast<float>(value * (1 + 0x1p-40));
  return static_cast<double>(rounded) >= value ? rounded : std::nextafter(rounded, kInfinity);
}

uint8_t EncodeWitness(float norm, int16_t exponent) {
  if (norm == 0.0f) return 0;
  if (!(norm <= DecodeWitness(255, exponent))) return 255;
  int low = 1;
  int high = 255;  // w(high) >= norm
  while (low < high) {
    const int middle = (low + high) / 2;
    if (DecodeWitness(static_cast<uint8_t>(middle), exponent) >= norm) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return static_cast<uint8_t>(high);
}

int32_t WitnessBandOf(const CacheSpec& spec, int32_t bands, int32_t channel) {
  if (channel >= spec.rotary_dim) return channel * bands / spec.head_dim;
  const int32_t pair_count = spec.rotary_dim / 2;
  const int32_t pair = spec.rope_pairing == RopePairing::kHalfSplit ? channel % pair_count
                                                                     : channel / 2;
  return pair * bands / pair_count;
}

}  // namespace certkv
