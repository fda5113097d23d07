// StoreLink: the certifier's side of the store. Finds caches by digest, attaches as a READER, maps
// their slabs and workers' staging memory, and notices when the store is gone.
#ifndef CERTKV_SERVICES_CERTIFIER_STORE_LINK_H_
#define CERTKV_SERVICES_CERTIFIER_STORE_LINK_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/ids.h"
#include "services/certifier/mapped_cache.h"

namespace certkv::certifier {

// Invariants:
//  1. A cache is marked dead before its attachment is forgotten; no read of it succeeds afterwards.
//  2. A staging map belongs to one attachment and is shared by all views that name its id.
// Threads: all methods may be called concurrently; the calls to the store are made one at a time.
class StoreLink {
 public:
  StoreLink(const std::string& target, int64_t timeout_ms);
  ~StoreLink();  // detaches

  // The mapped cache of a spec digest; attaches when it isn't. Blocks on the store.
  // Errors: NotFound [CACHE_NOT_FOUND], no such cache is registered; Unavailable
  //         [STORE_UNREACHABLE]; FailedPrecondition [SLAB_MISMATCH].
  absl::StatusOr<std::shared_ptr<MappedCache>> FindCache(const SpecDigest& digest)
      ABSL_LOCKS_EXCLUDED(attach_mutex_, mutex_);

  // A worker's staging memory by its id. Blocks on the store when it isn't mapped.
  // Errors: NotFound [STAGING_NOT_FOUND]; Unavailable [STORE_UNREACHABLE].
  absl::StatusOr<std::shared_ptr<const StagingMap>> FindStaging(const MappedCache& cache,
                                                                int64_t staging_id)
      ABSL_LOCKS_EXCLUDED(attach_mutex_, mutex_);

 private:
  struct Attachment;
  struct Wire;  // the gRPC stub

  std::shared_ptr<Attachment> FindAttachment(const SpecDigest& digest) const;
  absl::StatusOr<std::shared_ptr<Attachment>> Attach(const SpecDigest& digest);
  void WatchSockets();

  const std::unique_ptr<Wire> wire_;
  const int64_t timeout_ms_;
  absl::Mutex attach_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);  // one call to the store at a time
  mutable absl::Mutex mutex_;                              // never held while anything blocks
  absl::flat_hash_map<SpecDigest, std::shared_ptr<Attachment>> attachments_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> stopping_{false};
  std::thread watcher_;  // last: it uses the others
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_STORE_LINK_H_
