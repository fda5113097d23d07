// RemoteLookup: a lookup that goes on at other nodes where this one lacks the rest of a chain.
#ifndef CERTKV_SERVICES_KVSTORE_REMOTE_LOOKUP_H_
#define CERTKV_SERVICES_KVSTORE_REMOTE_LOOKUP_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/ids.h"
#include "services/kvstore/bulk_plane.h"
#include "services/kvstore/cluster_link.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// Invariants:
//  1. `done` is called once, with the blocks found here when the lookup began, or a longer prefix.
//  2. Of this lookup's leases only the one answered is held afterwards.
//  3. A lookup waits for other nodes no longer than link->wait_ms(); a pull that takes longer goes
//     on, so that the next lookup finds what came.
// Threads: Start is safe on any; `done` is called on any.
class RemoteLookup : public std::enable_shared_from_this<RemoteLookup> {
 public:
  struct Dependencies {
    StoreEngine* engine = nullptr;
    BulkPlane* bulk = nullptr;
    ClusterLink* link = nullptr;
    boost::asio::io_context* io_context = nullptr;  // of its timer
  };
  using Done = std::function<void(const absl::StatusOr<LeasedBlocks>&)>;

  // `local` is what TryLookupAndLease or LookupAndLease of `keys`, a chain from its beginning,
  // gave.
  static void Start(const Dependencies& with, SessionId session, std::vector<BlockKey> keys,
                    int64_t lease_duration_ms, LeasedBlocks local, Done done);

 private:
  RemoteLookup(const Dependencies& with, SessionId session, std::vector<BlockKey> keys,
               int64_t lease_duration_ms, LeasedBlocks local, Done done);

  void PullFromNext() ABSL_LOCKS_EXCLUDED(mutex_);
  void TakeResult(const std::string& source, const absl::StatusOr<PullResult>& pulled)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Looks again, where something came; has it all now?
  bool LookAgain() ABSL_LOCKS_EXCLUDED(mutex_);
  void Answer(std::atomic<int64_t> ClusterCounters::*count) ABSL_LOCKS_EXCLUDED(mutex_);

  const Dependencies with_;
  const SessionId session_;
  const std::vector<BlockKey> keys_;
  const int64_t lease_duration_ms_;
  const std::vector<std::string> sources_;
  size_t next_source_ = 0;  // of the pull that runs; one at a time
  bool has_failed_ = false;
  bool has_pulled_ = false;
  boost::asio::steady_timer timer_;
  absl::Mutex mutex_;
  LeasedBlocks found_ ABSL_GUARDED_BY(mutex_);
  Done done_ ABSL_GUARDED_BY(mutex_);  // null: it was called
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_REMOTE_LOOKUP_H_
