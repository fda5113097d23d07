#include "services/kvstore/device_place.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {

absl::StatusOr<DevicePlace> ChooseDevice(const KvStoreConfig& config) {
  if (config.device == DeviceChoice::kHost) return DevicePlace{};
  DeviceRuntime* const runtime = RegisteredDeviceRuntime();
  if (runtime == nullptr) {
    if (config.device == DeviceChoice::kAuto) return DevicePlace{};
    if (!config.device_error.ok()) return config.device_error;
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_MISSING",
                     "kvstore.device is cuda, and this program has no devices; set device: host");
  }
  CERTKV_ASSIGN_OR_RETURN(const std::vector<DeviceProperties> devices, runtime->Devices());
  for (const DeviceProperties& device : devices) {
    if (device.device == config.device_index) return DevicePlace{runtime, device};
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_NOT_HERE",
                   absl::StrCat("kvstore.device_index is ", config.device_index,
                                ", this process sees ", devices.size(),
                                " GPUs, counted from 0; choose one of them, or let the process "
                                "see more"));
}

}  // namespace certkv::kvstore
