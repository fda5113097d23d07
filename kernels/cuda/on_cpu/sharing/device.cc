// The device of the shared runtime: there is one, and it is these CPU threads.
#include <cstring>

#include "kernels/cuda/on_cpu/sharing/injected_failures.h"

namespace certkv::cuda_sharing {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const auto injected = InjectedFailureOf("cudaGetDeviceCount")) return injected;
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const auto injected = InjectedFailureOf("cudaSetDevice")) return injected;
  return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return cudaErrorInvalidDevice;
  *properties = {};
  std::strcpy(properties->name, "CPU threads");
  std::memcpy(properties->uuid.bytes, "certkv-on-cpu-01", sizeof(properties->uuid.bytes));
  properties->totalGlobalMem = size_t{1} << 33;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return TakeLastError(); }

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorDeviceUninitialized:
      return "invalid device context";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    default:
      return "an error of CUDA";
  }
}

}  // namespace certkv::cuda_sharing
