#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/gather.h"

namespace certkv::cuda {
namespace {

constexpr int kGatherThreads = 256;
static_assert(sizeof(uint4) == kCopyAlignment);

// Grid: (copies). A thread moves 16 bytes at a time, neighbours side by side.
__global__ void __launch_bounds__(kGatherThreads) Gather(const OriginalCopy* copies) {
  const OriginalCopy& copy = copies[blockIdx.x];
  const uint4* const from = static_cast<const uint4*>(copy.from);
  uint4* const to = static_cast<uint4*>(copy.to);
  const int64_t count = copy.size_bytes / kCopyAlignment;
  for (int64_t n = ThreadIndex(); n < count; n += kGatherThreads) to[n] = from[n];
}

bool IsAligned(const void* address) {
  return address != nullptr && reinterpret_cast<uintptr_t>(address) % kCopyAlignment == 0;
}

}  // namespace

absl::Status CheckOriginalCopies(absl::Span<const OriginalCopy> copies) {
  for (size_t n = 0; n < copies.size(); ++n) {
    const OriginalCopy& copy = copies[n];
    if (IsAligned(copy.from) && IsAligned(copy.to) && copy.size_bytes > 0 &&
        copy.size_bytes % kCopyAlignment == 0) {
      continue;
    }
    return MakeError(
        absl::StatusCode::kInvalidArgument, "ATTEND_ARGS_INVALID",
        absl::StrCat("copy ", n, " of ", copy.size_bytes, " bytes from 0x",
                     absl::Hex(reinterpret_cast<uintptr_t>(copy.from)), " to 0x",
                     absl::Hex(reinterpret_cast<uintptr_t>(copy.to)),
                     ": addresses must not be null, and they and the size must be multiples of ",
                     kCopyAlignment, "; pass whole originals of a slab"));
  }
  return absl::OkStatus();
}

int LaunchGather(const OriginalCopy* copies, int32_t copy_count, CUstream_st* stream) {
  if (copy_count == 0) return cudaSuccess;
  return LaunchKernel(Gather, dim3(copy_count), dim3(kGatherThreads), 0, stream, copies);
}

}  // namespace certkv::cuda
