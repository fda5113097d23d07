// A ledger that several replicas of gate share: what each request has spent of its budget, which
// batches were counted, and what a tenant's requests commit together.
//
// Without one (the default) a request's Budget, TenantBudget and batch numbers, in this process,
// are the ledger. With one they are a mirror: every slice, counted batch and decided read is first
// entered there, in one atomic step, and only then acted on here. Nothing of it is done when the
// ledger can't be asked: no slice is given, no batch counted, no read accepted.
//
// The policy is there, too, once it was changed (service_policy.h). What a replica keeps for
// itself: the terms it leased, and the picture of a request (risk_account.h), which has the batches
// that were reported to this replica.
//
// Promises of every implementation (ledger_redis_test breaks each):
//   1. the slices of a request that were given and not returned, what was decided and what is
//      reported beyond them are within its limit, whichever replicas asked; a tenant's, in one
//      window, within the tenant's;
//   2. a batch of a reporter is counted once, and none is left out;
//   3. an answer that does not come in time is an error, and what it may have done is spent;
//   4. a request that was opened before the ledger was lost is given nothing more (is_void).
//
// Amounts are units of budget_units.h. Threads: all methods are safe. They block, at most until the
// LedgerDeadline of the calling thread; so no lock is held over a call.
#ifndef CERTKV_SERVICES_GATE_LEDGER_H_
#define CERTKV_SERVICES_GATE_LEDGER_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "services/gate/budget.h"

namespace certkv::gate {

// When the calls that this thread makes to a ledger have to be answered. Of several, the innermost
// holds. Without one a call fails: it would block for an unknown time.
class LedgerDeadline {
 public:
  using Time = std::chrono::steady_clock::time_point;
  explicit LedgerDeadline(Time time);
  ~LedgerDeadline();
  LedgerDeadline(const LedgerDeadline&) = delete;
  LedgerDeadline& operator=(const LedgerDeadline&) = delete;
  // What is left, 0 when it is over.
  static std::chrono::microseconds Left();

 private:
  const Time before_;
};

// What the ledger has of a request, as of one answer.
struct LedgerState {
  bool known = false;         // false: never opened, or forgotten; the rest says nothing
  bool closed = false;        //
  bool is_void = false;       // opened before the ledger was lost: nothing more is given
  bool overrun = false;       // more was reported as certified than all slices allow
  std::string forced_reason;  // "" unless all further reads are exact
  std::string record;         // of LedgerOpening; only Open and Load tell it
  int64_t limit_units = 0;
  int64_t left_units = 0;  // may be below 0
};

struct LedgerOpening {
  std::string record;       // kept as it is
  int64_t limit_units = 0;  // 0: the request has no budget
};

// What of a tenant's budget a step may take.
struct LedgerTenant {
  std::string name = {};    // "" = none
  int64_t limit_units = 0;  // kUnitsMax = none
  int64_t window_ms = 0;
};

struct LedgerGrantAsk {
  int64_t lease_id = 0;  // the slice may be returned under it
  int64_t units = 0;     // of a whole slice; less is given when less is left
  SliceSchedule schedule = SliceSchedule::kShare;  // kUnion: `units` is not looked at
};

struct LedgerReturn {
  int64_t lease_id = 0;
  int64_t spent_units = 0;
};

struct LedgerBatch {
  int64_t reporter_id = 0;
  int64_t batch_number = 0;
  int64_t read_count = 0;
  int64_t certified_units = 0;
  int64_t exact_units = 0;
  std::string forced_reason = {};  // not "": a read was outside every tolerance that was leased
  std::vector<LedgerReturn> returned = {};
};

struct LedgerCount {
  bool counted = false;        // now; else it had been before, or comes too early
  int64_t expected_batch = 0;  // not 0: a batch is missing before this one, which was not counted
  LedgerState state;
};

struct LedgerGrant {
  int64_t units = 0;  // 0: too little is left to be of use
  LedgerState state;
};

// The policy that replicas share; what `text` says is not looked at here.
struct LedgerPolicy {
  int64_t version = 0;      // 0: none
  std::string text = {};    //
  std::string source = {};  // who changed it, for people
};

class Ledger {
 public:
  virtual ~Ledger() = default;

  // Errors of all: Unavailable [LEDGER_UNAVAILABLE].
  // Opens the request unless it is known; then `opening` says nothing.
  virtual absl::StatusOr<LedgerState> Open(const std::string& request,
                                           const LedgerOpening& opening) = 0;
  virtual absl::StatusOr<LedgerState> Load(const std::string& request) = 0;
  virtual absl::StatusOr<LedgerGrant> Grant(const std::string& request, const LedgerTenant& tenant,
                                            const LedgerGrantAsk& ask) = 0;
  virtual absl::StatusOr<LedgerCount> Count(const std::string& request, const LedgerTenant& tenant,
                                            const LedgerBatch& batch) = 0;
  // Takes `units` of a read that gate accepts, or refuses: then `units` of the answer is 0. Of an
  // exact read nothing is refused.
  virtual absl::StatusOr<LedgerGrant> Decide(const std::string& request, const LedgerTenant& tenant,
                                             int64_t units, bool exact) = 0;
  virtual absl::StatusOr<LedgerState> Close(const std::string& request) = 0;
  // What each of these tenants has committed in its window, of so many milliseconds; 0 where none
  // is known. 2^62 and more: all, because the ledger was lost in this window.
  virtual absl::StatusOr<std::vector<int64_t>> TenantsCommitted(
      const std::vector<std::string>& tenants, int64_t window_ms) = 0;
  // Puts a policy in the place of one of a lower version; the answer is the one that is there then.
  virtual absl::StatusOr<LedgerPolicy> PutPolicy(const LedgerPolicy& policy) = 0;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_LEDGER_H_
