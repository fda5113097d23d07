// Memory of GPUs for what outlives an operation: allocations that other processes can open, and
// asynchronous copies. Nothing here needs CUDA: kernels/cuda implements it where nvcc was, and
// registers it where there is a GPU.
#ifndef CERTKV_KERNELS_OPS_DEVICE_RUNTIME_H_
#define CERTKV_KERNELS_OPS_DEVICE_RUNTIME_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

struct CUevent_st;
struct CUstream_st;

namespace certkv {

struct DeviceProperties {
  int32_t device = 0;  // its number in this process; others may count otherwise
  std::string name;
  std::array<uint8_t, 16> uuid{};
  int64_t memory_bytes = 0;
};

// What another process on this machine opens an allocation or an event by.
using DeviceHandle = std::array<uint8_t, 64>;

// Errors of all methods: ResourceExhausted [DEVICE_MEMORY_FULL]; FailedPrecondition
// [DEVICE_IMPORT_REFUSED], a handle that the driver doesn't open or make; Internal [DEVICE_FAILED],
// what else the driver says. Methods without a Status can't fail in a way that anybody could act
// on. Threads: all methods may be called concurrently; a stream and an event are used by one at a
// time.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  // At least one. Errors: FailedPrecondition [DEVICE_MISSING].
  virtual absl::StatusOr<std::vector<DeviceProperties>> Devices() = 0;

  // Makes this the device of what the thread queues on the default stream (a null stream).
  virtual absl::Status Use(int32_t device) = 0;

  virtual absl::StatusOr<void*> Allocate(int32_t device, int64_t size_bytes) = 0;
  // Also while this process has it imported: then it goes with the last of these.
  virtual void Free(void* address) = 0;
  // The whole of an allocation, `address` its begin.
  virtual absl::StatusOr<DeviceHandle> ExportMemory(void* address) = 0;
  // Maps an allocation of this or another process on the same device.
  virtual absl::StatusOr<void*> ImportMemory(int32_t device, const DeviceHandle& handle) = 0;
  virtual void ReleaseMemory(void* address) = 0;

  // The device that an address is memory of, of this process or imported; -1: of none.
  virtual absl::StatusOr<int32_t> DeviceOf(const void* address) = 0;

  // Streams are independent of each other and of the default stream.
  virtual absl::StatusOr<CUstream_st*> CreateStream(int32_t device) = 0;
  virtual void DestroyStream(CUstream_st* stream) = 0;
  // Queue a copy; host memory stays as it is until the stream has passed it, and is read or written
  // by the device directly where it is pinned.
  virtual absl::Status CopyToDevice(void* to, const void* from, int64_t size_bytes,
                                    CUstream_st* stream) = 0;
  virtual absl::Status CopyToHost(void* to, const void* from, int64_t size_bytes,
                                  CUstream_st* stream) = 0;
  // From the device's memory to its memory.
  virtual absl::Status CopyOnDevice(void* to, const void* from, int64_t size_bytes,
                                    CUstream_st* stream) = 0;
  // Queues that device memory is made zeros: a new allocation holds what others left there.
  virtual absl::Status Clear(void* address, int64_t size_bytes, CUstream_st* stream) = 0;
  // Blocks until the stream has done what was queued; says what of it failed.
  virtual absl::Status Wait(CUstream_st* stream) = 0;
  // Has it? Doesn't block. The same errors.
  virtual absl::StatusOr<bool> IsDone(CUstream_st* stream) = 0;

  // Events of an allocation's export: without times, and open to other processes.
  virtual absl::StatusOr<CUevent_st*> CreateEvent(int32_t device) = 0;
  // Of CreateEvent and of ImportEvent.
  virtual void DestroyEvent(CUevent_st* event) = 0;
  virtual absl::Status RecordEvent(CUevent_st* event, CUstream_st* stream) = 0;
  // The stream goes on when the event has happened as it was recorded last. May be called by
  // several threads at a time.
  virtual absl::Status QueueWait(CUstream_st* stream, CUevent_st* event) = 0;
  virtual absl::StatusOr<DeviceHandle> ExportEvent(CUevent_st* event) = 0;
  virtual absl::StatusOr<CUevent_st*> ImportEvent(int32_t device, const DeviceHandle& handle) = 0;

  // Locks whole pages of a mapping in memory, for what devices copy or read by themselves.
  // kReadOnly: devices only read it, and the mapping may be one that can't be written to. Errors
  // also: ResourceExhausted [DEVICE_MEMORY_FULL], so much can't be locked; FailedPrecondition
  // [DEVICE_PIN_REFUSED], the thread's device (Use) can't read such a mapping.
  enum class HostAccess : uint8_t { kReadOnly, kReadWrite };
  virtual absl::Status PinHost(void* address, int64_t size_bytes, HostAccess access) = 0;
  virtual void UnpinHost(void* address) = 0;
  // Where kernels find what lies at `address` in pinned memory.
  virtual absl::StatusOr<const void*> AddressOfPinned(const void* address) = 0;
};

// From now on this process has these devices; null: none. Not to be called while one is used.
void RegisterDeviceRuntime(DeviceRuntime* runtime);
// Null where none was registered.
DeviceRuntime* RegisteredDeviceRuntime();

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_DEVICE_RUNTIME_H_
