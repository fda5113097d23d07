// DeviceStaging: memory of the store's GPU in which one worker writes originals before they are
// sealed there.
#ifndef CERTKV_SERVICES_KVSTORE_DEVICE_STAGING_H_
#define CERTKV_SERVICES_KVSTORE_DEVICE_STAGING_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/slab_layout.h"
#include "services/kvstore/exported_memory.h"

namespace certkv::kvstore {

// It has the slots of the worker's staging slab, at the same offsets: a slot that is reserved is
// reserved in both, and a seal says in which of them the originals are. The slab's header page says
// how to reach it (kernels/core/device_export.h; it has no event).
//
// The worker, and whoever has its slab's header page, can write to it at any time: the store copies
// a slot into memory of its own before it looks at anything in it (DeviceSealer).
// Threads: const after Create.
class DeviceStaging {
 public:
  // `host` is the store's map of the staging slab, its header written, which nobody else has yet;
  // it outlives this. What others have left in the memory is cleared. Blocks until the device has
  // done that. Errors: those of DeviceRuntime; then the header page says of none.
  static absl::StatusOr<std::unique_ptr<DeviceStaging>> Create(const DevicePlace& place,
                                                               const SlabLayout& layout,
                                                               uint8_t* host);
  // Withdraws it, then gives the memory back.
  ~DeviceStaging();

  const uint8_t* base() const { return memory_->base(); }

 private:
  DeviceStaging(uint8_t* host, std::unique_ptr<ExportedMemory> memory)
      : host_(host), memory_(std::move(memory)) {}
  absl::Status Export(const DevicePlace& place, const SlabLayout& layout);

  uint8_t* const host_;
  const std::unique_ptr<ExportedMemory> memory_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_DEVICE_STAGING_H_
