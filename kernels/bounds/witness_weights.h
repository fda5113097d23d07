// Weights of the token witness for a model's queries (docs/bounds.md, section 2).
//
// Any weights are sound: q.r = sum_i (q_i / w_i)(w_i r_i). The half-width ||q / w|| ||w r|| is
// smallest where w_i^2 is |q_i| / |r_i|, and then sum_i |q_i r_i|. Queries of one head resemble
// each other, so weights from some of a model's queries fit the others.
#ifndef CERTKV_KERNELS_BOUNDS_WITNESS_WEIGHTS_H_
#define CERTKV_KERNELS_BOUNDS_WITNESS_WEIGHTS_H_

#include <vector>

#include "absl/types/span.h"

namespace certkv {

// Weights of one KV head's channels: (query_rms / residual_rms)^0.4, with a geometric mean of 1,
// within [1/8, 8]. The exponent that is best on average, .5, serves queries
// worse that are least like the others (docs/decisions/0067).
//
// query_rms: of the head's queries, each divided by its norm, [d]; residual_rms: of k - k^, in key
// units, [d]. Channels where one of them is 0, not finite or negative count as 1e-3 of the largest.
// Empty when the sizes differ or a span is empty.
std::vector<float> ChooseWitnessWeights(absl::Span<const double> query_rms,
                                        absl::Span<const double> residual_rms);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_WITNESS_WEIGHTS_H_
