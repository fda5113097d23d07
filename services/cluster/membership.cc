#include "services/cluster/membership.h"

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/common/random_id.h"

namespace certkv::cluster {
namespace {

constexpr int64_t kRetryMs = 500;
constexpr int64_t kTtlSecondsMax = 3600;
constexpr size_t kInstanceBytes = 8;

absl::Status CheckOptions(const MembershipOptions& options) {
  if (options.etcd.endpoints.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                     "no endpoint of etcd; name at least one as host:port");
  }
  if (options.ttl_seconds < 1 || options.ttl_seconds > kTtlSecondsMax) {
    return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                     absl::StrCat("a registration's time to live is ", options.ttl_seconds,
                                  " s, must be in [1, ", kTtlSecondsMax, "]"));
  }
  // The cluster's name has the letters of a node's.
  const Node cluster{options.cluster, "x", "", 1, "x"};
  if (!CheckNode(cluster).ok()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                     absl::StrCat("the cluster's name \"", options.cluster,
                                  "\" must be 1 to 64 of [a-zA-Z0-9._-]"));
  }
  return options.self.has_value() ? CheckNode(*options.self) : absl::OkStatus();
}

}  // namespace

absl::StatusOr<MembershipOptions> ToMembershipOptions(const ClusterConfig& config) {
  MembershipOptions options;
  CERTKV_ASSIGN_OR_RETURN(options.etcd.endpoints, ParseEndpoints(config.etcd));
  options.etcd.tls = {config.etcd_certificate, config.etcd_key, config.etcd_ca};
  options.cluster = config.name;
  options.ttl_seconds = config.ttl_ms / 1000;
  options.self = Node{config.node, config.target, config.bulk_target, config.weight, ""};
  return options;
}

absl::StatusOr<std::unique_ptr<Membership>> Membership::Start(MembershipOptions options) {
  if (options.self.has_value()) {
    options.self->instance = absl::BytesToHexString(RandomBytes(kInstanceBytes));
  }
  CERTKV_RETURN_IF_ERROR(CheckOptions(options));
  auto membership = std::unique_ptr<Membership>(new Membership(std::move(options)));
  Membership* const raw = membership.get();
  membership->follower_ = std::thread([raw] { raw->Follow(); });
  if (raw->options_.self.has_value()) {
    membership->keeper_ = std::thread([raw] { raw->KeepRegistered(); });
  }
  return membership;
}

Membership::Membership(MembershipOptions options)
    : options_(std::move(options)),
      prefix_(absl::StrCat("/certkv/", options_.cluster, "/nodes/")),
      etcd_(options_.etcd),
      map_(std::make_shared<const ShardMap>()) {}

Membership::~Membership() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (keeper_.joinable()) keeper_.join();
  etcd_.Stop();
  if (follower_.joinable()) follower_.join();
}

std::shared_ptr<const ShardMap> Membership::map() const {
  absl::MutexLock lock(&mutex_);
  return map_;
}

MembershipStatus Membership::status() const {
  absl::MutexLock lock(&mutex_);
  return {is_registered_, is_watching_, watch_problem_.ok() ? register_problem_ : watch_problem_};
}

bool Membership::WaitUntil(const std::function<bool(const ShardMap&)>& wanted,
                           int64_t timeout_ms) const {
  const auto is_so = [this, &wanted]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return wanted(*map_); };
  absl::MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(absl::Condition(&is_so), absl::Milliseconds(timeout_ms));
}

void Membership::Pause(int64_t milliseconds) {
  absl::MutexLock lock(&mutex_);
  mutex_.AwaitWithTimeout(absl::Condition(&stopping_), absl::Milliseconds(milliseconds));
}

void Membership::SetProblem(bool of_watch, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  absl::Status& problem = of_watch ? watch_problem_ : register_problem_;
  const bool changed = problem.code() != status.code() || ReasonOf(problem) != ReasonOf(status);
  problem = status;
  if (!changed || stopping_) return;
  if (status.ok()) {
    Log(LogLevel::kInfo, of_watch ? "cluster_followed" : "cluster_joined",
        {{"cluster", options_.cluster}, {"revision", map_->revision()}});
  } else {
    Log(LogLevel::kWarning, of_watch ? "cluster_not_followed" : "cluster_not_joined",
        {{"cluster", options_.cluster}, {"error", status.message()}});
  }
}

void Membership::KeepRegistered() {
  const int64_t beat_ms = options_.ttl_seconds * 1000 / 3;
  for (;;) {
    const absl::Status status = StepRegistration();
    SetProblem(/*of_watch=*/false, status);
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) break;
      // Woken early when the registration was found to be gone.
      const auto wakes = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || (register_problem_.ok() && !is_registered_);
      };
      mutex_.AwaitWithTimeout(absl::Condition(&wakes),
                              absl::Milliseconds(status.ok() ? beat_ms : kRetryMs));
      if (stopping_) break;
    }
  }
  if (lease_ != 0) etcd_.Revoke(lease_).IgnoreError();  // else it ends by itself
}

