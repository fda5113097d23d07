// A fake store's memory whose device slab has a copy on the device that host memory is.
#ifndef CERTKV_TESTS_DEVICE_DEVICE_CACHE_H_
#define CERTKV_TESTS_DEVICE_DEVICE_CACHE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/core/check.h"
#include "kernels/cuda/cuda.h"
#include "kernels/ops/device_runtime.h"
#include "services/certifier/fake_cache.h"
#include "services/kvstore/device_copy.h"

namespace certkv {

inline DeviceRuntime* HostMemoryDevice() {
  CERTKV_CHECK(cuda::UseDevice().ok(), "host memory is a device");
  return RegisteredDeviceRuntime();
}

// Where the store writes the fake's device slab, from its beginning.
inline uint8_t* StoreBase(certifier::FakeCache* fake) {
  const SlabLayout& layout = fake->cache()->device().layout();
  return fake->scan(0, 0, 0, 0) - layout.scan_offset(fake->blocks()[0].device.slot, 0, 0, 0);
}

// The copy of a slab in which blocks were put, with all of them.
inline std::unique_ptr<kvstore::DeviceCopy> CopyOf(certifier::FakeCache* fake) {
  DeviceRuntime* const runtime = HostMemoryDevice();
  auto copy = kvstore::DeviceCopy::Create({runtime, runtime->Devices()->front()},
                                          fake->cache()->device().layout(), StoreBase(fake));
  CERTKV_CHECK(copy.ok(), "the copy of a test is made");
  std::vector<int32_t> slots;
  for (const BlockHandle& block : fake->blocks()) slots.push_back(block.device.slot);
  (*copy)->Upload(slots);
  CERTKV_CHECK((*copy)->is_ready(), "and has what was put");
  return *std::move(copy);
}

}  // namespace certkv

#endif  // CERTKV_TESTS_DEVICE_DEVICE_CACHE_H_
