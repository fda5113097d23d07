// RequestRegistry: the policy in force and its history.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/gate/request_registry.h"

namespace certkv::gate {

absl::Status CheckPolicyVersion(int64_t asked, int64_t in_force) {
  if (asked == 0 || asked == in_force) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kAborted, "POLICY_VERSION",
      absl::StrCat("the policy in force has version ", in_force, ", the update is for version ",
                   asked, "; get the policy, change it and try again"));
}

absl::StatusOr<Policy> RequestRegistry::UpdatePolicy(const Policy& policy,
                                                     absl::string_view source) {
  CERTKV_RETURN_IF_ERROR(ValidatePolicy(policy));
  const int64_t now_ms = clock_->NowMs();
  absl::MutexLock lock(&mutex_);
  CERTKV_RETURN_IF_ERROR(CheckPolicyVersion(policy.version, policy_->version));
  Policy next = policy;
  next.version = policy_->version + 1;
  PutPolicy(next, source, now_ms);
  return next;
}

void RequestRegistry::AdoptPolicy(const Policy& policy, absl::string_view source) {
  const int64_t now_ms = clock_->NowMs();
  absl::MutexLock lock(&mutex_);
  if (policy.version < policy_->version || SamePolicy(policy, *policy_)) return;
  PutPolicy(policy, source, now_ms);
}

void RequestRegistry::PutPolicy(const Policy& policy, absl::string_view source, int64_t now_ms) {
  policy_changes_.push_front({.time_ms = now_ms,
                              .version = policy.version,
                              .source = std::string(source),
                              .before = DescribePolicy(*policy_),
                              .after = DescribePolicy(policy)});
  if (policy_changes_.size() > kPolicyChangesMax) policy_changes_.pop_back();
  policy_ = std::make_shared<const Policy>(policy);
  for (const auto& named : tenants_) named.second->SetLimit(policy_->tenant_budget);
}

std::vector<PolicyChange> RequestRegistry::PolicyChanges() const {
  absl::ReaderMutexLock lock(&mutex_);
  return {policy_changes_.begin(), policy_changes_.end()};
}

PolicyChange RequestRegistry::LatestPolicyChange() const {
  absl::ReaderMutexLock lock(&mutex_);
  return policy_changes_.front();
}

absl::StatusOr<PolicyTrial> RequestRegistry::TryPolicy(const Policy& policy) const {
  CERTKV_RETURN_IF_ERROR(ValidatePolicy(policy));
  return sample_.Try(policy);
}

}  // namespace certkv::gate
