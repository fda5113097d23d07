#include "services/kvstore/device_staging.h"

#include <cstring>
#include <utility>

#include "kernels/core/device_export.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

void SetState(uint8_t* host, DeviceExportState state) {
  DeviceExportAt(host).state.store(state, std::memory_order_release);
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceStaging>> DeviceStaging::Create(const DevicePlace& place,
                                                                     const SlabLayout& layout,
                                                                     uint8_t* host) {
  CERTKV_ASSIGN_OR_RETURN(auto memory, ExportedMemory::Allocate(place, layout.slab_bytes()));
  std::unique_ptr<DeviceStaging> staging(new DeviceStaging(host, std::move(memory)));
  const absl::Status status = staging->Export(place, layout);
  if (!status.ok()) std::memset(host + kDeviceExportOffset, 0, sizeof(DeviceExport));
  CERTKV_RETURN_IF_ERROR(status);
  SetState(host, DeviceExportState::kReady);
  return staging;
}

absl::Status DeviceStaging::Export(const DevicePlace& place, const SlabLayout& layout) {
  CERTKV_RETURN_IF_ERROR(memory_->Describe(nullptr, &DeviceExportAt(host_)));
  CERTKV_ASSIGN_OR_RETURN(CUstream_st* const stream,
                          place.runtime->CreateStream(place.device.device));
  absl::Status status = place.runtime->Clear(memory_->base(), layout.slab_bytes(), stream);
  // Who opens the handle finds the record in it.
  if (status.ok()) {
    status = place.runtime->CopyToDevice(memory_->base(), host_, kSlabPageBytes, stream);
  }
  if (status.ok()) status = place.runtime->Wait(stream);
  place.runtime->DestroyStream(stream);
  return status;
}

DeviceStaging::~DeviceStaging() {
  const bool was_given = DeviceExportAt(host_).state.load() == DeviceExportState::kReady;
  if (was_given) SetState(host_, DeviceExportState::kWithdrawn);
}

}  // namespace certkv::kvstore
