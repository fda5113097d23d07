// ImportedSlab: a device slab's copy in a GPU's memory, opened by a process that has the slab
// mapped.
#ifndef CERTKV_KERNELS_OPS_IMPORTED_SLAB_H_
#define CERTKV_KERNELS_OPS_IMPORTED_SLAB_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/ops/device_runtime.h"
#include "kernels/ops/imported_memory.h"

namespace certkv {

// How to read a slot in the copy: generation and then IsReady() before, the generation again after
// the kernel has ended, both in the mapped slab (kernels/core/device_export.h). The first read of a
// generation compares the copy with the mapped bytes, whose checksums tell whether they are right.
//
// While it lives, the mapped slab is resident (kernels/ops/resident.h).
// Threads: all calls may be made concurrently.
class ImportedSlab {
 public:
  // `host` is the whole slab, mapped, with the header of such a slab; it and `runtime` outlive
  // this. Errors: as ImportedMemory::Open.
  static absl::StatusOr<std::unique_ptr<ImportedSlab>> Open(DeviceRuntime* runtime,
                                                            const uint8_t* host,
                                                            int64_t size_bytes);
  ~ImportedSlab();

  const uint8_t* device_base() const { return memory_->base(); }
  int32_t device() const { return memory_->device(); }
  // Is the copy to be used: not withdrawn by its store, nor given up here?
  bool IsReady() const;
  // Not to be used any more by this process, because its device failed.
  void GiveUp() { is_given_up_.store(true, std::memory_order_relaxed); }

  // Makes what this thread queues on the default stream from now on run on the copy's device, after
  // everything that its store had copied when this was called.
  absl::Status Prepare() const;

  struct Range {
    int64_t offset;  // in the slab
    int64_t size_bytes;
  };
  // Has the copy the bytes that the mapped slab has? Blocks.
  absl::StatusOr<bool> Equals(absl::Span<const Range> ranges) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  ImportedSlab(DeviceRuntime* runtime, const uint8_t* host, int64_t size_bytes)
      : runtime_(runtime), host_(host), size_bytes_(size_bytes) {}
  absl::Status Import();

  DeviceRuntime* const runtime_;
  const uint8_t* const host_;
  const int64_t size_bytes_;
  std::unique_ptr<ImportedMemory> memory_;
  CUevent_st* event_ = nullptr;
  std::atomic<bool> is_given_up_{false};
  absl::Mutex mutex_;
  CUstream_st* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::vector<uint8_t> scratch_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_IMPORTED_SLAB_H_
