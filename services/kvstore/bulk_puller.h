// BulkPuller: fetches chains of blocks from other stores into this one.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_PULLER_H_
#define CERTKV_SERVICES_KVSTORE_BULK_PULLER_H_

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/ids.h"
#include "services/common/clock.h"
#include "services/kvstore/bulk_config.h"
#include "services/kvstore/bulk_counters.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

class BulkDetour;
class BulkPool;
class PullJob;

// Invariants:
//  1. A block is published only after every checksum of it that is there was compared.
//  2. Bytes that were asked for and not received are at most config.in_flight_bytes, or a block a
//     connection.
//  3. What was received of a block is not asked for again when its connection is cut.
// Threads: Start and Stop are safe on any; all else runs on the io_context's threads.
class BulkPuller {
 public:
  struct Dependencies {
    StoreEngine* engine = nullptr;
    ComputePool* pool = nullptr;
    const Clock* clock = nullptr;
    BulkCounters* counters = nullptr;
    BulkDetour* detour = nullptr;  // null: all comes by TCP
  };
  BulkPuller(const BulkConfig& config, Dependencies dependencies,
             boost::asio::io_context* io_context);
  ~BulkPuller();

  // `done` is called once, on a thread of the io_context or on this one, while the blocks that were
  // pulled are still held: with what came of the chain before the first block that the peer does
  // not have, or with the error that ended the pull; what was published by then stays.
  // Errors: InvalidArgument [BULK_PEER_UNKNOWN]; ResourceExhausted [BULK_PULL_LIMIT], with a retry
  // delay; Unavailable [BULK_DISCONNECTED], after several attempts, [STORE_STOPPING]; DataLoss
  // [BULK_BLOCK_DAMAGED], twice; Cancelled [PULL_CANCELLED]; InvalidArgument [PARENT_MISMATCH];
  // those of StoreEngine::BeginPull, ClaimForPull, PublishPulled, of BulkClient, and of the peer.
  using Done = std::function<void(const absl::StatusOr<PullResult>&)>;
  void Start(PullRequest request, Done done);
  // Ends all pulls, soon; no more begin.
  void Stop();

 private:
  const BulkConfig config_;
  const Dependencies with_;
  boost::asio::io_context* const io_context_;
  const std::shared_ptr<BulkPool> connections_;
  absl::Mutex mutex_;
  std::vector<std::weak_ptr<PullJob>> jobs_ ABSL_GUARDED_BY(mutex_);
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_PULLER_H_
