#include "kernels/cuda/on_cpu/cuda_runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace {

using certkv::cuda_on_cpu::Enter;
using certkv::cuda_on_cpu::RuntimeCall;
using certkv::cuda_on_cpu::Submit;

thread_local std::string last_failure;

}  // namespace

cudaError_t cudaMalloc(void** address, size_t size_bytes) {
  *address = nullptr;
  if (const cudaError_t error = Enter(RuntimeCall::kAllocate); error != cudaSuccess) return error;
  *address = size_bytes == 0 ? nullptr : std::malloc(size_bytes);
  if (*address == nullptr && size_bytes > 0) return cudaErrorMemoryAllocation;
  // Not zeros, which would hide what nobody has written.
  if (size_bytes > 0) std::memset(*address, 0xff, size_bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  // Also where it fails: who frees can do nothing else about it.
  std::free(address);
  return address == nullptr ? cudaSuccess : Enter(RuntimeCall::kFree);
}

cudaError_t cudaMallocHost(void** address, size_t size_bytes) {
  return cudaMalloc(address, size_bytes);
}
cudaError_t cudaFreeHost(void* address) { return cudaFree(address); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return Submit(RuntimeCall::kCopy, stream, [=] {
    if (size_bytes > 0) std::memcpy(to, from, size_bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaMemsetAsync(void* address, int byte, size_t size_bytes, cudaStream_t stream) {
  return Submit(RuntimeCall::kCopy, stream, [=] {
    if (size_bytes > 0) std::memset(address, byte, size_bytes);
    return cudaSuccess;
  });
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = {"cpu threads", 0, certkv::cuda_on_cpu::kMultiprocessorCount};
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
    case cudaErrorIllegalState:
      return "the operation cannot be performed in the present state";
    case cudaErrorMisalignedAddress:
      return "misaligned address";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated:
      return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureImplicit:
      return "operation would make the legacy stream depend on a capturing blocking stream";
    case cudaErrorInvalidConfiguration:
    case cudaErrorLaunchFailure:
      return last_failure.empty() ? "unspecified launch failure" : last_failure.c_str();
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
