// Keys with subtractive dither (docs/bounds.md, section 10): a half-width that holds but for a
// small probability, from the scales alone, and smaller than ScaleHalfWidth by about sqrt(d).
//
// Keys of format K8D are stored with it. Whoever uses the half-width charges its
// failure_probability (RiskMode::kUnion); without a right to do so, the deterministic bound of K8
// (ScaleHalfWidth) holds for such keys too.
//
// Threads: pure functions.
#ifndef CERTKV_KERNELS_BOUNDS_DITHER_H_
#define CERTKV_KERNELS_BOUNDS_DITHER_H_

#include <array>
#include <cstdint>

#include "absl/types/span.h"

namespace certkv {

// Philox4x32-10: four words from a counter and a key, without state (Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

// Where a dither is added: the generator's key and counter. The secret is the cache's; the tag
// names block, layer, KV head and tile (kernels/core/block_key.h). Two places never have the same
// counter.
struct DitherPlace {
  uint64_t secret = 0;        // 64 random bits
  uint64_t identity_tag = 0;  // of the tile
  int32_t token = 0;          // of the tile, [0, 2^16)
};

// The dither of channels [0, u.size()) in units of the step: odd multiples of 2^-25 in (-1/2, 1/2),
// exact in float. At most 2^16 channels.
void DitherOf(const DitherPlace& place, absl::Span<float> u);
// The same of one channel, in [0, 2^16).
float DitherAt(const DitherPlace& place, int32_t channel);

// 32 bits that say with which secret a tile was made: in its header, so that no reader takes off
// another dither than was added. Of the same generator, and tells nothing of the dither.
uint32_t DitherCheck(uint64_t secret, uint64_t identity_tag);

// Bounds the logit errors of all of `token_count` tokens at once, but for probability
// `failure_probability`, in units of s sqrt(sum q_i^2 scale_i^2): sqrt(2 ln(2 N / delta) / 12),
// rounded up. +infinity for an unknown or impossible argument.
double DitherFactor(int64_t token_count, double failure_probability);

// The part of the half-width that pays for the lattice of the dither, in units of
// s sum |q_i| scale_i: 2^-24 steps; and for codes and keys in double, below 2^-28 steps, with room
// for a float kernel.
inline constexpr double kDitherLattice = 0x1p-13;

// What a read shares.
struct DitheredRead {
  double logit_scale = 0;          // s
  int64_t token_count = 0;         // N, >= 1: all that the read bounds by this
  double failure_probability = 0;  // delta of the read, in (0, 1)
};

// s sqrt(sum q_i^2 scale_i^2) DitherFactor + s sum |q_i| scale_i kDitherLattice, nats, rounded up:
// bounds the logit error of every of N such tokens at once, but for delta, when `query` does not
// depend on their dither and no code was clipped.
// Unknown input, a delta outside (0, 1): +infinity.
double DitherHalfWidth(absl::Span<const float> query,          // [d]
                       absl::Span<const float> channel_scale,  // [d], step, >= 0
                       const DitheredRead& read);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_DITHER_H_
