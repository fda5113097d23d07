// One request at gate: its policy leases, its reporters, its budget and its risk.
//
// Leases. Whoever opens the request gets a lease; each reporter is answered with the lease it is to
// use. With a budget (all modes but kThreshold) a lease carries a slice that one reporter may
// spend, so two must not share one: an opener's lease goes to the reporter that first names it, and
// a reporter that names none gets a new lease with a slice of its own. A live lease is prolonged
// under its lease_id; an expired one is never prolonged, because its holder's account of the slice
// may be gone. A reporter may return a slice, saying what it spent of it; what it did not spend is
// given anew.
//
// Invariants (request_test breaks each):
//   1. `sequence` rises with every lease given or changed;
//   2. a batch is counted at most once, and no batch is left out: each reporter's batch numbers
//      are consecutive from 1;
//   3. a read outside every tolerance that was leased is counted as such and, unless the request
//      only observes, all leases from then on are kExact;
//   4. the request's risk_mode and budget are those of the policy when it was opened.
//
// Threads: none; the owner locks. Time is the caller's.
#ifndef CERTKV_SERVICES_GATE_REQUEST_H_
#define CERTKV_SERVICES_GATE_REQUEST_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/policy.h"
#include "services/gate/budget.h"
#include "services/gate/escalator.h"
#include "services/gate/ledger.h"
#include "services/gate/ledger_budget.h"
#include "services/gate/policy.h"
#include "services/gate/risk_account.h"
#include "services/gate/risk_index.h"
#include "services/gate/risk_list.h"
#include "services/gate/tenant_budget.h"

namespace certkv::gate {

// How long after its lease's end a read may still be reported and be judged by that lease.
inline constexpr int64_t kReportGraceMs = 60'000;
// Slices of one reporter that it may return; an older one stays spent.
inline constexpr int32_t kSlicesPerReporterMax = 8;
// Openers whose leases wait for their reporter; an older one's reporter gets a new lease.
inline constexpr int32_t kOpenerLeasesMax = 64;
// Largest worst_case_tv of a read from originals alone, as in the certifier: beyond it the bound is
// more than float arithmetic, and the read is no exact one.
inline constexpr float kExactTvMax = 0.0625f;

// "I will spend no more of this lease's slice."
struct ReturnedSlice {
  int64_t lease_id = 0;
  int64_t spent_units = 0;  // budget_units.h
};

// How far an output that was used lies from the exact one, computed again from originals, and how
// far it may.
struct CanaryResult {
  int32_t layer = 0;
  int32_t query_head = 0;
  int64_t query_position = 0;
  double error = 0;  // 2-norm, value units; NaN: the output held one
  double bound = 0;  // the certificate's and the recomputation's together
};

struct ReportBatch {
  int64_t reporter_id = 0;
  int64_t batch_number = 0;
  int64_t lease_id = 0;                            // that the reporter reads under; 0 = none
  absl::Span<const ReadCertificate> certificates;  // validated
  int64_t failed_read_count = 0;
  absl::Span<const ReturnedSlice> returned = {};  // no two of one lease
  bool is_last = false;  // the reporter serves no more: it is answered without a lease
  absl::Span<const CanaryResult> canaries = {};
  std::optional<bool> ledger_counted = {};  // what a shared ledger says: this batch is new
};

enum class DirectiveAction : uint8_t { kContinue = 1, kTighten = 2, kForceExact = 3, kRelease = 4 };

struct ReportAnswer {
  DirectiveAction action = DirectiveAction::kContinue;
  std::string explanation;           // for people
  std::optional<PolicyLease> lease;  // unless kRelease, or the batch was the last
  bool counted = false;              // false: the batch had been counted before
  int64_t outside_tolerance = 0;     // reads of this batch that no lease allowed
  int64_t canary_mismatches = 0;     // of this batch
};

struct Decision {
  bool accepted = false;
  Rung next_rung = Rung::kNone;  // when not accepted
  std::string explanation;
};

// A copy of everything GetRequestRisk tells.
struct RequestRisk {
  std::string request;
  std::string label;
  bool closed = false;
  RiskTotals totals;
  std::vector<HeadRisk> heads;  // the riskiest kRiskiestHeads, or all in their order
  std::vector<WorstRead> worst_reads;
  std::vector<HeadRule> head_rules;  // that leases given now have
  RiskTimeline timeline;             // with all heads only
  float score = 0;
  std::vector<RiskEvent> events;
  RiskMode risk_mode = RiskMode::kThreshold;
  Tolerances tolerances;
  ReadMode read_mode = ReadMode::kEnforce;
  std::string tenant;
  std::string model;
  double budget = 0;  // in what the mode spends; 0 in kThreshold
  double budget_committed = 0;
  double budget_left = 0;
  double loss_bound = 0;  // kAnytime: AnytimeLossBound of the sum so far
  bool forced_exact = false;
  bool counts_one_replica = false;  // of several that share a ledger, which has the budget
  int64_t open_time_ms = 0;
  int64_t update_time_ms = 0;
};

// Was the read computed from originals alone, and is its bound float arithmetic?
bool IsExactOutput(const ReadCertificate& certificate);
// And did it take nothing of a kUnion budget before it came to that?
bool IsExactByArithmetic(const ReadCertificate& certificate);
// FailedPrecondition [REQUEST_CLOSED].
absl::Status ClosedError(absl::string_view name);

class Request {
 public:
  struct Limits {
    int32_t heads_max = 16384;
    int32_t reporters_max = 64;
    bool shared = false;  // its account is in a shared ledger
  };
  // `tenant` may be null.
  Request(std::string name, std::string label, RequestTerms terms, const Policy& policy,
          const Limits& limits, int64_t now_ms, std::shared_ptr<TenantBudget> tenant = nullptr);

