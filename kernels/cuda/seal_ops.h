// kernels/ops/seal_on_device.h on a device. Needs no CUDA to include.
#ifndef CERTKV_KERNELS_CUDA_SEAL_OPS_H_
#define CERTKV_KERNELS_CUDA_SEAL_OPS_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/ops/seal_on_device.h"

namespace certkv::cuda {

// For DeviceOps: bring the tables to the device, launch, and wait.
absl::Status SealTiles(absl::Span<const DeviceSeal> seals);
absl::Status CopyRuns(absl::Span<const DeviceRun> runs);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_SEAL_OPS_H_
