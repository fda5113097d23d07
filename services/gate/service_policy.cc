#include "services/gate/service_policy.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "certkv/gate/v1/gate.pb.h"
#include "kernels/core/status.h"
#include "services/gate/convert.h"

namespace certkv::gate {
namespace {

// Others may change the policy at the same time; a caller that names no version goes on.
constexpr int kAttemptsMax = 3;

LedgerPolicy ToShared(const Policy& policy, absl::string_view source) {
  return {.version = policy.version,
          .text = PolicyToProto(policy).SerializeAsString(),
          .source = std::string(source)};
}

}  // namespace

absl::StatusOr<bool> PolicyShare::Adopt(const LedgerPolicy& shared) {
  const Policy mine = registry_->policy();
  if (shared.version < mine.version || shared.version == 0) return false;
  v1::Policy proto;
  absl::StatusOr<Policy> policy = absl::InvalidArgumentError("it is no message");
  if (proto.ParseFromString(shared.text)) policy = PolicyFromProto(proto);
  if (!policy.ok()) {
    return MakeError(
        absl::StatusCode::kUnavailable, "LEDGER_UNAVAILABLE",
        absl::StrCat("the shared ledger has version ", shared.version,
                     " of the policy, which this version of gate can't read (",
                     policy.status().message(), "); run one version of gate at a ledger"));
  }
  policy->version = shared.version;
  if (SamePolicy(*policy, mine)) return false;
  registry_->AdoptPolicy(*policy, shared.source);
  return true;
}

absl::StatusOr<bool> PolicyShare::Sync() {
  if (ledger_ == nullptr) return false;
  const PolicyChange latest = registry_->LatestPolicyChange();
  const Policy mine = registry_->policy();
  // Version 1 is this replica's file.
  CERTKV_ASSIGN_OR_RETURN(
      const LedgerPolicy shared,
      ledger_->PutPolicy(mine.version > 1 ? ToShared(mine, latest.source) : LedgerPolicy{}));
  return Adopt(shared);
}

absl::StatusOr<Policy> PolicyShare::Update(const Policy& policy, absl::string_view source) {
  if (ledger_ == nullptr) return registry_->UpdatePolicy(policy, source);
  CERTKV_RETURN_IF_ERROR(ValidatePolicy(policy));
  CERTKV_RETURN_IF_ERROR(Sync().status());
  for (int i = 0;; ++i) {
    const int64_t version = registry_->policy().version;
    CERTKV_RETURN_IF_ERROR(CheckPolicyVersion(policy.version, version));
    Policy next = policy;
    next.version = version + 1;
    const LedgerPolicy put = ToShared(next, source);
    CERTKV_ASSIGN_OR_RETURN(const LedgerPolicy shared, ledger_->PutPolicy(put));
    const bool is_ours = shared.version == put.version && shared.text == put.text;
    if (is_ours) {
      registry_->AdoptPolicy(next, source);
      return next;
    }
    CERTKV_RETURN_IF_ERROR(Adopt(shared).status());
    if (i + 1 == kAttemptsMax) return CheckPolicyVersion(version, shared.version);
  }
}

}  // namespace certkv::gate
