#include "kernels/ops/imported_slab.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/boot_id.h"
#include "kernels/core/device_export.h"
#include "kernels/core/slab_layout.h"
#include "kernels/core/status.h"
#include "kernels/ops/resident.h"

namespace certkv {
namespace {

constexpr int64_t kScratchBytes = int64_t{1} << 20;

absl::Status Stale(absl::string_view what) {
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "DEVICE_HANDLE_STALE",
      absl::StrCat("the slab's copy on a GPU ", what, "; attach again, or read host memory"));
}

template <size_t size>
DeviceHandle HandleOf(const uint8_t (&bytes)[size]) {
  DeviceHandle handle;
  static_assert(size == sizeof(handle));
  std::copy(bytes, bytes + size, handle.begin());
  return handle;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ImportedSlab>> ImportedSlab::Open(DeviceRuntime* runtime,
                                                                 const uint8_t* host,
                                                                 int64_t size_bytes) {
  std::unique_ptr<ImportedSlab> slab(new ImportedSlab(runtime, host, size_bytes));
  CERTKV_RETURN_IF_ERROR(slab->Import());
  AddResident({host, size_bytes, slab->device_base_});
  return slab;
}

ImportedSlab::~ImportedSlab() {
  RemoveResident(host_);
  absl::MutexLock lock(&mutex_);
  // What a comparison that failed has left there waits for the event, and writes to the scratch.
  if (stream_ != nullptr) runtime_->Wait(stream_).IgnoreError();
  if (stream_ != nullptr) runtime_->DestroyStream(stream_);
  if (event_ != nullptr) runtime_->DestroyEvent(event_);
  if (device_base_ != nullptr) runtime_->ReleaseMemory(const_cast<uint8_t*>(device_base_));
}

absl::Status ImportedSlab::CheckRecord() {
  const DeviceExport& record = DeviceExportAt(host_);
  const DeviceExportState state = record.state.load(std::memory_order_acquire);
  if (record.magic == 0 || state != DeviceExportState::kReady) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "DEVICE_COPY_MISSING",
        absl::StrCat("the store has ", record.magic == 0 ? "no copy" : "withdrawn the copy",
                     " of this cache's device tier in a GPU's memory; look at its log, or set "
                     "kvstore.device"));
  }
  if (record.magic != kDeviceExportMagic || record.version != kDeviceExportVersion) {
    return Stale(absl::StrCat("is described in version ", record.version,
                              ", this program knows version ", kDeviceExportVersion));
  }
  const BootId boot = CurrentBootId();
  if (boot == BootId{} || std::memcmp(record.boot_id, boot.data(), boot.size()) != 0) {
    return Stale("was made before this machine started, or on another one");
  }
  if (record.size_bytes != size_bytes_) {
    return Stale(absl::StrCat("has ", record.size_bytes, " bytes, the slab ", size_bytes_));
  }
  CERTKV_ASSIGN_OR_RETURN(const std::vector<DeviceProperties> devices, runtime_->Devices());
  for (const DeviceProperties& device : devices) {
    if (std::memcmp(device.uuid.data(), record.device_uuid, device.uuid.size()) != 0) continue;
    device_ = device.device;
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_NOT_HERE",
                   absl::StrCat("the slab's copy is on a GPU that isn't one of the ",
                                devices.size(), " that this process sees; let it see the store's"));
}

absl::Status ImportedSlab::Import() {
  CERTKV_RETURN_IF_ERROR(CheckRecord());
  const DeviceExport& record = DeviceExportAt(host_);
  CERTKV_ASSIGN_OR_RETURN(void* const memory,
                          runtime_->ImportMemory(device_, HandleOf(record.memory_handle)));
  device_base_ = static_cast<const uint8_t*>(memory);
  CERTKV_ASSIGN_OR_RETURN(event_, runtime_->ImportEvent(device_, HandleOf(record.event_handle)));
  uint8_t page[kSlabPageBytes] = {};
  {
    absl::MutexLock lock(&mutex_);
    scratch_.resize(kScratchBytes);
    CERTKV_ASSIGN_OR_RETURN(stream_, runtime_->CreateStream(device_));
    CERTKV_RETURN_IF_ERROR(runtime_->CopyToHost(page, device_base_, kSlabPageBytes, stream_));
    CERTKV_RETURN_IF_ERROR(runtime_->Wait(stream_));
  }
  // What the handle opened is this slab's copy: it has the header and the record in it.
  const DeviceExport& inside = DeviceExportAt(page);
  if (std::memcmp(page, host_, sizeof(SlabHeader)) == 0 && inside.magic == record.magic &&
      inside.export_id == record.export_id) {
    return absl::OkStatus();
  }
  return Stale("is other memory than its handle was made for");
}

bool ImportedSlab::IsReady() const {
  return !is_given_up_.load(std::memory_order_relaxed) &&
         DeviceExportAt(host_).state.load(std::memory_order_acquire) == DeviceExportState::kReady;
}

absl::Status ImportedSlab::Prepare() const {
  CERTKV_RETURN_IF_ERROR(runtime_->Use(device_));
  return runtime_->QueueWait(nullptr, event_);
}

absl::StatusOr<bool> ImportedSlab::Equals(absl::Span<const Range> ranges) {
  absl::MutexLock lock(&mutex_);
  CERTKV_RETURN_IF_ERROR(runtime_->QueueWait(stream_, event_));
  size_t next = 0;
  int64_t begin = 0;  // of what is left of ranges[next]
  while (next < ranges.size()) {
    // As many ranges as the scratch has room for, waited for together.
    std::vector<Range> copied;
    int64_t used = 0;
    while (next < ranges.size() && used < kScratchBytes) {
      const Range left = {ranges[next].offset + begin, ranges[next].size_bytes - begin};
      const int64_t size_bytes = std::min(left.size_bytes, kScratchBytes - used);
      CERTKV_RETURN_IF_ERROR(runtime_->CopyToHost(scratch_.data() + used,
                                                  device_base_ + left.offset, size_bytes, stream_));
      copied.push_back({left.offset, size_bytes});
      used += size_bytes;
      begin += size_bytes;
      if (begin < ranges[next].size_bytes) continue;
      ++next;
      begin = 0;
    }
    CERTKV_RETURN_IF_ERROR(runtime_->Wait(stream_));
    int64_t at = 0;
    for (const Range& range : copied) {
      const auto size = static_cast<size_t>(range.size_bytes);
      if (std::memcmp(scratch_.data() + at, host_ + range.offset, size) != 0) return false;
      at += range.size_bytes;
    }
  }
  return true;
}

}  // namespace certkv
