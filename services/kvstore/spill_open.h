// Opens the tier on disk that the config asks for.
#ifndef CERTKV_SERVICES_KVSTORE_SPILL_OPEN_H_
#define CERTKV_SERVICES_KVSTORE_SPILL_OPEN_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "services/common/clock.h"
#include "services/kvstore/config.h"
#include "services/kvstore/spill_tier.h"

namespace certkv::kvstore {

// Null when none is configured; else a tier whose index is still to be read, by a SpillLoader. A
// disk that fails or holds damaged files is logged (spill_off), and the tier says so in its
// statistics: the store goes on from memory. Waits for the disk, but not for as long as there are
// many blocks. Errors: FailedPrecondition [SPILL_FOREIGN | SPILL_FORMAT | SPILL_SPEC_MISMATCH |
// SPILL_IN_USE]: somebody has to decide, so the server does not start.
absl::StatusOr<std::unique_ptr<SpillTier>> OpenSpill(const KvStoreConfig& config,
                                                     const Clock* clock);

// Reads the index of a tier on a thread of its own, which takes seconds for each million blocks. It
// logs how far it is (spill_opening, once a second), and that the index is there (spill_open) or
// cannot be read (spill_off: the store goes on with what was).
// Threads: all calls are safe concurrently.
class SpillLoader {
 public:
  // `tier` and `clock` outlive it; `directory` is for the log.
  SpillLoader(SpillTier* tier, std::string directory, const Clock* clock);
  // Ends the reading where it is. Nothing is called afterwards.
  ~SpillLoader();
  SpillLoader(const SpillLoader&) = delete;
  SpillLoader& operator=(const SpillLoader&) = delete;

  // Calls `loaded` once the reading has ended by itself: now, or later on the loader's thread. In
  // the order in which they were given. They may not call the loader.
  void WhenLoaded(std::function<void()> loaded);
  // Blocks for at most `timeout`.
  void WaitUntilLoaded(absl::Duration timeout);

 private:
  void Run();
  bool Report(const SpillProgress& progress);  // false: stop

  SpillTier* const tier_;
  const std::string directory_;
  const Clock* const clock_;
  const int64_t start_ns_;
  int64_t said_ns_;  // of the thread
  std::atomic<bool> is_stopping_{false};
  absl::Mutex mutex_;
  bool is_loaded_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::function<void()>> when_loaded_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SPILL_OPEN_H_
