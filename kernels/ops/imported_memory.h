// ImportedMemory: a GPU's memory that another process exports by the record in a slab's header page
// (kernels/core/device_export.h), opened by a process that has the slab mapped.
#ifndef CERTKV_KERNELS_OPS_IMPORTED_MEMORY_H_
#define CERTKV_KERNELS_OPS_IMPORTED_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/device_export.h"
#include "kernels/ops/device_runtime.h"

namespace certkv {

// The memory has as many bytes as the slab and the slab's layout; its header page is the slab's as
// it was when the memory was made, record included, so that what a handle opens proves itself.
// Threads: all calls may be made concurrently.
class ImportedMemory {
 public:
  // `host` is the whole slab, mapped; it and `runtime` outlive this. Errors: FailedPrecondition
  // [DEVICE_COPY_MISSING], a device slab's record says of none, or not any more;
  // [DEVICE_STAGING_MISSING], a staging slab's; [DEVICE_HANDLE_STALE], it is of another version,
  // boot or slab than this is; [DEVICE_NOT_HERE], this process doesn't see that GPU; and those of
  // DeviceRuntime.
  static absl::StatusOr<std::unique_ptr<ImportedMemory>> Open(DeviceRuntime* runtime,
                                                              const uint8_t* host,
                                                              int64_t size_bytes);
  ~ImportedMemory();

  uint8_t* base() const { return base_; }
  int32_t device() const { return device_; }
  DeviceRuntime* runtime() const { return runtime_; }
  const DeviceExport& record() const { return DeviceExportAt(host_); }
  // Has who exports it not withdrawn it?
  bool IsReady() const {
    return record().state.load(std::memory_order_acquire) == DeviceExportState::kReady;
  }

 private:
  ImportedMemory(DeviceRuntime* runtime, const uint8_t* host) : runtime_(runtime), host_(host) {}
  absl::Status Import(int64_t size_bytes);
  absl::Status CheckRecord(int64_t size_bytes);
  absl::Status CheckHeaderPage() const;

  DeviceRuntime* const runtime_;
  const uint8_t* const host_;
  int32_t device_ = 0;
  uint8_t* base_ = nullptr;
};

// A record's handle as the runtime takes it.
DeviceHandle ExportedHandle(const uint8_t (&bytes)[64]);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_IMPORTED_MEMORY_H_
