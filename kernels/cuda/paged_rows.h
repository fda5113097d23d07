// kernels/ops/paged_rows.h on a device: rows of an engine's pages into pinned host memory or device
// memory, in one launch. Needs no CUDA to include.
#ifndef CERTKV_KERNELS_CUDA_PAGED_ROWS_H_
#define CERTKV_KERNELS_CUDA_PAGED_ROWS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/ops/paged_rows.h"

struct CUstream_st;

namespace certkv::cuda {

// Queues the kernel. `rows` and all that it points to are device addresses, or pinned host memory;
// they were checked as CopyPagedRowsOnDevice does, and have `head_count` heads each. 0, or the
// number of a cudaError_t. Nothing is allocated and nothing waits.
int LaunchPagedRows(const PagedRows* rows, int32_t rows_count, int32_t head_count,
                    CUstream_st* stream);

// For DeviceOps: copies the tables to the device, launches, and waits.
absl::Status CopyPagedRows(absl::Span<const PagedRows> rows);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_PAGED_ROWS_H_
