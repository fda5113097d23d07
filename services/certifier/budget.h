// How much the sum of worst_case_tv (RiskMode::kCumulative and kAnytime) or of failure_probability
// (kUnion) may still grow under one policy lease.
//
// A head reserves its worst_case_tv before its output is served; the reservation stays spent when
// the read succeeds and is given back when it ends in an error, because then nothing was served.
// A head of dithered keys takes its share before it is read, and never gives it back: whether a
// read ends exact or in an error depends on the dither, and a share that came back in just those
// cases would let the others fail more often than they pay for (docs/bounds.md, section 10).
// Amounts are integers in units of 2^-40, a head's rounded up and the slice rounded down, so that
// the sum neither depends on the order of threads nor exceeds the slice by rounding.
//
// Invariant: 0 <= spent <= slice, at every moment and under any concurrency.
#ifndef CERTKV_SERVICES_CERTIFIER_BUDGET_H_
#define CERTKV_SERVICES_CERTIFIER_BUDGET_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/policy.h"

namespace certkv::certifier {

// Threads: all methods may be called concurrently; lock-free.
class BudgetAccount {
 public:
  // `slice` is finite and >= 0.
  explicit BudgetAccount(double slice);

  // Takes an amount from the slice. Returns the units taken (to be given back on failure), or -1
  // when they don't fit (a NaN never fits).
  int64_t Reserve(float amount);
  // Gives units of a reservation back: its head was not served.
  void Refund(int64_t units);
  // kUnion: takes FailureShare of the slice; 0 when it does not fit.
  float TakeShare();

  double spent() const;  // sum reserved, taken or served
  double slice() const { return slice_; }

 private:
  const double slice_;
  const int64_t slice_units_;
  std::atomic<int64_t> spent_units_{0};
};

// The accounts of all leases seen, so that two views under one lease spend one slice, and a view
// that is closed and opened again doesn't start anew. An account is forgotten when its lease has
// expired: no read may use it then.
// Threads: concurrent calls are safe.
class BudgetBook {
 public:
  // `account_limit` bounds memory; at least 1.
  explicit BudgetBook(int32_t account_limit) : account_limit_(account_limit) {}

  // The account of a valid lease; null in kThreshold.
  // Errors: InvalidArgument [POLICY_LEASE_INVALID], the lease id is known with another slice;
  //         ResourceExhausted [BUDGET_ACCOUNT_LIMIT].
  absl::StatusOr<std::shared_ptr<BudgetAccount>> AccountOf(const PolicyLease& lease, int64_t now_ms)
      ABSL_LOCKS_EXCLUDED(mutex_);
  int32_t size() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Entry {
    std::shared_ptr<BudgetAccount> account;
    int64_t expire_time_ms = 0;
  };
  const int32_t account_limit_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<int64_t, Entry> accounts_ ABSL_GUARDED_BY(mutex_);  // by lease id
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_BUDGET_H_
