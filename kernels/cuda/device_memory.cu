#include "absl/strings/str_cat.h"
#include "kernels/cuda/device_memory.h"

namespace certkv::cuda {

absl::Status StatusOfCuda(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  if (error == cudaErrorMemoryAllocation) {
    return MakeError(absl::StatusCode::kResourceExhausted, "DEVICE_MEMORY_FULL",
                     absl::StrCat(what,
                                  ": the device has no memory left; read fewer tokens at "
                                  "once, or give the device less to hold"));
  }
  return MakeError(
      absl::StatusCode::kInternal, "DEVICE_FAILED",
      absl::StrCat(what, ": ", cudaGetErrorString(error), " (CUDA error ", static_cast<int>(error),
                   "); use backend cpu, and look at the device"));
}

absl::StatusOr<void*> DeviceMemory::AllocateBytes(int64_t size_bytes) {
  if (size_bytes == 0) return nullptr;
  void* address = nullptr;
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(cudaMalloc(&address, static_cast<size_t>(size_bytes)),
                                      absl::StrCat("allocating ", size_bytes, " bytes")));
  allocations_.emplace_back(address);
  return address;
}

absl::Status DeviceMemory::CopyInto(void* to, const void* from, int64_t size_bytes) {
  if (size_bytes == 0) return absl::OkStatus();
  return StatusOfCuda(
      cudaMemcpyAsync(to, from, static_cast<size_t>(size_bytes), cudaMemcpyHostToDevice, nullptr),
      "copying to the device");
}

absl::StatusOr<void*> DeviceMemory::CopyBytes(const void* from, int64_t size_bytes) {
  CERTKV_ASSIGN_OR_RETURN(void* const to, AllocateBytes(size_bytes));
  CERTKV_RETURN_IF_ERROR(CopyInto(to, from, size_bytes));
  return to;
}

absl::Status DeviceMemory::ReadBack() {
  for (const Result& result : results_) {
    if (result.size_bytes == 0) continue;
    CERTKV_RETURN_IF_ERROR(StatusOfCuda(
        cudaMemcpyAsync(result.host, result.device, static_cast<size_t>(result.size_bytes),
                        cudaMemcpyDeviceToHost, nullptr),
        "copying from the device"));
  }
  return StatusOfCuda(cudaStreamSynchronize(nullptr), "waiting for the device");
}

}  // namespace certkv::cuda
