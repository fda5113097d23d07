// What stands in for the CUDA backend where there was no nvcc.
#include "kernels/core/status.h"
#include "kernels/cuda/cuda.h"

namespace certkv::cuda {
namespace {

absl::Status Absent() {
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_MISSING",
                   "this program was built without CUDA; set device: host, or build it where nvcc "
                   "is");
}

}  // namespace

absl::Status CheckDevice() { return Absent(); }

absl::Status UseDevice() { return Absent(); }

}  // namespace certkv::cuda
