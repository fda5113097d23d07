// Brings originals together for a repaired read: copies runs of bytes that lie in many places,
// pinned host memory among them, to where AttendTile::original_keys and original_values point. One
// launch for all tiles of all heads that are repaired. Needs no CUDA to include.
#ifndef CERTKV_KERNELS_CUDA_GATHER_H_
#define CERTKV_KERNELS_CUDA_GATHER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

struct CUstream_st;

namespace certkv::cuda {

inline constexpr int64_t kCopyAlignment = 16;  // of both addresses and of the size, bytes

// One run, at addresses as the device sees them. Runs don't overlap.
struct OriginalCopy {
  const void* from;
  void* to;
  int64_t size_bytes;
};

// For host addresses of the records, before they go to the device.
// Errors: InvalidArgument [ATTEND_ARGS_INVALID], a run is null, misaligned or has a size that isn't
//         a multiple of kCopyAlignment above 0.
absl::Status CheckOriginalCopies(absl::Span<const OriginalCopy> copies);

// Queues the copies. `copies` is a device address; they were checked. 0, or the number of a
// cudaError_t. Nothing is allocated and nothing waits.
int LaunchGather(const OriginalCopy* copies, int32_t copy_count, CUstream_st* stream);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_GATHER_H_
