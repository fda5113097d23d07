// LeaseKeeper: renews block leases in the background while their owners live.
#ifndef CERTKV_CLIENTS_CPP_LEASE_KEEPER_H_
#define CERTKV_CLIENTS_CPP_LEASE_KEEPER_H_

#include <cstdint>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "clients/cpp/lease_book.h"
#include "kernels/core/ids.h"

namespace certkv::client {

// What a LeaseBook says is done on a thread of its own.
//
// Invariant: no lock is held while the store is asked.
class LeaseKeeper {
 public:
  // Renews one lease and returns the new deadline (Unix epoch, ms). Called from the keeper's
  // thread.
  using Renew = std::function<absl::StatusOr<int64_t>(LeaseId)>;

  LeaseKeeper(int64_t lease_duration_ms, Renew renew);
  ~LeaseKeeper();  // stops the thread; releases nothing

  void Add(LeaseId lease, int64_t expire_time_ms);
  void Remove(LeaseId lease);
  // Errors: FailedPrecondition [LEASE_LOST], with why.
  absl::Status Check(LeaseId lease) const;

 private:
  void Run();
  void RenewDue();

  const int64_t lease_duration_ms_;
  const Renew renew_;
  mutable absl::Mutex mutex_;
  LeaseBook book_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_LEASE_KEEPER_H_
