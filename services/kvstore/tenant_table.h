// TenantTable: who the store keeps quotas for.
#ifndef CERTKV_SERVICES_KVSTORE_TENANT_TABLE_H_
#define CERTKV_SERVICES_KVSTORE_TENANT_TABLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "services/kvstore/block_record.h"

namespace certkv::kvstore {

inline constexpr int32_t kTenantQuotasMax = 256;
inline constexpr size_t kTenantNameBytesMax = 64;

// What one tenant may have of each registered cache, in bytes of a tier, and of the disk. Up to its
// guaranteed share a tenant loses nothing to others; above it, it is the first to lose.
struct TenantQuota {
  std::string tenant;  // "*": each tenant that no other quota names
  int64_t device_guaranteed_bytes = 0;
  int64_t device_limit_bytes = 0;  // 0: none but the tier's size
  int64_t backing_guaranteed_bytes = 0;
  int64_t backing_limit_bytes = 0;  // 0: none but the tier's size
  int64_t spill_limit_bytes = 0;    // of the disk, of all caches together; 0: none but its size
};

// The sizes of the tiers that quotas are of.
struct QuotaTiers {
  int64_t device_bytes = 0;
  int64_t backing_bytes = 0;
  int64_t spill_bytes = 0;
};

// 0 to 64 of [a-zA-Z0-9._-]. Errors: InvalidArgument [TENANT_INVALID].
absl::Status CheckTenantName(absl::string_view name);

// Errors: InvalidArgument [QUOTA_INVALID], naming the tenant and the setting: a name that is none
// or comes twice, a guarantee above its limit or for "*", a limit or the sum of all guarantees
// above the tier.
absl::Status CheckTenantQuotas(const std::vector<TenantQuota>& quotas, const QuotaTiers& tiers);

// The tenant's own quota, or that of "*", or one without limits.
const TenantQuota& FindTenantQuota(const std::vector<TenantQuota>& quotas, absl::string_view name);

// Invariants:
//  1. Index 0 is the tenant without a name, always there.
//  2. An index keeps its name while the tenant is in use.
// Threads: the caller serializes.
class TenantTable {
 public:
  // `quotas` are valid; at most `tenant_limit` >= 1 names at a time.
  TenantTable(std::vector<TenantQuota> quotas, int32_t tenant_limit);

  // Finds the tenant, or gives it an index; that of one for which is_unused(index) where there is
  // no other. Errors: InvalidArgument [TENANT_INVALID]; ResourceExhausted [TENANT_LIMIT].
  absl::StatusOr<TenantIndex> FindOrAdd(absl::string_view name,
                                        absl::FunctionRef<bool(TenantIndex)> is_unused);
  const std::string& NameOf(TenantIndex tenant) const {
    return names_[static_cast<size_t>(tenant)];
  }
  const TenantQuota& QuotaOf(TenantIndex tenant) const;
  int32_t size() const { return static_cast<int32_t>(names_.size()); }

 private:
  const std::vector<TenantQuota> quotas_;
  const int32_t tenant_limit_;
  std::vector<std::string> names_;  // by index
  absl::flat_hash_map<std::string, TenantIndex> by_name_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_TENANT_TABLE_H_
