// Memory on the device for one operation, filled from and read back to the host.
#ifndef CERTKV_KERNELS_CUDA_DEVICE_MEMORY_H_
#define CERTKV_KERNELS_CUDA_DEVICE_MEMORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/status.h"
#include "kernels/cuda/device.h"

namespace certkv::cuda {

// OK, or what the runtime says of `what`, as kernels/ops/device.h lists.
absl::Status StatusOfCuda(cudaError_t error, absl::string_view what);

// Every allocation made for one operation; freed together. Used by one thread, on the default
// stream.
class DeviceMemory {
 public:
  // Room for `count` elements; null for 0.
  template <typename T>
  absl::StatusOr<T*> Allocate(int64_t count) {
    CERTKV_ASSIGN_OR_RETURN(void* const bytes, AllocateBytes(count * int64_t{sizeof(T)}));
    return static_cast<T*>(bytes);
  }
  // A copy of host memory; null for null.
  template <typename T>
  absl::StatusOr<const T*> Copy(const T* from, int64_t count) {
    if (from == nullptr) return nullptr;
    CERTKV_ASSIGN_OR_RETURN(void* const to, CopyBytes(from, count * int64_t{sizeof(T)}));
    return static_cast<const T*>(to);
  }
  // Room for what an operation writes to `to` on the host; null for null. ReadBack copies it.
  template <typename T>
  absl::StatusOr<T*> AllocateResult(T* to, int64_t count) {
    if (to == nullptr) return nullptr;
    CERTKV_ASSIGN_OR_RETURN(T* const on_device, Allocate<T>(count));
    results_.push_back({to, on_device, count * int64_t{sizeof(T)}});
    return on_device;
  }

  absl::Status CopyInto(void* to, const void* from, int64_t size_bytes);
  // Waits for what was queued, then copies every result to the host.
  absl::Status ReadBack();

 private:
  struct Free {
    void operator()(void* address) const { cudaFree(address); }
  };
  struct Result {
    void* host;
    const void* device;
    int64_t size_bytes;
  };

  absl::StatusOr<void*> AllocateBytes(int64_t size_bytes);
  absl::StatusOr<void*> CopyBytes(const void* from, int64_t size_bytes);

  std::vector<std::unique_ptr<void, Free>> allocations_;
  std::vector<Result> results_;
};

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_DEVICE_MEMORY_H_
