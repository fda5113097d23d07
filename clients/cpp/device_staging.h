// DeviceStaging: a worker's staging slots on the store's GPU, for pages that are on it.
#ifndef CERTKV_CLIENTS_CPP_DEVICE_STAGING_H_
#define CERTKV_CLIENTS_CPP_DEVICE_STAGING_H_

#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "clients/cpp/paged_cache.h"
#include "kernels/ops/imported_memory.h"

namespace certkv::client {

// Opened when it is first asked for, by the record in the staging slab's header page. Once it was
// given up, because the store has withdrawn it or the device failed, it stays so: everything goes
// through the mapped slots then.
// Threads: all calls may be made concurrently.
class DeviceStaging {
 public:
  // The mapped staging slab, and the mapped device slab of the same cache; they outlive this.
  DeviceStaging(const uint8_t* staging, int64_t size_bytes, const uint8_t* device_slab)
      : staging_(staging), size_bytes_(size_bytes), device_slab_(device_slab) {}

  // Where the staging slab begins in the memory of the GPU on which `cache` has its pages; null
  // where it isn't on that GPU, and where there are none. status() says why then.
  uint8_t* BaseFor(const PagedCache& cache) ABSL_LOCKS_EXCLUDED(mutex_);
  void GiveUp(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);

  // Why the last cache's rows went through the mapped slots; OK where they did not.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  absl::Status Open(const PagedCache& cache) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint8_t* const staging_;
  const int64_t size_bytes_;
  const uint8_t* const device_slab_;
  mutable absl::Mutex mutex_;
  std::unique_ptr<ImportedMemory> memory_ ABSL_GUARDED_BY(mutex_);
  bool is_given_up_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_DEVICE_STAGING_H_
