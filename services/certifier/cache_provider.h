// Where a certifier gets the maps of a cache from.
#ifndef CERTKV_SERVICES_CERTIFIER_CACHE_PROVIDER_H_
#define CERTKV_SERVICES_CERTIFIER_CACHE_PROVIDER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>

#include "absl/status/statusor.h"
#include "kernels/core/ids.h"
#include "services/certifier/mapped_cache.h"

namespace certkv::certifier {

struct AcquiredCache {
  std::shared_ptr<MappedCache> cache;
  std::shared_ptr<const StagingMap> staging;  // null when none was asked for
};

// Which cache: of what, and whose.
struct CacheOwner {
  SpecDigest spec_digest;
  std::string tenant;  // "" is nobody in particular

  friend bool operator<(const CacheOwner& a, const CacheOwner& b) {
    return std::tie(a.spec_digest, a.tenant) < std::tie(b.spec_digest, b.tenant);
  }
};

// Threads: all methods may be called concurrently.
class CacheProvider {
 public:
  using Done = std::function<void(absl::StatusOr<AcquiredCache>)>;

  virtual ~CacheProvider() = default;

  // Maps the cache of that spec and tenant, and the staging memory of that name unless it is 0.
  // Calls `done` once, before it returns or later on another thread. Doesn't block. Errors:
  // Unavailable [STORE_UNREACHABLE]; NotFound [CACHE_NOT_FOUND], [STAGING_NOT_FOUND] or
  //         what else the store says; FailedPrecondition [SLAB_MISMATCH], [MAP_FAILED].
  // `traceparent`, where not "", goes along with the calls to the store that this makes.
  virtual void Acquire(const CacheOwner& owner, int64_t staging_id, Done done,
                       const std::string& traceparent) = 0;
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_CACHE_PROVIDER_H_