  // A lease for one more that opened the request.
  // Errors: FailedPrecondition [REQUEST_CLOSED]; [REQUEST_MISMATCH], opened before with other
  // tolerances or another read mode.
  absl::StatusOr<PolicyLease> Open(const RequestTerms& terms, const Policy& policy, int64_t now_ms);

  // Counts a batch and says how to go on. A closed request counts, too, and answers kRelease.
  // Errors: InvalidArgument [REPORT_INVALID]; FailedPrecondition [BATCH_GAP], a batch is missing;
  // ResourceExhausted [REPORTER_LIMIT]. Nothing was counted then.
  absl::StatusOr<ReportAnswer> Report(const ReportBatch& batch, const Policy& policy,
                                      int64_t now_ms);
  // The two parts of Report: what the batch says is counted, then the reporter gets its lease. With
  // a shared ledger a slice for it is put between them.
  absl::StatusOr<ReportAnswer> CountReport(const ReportBatch& batch, const Policy& policy,
                                           int64_t now_ms);
  void AnswerReport(const ReportBatch& batch, const Policy& policy, int64_t now_ms,
                    ReportAnswer* answer);
  // Errors of Report, but for a missing batch when a shared ledger has counted it.
  absl::Status CheckBatch(const ReportBatch& batch) const;

  // With a shared ledger only (request_ledger.cc).
  // What another replica may have leased is taken to be what this one leases now.
  void Adopt(const Policy& policy, int64_t now_ms);
  LedgerBatch BatchForLedger(const ReportBatch& batch, const Policy& policy) const;
  void SetLedgerState(const LedgerState& state, int64_t now_ms);
  // What to ask for before the reporter (0: an opener) is answered.
  std::optional<LedgerGrantAsk> WantedSlice(int64_t reporter_id, const Policy& policy,
                                            int64_t now_ms) const;
  void PutSlice(int64_t lease_id, int64_t units);
  // Decide would accept the read if its amount, in units, were put; 0: it would not, or does.
  int64_t WantedByDecide(const ReadCertificate& certificate, const Policy& policy,
                         int64_t now_ms) const;
  void PutDecided(int64_t units);
  // What a read takes from the budget; 0 without one.
  int64_t UnitsOf(const ReadCertificate& certificate) const;

  // Is this read accepted? If so it is counted (and must not be reported as well).
  // Errors: FailedPrecondition [REQUEST_CLOSED].
  absl::StatusOr<Decision> Decide(const ReadCertificate& certificate, const Policy& policy,
                                  int64_t now_ms);

  // Idempotent. `event_kind` and message are recorded when not empty.
  void Close(int64_t now_ms, absl::string_view event_kind = "", absl::string_view message = "");

  // With all heads it may be large: heads_max of them.
  // The exact heads are those of `now_ms`.
  RequestRisk Risk(const Policy& policy, bool all_heads = false, int64_t now_ms = 0) const;
  Standing standing() const;

  // These never change: they may be read without the owner's lock.
  bool MatchesTexts(const RiskFilter& filter) const;
  const std::string& name() const { return name_; }
  const RequestTerms& terms() const { return terms_; }
  RiskMode risk_mode() const { return risk_mode_; }
  const std::deque<RiskEvent>& events() const { return account_.events(); }
  bool closed() const { return closed_; }
  int64_t last_use_ms() const { return last_use_ms_; }
  // Moves on whenever Risk would answer something else.
  int64_t change_count() const { return change_count_; }

