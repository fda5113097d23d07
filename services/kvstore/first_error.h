// FirstError: the first error by order of the work, whatever the order of the threads.
#ifndef CERTKV_SERVICES_KVSTORE_FIRST_ERROR_H_
#define CERTKV_SERVICES_KVSTORE_FIRST_ERROR_H_

#include <atomic>
#include <cstdint>
#include <limits>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

namespace certkv::kvstore {

// Threads: all calls are safe concurrently.
class FirstError {
 public:
  // False when an earlier piece of work has failed, so that this one need not be done.
  bool IsNeeded(int64_t index) const { return index < index_.load(std::memory_order_relaxed); }
  void Report(int64_t index, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (index >= index_.load(std::memory_order_relaxed)) return;
    index_.store(index, std::memory_order_relaxed);
    status_ = status;
  }
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  std::atomic<int64_t> index_{std::numeric_limits<int64_t>::max()};
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_FIRST_ERROR_H_
