// Keys with subtractive dither (docs/bounds.md, section 10): a half-width that holds but for a
// small probability, from the scales alone, and smaller than ScaleHalfWidth by about sqrt(d).
//
// It is a type of its own: no number of the deterministic tier can be made of it or added to it by
// accident, and whoever uses it charges its failure_probability (RiskMode::kUnion).
//
// No format, read path or service uses it: the store has no dithered format.
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

// Where a dither is added. Two places never have the same counter.
struct DitherPlace {
  uint64_t request_key = 0;  // secret of the request, 64 random bits
  int32_t layer = 0;         // [0, 1024)
  int32_t kv_head = 0;       // [0, 8192)
  int64_t token = 0;         // [0, 2^32)
};

// The dither of channels [0, u.size()) in units of the step: odd multiples of 2^-25 in (-1/2, 1/2),
// exact in float. At most 2^16 channels.
void DitherOf(const DitherPlace& place, absl::Span<float> u);

// A bound on the logit errors of all tokens of one read at once, but for a probability.
class ProbableHalfWidth {
 public:
  ProbableHalfWidth(double half_width, double failure_probability)
      : half_width_(half_width), failure_probability_(failure_probability) {}
  // Nats, rounded up; +infinity when unknown.
  double half_width_nats() const { return half_width_; }
  // Of the whole read that it was made for, however many tokens.
  double failure_probability() const { return failure_probability_; }

 private:
  double half_width_;
  double failure_probability_;
};

// What a read shares.
struct DitheredRead {
  double logit_scale = 0;          // s
  int64_t token_count = 0;         // N, >= 1: all that the read bounds by this
  double failure_probability = 0;  // delta of the read, in (0, 1)
};

// sqrt(s^2 sum q_i^2 scale_i^2 / 12) sqrt(2 ln(2 N / delta)) + s sum |q_i| scale_i 2^-13, which
// bounds the logit error of every of N such tokens, but for delta, when `query` does not depend on
// their dither and no code was clipped. The last term pays for the lattice of the dither (2^-24
// steps) and for codes and keys in double (kernels/reference/dither_key.h, below 2^-28 steps), with
// room for a float kernel.
// Unknown input, a delta outside (0, 1): +infinity.
ProbableHalfWidth DitherHalfWidth(absl::Span<const float> query,          // [d]
                                  absl::Span<const float> channel_scale,  // [d], step, > 0
                                  const DitheredRead& read);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_DITHER_H_