 private:
  struct HeldSlice {
    int64_t lease_id = 0;
    Slice slice;
  };
  struct Reporter {
    int64_t last_batch = 0;
    std::optional<PolicyLease> lease;
    std::vector<HeldSlice> slices;  // that it may return; the latest kSlicesPerReporterMax
    double used = 0;                // certified amounts reported since the slice was given
    bool pressed = false;           // a read was exact because the slice could not hold it
  };
  // Given by Open and not yet named by a reporter.
  struct OpenerLease {
    PolicyLease lease;
    Slice slice;
  };
  // What was leased, to judge reports by.
  struct Leased {
    PolicyLease terms;  // read_mode, tolerances and head_rules alone
    int64_t expire_time_ms;
  };

  // The policy for this request.
  const Policy& Resolve(const Policy& policy) const;
  // What leases say of layers and heads now.
  std::vector<HeadRule> RulesNow(const Policy& policy, ReadMode mode, int64_t now_ms) const;
  void CountRepair(const ReadCertificate& certificate, const Policy& policy, int64_t now_ms);
  // Shared conditions of the leases given now.
  ReadMode ModeNow(const Policy& policy) const;
  PolicyLease NewLease(const Policy& policy, int64_t now_ms, Slice* slice);
  // Puts `mode`, the policy's other terms and a fresh expiry into a lease.
  void RenewTerms(const Policy& policy, ReadMode mode, int64_t now_ms, PolicyLease* lease);
  void RememberLeased(const PolicyLease& lease, int64_t now_ms);
  // Hands the opener's lease of this id to the reporter, when it has none and there is one.
  void AdoptLease(int64_t lease_id, Reporter* reporter);
  static void Hold(int64_t lease_id, const Slice& slice, Reporter* reporter);
  void TakeBack(absl::Span<const ReturnedSlice> returned, int64_t now_ms, Reporter* reporter);
  // What a read takes from the budget.
  double AmountOf(const ReadCertificate& certificate) const;
  void UpdateReporterLease(const Policy& policy, int64_t now_ms, Reporter* reporter);
  // Why the read was not allowed; "" when some lease allowed it.
  std::string WhyOutside(const ReadCertificate& certificate) const;
  void Count(const ReadCertificate& certificate, const Policy& policy, int64_t now_ms,
             Reporter* reporter, ReportAnswer* answer);
  void CountCanaries(absl::Span<const CanaryResult> canaries, int64_t now_ms, ReportAnswer* answer);
  void CheckOverrun(const Policy& policy, int64_t now_ms);
  // Is the slice of the reporter's lease used, as far as reports tell?
  bool NeedsSlice(const Reporter& reporter) const;
  HeadTerms TermsForDecide(const Policy& policy, const ReadCertificate& certificate,
                           int64_t now_ms) const;
  // Does the budget allow the read? In words why not.
  std::string WhyNotAccepted(const ReadCertificate& certificate, const Tolerances& tolerances,
                             Rung* next_rung);
  void FillDirective(const Policy& policy, const std::optional<PolicyLease>& before,
                     const PolicyLease& lease, ReportAnswer* answer) const;
  void Touch(int64_t now_ms);

  const std::string name_;  // "requests/{request}"
  const std::string label_;
  const RequestTerms terms_;
  mutable std::optional<Policy> resolved_;  // of its version, when that has overrides
  const RiskMode risk_mode_;
  const double loss_limit_;           // kAnytime
  const double failure_probability_;  // kUnion, kAnytime
  const double slice_share_;
  const Limits limits_;
  const int64_t open_time_ms_;
  Escalator escalator_;
  std::unique_ptr<RequestBudget> budget_;  // all modes but kThreshold
  LedgerBudget* ledger_budget_ = nullptr;  // the same, with a shared ledger
  RiskAccount account_;
  std::deque<OpenerLease> opener_leases_;  // the latest kOpenerLeasesMax
  int64_t sequence_ = 0;
  bool closed_ = false;
  std::string forced_reason_;    // not empty: a read was outside tolerance, or the budget overrun
  bool exhausted_told_ = false;  // the event of an exhausted budget was recorded
  int64_t last_use_ms_;
  int64_t update_time_ms_;
  int64_t change_count_ = 1;
  std::vector<Leased> leased_;
  absl::flat_hash_map<int64_t, Reporter> reporters_;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_REQUEST_H_
