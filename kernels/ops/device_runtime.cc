#include "kernels/ops/device_runtime.h"

#include <atomic>

namespace certkv {
namespace {

std::atomic<DeviceRuntime*> registered{nullptr};

}  // namespace

void RegisterDeviceRuntime(DeviceRuntime* runtime) {
  registered.store(runtime, std::memory_order_release);
}

DeviceRuntime* RegisteredDeviceRuntime() { return registered.load(std::memory_order_acquire); }

}  // namespace certkv
