#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "kernels/cuda/on_cpu/sharing/cuda_runtime.h"
#endif
#include "kernels/cuda/device_runtime.h"

namespace certkv::cuda {
namespace {

#if !defined(__CUDACC__)
using namespace cuda_sharing;  // NOLINT: what nvcc has everywhere
#endif

absl::Status Failed(absl::StatusCode code, absl::string_view reason, absl::string_view what,
                    cudaError_t error, absl::string_view remedy) {
  cudaGetLastError();  // it is told here; the next launch isn't to be blamed for it
  return MakeError(code, reason,
                   absl::StrCat(what, ": ", cudaGetErrorString(error), " (CUDA error ",
                                static_cast<int>(error), "); ", remedy));
}

absl::Status StatusOf(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  if (error == cudaErrorMemoryAllocation) {
    return Failed(absl::StatusCode::kResourceExhausted, "DEVICE_MEMORY_FULL", what, error,
                  "give the device less to hold, or set device: host");
  }
  return Failed(absl::StatusCode::kInternal, "DEVICE_FAILED", what, error,
                "look at the device, or set device: host");
}

// Streams and events as the interface names them.
cudaStream_t Own(CUstream_st* stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Own(CUevent_st* event) { return reinterpret_cast<cudaEvent_t>(event); }
CUstream_st* Public(cudaStream_t stream) { return reinterpret_cast<CUstream_st*>(stream); }
CUevent_st* Public(cudaEvent_t event) { return reinterpret_cast<CUevent_st*>(event); }

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(DeviceHandle));
static_assert(sizeof(cudaIpcEventHandle_t) == sizeof(DeviceHandle));

// What making or opening a handle ended in.
absl::Status StatusOfHandle(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess || error == cudaErrorMemoryAllocation) return StatusOf(error, what);
  return Failed(absl::StatusCode::kFailedPrecondition, "DEVICE_IMPORT_REFUSED", what, error,
                "the processes must see the same GPU and share its driver: give both the same "
                "container settings, or set device: host");
}

// What a mapping that can't be written to is registered with. CUDA: cudaHostRegisterReadOnly, where
// the device knows it; nothing, where the device goes by the host's page tables.
absl::StatusOr<unsigned int> ReadOnlyFlag() {
  int device = 0;
  CERTKV_RETURN_IF_ERROR(StatusOf(cudaGetDevice(&device), "asking for the thread's device"));
  int is_known = 0;
  int uses_host_tables = 0;
  CERTKV_RETURN_IF_ERROR(
      StatusOf(cudaDeviceGetAttribute(&is_known, cudaDevAttrHostRegisterReadOnlySupported, device),
               "asking whether the device reads read-only mappings"));
  if (is_known != 0) return cudaHostRegisterReadOnly;
  CERTKV_RETURN_IF_ERROR(
      StatusOf(cudaDeviceGetAttribute(&uses_host_tables,
                                      cudaDevAttrPageableMemoryAccessUsesHostPageTables, device),
               "asking whose page tables the device uses"));
  if (uses_host_tables != 0) return 0u;
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_PIN_REFUSED",
                   absl::StrCat("device ", device,
                                " reads no memory that is mapped read-only; leave it unpinned"));
}

template <typename Handle>
DeviceHandle BytesOf(const Handle& handle) {
  DeviceHandle bytes;
  std::memcpy(bytes.data(), &handle, sizeof(handle));
  return bytes;
}

template <typename Handle>
Handle HandleOf(const DeviceHandle& bytes) {
  Handle handle;
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  return handle;
}

}  // namespace

absl::StatusOr<std::vector<DeviceProperties>> CudaDeviceRuntime::Devices() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_MISSING",
                     absl::StrCat("this machine has no GPU that CUDA can use (",
                                  cudaGetErrorString(error), "); set device: host"));
  }
  std::vector<DeviceProperties> devices(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    CERTKV_RETURN_IF_ERROR(
        StatusOf(cudaGetDeviceProperties(&properties, i), "asking for a device's properties"));
    devices[i].device = i;
    devices[i].name = properties.name;
    devices[i].memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    std::memcpy(devices[i].uuid.data(), &properties.uuid, devices[i].uuid.size());
  }
  return devices;
}

absl::Status CudaDeviceRuntime::Use(int32_t device) {
  return StatusOf(cudaSetDevice(device), absl::StrCat("choosing device ", device));
}

