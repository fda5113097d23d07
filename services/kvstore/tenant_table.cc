#include "services/kvstore/tenant_table.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

constexpr absl::string_view kEveryOther = "*";

absl::Status QuotaInvalid(absl::string_view tenant, absl::string_view text) {
  return MakeError(absl::StatusCode::kInvalidArgument, "QUOTA_INVALID",
                   absl::StrCat("kvstore_tenants: tenant \"", tenant, "\" ", text));
}

struct TierQuota {
  absl::string_view tier;  // "device", "backing"
  int64_t guaranteed_bytes;
  int64_t limit_bytes;
  int64_t tier_bytes;
};

absl::Status CheckTier(absl::string_view tenant, const TierQuota& quota, int64_t* guaranteed_sum) {
  const std::string memory = absl::StrCat("kvstore.", quota.tier, "_memory");
  if (quota.limit_bytes > quota.tier_bytes) {
    return QuotaInvalid(
        tenant, absl::StrCat("has ", quota.tier, "_limit ", quota.limit_bytes, " bytes, ", memory,
                             " is ", quota.tier_bytes, "; lower the one, or raise the other"));
  }
  if (quota.limit_bytes > 0 && quota.guaranteed_bytes > quota.limit_bytes) {
    return QuotaInvalid(
        tenant, absl::StrCat("has ", quota.tier, "_guaranteed ", quota.guaranteed_bytes,
                             " bytes, above its ", quota.tier, "_limit, ", quota.limit_bytes,
                             "; lower the one, or raise the other"));
  }
  if (tenant == kEveryOther && quota.guaranteed_bytes > 0) {
    return QuotaInvalid(tenant,
                        absl::StrCat("has ", quota.tier, "_guaranteed ", quota.guaranteed_bytes,
                                     " bytes, but there may be any number of such "
                                     "tenants; guarantee to tenants by name"));
  }
  *guaranteed_sum += quota.guaranteed_bytes;
  if (*guaranteed_sum <= quota.tier_bytes) return absl::OkStatus();
  return QuotaInvalid(
      tenant, absl::StrCat("has ", quota.tier, "_guaranteed ", quota.guaranteed_bytes,
                           " bytes, which makes ", *guaranteed_sum, " with the tenants before it; ",
                           memory, " is ", quota.tier_bytes,
                           ": nobody can keep all these promises; lower some, or raise ", memory));
}

}  // namespace

absl::Status CheckTenantName(absl::string_view name) {
  const bool fits =
      name.size() <= kTenantNameBytesMax && std::all_of(name.begin(), name.end(), [](char c) {
        return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' ||
               c == '-';
      });
  if (fits) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "TENANT_INVALID",
                   absl::StrCat("the tenant's name has ", name.size(), " bytes, must have at most ",
                                kTenantNameBytesMax, " of [a-zA-Z0-9._-]"));
}

absl::Status CheckTenantQuotas(const std::vector<TenantQuota>& quotas, const QuotaTiers& tiers) {
  absl::flat_hash_set<std::string> seen;
  int64_t device_sum = 0;
  int64_t backing_sum = 0;
  for (const TenantQuota& quota : quotas) {
    if (quota.tenant != kEveryOther) CERTKV_RETURN_IF_ERROR(CheckTenantName(quota.tenant));
    if (!seen.insert(quota.tenant).second) {
      return QuotaInvalid(quota.tenant, "comes twice; give each tenant one quota");
    }
    CERTKV_RETURN_IF_ERROR(CheckTier(
        quota.tenant,
        {"device", quota.device_guaranteed_bytes, quota.device_limit_bytes, tiers.device_bytes},
        &device_sum));
    CERTKV_RETURN_IF_ERROR(CheckTier(
        quota.tenant,
        {"backing", quota.backing_guaranteed_bytes, quota.backing_limit_bytes, tiers.backing_bytes},
        &backing_sum));
    if (quota.spill_limit_bytes > tiers.spill_bytes) {
      return QuotaInvalid(quota.tenant,
                          absl::StrCat("has spill_limit ", quota.spill_limit_bytes,
                                       " bytes, kvstore.spill_size is ", tiers.spill_bytes,
                                       "; lower the one, or raise the other"));
    }
  }
  return absl::OkStatus();
}

TenantTable::TenantTable(std::vector<TenantQuota> quotas, int32_t tenant_limit)
    : quotas_(std::move(quotas)), tenant_limit_(tenant_limit), names_{""} {
  CERTKV_CHECK(tenant_limit >= 1 && tenant_limit <= 65536, "a tenant's index has 16 bits");
  by_name_[""] = TenantIndex{};
}

absl::StatusOr<TenantIndex> TenantTable::FindOrAdd(absl::string_view name,
                                                   absl::FunctionRef<bool(TenantIndex)> is_unused) {
  const auto found = by_name_.find(name);
  if (found != by_name_.end()) return found->second;
  CERTKV_RETURN_IF_ERROR(CheckTenantName(name));
  if (size() < tenant_limit_) {
    const auto index = static_cast<TenantIndex>(names_.size());
    names_.emplace_back(name);
    by_name_.emplace(name, index);
    return index;
  }
  for (size_t i = 1; i < names_.size(); ++i) {
    const auto index = static_cast<TenantIndex>(i);
    if (!is_unused(index)) continue;
    by_name_.erase(names_[i]);
    names_[i] = std::string(name);
    by_name_.emplace(name, index);
    return index;
  }
  return MakeError(
      absl::StatusCode::kResourceExhausted, "TENANT_LIMIT",
      absl::StrCat("the store has blocks or sessions of ", size(), " tenants, at most ",
                   tenant_limit_, "; detach the workers of one, or raise kvstore.tenant_limit"));
}

const TenantQuota& TenantTable::QuotaOf(TenantIndex tenant) const {
  return FindTenantQuota(quotas_, NameOf(tenant));
}

const TenantQuota& FindTenantQuota(const std::vector<TenantQuota>& quotas, absl::string_view name) {
  static const TenantQuota* const none = new TenantQuota;
  const TenantQuota* best = none;
  for (const TenantQuota& quota : quotas) {
    if (quota.tenant == name) return quota;
    if (quota.tenant == kEveryOther) best = &quota;
  }
  return *best;
}

}  // namespace certkv::kvstore
