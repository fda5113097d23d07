// What the reads of one request add up to: sums over all of them and per layer and query head, how
// they ended, and events that an operator should see.
//
// Invariants (risk_account_test breaks each):
//   1. every recorded read is in the totals; sums are rounded up (RiskSums);
//   2. at most `heads_max` heads are kept apart; a read of another is in the totals only, and the
//      first such is an event;
//   3. at most kRiskEventsMax events are kept, the latest.
//
// Threads: none; the owner locks.
#ifndef CERTKV_SERVICES_GATE_RISK_ACCOUNT_H_
#define CERTKV_SERVICES_GATE_RISK_ACCOUNT_H_

#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "kernels/bounds/risk_ledger.h"
#include "kernels/core/policy.h"

namespace certkv::gate {

inline constexpr int32_t kRiskEventsMax = 16;
inline constexpr int32_t kRiskiestHeads = 16;

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
};

class RiskAccount {
 public:
  explicit RiskAccount(int32_t heads_max) : heads_max_(heads_max) {}

  // Records a read that gave an output; `certificate` was validated (ReadCertificateFromProto).
  void Record(const ReadCertificate& certificate, bool outside_tolerance, int64_t now_ms);
  void RecordFailed(int64_t read_count);
  void AddEvent(int64_t time_ms, absl::string_view kind, absl::string_view message);

  const RiskTotals& totals() const { return totals_; }
  const std::deque<RiskEvent>& events() const { return events_; }
  // At most `count` heads, by largest worst_case_tv, then by sum, then by place.
  std::vector<HeadRisk> RiskiestHeads(int32_t count) const;

 private:
  int32_t heads_max_;
  bool head_limit_met_ = false;
  RiskTotals totals_;
  absl::flat_hash_map<std::pair<int32_t, int32_t>, RiskSums> heads_;  // by layer and query head
  std::deque<RiskEvent> events_;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_RISK_ACCOUNT_H_
