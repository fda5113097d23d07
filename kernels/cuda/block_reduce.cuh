// One value of each thread of a block, put together.
#ifndef CERTKV_KERNELS_CUDA_BLOCK_REDUCE_CUH_
#define CERTKV_KERNELS_CUDA_BLOCK_REDUCE_CUH_

#include "kernels/cuda/attend_block.cuh"

namespace certkv::cuda {

// All threads get the result, whose order of operations is fixed. `scratch`: [kBlockThreads].
template <typename T, typename Operation>
__device__ T BlockReduce(T* scratch, T value, Operation operation) {
  scratch[ThreadIndex()] = value;
  __syncthreads();
  for (int step = kBlockThreads / 2; step > 0; step /= 2) {
    if (ThreadIndex() < step) {
      scratch[ThreadIndex()] = operation(scratch[ThreadIndex()], scratch[ThreadIndex() + step]);
    }
    __syncthreads();
  }
  const T result = scratch[0];
  __syncthreads();
  return result;
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_BLOCK_REDUCE_CUH_
