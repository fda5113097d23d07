// The part of the CUDA runtime that kernels/cuda uses, over host memory: devices, memory, launches.
// Everything is done when a call returns, but what is captured (cuda_stream.h).
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_CUDA_RUNTIME_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_CUDA_RUNTIME_H_

#include <cstddef>
#include <memory>
#include <tuple>
#include <utility>

#include "kernels/cuda/on_cpu/cuda_language.h"
#include "kernels/cuda/on_cpu/cuda_stream.h"

// Numbers of the CUDA runtime.
enum cudaMemcpyKind : int {
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
};
enum cudaDeviceAttr : int { cudaDevAttrMultiProcessorCount = 16 };
enum cudaFuncAttribute : int { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

// Exactly of that size, so that AddressSanitizer sees what is read or written beside it.
cudaError_t cudaMalloc(void** address, size_t size_bytes);
cudaError_t cudaFree(void* address);
cudaError_t cudaMallocHost(void** address, size_t size_bytes);
cudaError_t cudaFreeHost(void* address);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size_bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemsetAsync(void* address, int byte, size_t size_bytes, cudaStream_t stream);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
struct cudaDeviceProp {
  char name[256];
  size_t totalGlobalMem;  // 0 here: that of the host
  int multiProcessorCount;
};
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
// Why the last launch of this thread failed, where that is more than the number says.
const char* cudaGetErrorString(cudaError_t error);

namespace certkv::cuda_on_cpu {

// As on a GPU, a launch with more dynamic shared memory than this is refused before
// cudaFuncSetAttribute has allowed it.
inline constexpr size_t kSharedBytesDefaultMax = 48 << 10;
// Of compute capability 8.0, the smallest of the GPUs that CertKV is compiled for.
inline constexpr size_t kSharedBytesMax = 163 << 10;
// What cudaDevAttrMultiProcessorCount says: so few that short reads have splits of several units.
inline constexpr int kMultiprocessorCount = 1;

cudaError_t AllowSharedBytes(const void* kernel, int size_bytes);
cudaError_t LaunchGrid(const void* kernel, const GridLaunch& launch);

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, const Arguments&... arguments) {
  struct Call {
    Call(void (*kernel)(Parameters...), std::tuple<Parameters...> arguments)
        : kernel(kernel), arguments(std::move(arguments)) {}
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> arguments;
  };
  // Arguments are those of now, also where the launch is recorded.
  const auto call = std::make_shared<Call>(kernel, std::tuple<Parameters...>(arguments...));
  GridLaunch launch;
  launch.grid = {grid.x, grid.y, grid.z};
  launch.block = {block.x, block.y, block.z};
  launch.shared_bytes = shared_bytes;
  launch.run = [](void* argument) {
    auto* const call = static_cast<Call*>(argument);
    std::apply(call->kernel, call->arguments);
  };
  launch.argument = call.get();
  return Submit(RuntimeCall::kLaunch, stream, [call, launch, kernel] {
    return LaunchGrid(reinterpret_cast<const void*>(kernel), launch);
  });
}

}  // namespace certkv::cuda_on_cpu

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute,
                                 int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
  return certkv::cuda_on_cpu::AllowSharedBytes(reinterpret_cast<const void*>(kernel), value);
}

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_CUDA_RUNTIME_H_
