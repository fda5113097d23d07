// What a gate has done since it started, over all requests: for metrics and the dashboard.
#ifndef CERTKV_SERVICES_GATE_COUNTERS_H_
#define CERTKV_SERVICES_GATE_COUNTERS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "kernels/bounds/risk_ledger.h"
#include "kernels/core/policy.h"
#include "services/common/metrics.h"

namespace certkv::gate {

// Threads: all members may be used concurrently; lock-free. Each number is exact; several read
// together are not a snapshot.
struct GateCounters {
  static constexpr int kFormatCount = 8;
  static constexpr int kRungCount = 6;  // index: Rung; [0] unused

  // Reads that gave an output, reported or decided here.
  std::atomic<int64_t> reads_by_format[kFormatCount][kFormatCount][kRungCount]{};
  std::atomic<int64_t> reads_by_outcome[4]{};  // index: Outcome; [0] unused
  std::atomic<int64_t> tv_histogram[kTvBucketCount]{};
  std::atomic<double> tv_sum{0};
  std::atomic<int64_t> failed_reads{0};
  std::atomic<int64_t> reads_outside_tolerance{0};
  std::atomic<int64_t> repair_bytes{0};
  std::atomic<int64_t> canary_checks{0};      // heads whose used output was compared
  std::atomic<int64_t> canary_mismatches{0};  // and was not what was served
  std::atomic<int64_t> batches{0};            // counted
  std::atomic<int64_t> batches_repeated{0};   // had been counted before
  std::atomic<int64_t> directives[5]{};       // index: DirectiveAction; [0] unused
  std::atomic<int64_t> decisions_accepted{0};
  std::atomic<int64_t> decisions_refused{0};
  std::atomic<int64_t> requests_opened{0};
  std::atomic<int64_t> requests_closed{0};   // by their client
  std::atomic<int64_t> requests_idle{0};     // closed for being idle
  std::atomic<int64_t> requests_refused{0};  // too many, of an unknown tenant, or terms not allowed
  std::atomic<int64_t> ledger_failures{0};   // steps in a shared ledger that were not answered
  LatencyHistogram batch_seconds;            // counting a batch

  // Adds a batch's certificates.
  void CountReads(absl::Span<const ReadCertificate> certificates);
};

// What CountReads has counted by one pair of formats.
struct FormatReads {
  int key_format = 0;
  int value_format = 0;
  std::array<int64_t, GateCounters::kRungCount> by_rung{};
  int64_t total() const;
};
// Pairs with reads, in the order of their numbers.
std::vector<FormatReads> ReadsByFormat(const GateCounters& counters);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_COUNTERS_H_
