#include "services/kvstore/cluster_link.h"

#include <algorithm>
#include <utility>

#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

// Beside this node itself.
constexpr size_t kSourcesMax = 2;

// Nobody was there, or what was there is no store of this cluster. Any other error is an answer.
bool IsUnreachable(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  return reason == "BULK_DISCONNECTED" || reason == "BULK_TLS_FAILED" || reason == "BULK_VERSION" ||
         reason == "BULK_PEER_MISMATCH";
}

}  // namespace

absl::StatusOr<std::unique_ptr<ClusterLink>> ClusterLink::Create(const ClusterConfig& config,
                                                                 const Clock* clock) {
  CERTKV_ASSIGN_OR_RETURN(auto options, cluster::ToMembershipOptions(config));
  CERTKV_ASSIGN_OR_RETURN(auto membership, cluster::Membership::Start(std::move(options)));
  return std::unique_ptr<ClusterLink>(new ClusterLink(config, clock, std::move(membership)));
}

ClusterLink::ClusterLink(const ClusterConfig& config, const Clock* clock,
                         std::unique_ptr<cluster::Membership> membership)
    : config_(config), clock_(clock), membership_(std::move(membership)) {}

std::vector<std::string> ClusterLink::SourcesFor(const BlockKey& root) const {
  const auto map = membership_->map();
  const int64_t now_ns = clock_->MonotonicNs();
  std::vector<std::string> sources;
  absl::MutexLock lock(&mutex_);
  for (const cluster::Node* node : map->RankedFor(root, kSourcesMax)) {
    if (node->name == config_.node || node->bulk_target.empty()) continue;
    const auto quiet = quiet_.find(node->bulk_target);
    if (quiet != quiet_.end() && now_ns < quiet->second.until_ns) continue;
    sources.push_back(node->bulk_target);
  }
  return sources;
}

void ClusterLink::NoteAnswer(const std::string& bulk_target, const absl::Status& status) {
  absl::MutexLock lock(&mutex_);
  if (!IsUnreachable(status)) {
    quiet_.erase(bulk_target);
    return;
  }
  Quiet& quiet = quiet_[bulk_target];
  quiet.ms = std::clamp(2 * quiet.ms, kQuietMsMin, kQuietMsMax);
  quiet.until_ns = clock_->MonotonicNs() + quiet.ms * 1'000'000;
}

}  // namespace certkv::kvstore
