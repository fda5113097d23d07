// Counts where a progressive read's certificate is false, and how much it read. As in bound_tally.h
// everything is compared with attention over the ORIGINALS in double.
#ifndef CERTKV_TESTS_CONFORMANCE_PROGRESSIVE_TALLY_H_
#define CERTKV_TESTS_CONFORMANCE_PROGRESSIVE_TALLY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops/attend_progressive.h"
#include "kernels/ops/finish_certificate.h"
#include "tests/conformance/exact_attention.h"
#include "tests/conformance/sequence_case.h"

namespace certkv::conformance {

// Memory for the results of one progressive read.
class ProgressiveRead {
 public:
  // Every head skips within `skip_tolerance`.
  ProgressiveRead(const AttendArgs& args, float skip_tolerance);
  ProgressiveRead(const ProgressiveRead&) = delete;
  ProgressiveRead& operator=(const ProgressiveRead&) = delete;

  absl::Status TryRun(Backend backend);
  void Run(Backend backend);  // must succeed
  Certificate Finish(Backend backend, int g) const;

  ProgressiveArgs* mutable_args() { return &args_; }
  const AttendArgs& args() const { return args_.read; }
  const ProgressiveResult& view() const { return view_; }
  ProgressiveResult* mutable_view() { return &view_; }
  bool IsRead(int g, int64_t token) const;  // in full: token of the tail, or of a sub-block read
  absl::Span<const float> output(int g) const;

 private:
  ProgressiveArgs args_;
  std::vector<float> tolerances_;
  std::vector<float> memory_;
  std::vector<int32_t> counts_;
  std::vector<uint8_t> masks_;
  ProgressiveResult view_{};
};

struct ProgressiveTally {
  int64_t reads = 0;              // (query, head) pairs
  int64_t cells = 0;              // (token, head) pairs
  int64_t cells_read = 0;         // of those, in full
  int64_t stored_cells = 0;       // in tiles
  int64_t skip_violations = 0;    // sum_S e^l > e^skipped_lse
  int64_t share_violations = 0;   // p(S) > skipped_share
  int64_t kept_violations = 0;    // the atoms' masses are not within c of the exact ones
  int64_t radius_violations = 0;  // value_radius < ||v|| of a token of the range
  int64_t tv_violations = 0;
  int64_t output_violations = 0;
  // log of the bound of what was skipped less log of what it is, where something was.
  std::vector<float> looseness;
  double share_max = 0;    // largest skipped_share
  double worst_tv = 0;     // largest TV(p, p^)
  double worst_bound = 0;  // largest worst_case_tv

  int64_t violations() const {
    return skip_violations + share_violations + kept_violations + radius_violations +
           tv_violations + output_violations;
  }
  // Of the stored tokens, read in full.
  double ShareRead() const {
    const int64_t tail = cells - stored_cells;
    return stored_cells == 0
               ? 1
               : static_cast<double>(cells_read - tail) / static_cast<double>(stored_cells);
  }
  // Adds what another one has counted.
  void Merge(const ProgressiveTally& other);
  double MedianLooseness() const;
  std::string Summary() const;
};

// Adds the heads of a read that has run, finished by `backend`. `original` is
// OriginalRows(sequence), `served` ServedRows(sequence, args, 0).
void AddProgressiveRead(Backend backend, const ProgressiveRead& read, const SequenceRows& original,
                        const SequenceRows& served, ProgressiveTally* tally);

}  // namespace certkv::conformance

#endif  // CERTKV_TESTS_CONFORMANCE_PROGRESSIVE_TALLY_H_
