// ExportedMemory: memory of a GPU that other processes open by the record in a slab's header page.
#ifndef CERTKV_SERVICES_KVSTORE_EXPORTED_MEMORY_H_
#define CERTKV_SERVICES_KVSTORE_EXPORTED_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/device_export.h"
#include "kernels/ops/device_runtime.h"

namespace certkv::kvstore {

// Which GPU has what the store keeps on one.
struct DevicePlace {
  DeviceRuntime* runtime = nullptr;  // null: there are none
  DeviceProperties device{};
};

// Device memory whose allocation has no other in its 2 MiB blocks, which CUDA shares as a whole.
// Holds what was left there until it is written.
// Threads: const after Allocate.
class ExportedMemory {
 public:
  // Errors: those of DeviceRuntime::Allocate.
  static absl::StatusOr<std::unique_ptr<ExportedMemory>> Allocate(const DevicePlace& place,
                                                                  int64_t size_bytes);
  // Processes that have it open had better have closed it.
  ~ExportedMemory();
  ExportedMemory(const ExportedMemory&) = delete;
  ExportedMemory& operator=(const ExportedMemory&) = delete;

  uint8_t* base() const { return base_; }

  // Fills a header page's record, but for its state: whoever sees it would open what isn't written
  // yet. `event` null: no handle. Errors: those of DeviceRuntime; then the record is untouched.
  absl::Status Describe(CUevent_st* event, DeviceExport* record) const;

 private:
  ExportedMemory(const DevicePlace& place, int64_t size_bytes, void* base)
      : place_(place), size_bytes_(size_bytes), base_(static_cast<uint8_t*>(base)) {}

  const DevicePlace place_;
  const int64_t size_bytes_;  // as asked for
  uint8_t* const base_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_EXPORTED_MEMORY_H_