absl::StatusOr<void*> CudaDeviceRuntime::Allocate(int32_t device, int64_t size_bytes) {
  CERTKV_RETURN_IF_ERROR(Use(device));
  void* address = nullptr;
  CERTKV_RETURN_IF_ERROR(
      StatusOf(cudaMalloc(&address, static_cast<size_t>(size_bytes)),
               absl::StrCat("allocating ", size_bytes, " bytes on device ", device)));
  const std::lock_guard lock(mutex_);
  allocations_[address] = {};
  return address;
}

void CudaDeviceRuntime::Free(void* address) {
  const std::lock_guard lock(mutex_);
  allocations_.at(address).is_freed = true;
  if (Drop(&allocations_, address)) cudaFree(address);
}

absl::StatusOr<DeviceHandle> CudaDeviceRuntime::ExportMemory(void* address) {
  cudaIpcMemHandle_t handle{};
  CERTKV_RETURN_IF_ERROR(
      StatusOfHandle(cudaIpcGetMemHandle(&handle, address), "exporting device memory"));
  const std::lock_guard lock(mutex_);
  return allocations_.at(address).handle = BytesOf(handle);
}

absl::StatusOr<void*> CudaDeviceRuntime::ImportMemory(int32_t device, const DeviceHandle& handle) {
  {
    const std::lock_guard lock(mutex_);
    if (void* const owned = ImportOwned(&allocations_, handle)) return owned;
  }
  CERTKV_RETURN_IF_ERROR(Use(device));
  void* address = nullptr;
  CERTKV_RETURN_IF_ERROR(
      StatusOfHandle(cudaIpcOpenMemHandle(&address, HandleOf<cudaIpcMemHandle_t>(handle),
                                          cudaIpcMemLazyEnablePeerAccess),
                     "opening another process's device memory"));
  return address;
}

void CudaDeviceRuntime::ReleaseMemory(void* address) {
  const std::lock_guard lock(mutex_);
  const auto owned = allocations_.find(address);
  if (owned == allocations_.end()) {
    cudaIpcCloseMemHandle(address);
    return;
  }
  --owned->second.import_count;
  if (Drop(&allocations_, address)) cudaFree(address);
}

absl::StatusOr<int32_t> CudaDeviceRuntime::DeviceOf(const void* address) {
  cudaPointerAttributes attributes{};
  CERTKV_RETURN_IF_ERROR(
      StatusOf(cudaPointerGetAttributes(&attributes, address), "asking whose memory it is"));
  return attributes.type == cudaMemoryTypeDevice ? attributes.device : -1;
}

absl::StatusOr<CUstream_st*> CudaDeviceRuntime::CreateStream(int32_t device) {
  CERTKV_RETURN_IF_ERROR(Use(device));
  cudaStream_t stream = nullptr;
  CERTKV_RETURN_IF_ERROR(
      StatusOf(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "making a stream"));
  return Public(stream);
}

void CudaDeviceRuntime::DestroyStream(CUstream_st* stream) { cudaStreamDestroy(Own(stream)); }

absl::Status CudaDeviceRuntime::CopyToDevice(void* to, const void* from, int64_t size_bytes,
                                             CUstream_st* stream) {
  return StatusOf(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), cudaMemcpyHostToDevice,
                                  Own(stream)),
                  "copying to the device");
}

absl::Status CudaDeviceRuntime::CopyToHost(void* to, const void* from, int64_t size_bytes,
                                           CUstream_st* stream) {
  return StatusOf(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), cudaMemcpyDeviceToHost,
                                  Own(stream)),
                  "copying from the device");
}

absl::Status CudaDeviceRuntime::CopyOnDevice(void* to, const void* from, int64_t size_bytes,
                                             CUstream_st* stream) {
  return StatusOf(cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes),
                                  cudaMemcpyDeviceToDevice, Own(stream)),
                  "copying within the device");
}

absl::Status CudaDeviceRuntime::Clear(void* address, int64_t size_bytes, CUstream_st* stream) {
  return StatusOf(cudaMemsetAsync(address, 0, static_cast<size_t>(size_bytes), Own(stream)),
                  "clearing device memory");
}

absl::Status CudaDeviceRuntime::Wait(CUstream_st* stream) {
  return StatusOf(cudaStreamSynchronize(Own(stream)), "waiting for the device");
}

absl::StatusOr<bool> CudaDeviceRuntime::IsDone(CUstream_st* stream) {
  const cudaError_t error = cudaStreamQuery(Own(stream));
  if (error == cudaErrorNotReady) return false;
  CERTKV_RETURN_IF_ERROR(StatusOf(error, "asking the device"));
  return true;
}

