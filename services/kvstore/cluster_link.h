// ClusterLink: whom this store asks for what it lacks of a chain.
#ifndef CERTKV_SERVICES_KVSTORE_CLUSTER_LINK_H_
#define CERTKV_SERVICES_KVSTORE_CLUSTER_LINK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/ids.h"
#include "services/cluster/config.h"
#include "services/cluster/membership.h"
#include "services/common/clock.h"

namespace certkv::kvstore {

// Lookups that were to be extended by other nodes, by how that ended. Threads: safe.
struct ClusterCounters {
  std::atomic<int64_t> extended{0};   // blocks came
  std::atomic<int64_t> nothing{0};    // the others have no more either
  std::atomic<int64_t> failed{0};     // nobody answered well
  std::atomic<int64_t> timed_out{0};  // answered without; what comes later stays
  std::atomic<int64_t> blocks{0};     // that came
};

// Threads: all calls are safe.
class ClusterLink {
 public:
  // Joins the cluster in the background. Errors: as Membership::Start, ToMembershipOptions.
  static absl::StatusOr<std::unique_ptr<ClusterLink>> Create(const ClusterConfig& config,
                                                             const Clock* clock);

  // Bulk targets of the nodes that may have the chain which begins with `root`, other than this
  // one: its owner, and the next in rank, which was the owner before the last node came. Without
  // those that failed lately.
  std::vector<std::string> SourcesFor(const BlockKey& root) const ABSL_LOCKS_EXCLUDED(mutex_);
  // A node that could not be reached is not asked again for a second, then two, up to
  // kQuietMsMax; an answer ends that.
  void NoteAnswer(const std::string& bulk_target, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mutex_);

  int64_t wait_ms() const { return config_.pull_wait_ms; }
  cluster::MembershipStatus status() const { return membership_->status(); }
  std::shared_ptr<const cluster::ShardMap> map() const { return membership_->map(); }
  ClusterCounters* counters() { return &counters_; }
  const ClusterCounters& counters() const { return counters_; }

  static constexpr int64_t kQuietMsMin = 1000;
  static constexpr int64_t kQuietMsMax = 30'000;

 private:
  struct Quiet {
    int64_t until_ns = 0;
    int64_t ms = 0;  // of the last time
  };

  ClusterLink(const ClusterConfig& config, const Clock* clock,
              std::unique_ptr<cluster::Membership> membership);

  const ClusterConfig config_;
  const Clock* const clock_;
  const std::unique_ptr<cluster::Membership> membership_;
  ClusterCounters counters_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<std::string, Quiet> quiet_ ABSL_GUARDED_BY(mutex_);  // by bulk target
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_CLUSTER_LINK_H_
