#include "kernels/ops/seal_on_device.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"
#include "kernels/ops/device.h"

namespace certkv {
namespace {

bool IsAligned(const void* address, int64_t alignment) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(alignment) == 0;
}

}  // namespace

absl::Status CheckSealsOnDevice(const CacheSpec& spec) {
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    if (spec.layers[layer].key_format == KeyFormat::kK8D) {
      return LacksOperation(absl::StrCat("K8D keys (layer ", layer, ")"));
    }
  }
  return absl::OkStatus();
}

absl::Status SealOnDevice(absl::Span<const DeviceSeal> seals) {
  CERTKV_ASSIGN_OR_RETURN(const DeviceOps* const device, RegisteredDevice());
  for (const DeviceSeal& seal : seals) {
    CERTKV_RETURN_IF_ERROR(CheckSealsOnDevice(*seal.spec));
    for (const DeviceTile& tile : seal.tiles) {
      CERTKV_CHECK(IsAligned(tile.scan, 64) && IsAligned(tile.detail, 64), "records are aligned");
    }
  }
  return device->seal_tiles(seals);
}

absl::Status CopyRunsOnDevice(absl::Span<const DeviceRun> runs) {
  CERTKV_ASSIGN_OR_RETURN(const DeviceOps* const device, RegisteredDevice());
  for (const DeviceRun& run : runs) {
    CERTKV_CHECK(IsAligned(run.from, 16) && IsAligned(run.to, 16) && run.size_bytes > 0 &&
                     run.size_bytes % 16 == 0,
                 "runs are of whole 16 bytes");
  }
  if (runs.empty()) return absl::OkStatus();
  return device->copy_runs(runs);
}

}  // namespace certkv
