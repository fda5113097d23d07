#include "services/kvstore/tenant_pool.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/sha256.h"
#include "kernels/core/status.h"
#include "services/common/identity.h"

namespace certkv::kvstore {
namespace {

constexpr absl::string_view kSaltDomain = "certkv.pool_salt.v1";
constexpr absl::string_view kCacheDomain = "certkv.pool_cache.v1";

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID", message);
}

}  // namespace

absl::Status CheckPools(const std::vector<PoolConfig>& pools) {
  absl::flat_hash_set<std::string> names;
  absl::flat_hash_set<std::string> tenants;
  for (const PoolConfig& pool : pools) {
    if (pool.name.empty() || !IsTenantName(pool.name) || !names.insert(pool.name).second) {
      return Invalid(absl::StrCat("kvstore_pools: the name '", pool.name,
                                  "' is taken, or not 1 to ", kTenantNameBytesMax,
                                  " of [a-zA-Z0-9._-]"));
    }
    const std::vector<std::string> members = SplitNames(pool.tenants);
    if (members.empty()) {
      return Invalid(absl::StrCat("kvstore_pools: ", pool.name, " has no tenants; name some"));
    }
    for (const std::string& tenant : members) {
      if (IsTenantName(tenant) && tenants.insert(tenant).second) continue;
      return Invalid(absl::StrCat("kvstore_pools: tenant '", tenant, "' of ", pool.name,
                                  " is in a pool already, or not 1 to ", kTenantNameBytesMax,
                                  " of [a-zA-Z0-9._-]"));
    }
  }
  return absl::OkStatus();
}

bool TenantPool::Has(absl::string_view tenant) const {
  return id.empty() || std::find(tenants.begin(), tenants.end(), tenant) != tenants.end();
}

TenantPool PoolOf(const std::vector<PoolConfig>& pools, absl::string_view tenant) {
  if (tenant.empty()) return TenantPool{"", {""}};
  for (const PoolConfig& pool : pools) {
    TenantPool shared{absl::StrCat("pool/", pool.name), SplitNames(pool.tenants)};
    if (shared.Has(tenant)) return shared;
  }
  return TenantPool{absl::StrCat("tenant/", tenant), {std::string(tenant)}};
}

std::string PoolKeySalt(absl::string_view pool_id) {
  if (pool_id.empty()) return "";
  Sha256 hash;
  hash.AddBytes(kSaltDomain);
  hash.AddSized(pool_id);
  const auto digest = hash.Finish();
  return std::string(digest.begin(), digest.end());
}

SpecDigest PoolCacheDigest(const SpecDigest& spec, absl::string_view pool_id) {
  if (pool_id.empty()) return spec;
  Sha256 hash;
  hash.AddBytes(kCacheDomain);
  hash.AddBytes(spec.view());
  hash.AddSized(pool_id);
  return SpecDigest{hash.Finish()};
}

}  // namespace certkv::kvstore
