// DeviceRuntime by the CUDA runtime.
#ifndef CERTKV_KERNELS_CUDA_DEVICE_RUNTIME_H_
#define CERTKV_KERNELS_CUDA_DEVICE_RUNTIME_H_

#include <map>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/ops/device_runtime.h"

namespace certkv::cuda {

// CUDA opens a handle in other processes only. Handles of this process are answered from a table,
// so that a store and a certifier in one process need no other way.
//
// Invariants:
//  1. `allocations_` has every allocation that was not given back to CUDA.
//  2. One is given back when it was freed and no import of this process is left.
class CudaDeviceRuntime final : public DeviceRuntime {
 public:
  absl::StatusOr<std::vector<DeviceProperties>> Devices() override;
  absl::Status Use(int32_t device) override;
  absl::StatusOr<void*> Allocate(int32_t device, int64_t size_bytes) override;
  void Free(void* address) override;
  absl::StatusOr<DeviceHandle> ExportMemory(void* address) override;
  absl::StatusOr<void*> ImportMemory(int32_t device, const DeviceHandle& handle) override;
  void ReleaseMemory(void* address) override;
  absl::StatusOr<int32_t> DeviceOf(const void* address) override;
  absl::StatusOr<CUstream_st*> CreateStream(int32_t device) override;
  void DestroyStream(CUstream_st* stream) override;
  absl::Status CopyToDevice(void* to, const void* from, int64_t size_bytes,
                            CUstream_st* stream) override;
  absl::Status CopyToHost(void* to, const void* from, int64_t size_bytes,
                          CUstream_st* stream) override;
  absl::Status CopyOnDevice(void* to, const void* from, int64_t size_bytes,
                            CUstream_st* stream) override;
  absl::Status Clear(void* address, int64_t size_bytes, CUstream_st* stream) override;
  absl::Status Wait(CUstream_st* stream) override;
  absl::StatusOr<bool> IsDone(CUstream_st* stream) override;
  absl::StatusOr<CUevent_st*> CreateEvent(int32_t device) override;
  void DestroyEvent(CUevent_st* event) override;
  absl::Status RecordEvent(CUevent_st* event, CUstream_st* stream) override;
  absl::Status QueueWait(CUstream_st* stream, CUevent_st* event) override;
  absl::StatusOr<DeviceHandle> ExportEvent(CUevent_st* event) override;
  absl::StatusOr<CUevent_st*> ImportEvent(int32_t device, const DeviceHandle& handle) override;
  absl::Status PinHost(void* address, int64_t size_bytes, HostAccess access) override;
  void UnpinHost(void* address) override;
  absl::StatusOr<const void*> AddressOfPinned(const void* address) override;

 private:
  // An allocation or an event of this process.
  struct Owned {
    DeviceHandle handle{};  // zeros until it is exported
    int32_t import_count = 0;
    bool is_freed = false;
  };
  // The owned one of that handle, with one more import; null when it is another process's.
  void* ImportOwned(std::map<void*, Owned>* owned, const DeviceHandle& handle);
  // True when nobody has it any more.
  bool Drop(std::map<void*, Owned>* owned, void* address);

  std::mutex mutex_;
  std::map<void*, Owned> allocations_;
  std::map<void*, Owned> events_;
};

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_DEVICE_RUNTIME_H_
