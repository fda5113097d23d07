#include "kernels/ops/imported_slab.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/status.h"
#include "kernels/ops/resident.h"

namespace certkv {
namespace {

constexpr int64_t kScratchBytes = int64_t{1} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<ImportedSlab>> ImportedSlab::Open(DeviceRuntime* runtime,
                                                                 const uint8_t* host,
                                                                 int64_t size_bytes) {
  std::unique_ptr<ImportedSlab> slab(new ImportedSlab(runtime, host, size_bytes));
  CERTKV_RETURN_IF_ERROR(slab->Import());
  AddResident({host, size_bytes, slab->device_base()});
  return slab;
}

ImportedSlab::~ImportedSlab() {
  RemoveResident(host_);
  absl::MutexLock lock(&mutex_);
  // What a comparison that failed has left there waits for the event, and writes to the scratch.
  if (stream_ != nullptr) runtime_->Wait(stream_).IgnoreError();
  if (stream_ != nullptr) runtime_->DestroyStream(stream_);
  if (event_ != nullptr) runtime_->DestroyEvent(event_);
}

absl::Status ImportedSlab::Import() {
  CERTKV_ASSIGN_OR_RETURN(memory_, ImportedMemory::Open(runtime_, host_, size_bytes_));
  CERTKV_ASSIGN_OR_RETURN(
      event_, runtime_->ImportEvent(device(), ExportedHandle(memory_->record().event_handle)));
  absl::MutexLock lock(&mutex_);
  scratch_.resize(kScratchBytes);
  CERTKV_ASSIGN_OR_RETURN(stream_, runtime_->CreateStream(device()));
  return absl::OkStatus();
}

bool ImportedSlab::IsReady() const {
  return !is_given_up_.load(std::memory_order_relaxed) && memory_->IsReady();
}

absl::Status ImportedSlab::Prepare() const {
  CERTKV_RETURN_IF_ERROR(runtime_->Use(device()));
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
      CERTKV_RETURN_IF_ERROR(runtime_->CopyToHost(
          scratch_.data() + used, device_base() + left.offset, size_bytes, stream_));
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
