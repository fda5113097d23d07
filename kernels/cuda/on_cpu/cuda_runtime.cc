#include "kernels/cuda/on_cpu/cuda_runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

thread_local std::string last_failure;

}  // namespace

cudaError_t cudaMalloc(void** address, size_t size_bytes) {
  *address = size_bytes == 0 ? nullptr : std::malloc(size_bytes);
  if (*address == nullptr && size_bytes > 0) return cudaErrorMemoryAllocation;
  // Not zeros, which would hide what nobody has written.
  if (size_bytes > 0) std::memset(*address, 0xff, size_bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind,
                            cudaStream_t) {
  if (size_bytes > 0) std::memcpy(to, from, size_bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int byte, size_t size_bytes, cudaStream_t) {
  if (size_bytes > 0) std::memset(address, byte, size_bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = certkv::cuda_on_cpu::kMultiprocessorCount;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
    case cudaErrorLaunchFailure:
      return last_failure.c_str();
  }
  return "unknown error";
}

namespace certkv::cuda_on_cpu {
namespace {

std::mutex allowed_mutex;
// Dynamic shared memory that kernels were allowed beyond the default.
std::map<const void*, size_t>& AllowedBytes() {
  static std::map<const void*, size_t> allowed;
  return allowed;
}

size_t AllowedBytesOf(const void* kernel) {
  const std::lock_guard lock(allowed_mutex);
  const auto found = AllowedBytes().find(kernel);
  return found == AllowedBytes().end() ? kSharedBytesDefaultMax : found->second;
}

}  // namespace

cudaError_t AllowSharedBytes(const void* kernel, int size_bytes) {
  if (size_bytes < 0 || static_cast<size_t>(size_bytes) > kSharedBytesMax) {
    return cudaErrorInvalidValue;
  }
  const std::lock_guard lock(allowed_mutex);
  AllowedBytes()[kernel] = std::max(kSharedBytesDefaultMax, static_cast<size_t>(size_bytes));
  return cudaSuccess;
}

cudaError_t LaunchGrid(const void* kernel, const GridLaunch& launch) {
  const size_t allowed = AllowedBytesOf(kernel);
  if (launch.shared_bytes > allowed) {
    last_failure = "the kernel asks for " + std::to_string(launch.shared_bytes) +
                   " bytes of dynamic shared memory, " + std::to_string(allowed) + " are allowed";
    return cudaErrorInvalidConfiguration;
  }
  last_failure = RunGrid(launch);
  return last_failure.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace certkv::cuda_on_cpu
