// The CUDA backend: the one header that those who choose a backend include. Needs no CUDA.
#ifndef CERTKV_KERNELS_CUDA_CUDA_H_
#define CERTKV_KERNELS_CUDA_CUDA_H_

#include "absl/status/status.h"
#include "kernels/ops/device.h"

namespace certkv::cuda {

// Is there a GPU that the kernels run on? Errors: FailedPrecondition [DEVICE_MISSING].
absl::Status CheckDevice();

// Makes this machine's GPUs those of the process: RegisterDevice and RegisterDeviceRuntime.
// Errors: FailedPrecondition [DEVICE_MISSING], there is none, or the program was built without
// CUDA; then nothing was registered.
absl::Status UseDevice();

// The kernels behind the contracts of kernels/ops, on the current device; for RegisterDevice.
const DeviceOps& HostMemoryOps();

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_CUDA_H_
