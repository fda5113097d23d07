// Who is in the cluster: each store node registers itself in etcd under a lease that it keeps
// alive, and watches the registrations of all.
//
// Key "/certkv/<cluster>/nodes/<name>", value NodeToText. A node that dies is gone when its lease
// ends; one that stops revokes it. While etcd does not answer, the last map stays in force: blocks
// are immutable and named by their content, so a map of yesterday costs hits and never gives wrong
// bytes.
#ifndef CERTKV_SERVICES_CLUSTER_MEMBERSHIP_H_
#define CERTKV_SERVICES_CLUSTER_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "services/cluster/config.h"
#include "services/cluster/etcd_client.h"
#include "services/cluster/shard_map.h"

namespace certkv::cluster {

struct MembershipOptions {
  EtcdOptions etcd;
  std::string cluster = "default";  // 1 to 64 of [a-zA-Z0-9._-]
  std::optional<Node> self;         // none: it only watches; `instance` is filled in
  int64_t ttl_seconds = 10;         // a dead node is gone after it; [1, 3600]
};

// Of a config that is on. Errors: InvalidArgument [CONFIG_INVALID].
absl::StatusOr<MembershipOptions> ToMembershipOptions(const ClusterConfig& config);

struct MembershipStatus {
  bool is_registered = false;  // this node, as far as it knows
  bool is_watching = false;    // changes come in; false: the map is the last one known
  absl::Status problem;        // why not; OK when both hold, or nothing is to be registered
};

// Promises (membership_test breaks each):
//  1. Two processes of one name are never both registered; the second waits for the first's lease
//     to end, unless it has the same target, where only one of them can listen.
//  2. The map changes only by what etcd says, and never goes back to an older revision.
//  3. A registration that is deleted or whose lease ended is made again.
// Threads: safe.
class Membership {
 public:
  // Returns at once; joins in the background and goes on trying.
  // Errors: InvalidArgument [NODE_INVALID | CONFIG_INVALID].
  static absl::StatusOr<std::unique_ptr<Membership>> Start(MembershipOptions options);
  // Leaves the cluster; takes up to `etcd.timeout_ms` when etcd does not answer.
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  // Never null; without nodes until etcd has answered once.
  std::shared_ptr<const ShardMap> map() const ABSL_LOCKS_EXCLUDED(mutex_);
  MembershipStatus status() const ABSL_LOCKS_EXCLUDED(mutex_);
  // Waits until the map is as wanted; false when it was not in time.
  bool WaitUntil(const std::function<bool(const ShardMap&)>& wanted, int64_t timeout_ms) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  explicit Membership(MembershipOptions options);
  std::string KeyOf(const std::string& name) const { return prefix_ + name; }

  // The thread that keeps this node registered.
  void KeepRegistered() ABSL_LOCKS_EXCLUDED(mutex_);
  // One step of it: a lease, a registration, or a sign of life.
  absl::Status StepRegistration() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Claim() ABSL_LOCKS_EXCLUDED(mutex_);
  // The thread that follows the registrations.
  void Follow() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status FollowOnce() ABSL_LOCKS_EXCLUDED(mutex_);
  void Apply(const std::vector<EtcdChange>& changes, int64_t revision) ABSL_LOCKS_EXCLUDED(mutex_);
  void Publish(int64_t revision) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes a registration into `nodes_`, or passes over it with a line in the log.
  void TakeEntry(const EtcdEntry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Until the time is over or it stops.
  void Pause(int64_t milliseconds) ABSL_LOCKS_EXCLUDED(mutex_);
  void SetProblem(bool of_watch, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  const MembershipOptions options_;
  const std::string prefix_;
  EtcdClient etcd_;
  int64_t lease_ = 0;            // of the keeping thread; 0 = none
  bool claimed_before_ = false;  // of the keeping thread
  mutable absl::Mutex mutex_;
  std::map<std::string, Node> nodes_ ABSL_GUARDED_BY(mutex_);  // by name
  std::shared_ptr<const ShardMap> map_ ABSL_GUARDED_BY(mutex_);
  bool is_registered_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_watching_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status register_problem_ ABSL_GUARDED_BY(mutex_);
  absl::Status watch_problem_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread keeper_;
  std::thread follower_;
};

}  // namespace certkv::cluster

#endif  // CERTKV_SERVICES_CLUSTER_MEMBERSHIP_H_
