// What the reads of one request add up to: sums over all of them and per layer and query head, how
// they ended, the worst of them, and events that an operator should see.
//
// Invariants (risk_account_test breaks each):
//   1. every recorded read is in the totals; sums are rounded up (RiskSums);
//   2. at most `heads_max` heads are kept apart, of each layer those from 0 to the largest seen; a
//      read of another is in the totals only, and the first such is an event;
//   3. at most kRiskEventsMax events are kept, the latest, and kWorstReadsMax reads, the worst.
//
// Memory: 64 bytes for each head kept, 40 for each worst read, 1.5 KiB of timeline.
//
// Threads: none; the owner locks.
#ifndef CERTKV_SERVICES_GATE_RISK_ACCOUNT_H_
#define CERTKV_SERVICES_GATE_RISK_ACCOUNT_H_

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/bounds/risk_ledger.h"
#include "kernels/core/policy.h"
#include "services/gate/risk_timeline.h"

namespace certkv::gate {

inline constexpr int32_t kRiskEventsMax = 16;
inline constexpr int32_t kRiskiestHeads = 16;
inline constexpr int32_t kWorstReadsMax = 16;

struct RiskEvent {
  int64_t time_ms = 0;
  std::string kind;     // UPPER_SNAKE
  std::string message;  // for people
};

struct HeadRisk {
  int32_t layer = 0;
  int32_t query_head = 0;
  RiskSums sums;
};

// One of the reads with the largest worst_case_tv before repair.
struct WorstRead {
  int32_t layer = 0;
  int32_t query_head = 0;
  int64_t query_position = 0;
  float first_worst_case_tv = 0;
  float worst_case_tv = 0;
  float output_error_bound = 0;
  Rung rung = Rung::kNone;
  Outcome outcome = Outcome::kObserved;
};

struct RiskTotals {
  RiskSums sums;  // of the reads that gave an output
  int64_t failed_read_count = 0;
  float max_first_worst_case_tv = 0;
  float max_output_error_bound = 0;
  int64_t reads_certified_first = 0;
  int64_t reads_by_rung[6] = {};  // index: Rung; [0] unused
  int64_t reads_exact = 0;
  int64_t reads_observed = 0;
  int64_t reads_outside_tolerance = 0;
  int64_t repair_bytes = 0;
  double failure_probability_sum = 0;  // rounded up
  int64_t canary_checks = 0;           // heads whose used output was compared
  int64_t canary_mismatches = 0;       // and was not what was served
};

class RiskAccount {
 public:
  explicit RiskAccount(int32_t heads_max) : heads_max_(heads_max) {}

  // Records a read that gave an output; `certificate` was validated (ReadCertificateFromProto).
  void Record(const ReadCertificate& certificate, bool outside_tolerance, int64_t now_ms);
  void RecordFailed(int64_t read_count);
  void RecordCanaries(int64_t checks, int64_t mismatches);
  void AddEvent(int64_t time_ms, absl::string_view kind, absl::string_view message);

  const RiskTotals& totals() const { return totals_; }
  const RiskTimeline& timeline() const { return timeline_; }
  // Orders requests: the largest worst_case_tv of a first read; 1 once an output was found to
  // differ from what was served.
  float score() const {
    return totals_.canary_mismatches > 0 ? 1.0f : totals_.max_first_worst_case_tv;
  }
  const std::deque<RiskEvent>& events() const { return events_; }
  // Of those, the latest by its time; -1: none.
  int64_t latest_event_ms() const { return latest_event_ms_; }
  // At most `count` heads, by largest worst_case_tv, then by sum, then by place.
  std::vector<HeadRisk> RiskiestHeads(int32_t count) const;
  // All heads that have reads, by layer and query head.
  std::vector<HeadRisk> AllHeads() const;
  // The worst first; of equal ones the earlier.
  std::vector<WorstRead> WorstReads() const;

 private:
  // RiskSums in half the bytes: there are many.
  struct HeadSums {
    float tv_max = 0;
    std::array<uint32_t, kTvBucketCount> histogram{};  // stay at their largest value
    double tv_sum = 0;                                 // rounded up
  };
  static HeadRisk ToHeadRisk(int32_t layer, int32_t query_head, const HeadSums& sums);
  // Null when it is one too many.
  HeadSums* HeadOf(int32_t layer, int32_t query_head);
  void KeepIfWorst(const ReadCertificate& certificate);

  int32_t heads_max_;
  bool head_limit_met_ = false;
  RiskTotals totals_;
  RiskTimeline timeline_;
  std::vector<std::vector<HeadSums>> layers_;  // [layer][query_head]
  int32_t head_count_ = 0;                     // of all layers
  std::vector<WorstRead> worst_;               // in no order
  size_t least_worst_ = 0;                     // its index, once there are kWorstReadsMax
  std::deque<RiskEvent> events_;
  int64_t latest_event_ms_ = -1;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_RISK_ACCOUNT_H_
