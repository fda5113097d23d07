#include "kernels/core/witness.h"

#include "kernels/core/witness_code.h"

namespace certkv {

int16_t WitnessExponentFor(float norm_max) { return code::WitnessExponentFor(norm_max); }

float DecodeWitness(uint8_t code, int16_t exponent) { return code::DecodeWitness(code, exponent); }

uint8_t EncodeWitness(float norm, int16_t exponent) { return code::EncodeWitness(norm, exponent); }

int32_t WitnessBandOf(const CacheSpec& spec, int32_t bands, int32_t channel) {
  return code::WitnessBandOf(spec.head_dim, spec.rope_pairing, spec.rotary_dim, bands, channel);
}

int32_t WitnessBandOf(const TileLayout& layout, int32_t channel) {
  return code::WitnessBandOf(layout.head_dim, layout.rope_pairing, layout.rotary_dim,
                             layout.witness_bands, channel);
}

}  // namespace certkv
