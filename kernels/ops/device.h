// Backend::kCuda: what the device's operations are in this process. Nothing here needs CUDA.
//
// Operations of kernels/ops take host memory. A device copies it there and back and allocates what
// it needs, so they are for tests, tools and comparisons; a decode path has its data on the device
// and launches kernels/cuda itself.
#ifndef CERTKV_KERNELS_OPS_DEVICE_H_
#define CERTKV_KERNELS_OPS_DEVICE_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/attend_progressive.h"
#include "kernels/ops/finish_certificate.h"
#include "kernels/ops/paged_rows.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/seal_on_device.h"

namespace certkv {

// Arguments were checked by kernels/ops; contracts are those of the operations.
// Errors: ResourceExhausted [DEVICE_MEMORY_FULL]; Internal [DEVICE_FAILED], the driver's words.
struct DeviceOps {
  absl::Status (*attend)(const AttendArgs& args, const AttendResult& result);
  absl::Status (*attend_progressive)(const ProgressiveArgs& args, const ProgressiveResult& result);
  // Without the header's checksums, which kernels/ops writes.
  absl::Status (*quantize_tile)(const QuantizeTileArgs& args);
  absl::Status (*finish_certificate)(const FinishArgs& args, Certificate* certificate);
  // CopyPagedRowsOnDevice: `base` and `out` are the device's addresses.
  absl::Status (*copy_paged_rows)(absl::Span<const PagedRows> rows);
  // SealOnDevice and CopyRunsOnDevice: all addresses are the device's.
  absl::Status (*seal_tiles)(absl::Span<const DeviceSeal> seals);
  absl::Status (*copy_runs)(absl::Span<const DeviceRun> runs);
};

// From now on Backend::kCuda runs these; null: none. Not to be called while an operation runs.
void RegisterDevice(const DeviceOps* device);

// Errors: FailedPrecondition [DEVICE_MISSING], no device was registered.
absl::StatusOr<const DeviceOps*> RegisteredDevice();

// Errors: Unimplemented [DEVICE_LACKS_OPERATION], saying so of `what`.
absl::Status LacksOperation(absl::string_view what);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_DEVICE_H_
