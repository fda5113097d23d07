#include "services/kvstore/exported_memory.h"

#include <algorithm>

#include "kernels/core/boot_id.h"
#include "kernels/core/status.h"
#include "services/common/random_id.h"

namespace certkv::kvstore {
namespace {

// CUDA shares whole 2 MiB blocks between processes: nothing else is to lie in one.
constexpr int64_t kSharedBlockBytes = int64_t{2} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<ExportedMemory>> ExportedMemory::Allocate(const DevicePlace& place,
                                                                         int64_t size_bytes) {
  const int64_t whole_bytes =
      (size_bytes + kSharedBlockBytes - 1) / kSharedBlockBytes * kSharedBlockBytes;
  CERTKV_ASSIGN_OR_RETURN(void* const base,
                          place.runtime->Allocate(place.device.device, whole_bytes));
  return std::unique_ptr<ExportedMemory>(new ExportedMemory(place, size_bytes, base));
}

ExportedMemory::~ExportedMemory() { place_.runtime->Free(base_); }

absl::Status ExportedMemory::Describe(CUevent_st* event, DeviceExport* record) const {
  CERTKV_ASSIGN_OR_RETURN(const DeviceHandle memory, place_.runtime->ExportMemory(base_));
  DeviceHandle event_handle{};
  if (event != nullptr) {
    CERTKV_ASSIGN_OR_RETURN(event_handle, place_.runtime->ExportEvent(event));
  }
  const BootId boot = CurrentBootId();
  record->magic = kDeviceExportMagic;
  record->version = kDeviceExportVersion;
  record->export_id = static_cast<uint64_t>(RandomId());
  record->size_bytes = size_bytes_;
  std::copy(boot.begin(), boot.end(), record->boot_id);
  std::copy(place_.device.uuid.begin(), place_.device.uuid.end(), record->device_uuid);
  std::copy(memory.begin(), memory.end(), record->memory_handle);
  std::copy(event_handle.begin(), event_handle.end(), record->event_handle);
  return absl::OkStatus();
}

}  // namespace certkv::kvstore
