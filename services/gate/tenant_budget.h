// The budget that all requests of one tenant share: how much their sums of worst_case_tv may grow
// together in one window of time (policy: tenant_budget, tenant_window).
//
// A request's Budget takes from here what it commits, in the same units of 2^-40, and gives back
// what a returned slice did not spend. Exact reads and what was served without a slice are charged
// even beyond the limit: they have happened.
//
// Invariants (tenant_budget_test breaks each):
//   1. what Take grants in one window, less what is given back, never exceeds the limit in force;
//   2. what is given back to another window than it was taken from is ignored: a window never has
//      more than its limit;
//   3. committed never overflows.
//
// Threads: all methods are safe. Lock order: a request's lock before this one.
#ifndef CERTKV_SERVICES_GATE_TENANT_BUDGET_H_
#define CERTKV_SERVICES_GATE_TENANT_BUDGET_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace certkv::gate {

class TenantBudget {
 public:
  // `limit` in [0, kBudgetMax]; 0 = none.
  explicit TenantBudget(double limit);

  struct Grant {
    int64_t units = 0;
    int64_t window = 0;  // for GiveBack
  };
  // Up to `units`, but nothing when less than `units_min` are left.
  Grant Take(int64_t units, int64_t units_min);
  void GiveBack(const Grant& grant);
  // What has happened, whether it fits or not.
  void Charge(int64_t units);

  // A new window: what was taken before counts no more.
  void BeginWindow();
  void SetLimit(double limit);

  double limit() const;      // 0 = none
  double committed() const;  // in this window
  int64_t left_units() const;

 private:
  int64_t LeftUnits() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  int64_t limit_units_ ABSL_GUARDED_BY(mutex_);
  int64_t committed_units_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t window_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_TENANT_BUDGET_H_
