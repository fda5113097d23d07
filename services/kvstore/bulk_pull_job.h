// PullJob: one pull of BulkPuller.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_PULL_JOB_H_
#define CERTKV_SERVICES_KVSTORE_BULK_PULL_JOB_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "services/kvstore/bulk_client.h"
#include "services/kvstore/bulk_pool.h"
#include "services/kvstore/bulk_puller.h"

namespace certkv::kvstore {

// Two stages: blocks, which are published in the order of the chain as they come, then, for
// PullOrder::kOriginalsLater, the originals of those. In each, connections that are free take runs
// of blocks.
//
// Invariants:
//  1. Slots of a claim are published or given back, once.
//  2. A block that was published without originals is completed or abandoned before EndPull.
// Lock order: mutex_, then the engine's or the pool's.
class PullJob : public std::enable_shared_from_this<PullJob> {
 public:
  PullJob(const BulkConfig& config, const BulkPuller::Dependencies& with,
          std::shared_ptr<BulkPool> connections, PullRequest request, BulkPuller::Done done);
  ~PullJob();

  void Begin();
  // Ends the job with Unavailable [STORE_STOPPING]. On any thread.
  void Stop();

 private:
  // A block on its way.
  struct Item {
    size_t index = 0;  // of its key; in stage two of pending_
    BlockWrite write;
    BlockId id = BlockId::kNone;  // stage two
    BulkTarget target;
    bool was_damaged = false;
    bool is_good = false;  // received, and all checksums are right
  };
  using Run = std::vector<Item>;
  using ClientPtr = std::shared_ptr<BulkClient>;
  // A block that was published without its originals.
  struct Pending {
    BlockId id = BlockId::kNone;
    BlockWrite write;
    bool is_settled = false;  // completed or abandoned
  };

  absl::Status Prepare();
  // Coroutines are static functions whose first argument keeps the job: GCC 12 destroys
  // temporaries of lambdas twice.
  static BulkSocket::Awaitable<void> FetchRun(std::shared_ptr<PullJob> self, ClientPtr client,
                                              std::shared_ptr<Run> run);
  // Has the detour, if there is one, bring what it can of a run.
  static BulkSocket::Awaitable<void> FetchByDetour(std::shared_ptr<PullJob> self, ClientPtr client,
                                                   std::shared_ptr<Run> run);
  // Compares the checksums of what has come. Damaged blocks are to be asked for once more:
  // Unavailable [BULK_DISCONNECTED]; DataLoss [BULK_BLOCK_DAMAGED], a second time.
  absl::Status Verify(Run* run);
  bool IsGood(Item* item);  // and where a GPU has a copy, its planes are there too
  bool IsWhole(Item* item);

  // Gives free connections what is next. Without more to do, ends the stage.
  void Pump();
  bool StartRun() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // A connection that no run uses: of this job, else of the pool. Null: all run.
  ClientPtr NextClient() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives all connections back; none runs.
  void ReturnClients() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Run> ClaimRun() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Run PendingRun() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishRun(ClientPtr client, Run* run, const absl::Status& status);
  void Take(Item* item, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PublishArrived() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndChainAt(size_t index, const absl::Status& error) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The originals of a pending block came, or will not.
  void Settle(size_t pending, bool is_there) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What Answer is to say.
  absl::StatusOr<PullResult> EndStageOne() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWanted(bool is_stage_two) const;  // is the pull still to go on?
  void Answer(const absl::StatusOr<PullResult>& result);

  const BulkConfig config_;
  const BulkPuller::Dependencies with_;
  const std::shared_ptr<BulkPool> connections_;
  const PullRequest request_;
  bool with_planes_;  // of stage one; set before it
  bool with_originals_;
  std::atomic<bool> is_stopped_{false};
  size_t run_blocks_ = 1;

  absl::Mutex mutex_;
  BulkPuller::Done done_ ABSL_GUARDED_BY(mutex_);
  Pull pull_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Cache> cache_;                            // of the pull; set once
  BulkPeer peer_;                                           // set once
  std::vector<ClientPtr> clients_ ABSL_GUARDED_BY(mutex_);  // config_.connections at most
  std::vector<ClientPtr> idle_ ABSL_GUARDED_BY(mutex_);
  bool is_stage_two_ ABSL_GUARDED_BY(mutex_) = false;
  int32_t running_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;          // key, or pending block, to be asked for next
  size_t end_ ABSL_GUARDED_BY(mutex_) = 0;           // first key that will not come
  size_t publish_next_ ABSL_GUARDED_BY(mutex_) = 0;  // first key that is not published
  std::map<size_t, PulledBlock> arrived_ ABSL_GUARDED_BY(mutex_);
  std::vector<Pending> pending_ ABSL_GUARDED_BY(mutex_);
  int32_t lost_count_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  PullResult result_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_PULL_JOB_H_
