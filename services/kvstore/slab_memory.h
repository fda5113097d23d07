// SlabMemory: the bytes of one slab, and the descriptor by which other processes map them.
#ifndef CERTKV_SERVICES_KVSTORE_SLAB_MEMORY_H_
#define CERTKV_SERVICES_KVSTORE_SLAB_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/slab_layout.h"
#include "services/kvstore/device_copy.h"

namespace certkv::kvstore {

// A memfd with the store's own writable mapping of it, and its header written.
//
// Invariants:
//  1. Device and backing slabs: the store's mapping, made before the seal, is the only writable one
//     there is or will be; export_fd() can be mapped read-only, and write(2) on it fails.
//  2. Staging slabs are shared writable with their worker. The store trusts nothing in them, the
//     header and generation table included: offsets come from layout().
//  3. Pages become resident when they are first written, so a slab costs what is in it.
//  4. Where a device slab has a copy in a GPU's memory, a slot is in it before it is sealed, or the
//     copy is withdrawn.
//
// Threads: const after Create and AddDeviceCopy; who may write which slot is SlotPool's and
// StagingArea's business.
class SlabMemory {
 public:
  // `spec` is valid, slot_count >= 1; `dither_secret` is the cache's. Errors: ResourceExhausted
  // [MEMFD_FAILED], Internal [MEMFD_SEAL_FAILED | MEMFD_REOPEN_FAILED], FailedPrecondition
  // [MAP_FAILED].
  static absl::StatusOr<std::shared_ptr<SlabMemory>> Create(const CacheSpec& spec, SlabKind kind,
                                                            int32_t slot_count,
                                                            uint64_t dither_secret = 0);

  // Gives a device slab a copy in a GPU's memory. To be called once, before the slab is shared.
  // Errors: those of DeviceRuntime; then there is none.
  absl::Status AddDeviceCopy(const DevicePlace& place);
  DeviceCopy* device_copy() const { return device_copy_.get(); }  // null: there is none
  // Brings slots that were written into the copy, if there is one. Blocks until they are there.
  void CopyToDevice(absl::Span<const int32_t> slots) const {
    if (device_copy_ != nullptr) device_copy_->Upload(slots);
  }

  const SlabLayout& layout() const { return layout_; }
  uint8_t* base() const { return mapping_.data(); }
  // The same bytes as readers see them, read-only; null for staging slabs.
  const uint8_t* reader_base() const { return reader_mapping_.data(); }
  // For other processes; lives as long as this object. Read-only for device and backing slabs,
  // read-write for staging slabs.
  int export_fd() const { return export_fd_.get(); }
  // Staging slabs: a new descriptor that can only be read. Errors: Internal [MEMFD_REOPEN_FAILED].
  absl::StatusOr<UniqueFd> OpenReadOnly() const { return ReopenReadOnly(export_fd_.get()); }

 private:
  SlabMemory(SlabLayout layout, UniqueFd export_fd, Mapping mapping, Mapping reader_mapping);

  const SlabLayout layout_;
  const UniqueFd export_fd_;
  const Mapping mapping_;
  const Mapping reader_mapping_;
  std::unique_ptr<DeviceCopy> device_copy_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SLAB_MEMORY_H_
