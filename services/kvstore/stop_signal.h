// StopSignal: what a thread that looks at something again and again waits for meanwhile.
#ifndef CERTKV_SERVICES_KVSTORE_STOP_SIGNAL_H_
#define CERTKV_SERVICES_KVSTORE_STOP_SIGNAL_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace certkv::kvstore {

// Threads: all methods are safe.
class StopSignal {
 public:
  void Set() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    is_set_ = true;
  }
  // True at once when it is set; false after `pause`.
  bool WaitFor(absl::Duration pause) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(absl::Condition(&is_set_), pause);
  }

 private:
  absl::Mutex mutex_;
  bool is_set_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_STOP_SIGNAL_H_
