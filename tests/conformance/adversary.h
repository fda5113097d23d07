// Queries for which a certificate must use all of its width, and certificates that are broken on
// purpose. What the tally doesn't find in the latter, it can't vouch for in the former.
#ifndef CERTKV_TESTS_CONFORMANCE_ADVERSARY_H_
#define CERTKV_TESTS_CONFORMANCE_ADVERSARY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "tests/conformance/bound_tally.h"
#include "tests/conformance/sequence_case.h"

namespace certkv::conformance {

// Both give [G][d]; head g asks about token 5 g, which lies in a tile.
//
// Against the bound from scales: +-1 in the channels whose residual is at least `share` of its
// largest possible, 0 elsewhere, so that the logit error is at least `share` of the half-width.
// Affine formats.
std::vector<float> QueriesAgainstScales(SequenceCase* sequence, double share);
// Against the witness: along the residual, where Cauchy-Schwarz is an equality in every band.
std::vector<float> QueriesAgainstWitness(SequenceCase* sequence);
// The same half way towards the token's own key, so that its logit is the largest of its sub-block:
// its error is .7 of its half-width.
std::vector<float> QueriesAgainstTopTokens(SequenceCase* sequence);

// A sequence of random shape for a scan of coarse codes (affine formats): keys lie at the end of
// their coarse step where the query is positive in their channel and at its beginning where it is
// negative, so that logits are 7/8 of the coarse half-width above what the scan computes.
// Sub-blocks lie at different levels: the lower ones are what a read skips.
std::unique_ptr<SequenceCase> SequenceAgainstCoarseScan(uint64_t seed, Backend quantizer);

// Which part of a certificate is made false, by a factor of 2.
enum class Canary : uint8_t { kNone, kHalfWidth, kTopHalfWidth, kWorstCaseTv, kOutputBound };

// AddRead with the part halved between Attend and the tally. A halved half-width also goes into
// the finishing step.
void AddReadWithCanary(Canary canary, Backend backend, const SequenceCase& sequence,
                       BoundTally* tally);

}  // namespace certkv::conformance

#endif  // CERTKV_TESTS_CONFORMANCE_ADVERSARY_H_
