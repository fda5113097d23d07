// A fixture of reads whose cache has a copy on the device that host memory is, and a certifier that
// reads it.
#ifndef CERTKV_TESTS_DEVICE_DEVICE_FIXTURE_H_
#define CERTKV_TESTS_DEVICE_DEVICE_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "services/certifier/read_fixture.h"
#include "tests/device/device_cache.h"

namespace certkv::certifier {

inline constexpr Tolerances kLoose = {.tv_tolerance = 0.2f, .value_tolerance = 0.5f};
inline constexpr int64_t kTokens = 400;

inline ReadKernels OnDevice() {
  ReadKernels kernels = KernelsOf(Backend::kCpu);
  kernels.attend_on_device = KernelsOf(Backend::kCuda).attend;
  return kernels;
}

struct DeviceFixture : ReadFixture {
  explicit DeviceFixture(const PolicyLease& policy = TestLease(kLoose),
                         ReadKernels kernels = OnDevice(),
                         const CacheSpec& spec = SmallSpec(2, 2, 3, 64))
      : ReadFixture(spec, kTokens, policy, 1.0f, std::move(kernels)), copy(CopyOf(&fake)) {
    const absl::Status imported = fake.cache()->ImportDeviceCopy(HostMemoryDevice());
    EXPECT_TRUE(imported.ok()) << imported;
  }
  // The copy of a record, to break things with.
  uint8_t* copied(const uint8_t* host) {
    return const_cast<uint8_t*>(fake.cache()->device_copy()->device_base()) +
           (host - StoreBase(&fake));
  }
  int64_t device_passes() { return checker.counters().device_passes; }
  auto fallbacks() { return checker.counters().DeviceFallbacksByReason(); }

  std::unique_ptr<kvstore::DeviceCopy> copy;
};

}  // namespace certkv::certifier

#endif  // CERTKV_TESTS_DEVICE_DEVICE_FIXTURE_H_