absl::StatusOr<CUevent_st*> CudaDeviceRuntime::CreateEvent(int32_t device) {
  CERTKV_RETURN_IF_ERROR(Use(device));
  cudaEvent_t event = nullptr;
  CERTKV_RETURN_IF_ERROR(
      StatusOf(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess),
               "making an event"));
  const std::lock_guard lock(mutex_);
  events_[Public(event)] = {};
  return Public(event);
}

void CudaDeviceRuntime::DestroyEvent(CUevent_st* event) {
  const std::lock_guard lock(mutex_);
  const auto owned = events_.find(event);
  if (owned != events_.end()) {
    // The one who made it is one of those who destroy it.
    if (owned->second.import_count > 0) {
      --owned->second.import_count;
      return;
    }
    events_.erase(owned);
  }
  cudaEventDestroy(Own(event));
}

absl::Status CudaDeviceRuntime::RecordEvent(CUevent_st* event, CUstream_st* stream) {
  return StatusOf(cudaEventRecord(Own(event), Own(stream)), "recording an event");
}

absl::Status CudaDeviceRuntime::QueueWait(CUstream_st* stream, CUevent_st* event) {
  return StatusOf(cudaStreamWaitEvent(Own(stream), Own(event), 0), "waiting for an event");
}

absl::StatusOr<DeviceHandle> CudaDeviceRuntime::ExportEvent(CUevent_st* event) {
  cudaIpcEventHandle_t handle{};
  CERTKV_RETURN_IF_ERROR(
      StatusOfHandle(cudaIpcGetEventHandle(&handle, Own(event)), "exporting an event"));
  const std::lock_guard lock(mutex_);
  return events_.at(event).handle = BytesOf(handle);
}

absl::StatusOr<CUevent_st*> CudaDeviceRuntime::ImportEvent(int32_t device,
                                                           const DeviceHandle& handle) {
  {
    const std::lock_guard lock(mutex_);
    if (void* const owned = ImportOwned(&events_, handle)) return static_cast<CUevent_st*>(owned);
  }
  CERTKV_RETURN_IF_ERROR(Use(device));
  cudaEvent_t event = nullptr;
  CERTKV_RETURN_IF_ERROR(
      StatusOfHandle(cudaIpcOpenEventHandle(&event, HandleOf<cudaIpcEventHandle_t>(handle)),
                     "opening another process's event"));
  return Public(event);
}

absl::Status CudaDeviceRuntime::PinHost(void* address, int64_t size_bytes, HostAccess access) {
  unsigned int flags = cudaHostRegisterPortable;
  if (access == HostAccess::kReadOnly) {
    CERTKV_ASSIGN_OR_RETURN(const unsigned int read_only, ReadOnlyFlag());
    flags |= read_only;
  }
  const std::string what = absl::StrCat("pinning ", size_bytes, " bytes of host memory");
  const cudaError_t error = cudaHostRegister(address, static_cast<size_t>(size_bytes), flags);
  if (error != cudaErrorMemoryAllocation) return StatusOf(error, what);
  return Failed(absl::StatusCode::kResourceExhausted, "DEVICE_MEMORY_FULL", what, error,
                "pin less, or let the process lock more: RLIMIT_MEMLOCK, its memory limit");
}

void CudaDeviceRuntime::UnpinHost(void* address) {
  // Nobody could act on an error, and the next launch isn't to be blamed for it.
  if (cudaHostUnregister(address) != cudaSuccess) cudaGetLastError();
}

absl::StatusOr<const void*> CudaDeviceRuntime::AddressOfPinned(const void* address) {
  void* on_device = nullptr;
  CERTKV_RETURN_IF_ERROR(
      StatusOf(cudaHostGetDevicePointer(&on_device, const_cast<void*>(address), 0),
               "asking where the device reads pinned memory"));
  return on_device;
}

void* CudaDeviceRuntime::ImportOwned(std::map<void*, Owned>* owned, const DeviceHandle& handle) {
  for (auto& [address, one] : *owned) {
    if (one.handle != handle || one.is_freed || one.handle == DeviceHandle{}) continue;
    ++one.import_count;
    return address;
  }
  return nullptr;
}

bool CudaDeviceRuntime::Drop(std::map<void*, Owned>* owned, void* address) {
  const Owned& one = owned->at(address);
  if (!one.is_freed || one.import_count > 0) return false;
  owned->erase(address);
  return true;
}

absl::Status UseDevice() {
  static auto* const runtime = new CudaDeviceRuntime;
  CERTKV_RETURN_IF_ERROR(runtime->Devices().status());
  RegisterDevice(&HostMemoryOps());
  RegisterDeviceRuntime(runtime);
  return absl::OkStatus();
}

}  // namespace certkv::cuda
