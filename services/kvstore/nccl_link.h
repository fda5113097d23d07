// NcclLink: a channel with the thread that uses it.
#ifndef CERTKV_SERVICES_KVSTORE_NCCL_LINK_H_
#define CERTKV_SERVICES_KVSTORE_NCCL_LINK_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "services/kvstore/nccl_channel.h"
#include "services/kvstore/stop_signal.h"

namespace certkv::kvstore {

// It begins with `begin`, then does what it is given, one after the other, until that fails,
// nothing comes for the idle time, or it is stopped. All of NCCL happens on its thread: what hangs
// there despite its deadlines keeps nobody else.
//
// Invariants:
//  1. Each work is done or refused, once.
// Threads: all methods are safe, but for the destructor, which is not called on the link's thread.
class NcclLink {
 public:
  using Begin = std::function<absl::StatusOr<std::unique_ptr<NcclChannel>>(StopSignal* stop)>;
  struct Work {
    std::function<absl::Status(NcclChannel* channel)> run;  // an error: the link is over
    std::function<void(const absl::Status& why)> refuse;    // instead
  };

  // `over` is called once, on the link's thread, before anything is refused for that reason: with
  // the error, or OK when it was idle or stopped.
  NcclLink(Begin begin, int64_t idle_ms, std::function<void(const absl::Status& why)> over);
  // Stops it and waits.
  ~NcclLink();

  // May refuse on this thread.
  void Do(Work work) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends it soon. Doesn't block.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);
  // It does nothing more, and its thread has ended or is about to.
  bool IsOver() const ABSL_LOCKS_EXCLUDED(mutex_);
  // It has nothing to do.
  bool IsIdle() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run();
  absl::Status RunUntilOver();
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_stopped_ || !works_.empty();
  }

  const Begin begin_;
  const int64_t idle_ms_;
  const std::function<void(const absl::Status&)> over_;
  StopSignal stop_;
  mutable absl::Mutex mutex_;
  std::deque<Work> works_ ABSL_GUARDED_BY(mutex_);  // the first one runs
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_over_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_NCCL_LINK_H_
