#include "services/kvstore/device_copy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/core/check.h"
#include "kernels/core/device_export.h"
#include "kernels/core/status.h"
#include "kernels/ops/seal_on_device.h"

namespace certkv::kvstore {

absl::StatusOr<std::unique_ptr<DeviceCopy>> DeviceCopy::Create(const DevicePlace& place,
                                                               const SlabLayout& layout,
                                                               uint8_t* host) {
  CERTKV_CHECK(layout.kind() == SlabKind::kDevice, "only device slabs have copies");
  std::unique_ptr<DeviceCopy> copy(new DeviceCopy(place, layout, host));
  CERTKV_RETURN_IF_ERROR(copy->Open());
  return copy;
}

DeviceCopy::DeviceCopy(const DevicePlace& place, const SlabLayout& layout, uint8_t* host)
    : place_(place), layout_(layout), host_(host), has_(layout.slot_count()) {}

DeviceCopy::~DeviceCopy() {
  absl::MutexLock lock(&mutex_);
  if (is_ready()) Withdraw(absl::CancelledError("the slab was given up"));
  for (const Chunk& chunk : chunks_) {
    // What an upload that failed has left there.
    if (chunk.stream != nullptr) place_.runtime->Wait(chunk.stream).IgnoreError();
    if (chunk.stream != nullptr) place_.runtime->DestroyStream(chunk.stream);
    if (chunk.is_pinned) place_.runtime->UnpinHost(chunk.bytes);
    std::free(chunk.bytes);
  }
  if (event_ != nullptr) place_.runtime->DestroyEvent(event_);
}

absl::Status DeviceCopy::Open() {
  absl::MutexLock lock(&mutex_);
  CERTKV_ASSIGN_OR_RETURN(memory_, ExportedMemory::Allocate(place_, layout_.slab_bytes()));
  CERTKV_RETURN_IF_ERROR(MakeChunks());
  CERTKV_ASSIGN_OR_RETURN(event_, place_.runtime->CreateEvent(place_.device.device));
  const absl::Status status = Export();
  if (!status.ok()) std::memset(host_ + kDeviceExportOffset, 0, sizeof(DeviceExport));
  return status;
}

absl::Status DeviceCopy::MakeChunks() {
  for (int32_t i = 0; i < kChunkCount; ++i) {
    Chunk& chunk = chunks_.emplace_back();
    chunk.bytes = static_cast<uint8_t*>(std::aligned_alloc(kSlabPageBytes, kChunkBytes));
    CERTKV_CHECK(chunk.bytes != nullptr, "the process has memory for a chunk");
    CERTKV_ASSIGN_OR_RETURN(chunk.stream, place_.runtime->CreateStream(place_.device.device));
    CERTKV_RETURN_IF_ERROR(
        place_.runtime->PinHost(chunk.bytes, kChunkBytes, DeviceRuntime::HostAccess::kReadWrite));
    chunk.is_pinned = true;
  }
  return absl::OkStatus();
}

absl::Status DeviceCopy::Export() {
  DeviceExport& record = DeviceExportAt(host_);
  CERTKV_RETURN_IF_ERROR(memory_->Describe(event_, &record));
  // The header page goes along: who opens a handle finds the record in it.
  CERTKV_RETURN_IF_ERROR(UploadRuns({{0, kSlabPageBytes}}));
  record.state.store(DeviceExportState::kReady, std::memory_order_release);
  return absl::OkStatus();
}

std::vector<DeviceCopy::Run> DeviceCopy::RunsOf(absl::Span<const int32_t> slots) const {
  std::vector<int32_t> sorted(slots.begin(), slots.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<Run> runs;
  const auto add = [&runs](int64_t offset, int64_t size_bytes) {
    if (!runs.empty() && runs.back().offset + runs.back().size_bytes == offset) {
      runs.back().size_bytes += size_bytes;
    } else {
      runs.push_back({offset, size_bytes});
    }
  };
  const int64_t tiles = layout_.tiles_per_block();
  for (int32_t layer = 0; layer < layout_.layer_count(); ++layer) {
    const TileLayout& tile = layout_.tile_layout(layer);
    for (int32_t head = 0; head < layout_.kv_head_count(); ++head) {
      for (const int32_t slot : sorted) {
        add(layout_.scan_offset(slot, layer, head, 0), tiles * tile.scan_bytes);
      }
      for (const int32_t slot : sorted) {
        add(layout_.detail_offset(slot, layer, head, 0), tiles * tile.detail_bytes);
      }
    }
  }
  return runs;
}

absl::Status DeviceCopy::UploadRuns(absl::Span<const Run> runs) {
  for (Chunk& chunk : chunks_) chunk.used_bytes = 0;
  size_t current = 0;
  for (Run run : runs) {
    while (run.size_bytes > 0) {
      if (chunks_[current].used_bytes == kChunkBytes) {
        // The next one is filled while the others are copied.
        current = (current + 1) % chunks_.size();
        CERTKV_RETURN_IF_ERROR(place_.runtime->Wait(chunks_[current].stream));
        chunks_[current].used_bytes = 0;
      }
      Chunk& chunk = chunks_[current];
      const int64_t size_bytes = std::min(run.size_bytes, kChunkBytes - chunk.used_bytes);
      uint8_t* const from = chunk.bytes + chunk.used_bytes;
      std::memcpy(from, host_ + run.offset, static_cast<size_t>(size_bytes));
      CERTKV_RETURN_IF_ERROR(place_.runtime->CopyToDevice(memory_->base() + run.offset, from,
                                                          size_bytes, chunk.stream));
      chunk.used_bytes += size_bytes;
      run.offset += size_bytes;
      run.size_bytes -= size_bytes;
    }
  }
  for (const Chunk& chunk : chunks_) CERTKV_RETURN_IF_ERROR(place_.runtime->Wait(chunk.stream));
  return RecordBatch();
}

absl::StatusOr<bool> DeviceCopy::RunsDiffer(absl::Span<const Run> runs) {
  const Chunk& chunk = chunks_[0];
  for (Run run : runs) {
    while (run.size_bytes > 0) {
      const int64_t size_bytes = std::min(run.size_bytes, kChunkBytes);
      CERTKV_RETURN_IF_ERROR(place_.runtime->CopyToHost(chunk.bytes, memory_->base() + run.offset,
                                                        size_bytes, chunk.stream));
      CERTKV_RETURN_IF_ERROR(place_.runtime->Wait(chunk.stream));
      const auto size = static_cast<size_t>(size_bytes);
      if (std::memcmp(chunk.bytes, host_ + run.offset, size) != 0) return true;
      run.offset += size_bytes;
      run.size_bytes -= size_bytes;
    }
  }
  return false;
}

void DeviceCopy::Upload(absl::Span<const int32_t> slots) {
  absl::MutexLock lock(&mutex_);
  if (!is_ready()) return;
  const std::vector<Run> runs = RunsOf(slots);
  const absl::Status status = UploadRuns(runs);
  if (!status.ok()) return Withdraw(status);
  for (const Run& run : runs) uploaded_bytes_ += run.size_bytes;
  for (const int32_t slot : slots) has_[slot].store(1, std::memory_order_release);
}

void DeviceCopy::Adopt(absl::Span<const int32_t> slots, absl::Span<const Piece> pieces) {
  absl::MutexLock lock(&mutex_);
  if (!is_ready()) return;
  absl::Status status = CopyPieces(pieces);
  // Its tables may have found no memory. The host has the bytes, too.
  if (!status.ok()) status = UploadRuns(RunsOf(slots));
  if (!status.ok()) return Withdraw(status);
  for (const Piece& piece : pieces) uploaded_bytes_ += piece.size_bytes;
  for (const int32_t slot : slots) has_[slot].store(1, std::memory_order_release);
}

absl::Status DeviceCopy::CopyPieces(absl::Span<const Piece> pieces) {
  std::vector<DeviceRun> runs;
  for (const Piece& piece : pieces) {
    runs.push_back({piece.from, memory_->base() + piece.offset, piece.size_bytes});
  }
  CERTKV_RETURN_IF_ERROR(place_.runtime->Use(place_.device.device));
  CERTKV_RETURN_IF_ERROR(CopyRunsOnDevice(runs));
  return RecordBatch();
}

absl::Status DeviceCopy::RecordBatch() {
  CERTKV_RETURN_IF_ERROR(place_.runtime->RecordEvent(event_, chunks_[0].stream));
  return place_.runtime->Wait(chunks_[0].stream);
}

bool DeviceCopy::Differs(int32_t slot) {
  absl::MutexLock lock(&mutex_);
  if (!is_ready()) return false;
  const absl::StatusOr<bool> differs = RunsDiffer(RunsOf({slot}));
  if (!differs.ok()) Withdraw(differs.status());
  return differs.ok() && *differs;
}

bool DeviceCopy::Has(int32_t slot) const {
  return has_[slot].load(std::memory_order_acquire) != 0 || !is_ready();
}

void DeviceCopy::Forget(int32_t slot) { has_[slot].store(0, std::memory_order_relaxed); }

bool DeviceCopy::is_ready() const {
  return DeviceExportAt(host_).state.load(std::memory_order_acquire) == DeviceExportState::kReady;
}

absl::Status DeviceCopy::error() const {
  absl::MutexLock lock(&error_mutex_);
  return error_;
}

void DeviceCopy::Withdraw(const absl::Status& why) {
  {
    absl::MutexLock lock(&error_mutex_);
    error_ = why;
  }
  DeviceExportAt(host_).state.store(DeviceExportState::kWithdrawn, std::memory_order_release);
}

}  // namespace certkv::kvstore
