// One run of the demo: a trace through the store, the certifier and gate, each read checked against
// the truth.
#ifndef CERTKV_CLIENTS_CLI_DEMO_RUN_H_
#define CERTKV_CLIENTS_CLI_DEMO_RUN_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "clients/cli/trace.h"
#include "clients/cli/truth.h"
#include "clients/cpp/options.h"
#include "clients/cpp/request.h"
#include "kernels/core/policy.h"

namespace certkv::cli {

struct DemoRunOptions {
  client::Options services;
  std::string format_name;  // ParseFormat
  FormatChoice format;
  float tv_tolerance = 0.2f;
  float skip_tolerance = 0;  // the policy of the server has to allow it
};

// Share of reads per bucket, log-spaced, for the drawing.
struct DemoHistogram {
  static constexpr int kBuckets = 24;  // from 1e-4 to 1, then above the tolerance too
  int64_t bound[kBuckets] = {};
  int64_t truth[kBuckets] = {};
};

struct DemoRunResult {
  std::string format;
  float tv_tolerance = 0;
  float skip_tolerance = 0;
  int64_t tokens = 0;
  int64_t reads = 0;           // one per query head
  int64_t failed_reads = 0;    // ended in an error: no output
  double capacity = 0;         // bytes of the originals / bytes of the device tier, tail aside
  int64_t original_bytes = 0;  // of the whole blocks
  int64_t device_bytes = 0;
  int32_t blocks_shared = 0;  // that the second worker found
  int32_t blocks = 0;
  double coverage = 0;              // share certified at the first read
  std::map<Rung, int64_t> repairs;  // reads by highest rung, kNone left out
  int64_t exact_outputs = 0;
  int64_t repair_bytes = 0;
  int64_t read_tokens = 0;  // in full, summed over the reads
  int64_t skipped_tokens = 0;
  int64_t read_bytes = 0;
  double worst_bound = 0;            // largest worst_case_tv of a served read
  double worst_true_tv = 0;          // largest true total variation of a served read
  double worst_unrepaired_tv = 0;    // what it would have been without repair
  double worst_first_bound = 0;      // largest worst_case_tv of a first read
  double worst_error_share = 0;      // largest output error / its bound
  double mean_relative_error = 0;    // of the outputs
  double mean_bound_over_truth = 0;  // tightness: mean of worst_case_tv / true TV of first reads
  int64_t violations = 0;            // a truth above its bound
  int64_t uncertified_outputs = 0;   // an output neither certified within tolerance nor exact
  double read_nanoseconds = 0;       // in the certifier, per layer and position, all heads; median
  client::RiskSummary risk;
  DemoHistogram histogram;
};

// Called with done and total reads.
using Progress = std::function<void(int64_t, int64_t)>;

// Truths of all reads of a trace, computed once and used by every run.
class DemoTruth {
 public:
  explicit DemoTruth(const Trace& trace, const Progress& progress);
  const HeadTruth& Of(int32_t layer, int32_t query, int32_t head) const {
    return truths_[(static_cast<size_t>(layer) * query_count_ + query) * head_count_ + head];
  }

 private:
  int32_t query_count_;
  int32_t head_count_;
  std::vector<HeadTruth> truths_;
};

// Two workers put the sequence (the second shares the first one's blocks) and read all positions by
// turns. Errors: those of the services.
absl::StatusOr<DemoRunResult> RunDemo(const Trace& trace, const DemoTruth& truth,
                                      const DemoRunOptions& options, const Progress& progress);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_DEMO_RUN_H_
