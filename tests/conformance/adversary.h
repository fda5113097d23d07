// Queries for which a certificate must use all of its width, and certificates that are broken on
// purpose. What the tally doesn't find in the latter, it can't vouch for in the former.
#ifndef CERTKV_TESTS_CONFORMANCE_ADVERSARY_H_
#define CERTKV_TESTS_CONFORMANCE_ADVERSARY_H_

#include <cstdint>
#include <vector>

#include "tests/conformance/bound_tally.h"
#include "tests/conformance/sequence_case.h"

namespace certkv::conformance {

// [G][d]. Head g points along the largest residuals of token g * 5: +-1 in the channels whose
// residual is at least `share` of its largest possible, 0 elsewhere, so that the logit error is at
// least `share` of the half-width from scales. Affine formats.
std::vector<float> AdversarialQueries(SequenceCase* sequence, double share);

// Which part of a certificate is made false, by a factor of 2.
enum class Canary : uint8_t { kNone, kHalfWidth, kWorstCaseTv, kOutputBound };

// AddRead with the part halved between Attend and the tally. A halved half-width also goes into
// the finishing step.
void AddReadWithCanary(Canary canary, Backend backend, const SequenceCase& sequence,
                       BoundTally* tally);

}  // namespace certkv::conformance

#endif  // CERTKV_TESTS_CONFORMANCE_ADVERSARY_H_
