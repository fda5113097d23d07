// RequestRegistry: all requests of a gate, their policy, limits and end.
//
// State is in memory: after a restart no request is known, and reports are answered kRelease. What
// had been leased before runs out by itself; readers then read originals or fail.
//
// Invariants:
//   1. at most `request_limit` requests are kept; an open one is never dropped for another;
//   2. a closed request is kept for the retention time unless its place is needed, or more than
//      `retained_limit` are closed: the oldest go first, with the next sweep;
//   3. policy versions never fall.
//
// With a shared ledger (ledger.h) a request of another replica is known here from its first call on
// (Adopt), and OpenRequest, Adopt, Report, Decide and CloseRequest block until the ledger has
// answered or the calling thread's LedgerDeadline is over. No lock is held meanwhile.
//
// Threads: all methods are safe. Lock order: the registry's lock, an entry's, a tenant's. Nothing
// else blocks beyond these locks. Time comes from the clock.
#ifndef CERTKV_SERVICES_GATE_REQUEST_REGISTRY_H_
#define CERTKV_SERVICES_GATE_REQUEST_REGISTRY_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "services/common/clock.h"
#include "services/gate/config.h"
#include "services/gate/counters.h"
#include "services/gate/ledger.h"
#include "services/gate/policy.h"
#include "services/gate/policy_trial.h"
#include "services/gate/request.h"
#include "services/gate/risk_index.h"

namespace certkv::gate {

inline constexpr int32_t kLabelBytesMax = 256;
inline constexpr int32_t kTenantBytesMax = 64;
inline constexpr int32_t kModelBytesMax = 128;
inline constexpr int32_t kPageSizeMax = 1000;
inline constexpr int32_t kPageSizeDefault = 50;

struct RiskQuery {
  int32_t page_size = 0;        // [1, kPageSizeMax]; 0 = kPageSizeDefault
  std::string page_token = {};  // "" = from the start
  RiskOrder order = RiskOrder::kScore;
  RiskFilter filter = {};
};

struct RiskPage {
  std::vector<RequestRisk> risks;  // in the order asked for
  std::string next_page_token;     // "" on the last page
  int64_t request_count = 0;       // that match, on this page and after it
};

// Who changed the policy, when and to what.
struct PolicyChange {
  int64_t time_ms = 0;
  int64_t version = 0;
  std::string source;  // "start", "config file", or the peer of an RPC
  std::string before;  // DescribePolicy
  std::string after;
};
inline constexpr int32_t kPolicyChangesMax = 256;
inline constexpr int32_t kEventsPerListMax = 1000;

// An event and the request that it is of.
struct NamedEvent {
  std::string request;
  RiskEvent event;
};

// How many requests are kept.
struct RegistrySizes {
  int64_t open = 0;
  int64_t closed = 0;
};

// What a tenant has committed of its budget in this window.
struct TenantStanding {
  std::string tenant;
  double budget = 0;  // 0 = none
  double committed = 0;
};

// Is an update for version `asked` (0: any) one of the policy in force?
// Errors: Aborted [POLICY_VERSION].
absl::Status CheckPolicyVersion(int64_t asked, int64_t in_force);

class RequestRegistry {
 public:
  // `config` is valid; `clock` and `ledger` (null: none is shared) outlive the registry.
  RequestRegistry(const GateConfig& config, const Clock* clock, Ledger* ledger = nullptr);

  // A lease of a new request, or another lease of an open one.
  // Errors: InvalidArgument [REQUEST_ID_INVALID | REQUEST_LABEL_INVALID | TOLERANCE_INVALID |
  // TENANT_INVALID | MODEL_INVALID]; ResourceExhausted [REQUEST_LIMIT | TENANT_LIMIT]; as
  // Request::Open; of a shared ledger, as the next ones: Unavailable [LEDGER_UNAVAILABLE].
  absl::StatusOr<PolicyLease> OpenRequest(absl::string_view request_id, absl::string_view label,
                                          const RequestTerms& terms);

  // Makes a request that another replica opened known here. Nothing without a shared ledger.
  // Errors: NotFound [REQUEST_NOT_FOUND] and others of Find; ResourceExhausted [REQUEST_LIMIT].
  absl::Status Adopt(absl::string_view request);
  // Adopt, and what the shared ledger has of the request now. One that is known stays as it is when
  // the ledger can't be asked or does not know it any more.
  absl::Status Refresh(absl::string_view request);
  // `request` is "requests/{request}" here and below. An unknown request is answered kRelease.
  // Errors: InvalidArgument [REQUEST_NAME_INVALID]; as Request::Report.
  absl::StatusOr<ReportAnswer> Report(absl::string_view request, const ReportBatch& batch);
  // That answer.
  static ReportAnswer ReleaseAnswer(absl::string_view explanation);

  // Errors of the others: InvalidArgument [REQUEST_NAME_INVALID]; NotFound [REQUEST_NOT_FOUND],
  // never opened, forgotten after its retention, or gate was restarted.
  // A read that a shared ledger can't be asked about is not accepted; that is no error.
  absl::StatusOr<Decision> Decide(absl::string_view request, const ReadCertificate& certificate);
  absl::StatusOr<RequestRisk> CloseRequest(absl::string_view request);
  absl::StatusOr<RequestRisk> GetRisk(absl::string_view request, bool all_heads = false) const;
  // Is the request one of the tenants that `may_use` names?
  absl::Status CheckTenant(absl::string_view request,
                           const std::function<bool(absl::string_view)>& may_use) const;
  // The risk when it has changed since `*change_count` (0 = tell anyhow), which is moved on.
  absl::StatusOr<std::optional<RequestRisk>> GetRiskIfChanged(absl::string_view request,
                                                              int64_t* change_count) const;

