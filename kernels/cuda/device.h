// What every file of device code includes: CUDA as nvcc knows it, or as on_cpu executes it.
//
// A kernel is launched with LaunchKernel; its shared memory is declared with
//   CERTKV_SHARED(float[4], sums);       // one variable for the block
//   CERTKV_DYNAMIC_SHARED(bytes);        // the launch's dynamic shared memory, 16-byte aligned
// so that both executions know it. Nothing else differs between them.
#ifndef CERTKV_KERNELS_CUDA_DEVICE_H_
#define CERTKV_KERNELS_CUDA_DEVICE_H_

#include <cstddef>
#include <type_traits>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#define CERTKV_SHARED(type, name) __shared__ std::type_identity_t<type> name
#define CERTKV_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#else
#include "kernels/cuda/on_cpu/cuda_runtime.h"

#define CERTKV_SHARED(type, name)                                                          \
  auto& name =                                                                             \
      *static_cast<std::type_identity_t<type>*>(::certkv::cuda_on_cpu::StaticSharedMemory( \
          [] {                                                                             \
            static const char tag = 0;                                                     \
            return &tag;                                                                   \
          }(),                                                                             \
          sizeof(std::type_identity_t<type>)))
#define CERTKV_DYNAMIC_SHARED(name) \
  unsigned char* const name = ::certkv::cuda_on_cpu::DynamicSharedMemory()
#endif

namespace certkv::cuda {

__device__ inline int ThreadIndex() { return static_cast<int>(threadIdx.x); }

// Queues the kernel on the stream. Nothing is allocated; it may be captured into a graph.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                         cudaStream_t stream, const Arguments&... arguments) {
#if defined(__CUDACC__)
  kernel<<<grid, block, shared_bytes, stream>>>(arguments...);
  return cudaGetLastError();
#else
  return ::certkv::cuda_on_cpu::Launch(kernel, grid, block, shared_bytes, stream, arguments...);
#endif
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_DEVICE_H_
