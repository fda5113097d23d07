// The arithmetic of witness.h, which says what each function does, for code that also runs on a
// GPU.
#ifndef CERTKV_KERNELS_CORE_WITNESS_CODE_H_
#define CERTKV_KERNELS_CORE_WITNESS_CODE_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/core/host_device.h"
#include "kernels/core/witness.h"

namespace certkv::code {

// 2^(i / kWitnessSteps), rounded up to float.
CERTKV_HOST_DEVICE constexpr float StepOfOctave(int i) {
  constexpr float kSteps[kWitnessSteps] = {
      0x1.000000p0f, 0x1.059b0ep0f, 0x1.0b5588p0f, 0x1.11301ep0f, 0x1.172b84p0f, 0x1.1d4874p0f,
      0x1.2387a8p0f, 0x1.29e9e0p0f, 0x1.306fe2p0f, 0x1.371a74p0f, 0x1.3dea66p0f, 0x1.44e088p0f,
      0x1.4bfdaep0f, 0x1.5342b6p0f, 0x1.5ab07ep0f, 0x1.6247ecp0f, 0x1.6a09e8p0f, 0x1.71f760p0f,
      0x1.7a1148p0f, 0x1.82589ap0f, 0x1.8ace56p0f, 0x1.93737cp0f, 0x1.9c491ap0f, 0x1.a5503cp0f,
      0x1.ae89fap0f, 0x1.b7f770p0f, 0x1.c199bep0f, 0x1.cb720ep0f, 0x1.d5818ep0f, 0x1.dfc974p0f,
      0x1.ea4afcp0f, 0x1.f50766p0f};
  return kSteps[i];
}

CERTKV_HOST_DEVICE inline int16_t WitnessExponentFor(float norm_max) {
  if (!(norm_max <= std::numeric_limits<float>::max())) return kWitnessExponentUnknown;
  if (norm_max <= 0) return 0;
  int exponent = 0;
  const float fraction = std::frexp(norm_max, &exponent);  // norm_max = fraction * 2^exponent
  return static_cast<int16_t>(fraction == 0.5f ? exponent - 1 : exponent);
}

CERTKV_HOST_DEVICE inline float DecodeWitness(uint8_t code, int16_t exponent) {
  if (code == 0) return 0.0f;
  const int steps = kWitnessSteps * exponent + code - 255;
  const int octave = steps >> kWitnessStepBits;  // floor
  if (octave > 127)
    return std::numeric_limits<float>::infinity();  // kWitnessExponentUnknown among them
  const float fraction = StepOfOctave(steps & (kWitnessSteps - 1));
  if (octave >= -126) {
    const auto shift = static_cast<uint32_t>(octave) << 23;  // modulo 2^32
    return std::bit_cast<float>(std::bit_cast<uint32_t>(fraction) + shift);
  }
  // Subnormal: the scaled value is exact in double, or 0 when it is under every float.
  const double value = std::ldexp(double{fraction}, octave);
  const auto nearest = static_cast<float>(value);
  return nearest >= value && nearest > 0
             ? nearest
             : std::nextafter(nearest, std::numeric_limits<float>::infinity());
}

// EncodeWitness of a norm in (0, DecodeWitness(255, exponent)].
CERTKV_HOST_DEVICE inline uint8_t SearchWitness(float norm, int16_t exponent) {
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

// The least step s of an octave with StepOfOctave(s) >= fraction, 32 when it is in the next octave;
// 1 <= fraction < 2.
CERTKV_HOST_DEVICE inline int StepAtLeast(float fraction) {
  // 2^(s/32) - 1 lies between its chord s/32 and the tangent at the octave's end, so steps of a
  // fraction f lie between 32 (f - 1) and 32 (f - 1) + 2.8.
  const float chord = (fraction - 1) * kWitnessSteps;
  int step = static_cast<int>(chord);
  while (step < kWitnessSteps && StepOfOctave(step) < fraction) ++step;
  return step;
}

// The least code whose decoded norm is at least `norm`, 255 when there is none.
CERTKV_HOST_DEVICE inline uint8_t EncodeWitness(float norm, int16_t exponent) {
  if (norm == 0.0f) return 0;
  if (!(norm <= DecodeWitness(255, exponent))) return 255;
  const uint32_t bits = std::bit_cast<uint32_t>(norm);
  const int octave = static_cast<int>(bits >> 23) - 127;
  // Under the least normal float, decoded norms are coarser than the steps.
  if (octave < -126) return SearchWitness(norm, exponent);
  const float fraction = std::bit_cast<float>((bits & 0x7fffffu) | 0x3f800000u);
  const int code = kWitnessSteps * (octave - exponent) + StepAtLeast(fraction) + 255;
  return code > 1 ? static_cast<uint8_t>(code) : 1;
}

CERTKV_HOST_DEVICE inline int32_t WitnessBandOf(int32_t head_dim, RopePairing pairing,
                                                int32_t rotary_dim, int32_t bands,
                                                int32_t channel) {
  if (channel >= rotary_dim) return channel * bands / head_dim;
  const int32_t pair_count = rotary_dim / 2;
  const int32_t pair = pairing == RopePairing::kHalfSplit ? channel % pair_count : channel / 2;
  return pair * bands / pair_count;
}

}  // namespace certkv::code

#endif  // CERTKV_KERNELS_CORE_WITNESS_CODE_H_