  // A page of requests after the place that `page_token` names. Risks move while one pages: a
  // request that passes the token's place is told twice or not.
  // Errors: InvalidArgument [PAGE_SIZE_INVALID | PAGE_TOKEN_INVALID | FILTER_INVALID].
  absl::StatusOr<RiskPage> ListRisks(const RiskQuery& query) const;

  int64_t NowMs() const { return clock_->NowMs(); }
  Policy policy() const { return *SharedPolicy(); }
  // `policy.version` is the version it replaces, or 0 for whatever is there. `source` is for
  // PolicyChanges.
  // Errors: InvalidArgument [POLICY_INVALID]; Aborted [POLICY_VERSION].
  absl::StatusOr<Policy> UpdatePolicy(const Policy& policy, absl::string_view source = "");
  // Puts a valid policy in force as it is, with its version, unless that is lower.
  void AdoptPolicy(const Policy& policy, absl::string_view source);
  // The latest kPolicyChangesMax, the latest first; the policy at start is one.
  std::vector<PolicyChange> PolicyChanges() const;
  PolicyChange LatestPolicyChange() const;
  // What would `policy` have made of the reads reported lately?
  // Errors: InvalidArgument [POLICY_INVALID].
  absl::StatusOr<PolicyTrial> TryPolicy(const Policy& policy) const;

  // Events of all requests that are kept, at or after `since_ms`, the latest first; at most
  // `count`, in [1, kEventsPerListMax].
  std::vector<NamedEvent> ListEvents(int64_t since_ms, int32_t count) const;

  const GateCounters& counters() const { return counters_; }
  GateCounters* mutable_counters() { return &counters_; }
  RegistrySizes sizes() const;
  // By name. With a shared ledger those with requests here and a budget, as of RefreshTenants.
  std::vector<TenantStanding> Tenants() const;
  // Asks the shared ledger what tenants have committed at all replicas. Errors: as the ledger's.
  absl::Status RefreshTenants();

  // Closes idle requests and forgets closed ones. Called about once a second. Returns how many were
  // closed for being idle.
  int32_t Sweep();

 private:
  struct Entry {
    template <typename... Args>
    explicit Entry(Args&&... args) : request(std::forward<Args>(args)...) {}
    mutable absl::Mutex mutex;
    Request request ABSL_GUARDED_BY(mutex);
    RiskIndex::Cell own_cell;           // takes its place after that
    RiskIndex::Cell* cell = &own_cell;  // of this request, while the entry is in entries_
    bool retired = false;               // is in retired_; the registry's lock guards it
    // After every change of the request.
    void UpdateCell() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { cell->Set(request.standing()); }
  };
  struct Retired {
    std::string name;
    int64_t close_time_ms;
  };

  absl::StatusOr<PolicyLease> OpenLocked(const std::string& name, absl::string_view label,
                                         const RequestTerms& terms)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Errors: InvalidArgument of the names.
  static absl::Status CheckOpening(absl::string_view request_id, absl::string_view label,
                                   const RequestTerms& terms);
  // With a shared ledger (request_registry_ledger.cc).
  absl::StatusOr<PolicyLease> OpenInLedger(const std::string& name, absl::string_view label,
                                           const RequestTerms& terms);
  absl::StatusOr<std::shared_ptr<Entry>> FindOrAdopt(const std::string& name);
  absl::StatusOr<std::shared_ptr<Entry>> AddAdopted(const std::string& name,
                                                    const LedgerState& state);
  absl::StatusOr<ReportAnswer> ReportToLedger(Entry* entry, const ReportBatch& batch,
                                              const Policy& policy);
  absl::StatusOr<Decision> DecideInLedger(Entry* entry, const ReadCertificate& certificate,
                                          const Policy& policy);
  // Takes a slice for the reporter (0: an opener) from the ledger when it needs one.
  absl::Status FetchSlice(Entry* entry, int64_t reporter_id, const Policy& policy);
  void ForgetUnknown(const std::string& name);
  absl::StatusOr<std::shared_ptr<Entry>> Find(absl::string_view request) const;
  std::shared_ptr<const Policy> SharedPolicy() const;
  void Retire(const std::string& name, Entry* entry, int64_t now_ms)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null for "", the budget of no tenant.
  absl::StatusOr<std::shared_ptr<TenantBudget>> TenantOf(const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PutPolicy(const Policy& policy, absl::string_view source, int64_t now_ms)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RollTenantWindow(int64_t now_ms) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const GateConfig config_;
  const Clock* const clock_;
  Ledger* const ledger_;  // null: none is shared
  mutable absl::Mutex mutex_;
  std::shared_ptr<const Policy> policy_ ABSL_GUARDED_BY(mutex_);  // never null
  std::deque<PolicyChange> policy_changes_ ABSL_GUARDED_BY(mutex_);
  PolicyTrialSample sample_;
  GateCounters counters_;
  RiskIndex index_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, std::shared_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
  std::deque<Retired> retired_ ABSL_GUARDED_BY(mutex_);  // closed requests, in order of closing
  absl::flat_hash_map<std::string, std::shared_ptr<TenantBudget>> tenants_ ABSL_GUARDED_BY(mutex_);
  int64_t tenant_window_start_ms_ ABSL_GUARDED_BY(mutex_);
  // With a shared ledger, in the place of tenants_: what they have committed. At most tenant_limit.
  absl::flat_hash_map<std::string, double> ledger_tenants_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_REQUEST_REGISTRY_H_
