// Compiled by two tests: with CERTKV_UNCOVERED the kernel uses what the execution on CPU threads
// doesn't cover, and must not compile.
#include "kernels/cuda/device.h"

namespace certkv::cuda {

__global__ void UseSharedMemory(int* out) {
#if defined(CERTKV_UNCOVERED)
  __shared__ int cell;
  cell = 1;
  __threadfence();
#else
  CERTKV_SHARED(int, cell);
  cell = 1;
#endif
  *out = cell;
}

}  // namespace certkv::cuda
