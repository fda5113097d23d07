// PinnedMemory: a mapping that a GPU reads where it lies.
#ifndef CERTKV_KERNELS_OPS_PINNED_MEMORY_H_
#define CERTKV_KERNELS_OPS_PINNED_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops/device_runtime.h"

namespace certkv {

// While it lives, the mapping is pinned in this process, and known as such
// (kernels/ops/resident.h). Nothing reads it on the device any more when it is destroyed.
class PinnedMemory {
 public:
  // `host` is the begin of a mapping, which this process need not be able to write to; it and
  // `runtime` outlive this. Blocks until every page is in memory, which takes the time of touching
  // all of them. Errors: those of DeviceRuntime::PinHost; then nothing is pinned.
  static absl::StatusOr<std::unique_ptr<PinnedMemory>> Pin(DeviceRuntime* runtime, int32_t device,
                                                           const uint8_t* host, int64_t size_bytes);
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory();

 private:
  PinnedMemory(DeviceRuntime* runtime, const uint8_t* host) : runtime_(runtime), host_(host) {}

  DeviceRuntime* const runtime_;
  const uint8_t* const host_;
};

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_PINNED_MEMORY_H_
