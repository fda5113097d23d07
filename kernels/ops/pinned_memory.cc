#include "kernels/ops/pinned_memory.h"

#include "kernels/core/status.h"
#include "kernels/ops/resident.h"

namespace certkv {

absl::StatusOr<std::unique_ptr<PinnedMemory>> PinnedMemory::Pin(DeviceRuntime* runtime,
                                                                int32_t device, const uint8_t* host,
                                                                int64_t size_bytes) {
  CERTKV_RETURN_IF_ERROR(runtime->Use(device));
  CERTKV_RETURN_IF_ERROR(runtime->PinHost(const_cast<uint8_t*>(host), size_bytes,
                                          DeviceRuntime::HostAccess::kReadOnly));
  std::unique_ptr<PinnedMemory> pinned(new PinnedMemory(runtime, host));
  CERTKV_ASSIGN_OR_RETURN(const void* const on_device, runtime->AddressOfPinned(host));
  AddPinned({host, size_bytes, static_cast<const uint8_t*>(on_device)});
  return pinned;
}

PinnedMemory::~PinnedMemory() {
  RemovePinned(host_);
  runtime_->UnpinHost(const_cast<uint8_t*>(host_));
}

}  // namespace certkv
