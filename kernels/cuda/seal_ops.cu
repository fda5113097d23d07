#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/gather.h"
#include "kernels/cuda/seal.h"
#include "kernels/cuda/seal_ops.h"

namespace certkv::cuda {
namespace {

// The layer's witness weights [kv heads][d] on the device; null where all are 1.
absl::StatusOr<const float*> CopyWeights(const DeviceSeal& seal, DeviceMemory* memory) {
  if (!seal.layout->has_witness_weights) return nullptr;
  std::vector<float> weights;
  for (int32_t head = 0; head < seal.spec->kv_head_count; ++head) {
    const float* const of_head = WitnessWeightsOf(*seal.spec, seal.layer, head);
    weights.insert(weights.end(), of_head, of_head + seal.spec->head_dim);
  }
  return memory->Copy(weights.data(), static_cast<int64_t>(weights.size()));
}

}  // namespace

absl::Status SealTiles(absl::Span<const DeviceSeal> seals) {
  DeviceMemory memory;
  for (const DeviceSeal& seal : seals) {
    if (seal.tiles.empty()) continue;
    CERTKV_ASSIGN_OR_RETURN(const float* const weights, CopyWeights(seal, &memory));
    std::vector<SealTile> tiles;
    for (const DeviceTile& tile : seal.tiles) {
      tiles.push_back(
          {tile.keys, tile.values,
           weights == nullptr ? nullptr : weights + int64_t{tile.kv_head} * seal.spec->head_dim,
           seal.layout->head_dim, seal.layout->value_dim, tile.identity_tag, tile.scan,
           tile.detail});
    }
    const auto count = static_cast<int32_t>(tiles.size());
    CERTKV_ASSIGN_OR_RETURN(const SealTile* const on_device, memory.Copy(tiles.data(), count));
    const SealFormat format{*seal.layout, seal.spec->original_dtype,
                            seal.spec->layers[seal.layer].fp8_key_scale};
    const int error = LaunchSeal(format, on_device, count, nullptr);
    CERTKV_RETURN_IF_ERROR(StatusOfCuda(static_cast<cudaError_t>(error), "sealing"));
  }
  return memory.ReadBack();
}

absl::Status CopyRuns(absl::Span<const DeviceRun> runs) {
  DeviceMemory memory;
  std::vector<OriginalCopy> copies;
  for (const DeviceRun& run : runs) copies.push_back({run.from, run.to, run.size_bytes});
  const auto count = static_cast<int32_t>(copies.size());
  CERTKV_ASSIGN_OR_RETURN(const OriginalCopy* const on_device, memory.Copy(copies.data(), count));
  const int error = LaunchGather(on_device, count, nullptr);
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(static_cast<cudaError_t>(error), "copying sealed tiles"));
  return memory.ReadBack();
}

}  // namespace certkv::cuda
