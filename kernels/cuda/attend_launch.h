// The kernels of attend.cu, for the files that launch them.
#ifndef CERTKV_KERNELS_CUDA_ATTEND_LAUNCH_H_
#define CERTKV_KERNELS_CUDA_ATTEND_LAUNCH_H_

#include <cstdint>

#include "kernels/cuda/attend.h"
#include "kernels/cuda/device.h"

namespace certkv::cuda {

// Reads that lie `stride_bytes` apart, in device memory.
struct ReadArray {
  const AttendRead* first;
  int64_t stride_bytes;

  __device__ const AttendRead& At(uint32_t n) const {
    const auto* const bytes = reinterpret_cast<const unsigned char*>(first);
    return *reinterpret_cast<const AttendRead*>(bytes + stride_bytes * n);
  }
};

// The units of all reads, up to plan.split_count splits of each.
cudaError_t LaunchSplits(const AttendPlan& plan, ReadArray reads, cudaStream_t stream);
// All splits of every head put together.
cudaError_t LaunchCombine(const AttendPlan& plan, ReadArray reads, cudaStream_t stream);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_ATTEND_LAUNCH_H_
