#include "kernels/ops/device.h"

#include <atomic>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

std::atomic<const DeviceOps*> registered{nullptr};

}  // namespace

void RegisterDevice(const DeviceOps* device) {
  registered.store(device, std::memory_order_release);
}

absl::StatusOr<const DeviceOps*> RegisteredDevice() {
  const DeviceOps* const device = registered.load(std::memory_order_acquire);
  if (device != nullptr) return device;
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_MISSING",
                   "backend cuda has no device in this process; use backend cpu, or register one "
                   "where a GPU is");
}

absl::Status LacksOperation(absl::string_view what) {
  return MakeError(absl::StatusCode::kUnimplemented, "DEVICE_LACKS_OPERATION",
                   absl::StrCat("backend cuda doesn't have ", what, " yet; use backend cpu"));
}

}  // namespace certkv
