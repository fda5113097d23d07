// StreamWatchdog: cancels a synchronous stream whose peer doesn't answer in time, so that a stopped
// server is an error and not a hang.
#ifndef CERTKV_CLIENTS_CPP_STREAM_WATCHDOG_H_
#define CERTKV_CLIENTS_CPP_STREAM_WATCHDOG_H_

#include <grpcpp/client_context.h>

#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace certkv::client {

// One thread; guards one operation at a time.
class StreamWatchdog {
 public:
  StreamWatchdog() : thread_([this] { Run(); }) {}
  ~StreamWatchdog() {
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
    }
    thread_.join();
  }

  // While the Guard lives, `context` is cancelled once `timeout` has passed. `context` must outlive
  // the Guard.
  class Guard {
   public:
    Guard(StreamWatchdog& watchdog, grpc::ClientContext* context, absl::Duration timeout)
        : watchdog_(watchdog) {
      absl::MutexLock lock(&watchdog_.mutex_);
      watchdog_.context_ = context;
      watchdog_.deadline_ = absl::Now() + timeout;
      watchdog_.changed_ = true;
    }
    ~Guard() {
      absl::MutexLock lock(&watchdog_.mutex_);
      watchdog_.context_ = nullptr;
      watchdog_.deadline_ = absl::InfiniteFuture();
    }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    StreamWatchdog& watchdog_;
  };

 private:
  bool Woken() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || changed_; }

  void Run() {
    absl::MutexLock lock(&mutex_);
    while (!stopping_) {
      mutex_.AwaitWithDeadline(absl::Condition(this, &StreamWatchdog::Woken), deadline_);
      changed_ = false;
      if (context_ != nullptr && absl::Now() >= deadline_) {
        context_->TryCancel();  // doesn't block; the operation then returns false
        context_ = nullptr;
        deadline_ = absl::InfiniteFuture();
      }
    }
  }

  absl::Mutex mutex_;
  grpc::ClientContext* context_ ABSL_GUARDED_BY(mutex_) = nullptr;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool changed_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_STREAM_WATCHDOG_H_
