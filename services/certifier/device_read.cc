#include "services/certifier/device_read.h"

#include <algorithm>
#include <vector>

#include "kernels/core/status.h"

namespace certkv::certifier {
namespace {

constexpr uint8_t kSourceOriginals = kSourceOriginalKeys | kSourceOriginalValues;

// Is there anything that the pass reads from the copy? There isn't in exact reads, when all of the
// pass's heads are at the top of their ladders, and where the range lies in the tail.
bool ReadsCopy(const ReadPlan& plan, const AttendArgs& args) {
  for (int32_t g = 0; g < args.group_size; ++g) {
    const uint8_t* const sources = args.tile_sources + int64_t{g} * args.tile_count;
    if (!std::all_of(sources + plan.tile_begin(), sources + plan.tile_end(),
                     [](uint8_t source) { return source == kSourceOriginals; })) {
      return true;
    }
  }
  return false;
}

// Compares the slots whose copy wasn't compared yet, all of them at once.
absl::Status CompareCopies(const ReadPlan& plan, int32_t kv_head, bool compare_all) {
  MappedCache& cache = *plan.cache;
  const SlabLayout& layout = cache.device().layout();
  const int32_t layer = plan.request.layer;
  const TileLayout& tile = plan.tile_layout();
  std::vector<SlotRef> slots;
  std::vector<ImportedSlab::Range> ranges;
  for (int32_t block = plan.first_block; block < plan.block_end; ++block) {
    const SlotRef& slot = (*plan.snapshot.blocks)[block].device;
    if (!compare_all && cache.compared_copies()->Contains(layer, kv_head, slot)) continue;
    slots.push_back(slot);
    ranges.push_back({layout.scan_offset(slot.slot, layer, kv_head, 0),
                      plan.tiles_per_block() * tile.scan_bytes});
    ranges.push_back({layout.detail_offset(slot.slot, layer, kv_head, 0),
                      plan.tiles_per_block() * tile.detail_bytes});
  }
  if (slots.empty()) return absl::OkStatus();
  CERTKV_ASSIGN_OR_RETURN(const bool equal, cache.device_copy()->Equals(ranges));
  if (!equal) {
    return MakeError(absl::StatusCode::kDataLoss, "DEVICE_COPY_DIFFERS",
                     "the GPU's copy of a block is not what its store has sealed; the host reads "
                     "it, and the store's scrub copies it again");
  }
  for (const SlotRef& slot : slots) {
    if (cache.device().StillMatches(slot)) cache.compared_copies()->Add(layer, kv_head, slot);
  }
  return absl::OkStatus();
}

absl::Status Run(const ReadPlan& plan, int32_t kv_head, const ReadKernels& kernels,
                 const AttendArgs& args, const AttendResult& result, void* workspace) {
  // After the generations, which ReadTiles has looked at (kernels/core/device_export.h).
  if (!plan.cache->device_copy()->IsReady()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_COPY_MISSING",
                     "the store has withdrawn its copy, or the device has failed here");
  }
  CERTKV_RETURN_IF_ERROR(CompareCopies(plan, kv_head, kernels.verify_every_read));
  CERTKV_RETURN_IF_ERROR(plan.cache->device_copy()->Prepare());
  return kernels.attend_on_device(args, result, workspace);
}

}  // namespace

bool AttendOnDevice(const ReadPlan& plan, int32_t kv_head, const ReadKernels& kernels,
                    const AttendArgs& args, const AttendResult& result, void* workspace,
                    CertifierCounters* counters) {
  ImportedSlab* const copy = plan.cache->device_copy();
  if (copy == nullptr || kernels.attend_on_device == nullptr || !ReadsCopy(plan, args))
    return false;
  const absl::Status status = Run(plan, kv_head, kernels, args, result, workspace);
  if (status.ok()) {
    counters->device_passes.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  if (ReasonOf(status) == "DEVICE_FAILED") copy->GiveUp();
  counters->CountDeviceFallback(status);
  return false;
}

}  // namespace certkv::certifier
