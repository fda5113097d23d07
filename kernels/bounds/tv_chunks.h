// Chunks of kTvChunkAtoms atoms made ready for the bins of tv_points.cc: the place of each atom's
// bin and its moments, in loops that the compiler turns into vectors. Internal to tv_points.cc.
#ifndef CERTKV_KERNELS_BOUNDS_TV_CHUNKS_H_
#define CERTKV_KERNELS_BOUNDS_TV_CHUNKS_H_

#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/bounds/tv_points.h"

namespace certkv::bounds_internal {

// Half-widths as the bits of a float that is not smaller: in the order of the half-widths, with
// everything unbounded, negative or NaN at the top end. Adding 0 makes -0 a 0.
inline uint32_t BitsOf(float half_width) { return std::bit_cast<uint32_t>(half_width + 0.0f); }

inline uint32_t BitsOf(double half_width) {
  if (half_width < 0) return std::numeric_limits<uint32_t>::max();  // even if it rounds to 0
  const auto nearest = static_cast<float>(half_width);
  const uint32_t bits = BitsOf(nearest);
  return double{nearest} < half_width && half_width > 0 ? bits + 1 : bits;
}

// What the hot loop needs of kChunkAtoms atoms.
struct PlainChunk {
  alignas(64) uint32_t offsets[kTvChunkAtoms];    // of their bins, in bytes
  alignas(64) double moments[2 * kTvChunkAtoms];  // mass and mass * half-width, in turn
  uint32_t bits_min;
  uint32_t bits_max;
  bool plain;  // false: some atom is a token to keep, out of range or invalid
};

// Where the bin of a half-width in [kTvBinnedMin, kTvBinnedMax) lies.
inline uint32_t OffsetOf(uint32_t bits) {
  return ((bits >> kTvBinShift) - kTvBinsBefore) * kTvBinBytes;
}

// Loops of constant length without branches, which the compiler vectorizes.
template <typename Mass, typename HalfWidth>
[[gnu::always_inline]] inline void PrepareAtoms(const Mass* mass, const Mass* top,
                                                const HalfWidth* half_width, Mass token_mass_min,
                                                PlainChunk* chunk) {
  int32_t plain = 1;
  for (int32_t j = 0; j < kTvChunkAtoms; ++j) {
    const Mass m = mass[j];
    const HalfWidth c = half_width[j];
    plain &= static_cast<int32_t>(m >= 0) & static_cast<int32_t>(top[j] >= 0) &
             static_cast<int32_t>(top[j] <= token_mass_min) &
             static_cast<int32_t>(c >= kTvBinnedMin) & static_cast<int32_t>(c < kTvBinnedMax);
  }
  chunk->plain = plain != 0;
  if (!chunk->plain) return;
  // As int32: positive floats are in the order of their bits.
  int32_t bits_min = std::numeric_limits<int32_t>::max();
  int32_t bits_max = 0;
  for (int32_t j = 0; j < kTvChunkAtoms; ++j) {
    const uint32_t bits = BitsOf(half_width[j]);
    const double m = mass[j];
    chunk->offsets[j] = OffsetOf(bits);
    chunk->moments[2 * j] = m;
    chunk->moments[2 * j + 1] = m * std::bit_cast<float>(bits);
    const auto ordered = static_cast<int32_t>(bits);
    bits_min = ordered < bits_min ? ordered : bits_min;
    bits_max = ordered > bits_max ? ordered : bits_max;
  }
  chunk->bits_min = static_cast<uint32_t>(bits_min);
  chunk->bits_max = static_cast<uint32_t>(bits_max);
}

template <typename Mass, typename HalfWidth>
void PrepareChunk(const Mass* mass, const Mass* top, const HalfWidth* half_width,
                  Mass token_mass_min, PlainChunk* chunk) {
  PrepareAtoms(mass, top, half_width, token_mass_min, chunk);
}

#if defined(__x86_64__)
// The finishing step's type, with twice the lanes where the CPU has them. No FMA: same results.
[[gnu::target("avx2")]] inline void PrepareAvx2(const float* mass, const float* top,
                                                const float* half_width, float token_mass_min,
                                                PlainChunk* chunk) {
  PrepareAtoms(mass, top, half_width, token_mass_min, chunk);
}

template <>
inline void PrepareChunk(const float* mass, const float* top, const float* half_width,
                         float token_mass_min, PlainChunk* chunk) {
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return PrepareAvx2(mass, top, half_width, token_mass_min, chunk);
  PrepareAtoms(mass, top, half_width, token_mass_min, chunk);
}
#endif

// A chunk of which the caller knows that it is plain. Its moments are float: rounding_ of the bins
// pays for that.
struct KnownChunk {
  alignas(64) uint32_t offsets[kTvChunkAtoms];
  alignas(64) float moments[2 * kTvChunkAtoms];
};

[[gnu::always_inline]] inline void PairAtoms(const float* mass, const float* half_width,
                                             KnownChunk* chunk) {
  for (int32_t j = 0; j < kTvChunkAtoms; ++j) {
    chunk->offsets[j] = OffsetOf(std::bit_cast<uint32_t>(half_width[j]));
  }
  for (int32_t j = 0; j < kTvChunkAtoms; ++j) {
    chunk->moments[2 * j] = mass[j];
    chunk->moments[2 * j + 1] = mass[j] * half_width[j];
  }
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] inline void PairAvx2(const float* mass, const float* half_width,
                                             KnownChunk* chunk) {
  PairAtoms(mass, half_width, chunk);
}
#endif

inline void PairKnown(const float* mass, const float* half_width, KnownChunk* chunk) {
#if defined(__x86_64__)
  static const bool has_avx2 = __builtin_cpu_supports("avx2") != 0;
  if (has_avx2) return PairAvx2(mass, half_width, chunk);
#endif
  PairAtoms(mass, half_width, chunk);
}

}  // namespace certkv::bounds_internal

#endif  // CERTKV_KERNELS_BOUNDS_TV_CHUNKS_H_
