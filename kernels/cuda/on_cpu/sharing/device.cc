// The devices of the shared runtime: there is one, or as many as the environment says, and they are
// these CPU threads.
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/on_cpu/sharing/injected_failures.h"

namespace certkv::cuda_sharing {
namespace {

int DeviceCount() {
  const char* const count = std::getenv(kDeviceCount);
  return count == nullptr ? 1 : std::atoi(count);
}

thread_local int current_device = 0;

}  // namespace

bool HasAttribute(cudaDeviceAttr attribute) {
  if (attribute == cudaDevAttrHostRegisterReadOnlySupported) {
    return InjectedFailureOf("cudaDevAttrHostRegisterReadOnlySupported") == cudaSuccess;
  }
  return InjectedFailureOf("cudaDevAttrPageableMemoryAccessUsesHostPageTables") != cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (const auto injected = InjectedFailureOf("cudaGetDeviceCount")) return injected;
  *count = DeviceCount();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (const auto injected = InjectedFailureOf("cudaSetDevice")) return injected;
  if (device >= DeviceCount()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (const auto injected = InjectedFailureOf("cudaGetDevice")) return injected;
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (const auto injected = InjectedFailureOf("cudaDeviceGetAttribute")) return injected;
  if (device >= DeviceCount()) return cudaErrorInvalidDevice;
  *value = HasAttribute(attribute) ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device >= DeviceCount()) return cudaErrorInvalidDevice;
  *properties = {};
  std::strcpy(properties->name, "CPU threads");
  std::memcpy(properties->uuid.bytes, "certkv-on-cpu-01", sizeof(properties->uuid.bytes));
  properties->uuid.bytes[15] = static_cast<char>('1' + device);
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
