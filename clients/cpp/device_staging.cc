#include "clients/cpp/device_staging.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/device_export.h"
#include "kernels/core/status.h"

namespace certkv::client {

absl::Status DeviceStaging::Open(const PagedCache& cache) {
  if (memory_ == nullptr) {
    auto opened = ImportedMemory::Open(cache.runtime(), staging_, size_bytes_);
    is_given_up_ = !opened.ok();
    CERTKV_RETURN_IF_ERROR(opened.status());
    memory_ = *std::move(opened);
  }
  // A copy that is withdrawn takes nothing more, so that nothing is sealed on its GPU.
  const bool is_ready =
      memory_->IsReady() && DeviceExportAt(device_slab_).state.load() == DeviceExportState::kReady;
  if (!is_ready) {
    is_given_up_ = true;
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_STAGING_MISSING",
                     "the store seals nothing on its GPU any more; look at its log");
  }
  if (memory_->runtime() == cache.runtime() && memory_->device() == cache.device()) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_NOT_HERE",
                   absl::StrCat("the engine's cache is on device ", cache.device(),
                                ", the store's staging memory on device ", memory_->device(),
                                "; set kvstore.device_index to that of the engine"));
}

uint8_t* DeviceStaging::BaseFor(const PagedCache& cache) {
  if (!cache.is_on_device()) return nullptr;
  absl::MutexLock lock(&mutex_);
  if (is_given_up_) return nullptr;
  status_ = Open(cache);
  return status_.ok() ? memory_->base() : nullptr;
}

void DeviceStaging::GiveUp(const absl::Status& why) {
  absl::MutexLock lock(&mutex_);
  if (is_given_up_) return;
  is_given_up_ = true;
  status_ = why;
}

absl::Status DeviceStaging::status() const {
  absl::MutexLock lock(&mutex_);
  return status_;
}

}  // namespace certkv::client
