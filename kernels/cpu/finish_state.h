// What the finishing step of the CPU backend asks of one instruction set. No inline functions
// (attend_state.h).
#ifndef CERTKV_KERNELS_CPU_FINISH_STATE_H_
#define CERTKV_KERNELS_CPU_FINISH_STATE_H_

#include <cstdint>

namespace certkv::cpu {

inline constexpr int kFinishChunk = 64;
inline constexpr float kFloatMax = 0x1.fffffep127f;

// Atoms of one query head. Arrays of outputs have room for `count` rounded up to kFinishChunk.
struct FinishMasses {
  int64_t count;
  const float* lse;
  const float* max_logit;
  const float* reported_half_width;
  // Out.
  float* mass;            // e^(lse - largest); 0 for an empty atom only
  float* half_width;      // reported + delta, rounded up
  float* chunk_mass_max;  // largest mass of each kFinishChunk atoms
  // Smallest and largest half-width of those; unspecified of a last chunk that isn't full.
  float* chunk_half_width_min;
  float* chunk_half_width_max;
  float largest_lse;
  float total;      // sum of masses, off by less than 2^-10 of itself
  float slack;      // sum of mass * delta, likewise
  float delta_max;  // at least the largest delta
  bool valid;       // false: an input is NaN, +infinity or negative, or all atoms are empty
};

// Defined with the attention kernels of each instruction set.
using FinishMassesFunction = void (*)(FinishMasses* masses);

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_FINISH_STATE_H_
