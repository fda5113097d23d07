// How far the attention output can be from the exact one (docs/bounds.md, section 4).
//
//   ||o - o^||_2 <= sum_t p^_t eta_t  +  2 TV* R_v  +  rounding        (after arXiv 2605.20868)
//
//   eta_t     value_error_bound, >= ||v_t - v^_t||_2; 0 for values read from originals
//   R_v       value_radius, >= ||v_t - v_0||_2 for EVERY token of the read and ONE centre v_0
//   rounding  what the kernel's own arithmetic adds to o^
//
// The centre is the origin: R_v bounds ||v_t||. A radius around a centre of each block, with the
// maximum taken over blocks, would be unsound: two blocks far apart can both have a small radius,
// while the key term moves mass between them.
//
// Units: value units. Rounding: up. Errors: none; NaN, negative input, 0 * infinity or spans of
// different lengths give +infinity. Threads: pure functions. Nothing is allocated.
#ifndef CERTKV_KERNELS_BOUNDS_OUTPUT_BOUND_H_
#define CERTKV_KERNELS_BOUNDS_OUTPUT_BOUND_H_

#include <cstdint>

#include "absl/types/span.h"

namespace certkv {

// sum m eta / sum m, over blocks: m any common scale, eta the maximum of the block. A block of mass
// 0 counts only when its eta is infinite (unknown).
double ValueTerm(absl::Span<const double> block_mass, absl::Span<const double> value_error_bound);

struct OutputBoundTerms {
  double value_term = 0;     // sum p^ eta
  double worst_case_tv = 1;  // of the served distribution; with skipping, MixWithSkipped
  double value_radius = 0;   // R_v, origin
  double rounding_term = 0;
};

// value_term + 2 worst_case_tv value_radius + rounding_term.
double OutputErrorBound(const OutputBoundTerms& terms);

// Rounding of a weighted sum of vectors in float: `rounding_count` roundings in sequence for each
// element (products, additions, and the roundings of the weights) lose at most
// FloatRoundingFactor(rounding_count) * sum_t p^_t ||v^_t||_2 in norm, and the sum is at most
// `decoded_radius` >= max ||v^_t||_2.
double OutputRoundingTerm(int64_t rounding_count, double decoded_radius);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_OUTPUT_BOUND_H_
