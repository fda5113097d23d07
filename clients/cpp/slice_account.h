// SliceAccount: what of a policy lease's slice this process was served.
//
// The certifier keeps to the slice too, but its account dies with it; this one is where outputs
// are used, so it is the one that counts: an output is used only when Spend has taken it from the
// slice. So a slice is never overspent, whatever certifiers do, and it is known at any moment how
// much of it can be returned to gate.
//
// Invariant (slice_account_test breaks it): what Spend takes never exceeds the slice, and nothing
// is taken after Close.
//
// Amounts are units of 2^-40, a read's rounded up and the slice rounded down, as at gate. Threads:
// all calls are safe.
#ifndef CERTKV_CLIENTS_CPP_SLICE_ACCOUNT_H_
#define CERTKV_CLIENTS_CPP_SLICE_ACCOUNT_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/core/policy.h"

namespace certkv::client {

class SliceAccount {
 public:
  explicit SliceAccount(const PolicyLease& lease);

  // Takes the heads of one read, all or none, under `lease`, which has the account's lease id.
  // Nothing costs in kThreshold and in kObserve, and exact heads do only in kUnion, what their
  // reads had taken of failure_probability before they came to be exact.
  bool Spend(const PolicyLease& lease, absl::Span<const ReadCertificate> certificates);
  // kUnion: a read of so many heads of dithered keys ended in an error, after each may have taken
  // its share. Takes those, or all that is left.
  void SpendFailed(const PolicyLease& lease, int64_t head_count);
  // Nothing can be spent from now on. Returns what was: exact, a multiple of 2^-40.
  double Close();

  int64_t lease_id() const { return lease_id_; }
  // Is there something that could be returned?
  bool has_slice() const { return slice_units_ > 0; }

 private:
  const int64_t lease_id_;
  const int64_t slice_units_;
  absl::Mutex mutex_;
  int64_t spent_units_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_SLICE_ACCOUNT_H_
