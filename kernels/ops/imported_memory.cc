#include "kernels/ops/imported_memory.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/boot_id.h"
#include "kernels/core/slab_layout.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

absl::Status Stale(absl::string_view what) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "DEVICE_HANDLE_STALE",
      absl::StrCat("the slab's memory on a GPU ", what, "; attach again, or use host memory"));
}

absl::Status Missing(const uint8_t* host, bool was_there) {
  SlabHeader header;
  std::memcpy(&header, host, sizeof(header));
  if (header.kind == SlabKind::kStaging) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_STAGING_MISSING",
                     absl::StrCat("the store has ", was_there ? "withdrawn" : "given no",
                                  " staging memory on a GPU to this session; look at its log, or "
                                  "set kvstore.device_staging_memory"));
  }
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "DEVICE_COPY_MISSING",
      absl::StrCat("the store has ", was_there ? "withdrawn the copy" : "no copy",
                   " of this cache's device tier in a GPU's memory; look at its log, or set "
                   "kvstore.device"));
}

}  // namespace

DeviceHandle ExportedHandle(const uint8_t (&bytes)[64]) {
  DeviceHandle handle;
  static_assert(sizeof(bytes) == sizeof(handle));
  std::copy(bytes, bytes + sizeof(bytes), handle.begin());
  return handle;
}

absl::StatusOr<std::unique_ptr<ImportedMemory>> ImportedMemory::Open(DeviceRuntime* runtime,
                                                                     const uint8_t* host,
                                                                     int64_t size_bytes) {
  std::unique_ptr<ImportedMemory> memory(new ImportedMemory(runtime, host));
  CERTKV_RETURN_IF_ERROR(memory->Import(size_bytes));
  return memory;
}

ImportedMemory::~ImportedMemory() {
  if (base_ != nullptr) runtime_->ReleaseMemory(base_);
}

absl::Status ImportedMemory::CheckRecord(int64_t size_bytes) {
  const DeviceExport& record = this->record();
  if (record.magic == 0 || !IsReady()) return Missing(host_, record.magic != 0);
  if (record.magic != kDeviceExportMagic || record.version != kDeviceExportVersion) {
    return Stale(absl::StrCat("is described in version ", record.version,
                              ", this program knows version ", kDeviceExportVersion));
  }
  const BootId boot = CurrentBootId();
  if (boot == BootId{} || std::memcmp(record.boot_id, boot.data(), boot.size()) != 0) {
    return Stale("was made before this machine started, or on another one");
  }
  if (record.size_bytes != size_bytes) {
    return Stale(absl::StrCat("has ", record.size_bytes, " bytes, the slab ", size_bytes));
  }
  CERTKV_ASSIGN_OR_RETURN(const std::vector<DeviceProperties> devices, runtime_->Devices());
  for (const DeviceProperties& device : devices) {
    if (std::memcmp(device.uuid.data(), record.device_uuid, device.uuid.size()) != 0) continue;
    device_ = device.device;
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_NOT_HERE",
                   absl::StrCat("the slab's memory is on a GPU that isn't one of the ",
                                devices.size(), " that this process sees; let it see the store's"));
}

absl::Status ImportedMemory::Import(int64_t size_bytes) {
  CERTKV_RETURN_IF_ERROR(CheckRecord(size_bytes));
  CERTKV_ASSIGN_OR_RETURN(void* const memory,
                          runtime_->ImportMemory(device_, ExportedHandle(record().memory_handle)));
  base_ = static_cast<uint8_t*>(memory);
  return CheckHeaderPage();
}

// What the handle opened is this slab's memory: it has the header and the record in it.
absl::Status ImportedMemory::CheckHeaderPage() const {
  uint8_t page[kSlabPageBytes] = {};
  CERTKV_ASSIGN_OR_RETURN(CUstream_st* const stream, runtime_->CreateStream(device_));
  absl::Status status = runtime_->CopyToHost(page, base_, kSlabPageBytes, stream);
  if (status.ok()) status = runtime_->Wait(stream);
  runtime_->DestroyStream(stream);
  CERTKV_RETURN_IF_ERROR(status);
  const DeviceExport& inside = DeviceExportAt(page);
  if (std::memcmp(page, host_, sizeof(SlabHeader)) == 0 && inside.magic == record().magic &&
      inside.export_id == record().export_id) {
    return absl::OkStatus();
  }
  return Stale("is other memory than its handle was made for");
}

}  // namespace certkv
