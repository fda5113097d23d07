// Counts where a certificate is false, and how much larger than the truth it is.
//
// Everything is compared with attention over the ORIGINALS in double. The same tally runs in the
// conformance suite, in the bound test and against the canaries, so what finds no violation there
// is known to find a broken bound.
#ifndef CERTKV_TESTS_CONFORMANCE_BOUND_TALLY_H_
#define CERTKV_TESTS_CONFORMANCE_BOUND_TALLY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops/finish_certificate.h"
#include "tests/conformance/exact_attention.h"
#include "tests/conformance/sequence_case.h"

namespace certkv::conformance {

struct BoundTally {
  int64_t cells = 0;  // (token, head) pairs
  int64_t reads = 0;  // (query, head) pairs
  // Tokens whose logit error exceeds the half-width of their atom; of the token with the atom's
  // largest logit, where one is clearly that, its own.
  int64_t half_width_violations = 0;
  // Atoms whose reported log-sum-exp or largest logit isn't within half-width of the exact one.
  int64_t atom_violations = 0;
  int64_t tv_violations = 0;      // TV(p, p^) > worst_case_tv
  int64_t output_violations = 0;  // ||o - o^|| > output_error_bound
  int64_t own_tops = 0;           // atoms whose top token has a smaller half-width than the rest
  // Half-width over the largest logit error of the atom, for atoms read quantized.
  std::vector<float> tightness;
  double worst_tv = 0;        // largest TV(p, p^)
  double worst_tv_bound = 0;  // largest worst_case_tv

  int64_t violations() const {
    return half_width_violations + atom_violations + tv_violations + output_violations;
  }
  // Adds what another one has counted.
  void Merge(const BoundTally& other);
  double MedianTightness() const;  // 0 when no atom was quantized
  std::string Summary() const;
};

// Adds one head of one read. `exact` and `served` are AttendExactly over OriginalRows and
// ServedRows.
void AddHead(const AttendArgs& args, int g, const ReadResult& result,
             const Certificate& certificate, const HeadAttention& exact,
             const HeadAttention& served, BoundTally* tally);

// FinishCertificate for one head of a read, which must succeed.
Certificate FinishHead(Backend backend, const AttendArgs& args, int g, const ReadResult& result,
                       float tv_tolerance, FinishWorkspace* workspace);

// Runs the read on `backend`, finishes each head and adds it. `original` is OriginalRows(sequence),
// `served` ServedRows(sequence, args, 0) of a read without sources.
void AddRead(Backend backend, const SequenceCase& sequence, const SequenceRows& original,
             const SequenceRows& served, BoundTally* tally);
// The same with any sources.
void AddRead(Backend backend, const SequenceCase& sequence, BoundTally* tally);

}  // namespace certkv::conformance

#endif  // CERTKV_TESTS_CONFORMANCE_BOUND_TALLY_H_
