// Which tenants share blocks: the pools of a store.
#ifndef CERTKV_SERVICES_KVSTORE_TENANT_POOL_H_
#define CERTKV_SERVICES_KVSTORE_TENANT_POOL_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/core/ids.h"

namespace certkv::kvstore {

// As a config file declares it.
struct PoolConfig {
  std::string name;
  std::string tenants;  // "a, b"
};
// Errors: InvalidArgument [CONFIG_INVALID], a name that is none or taken, a pool without tenants,
// or a tenant in two.
absl::Status CheckPools(const std::vector<PoolConfig>& pools);

// A pool has caches of its own: its own index, slabs, descriptors and place on disk. What is in
// one pool is neither found, mapped nor evicted by another.
struct TenantPool {
  std::string id;                    // "" for nobody in particular, "tenant/x" or "pool/x"
  std::vector<std::string> tenants;  // who shares it; [""] for ""

  // The pool of nobody in particular is for whoever may act for all tenants, so all may be in it.
  bool Has(absl::string_view tenant) const;
};

// The declared pool that `tenant` is in, else one of its own. `pools` and `tenant` are valid.
TenantPool PoolOf(const std::vector<PoolConfig>& pools, absl::string_view tenant);

// What block keys of a pool are salted with: 32 bytes that follow from its id; none for "".
std::string PoolKeySalt(absl::string_view pool_id);
// The name of a cache among those of all pools, in memory and on disk; the spec's digest itself
// for "", so that what was on disk before there were pools is found.
SpecDigest PoolCacheDigest(const SpecDigest& spec, absl::string_view pool_id);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_TENANT_POOL_H_
