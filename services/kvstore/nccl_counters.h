// What came and went by NCCL since the process started.
#ifndef CERTKV_SERVICES_KVSTORE_NCCL_COUNTERS_H_
#define CERTKV_SERVICES_KVSTORE_NCCL_COUNTERS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace certkv::kvstore {

// Threads: safe.
struct NcclCounters {
  std::atomic<int64_t> links{0};  // now, of both kinds
  std::atomic<int64_t> links_made{0};
  std::atomic<int64_t> blocks_received{0};
  std::atomic<int64_t> bytes_received{0};  // whether or not they were good
  std::atomic<int64_t> blocks_sent{0};
  std::atomic<int64_t> bytes_sent{0};

  // Times that NCCL was given up, by reason.
  void CountFailure(absl::string_view reason) ABSL_LOCKS_EXCLUDED(mutex) {
    absl::MutexLock lock(&mutex);
    ++failures[std::string(reason)];
  }
  std::map<std::string, int64_t> Failures() const ABSL_LOCKS_EXCLUDED(mutex) {
    absl::MutexLock lock(&mutex);
    return failures;
  }

  mutable absl::Mutex mutex;
  std::map<std::string, int64_t> failures ABSL_GUARDED_BY(mutex);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_NCCL_COUNTERS_H_
