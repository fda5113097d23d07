// The part of the CUDA runtime that kernels/cuda/device_runtime.cu uses, over host memory: memory
// and events that processes share, streams, pinning. In a namespace of its own, beside on_cpu's
// CUDA for kernels, which read this memory as any other.
//
// Copies and events that are queued on a stream are done when somebody waits for them and not
// before, so that a wait that is missing is always seen. Failures can be injected
// (injected_failures.h).
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_SHARING_CUDA_RUNTIME_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_SHARING_CUDA_RUNTIME_H_

#include <cstddef>
#include <cstdint>

namespace certkv::cuda_sharing {

// The variable of the environment that says how many devices there are, at most 9; without it: one.
inline constexpr char kDeviceCount[] = "CERTKV_DEVICES";

using cudaStream_t = struct Stream*;
using cudaEvent_t = struct Event*;

// Numbers of the CUDA runtime.
enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidDevice = 101,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorHostMemoryAlreadyRegistered = 712,
  cudaErrorHostMemoryNotRegistered = 713,
  cudaErrorNotSupported = 801,
  cudaErrorTimeout = 909,  // an event that nobody completed; CUDA would wait for ever
};
enum cudaMemcpyKind : int {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
};

// As a server of today has them; the other way where a failure of that name is injected.
enum cudaDeviceAttr : int {
  cudaDevAttrPageableMemoryAccessUsesHostPageTables = 100,
  cudaDevAttrHostRegisterReadOnlySupported = 113,
};

struct cudaDeviceProp {
  char name[256];
  struct {
    char bytes[16];
  } uuid;
  size_t totalGlobalMem;
};
enum cudaMemoryType : int { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeDevice = 2 };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
};
struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaIpcEventHandle_t {
  char reserved[64];
};
inline constexpr unsigned int cudaStreamNonBlocking = 1;
inline constexpr unsigned int cudaEventDisableTiming = 2;
inline constexpr unsigned int cudaEventInterprocess = 4;
inline constexpr unsigned int cudaIpcMemLazyEnablePeerAccess = 1;
inline constexpr unsigned int cudaHostRegisterPortable = 1;
inline constexpr unsigned int cudaHostRegisterReadOnly = 8;

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);  // of this thread; 0 until it is set
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
// The error of this thread's last call that failed, forgotten by this call.
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);

// Shared memory, of whole pages; the page after it isn't mapped.
cudaError_t cudaMalloc(void** address, size_t size_bytes);
cudaError_t cudaFree(void* address);
// As on a GPU, a handle is opened by other processes only, and only while its process lives.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address);
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned int flags);
cudaError_t cudaIpcCloseMemHandle(void* address);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address);
// Locks nothing, so that tests need no limit raised. Kernels find a shared mapping that is
// registered at another address, where nothing is mapped afterwards; other memory where it is.
cudaError_t cudaHostRegister(void* address, size_t size_bytes, unsigned int flags);
cudaError_t cudaHostUnregister(void* address);
cudaError_t cudaHostGetDevicePointer(void** on_device, void* host, unsigned int flags);

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* address, int byte, size_t size_bytes, cudaStream_t stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event);
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle);

}  // namespace certkv::cuda_sharing

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_SHARING_CUDA_RUNTIME_H_
