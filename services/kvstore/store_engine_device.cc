// Staging memory on a GPU, and blocks that are sealed from it.
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/kvstore/device_sealer.h"
#include "services/kvstore/device_staging.h"
#include "services/kvstore/seal_plan.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

absl::Status StoreEngine::CheckDeviceStaging(const Cache& cache, int64_t size_bytes) const {
  if (config_.device_staging_memory_bytes == 0) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_STAGING_MISSING",
                     "kvstore.device_staging_memory is 0; set it where workers have their pages on "
                     "the store's GPU");
  }
  const DeviceCopy* const copy = cache.device_memory()->device_copy();
  if (copy == nullptr || !copy->is_ready()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_STAGING_MISSING",
                     "the cache has no copy of its device tier on a GPU, so that nothing is sealed "
                     "there; see kvstore.device");
  }
  const int64_t bytes_left = config_.device_staging_memory_bytes - sessions_.device_staging_bytes();
  if (size_bytes <= bytes_left) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kResourceExhausted, "STAGING_MEMORY_FULL",
      absl::StrCat("staging memory on the GPU has ", bytes_left, " of ",
                   config_.device_staging_memory_bytes, " bytes left, the worker's slots need ",
                   size_bytes, "; ask for fewer slots, or raise device_staging_memory"));
}

void StoreEngine::GiveDeviceStaging(SessionId id, const std::shared_ptr<Cache>& cache,
                                    const std::shared_ptr<StagingArea>& staging) {
  const SlabMemory& memory = *staging->memory();
  const int64_t size_bytes = memory.layout().slab_bytes();
  const absl::Status checked = CheckDeviceStaging(*cache, size_bytes);
  if (!checked.ok()) return cache->NoteDeviceStaging(checked);
  sessions_.SetDeviceStaging(id, size_bytes);
  std::shared_ptr<DeviceSealer> sealer = cache->device_sealer();
  mutex_.Unlock();
  // The sealer's memory first: it never is memory that a worker had.
  absl::Status status;
  if (sealer == nullptr) {
    auto made = DeviceSealer::Create(device_, cache->spec());
    status = made.status();
    if (made.ok()) sealer = *std::move(made);
  }
  std::unique_ptr<DeviceStaging> on_device;
  if (status.ok()) {
    auto made = DeviceStaging::Create(device_, memory.layout(), memory.base());
    status = made.status();
    if (made.ok()) on_device = *std::move(made);
  }
  mutex_.Lock();
  cache->NoteDeviceStaging(status);
  if (!status.ok()) return sessions_.SetDeviceStaging(id, 0);
  cache->SetDeviceSealer(std::move(sealer));
  staging->SetOnDevice(std::move(on_device));
}

absl::Status StoreEngine::WriteSealed(SealPlan* plan) {
  const std::shared_ptr<DeviceSealer> sealer = plan->cache->device_sealer();
  const absl::Span<BlockWrite> writes = absl::MakeSpan(plan->writes);
  DeviceSealer::Outcome outcome;
  mutex_.Unlock();
  const absl::Status status =
      plan->from_device_staging
          ? sealer->Write(*plan->cache, *plan->staging, writes, pool_, &outcome)
          : WriteBlocks(*plan->cache, plan->staging.get(), writes, pool_);
  mutex_.Lock();
  counters_.device_blocks_sealed += outcome.sealed_count;
  counters_.device_blocks_fallen += outcome.fallen_count;
  plan->cache->NoteDeviceStaging(outcome.why);
  if (absl::StartsWith(ReasonOf(status), "DEVICE_")) {
    counters_.device_blocks_failed +=
        std::count_if(plan->writes.begin(), plan->writes.end(),
                      [](const BlockWrite& write) { return write.staging_slot >= 0; });
    plan->cache->NoteDeviceStaging(status);
  }
  return status;
}

}  // namespace certkv::kvstore