absl::Status Membership::StepRegistration() {
  bool registered = false;
  {
    absl::MutexLock lock(&mutex_);
    registered = is_registered_;
  }
  if (lease_ != 0) {
    const absl::Status alive = etcd_.KeepAlive(lease_);
    if (!absl::IsNotFound(alive)) CERTKV_RETURN_IF_ERROR(alive);
    if (!alive.ok()) lease_ = 0;
  }
  if (lease_ != 0 && registered) return absl::OkStatus();
  if (lease_ == 0) {
    CERTKV_ASSIGN_OR_RETURN(lease_, etcd_.GrantLease(options_.ttl_seconds));
  }
  return Claim();
}

absl::Status Membership::Claim() {
  const Node& self = *options_.self;
  const std::string key = KeyOf(self.name);
  CERTKV_ASSIGN_OR_RETURN(const EtcdEntry entry, etcd_.Get(key));
  const absl::StatusOr<Node> holder = NodeFromText(entry.value);
  const bool is_free = entry.mod_revision == 0 || !holder.ok() ||
                       holder->instance == self.instance ||
                       (holder->target == self.target && !claimed_before_);
  if (!is_free) {
    return MakeError(absl::StatusCode::kAlreadyExists, "NODE_NAME_TAKEN",
                     absl::StrCat("node ", self.name, " is registered by the process at ",
                                  holder->target, ", this one is at ", self.target,
                                  "; give each node a name of its own, or wait until that one's "
                                  "registration ends"));
  }
  CERTKV_ASSIGN_OR_RETURN(const bool put,
                          etcd_.PutIf(key, NodeToText(self), lease_, entry.mod_revision));
  if (!put) {
    return MakeError(absl::StatusCode::kAborted, "NODE_NAME_TAKEN",
                     absl::StrCat("the registration of node ", self.name,
                                  " changed meanwhile; it is tried again"));
  }
  claimed_before_ = true;
  absl::MutexLock lock(&mutex_);
  is_registered_ = true;
  return absl::OkStatus();
}

void Membership::Follow() {
  for (;;) {
    const absl::Status status = FollowOnce();
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      is_watching_ = false;
    }
    SetProblem(/*of_watch=*/true, status);
    if (!absl::IsOutOfRange(status)) Pause(kRetryMs);
  }
}

absl::Status Membership::FollowOnce() {
  CERTKV_ASSIGN_OR_RETURN(const EtcdListing listing, etcd_.List(prefix_));
  {
    absl::MutexLock lock(&mutex_);
    // A member of etcd's that is behind the others: ask again.
    if (listing.revision < map_->revision()) {
      return MakeError(absl::StatusCode::kUnavailable, "ETCD_UNAVAILABLE",
                       absl::StrCat("etcd answers with revision ", listing.revision,
                                    ", older than ", map_->revision(), " that was seen before"));
    }
    nodes_.clear();
    for (const EtcdEntry& entry : listing.entries) TakeEntry(entry);
    Publish(listing.revision);
    is_watching_ = true;
  }
  SetProblem(/*of_watch=*/true, absl::OkStatus());
  return etcd_.Watch(prefix_, listing.revision + 1,
                     [this](const std::vector<EtcdChange>& changes, int64_t revision) {
                       Apply(changes, revision);
                     });
}

void Membership::Apply(const std::vector<EtcdChange>& changes, int64_t revision) {
  absl::MutexLock lock(&mutex_);
  for (const EtcdChange& change : changes) {
    if (change.deleted) {
      nodes_.erase(std::string(absl::StripPrefix(change.entry.key, prefix_)));
    } else {
      TakeEntry(change.entry);
    }
  }
  Publish(revision);
}

void Membership::TakeEntry(const EtcdEntry& entry) {
  const std::string name(absl::StripPrefix(entry.key, prefix_));
  const absl::StatusOr<Node> node = NodeFromText(entry.value);
  if (node.ok() && node->name == name) {
    nodes_[name] = *node;
    return;
  }
  nodes_.erase(name);
  Log(LogLevel::kWarning, "cluster_registration_invalid",
      {{"cluster", options_.cluster},
       {"key", entry.key},
       {"error", node.ok() ? "its name is not that of its key" : node.status().message()}});
}

void Membership::Publish(int64_t revision) {
  std::vector<Node> nodes;
  for (const auto& [name, node] : nodes_) nodes.push_back(node);
  const std::vector<Node> before(map_->nodes().begin(), map_->nodes().end());
  map_ = std::make_shared<const ShardMap>(std::move(nodes), revision);
  if (options_.self.has_value()) {
    const Node* const self = map_->Find(options_.self->name);
    is_registered_ = self != nullptr && self->instance == options_.self->instance;
  }
  if (!std::equal(before.begin(), before.end(), map_->nodes().begin(), map_->nodes().end())) {
    Log(LogLevel::kInfo, "cluster_changed",
        {{"cluster", options_.cluster},
         {"nodes", map_->nodes().size()},
         {"revision", map_->revision()}});
  }
}

}  // namespace certkv::cluster
