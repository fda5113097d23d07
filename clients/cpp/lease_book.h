// LeaseBook: which block leases this process still holds, and which to renew now. It neither waits,
// nor reads a clock, nor calls; LeaseKeeper does, and so does the simulator.
#ifndef CERTKV_CLIENTS_CPP_LEASE_BOOK_H_
#define CERTKV_CLIENTS_CPP_LEASE_BOOK_H_

#include <cstdint>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/ids.h"

namespace certkv::client {

// When, by this process's clock, a lease of `duration_ms` ends that was asked for and answered at
// these times, and ends at `store_expire_ms` by the store's clock. Clocks that agree with that give
// the store's own time; others, which may be minutes apart, the earliest that it can end.
// `duration_ms` 0: the store's default, which is not known here; the store's time then.
int64_t LeaseExpireTime(int64_t asked_ms, int64_t answered_ms, int64_t duration_ms,
                        int64_t store_expire_ms);

// Invariants:
//  1. A lease is due for renewal after a third of its duration, so that two renewals may fail
//     before it expires.
//  2. A lease whose deadline has passed, or that the store no longer knows, is lost for ever:
//     Check() fails from then on, also when a later renewal would succeed.
// Times are Unix epoch in milliseconds. Threads: the caller serializes.
class LeaseBook {
 public:
  explicit LeaseBook(int64_t lease_duration_ms) : lease_duration_ms_(lease_duration_ms) {}

  void Add(LeaseId lease, int64_t expire_time_ms);
  void Remove(LeaseId lease) { leases_.erase(lease); }
  // Errors: FailedPrecondition [LEASE_LOST], with why.
  absl::Status Check(LeaseId lease, int64_t now_ms) const;
  // Leases to renew now, in the order of their ids. Those whose deadline has passed are lost.
  std::vector<LeaseId> Due(int64_t now_ms);
  // What the store said to a renewal: the new deadline or an error.
  void NoteRenewal(LeaseId lease, const absl::StatusOr<int64_t>& expire_time_ms, int64_t now_ms);

 private:
  struct State {
    int64_t expire_time_ms;
    int64_t renew_time_ms;
    absl::Status status;  // not OK: lost
  };

  const int64_t lease_duration_ms_;
  absl::btree_map<LeaseId, State> leases_;
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_LEASE_BOOK_H_
