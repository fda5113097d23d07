#include "services/kvstore/device_sealer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "kernels/core/block_key.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/seal_on_device.h"

namespace certkv::kvstore {
namespace {

constexpr int32_t kBatchBlocksMax = 64;

int32_t BatchBlocks(const CacheSpec& spec) {
  const int64_t slot_bytes = SlabLayout::SlotBytes(spec, SlabKind::kBacking);
  return static_cast<int32_t>(
      std::clamp<int64_t>(DeviceSealer::kBatchBytes / slot_bytes, 1, kBatchBlocksMax));
}

// Where a tile of a batch lies in memory of that layout.
TileTarget TileIn(uint8_t* base, const SlabLayout& records, const Plane& plane, int32_t tile) {
  const auto slot = static_cast<int32_t>(plane.block);
  return {base + records.scan_offset(slot, plane.layer, plane.kv_head, tile),
          base + records.detail_offset(slot, plane.layer, plane.kv_head, tile)};
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceSealer>> DeviceSealer::Create(const DevicePlace& place,
                                                                   const CacheSpec& spec) {
  CERTKV_RETURN_IF_ERROR(CheckSealsOnDevice(spec));
  std::unique_ptr<DeviceSealer> sealer(new DeviceSealer(place, spec));
  CERTKV_RETURN_IF_ERROR(sealer->Open());
  return sealer;
}

DeviceSealer::DeviceSealer(const DevicePlace& place, const CacheSpec& spec)
    : place_(place), spec_(spec), batch_blocks_(BatchBlocks(spec)) {}

DeviceSealer::~DeviceSealer() {
  absl::MutexLock lock(&mutex_);
  // What a step that failed has left there.
  if (stream_ != nullptr) place_.runtime->Wait(stream_).IgnoreError();
  if (stream_ != nullptr) place_.runtime->DestroyStream(stream_);
  FreeMirror(originals_);
  FreeMirror(records_);
}

absl::Status DeviceSealer::Open() {
  absl::MutexLock lock(&mutex_);
  CERTKV_ASSIGN_OR_RETURN(stream_, place_.runtime->CreateStream(place_.device.device));
  const SlabLayout originals(spec_, SlabKind::kStaging, batch_blocks_);
  const SlabLayout records(spec_, SlabKind::kDevice, batch_blocks_);
  CERTKV_RETURN_IF_ERROR(MakeMirror(originals.slab_bytes(), &originals_));
  CERTKV_RETURN_IF_ERROR(MakeMirror(records.slab_bytes(), &records_));
  CERTKV_ASSIGN_OR_RETURN(const void* const headers,
                          place_.runtime->AddressOfPinned(records_.host));
  headers_ = static_cast<const uint8_t*>(headers);
  return absl::OkStatus();
}

absl::Status DeviceSealer::MakeMirror(int64_t size_bytes, Mirror* mirror) {
  CERTKV_ASSIGN_OR_RETURN(void* const memory,
                          place_.runtime->Allocate(place_.device.device, size_bytes));
  mirror->device = static_cast<uint8_t*>(memory);
  mirror->host =
      static_cast<uint8_t*>(std::aligned_alloc(kSlabPageBytes, static_cast<size_t>(size_bytes)));
  CERTKV_CHECK(mirror->host != nullptr, "the process has memory for a batch");
  CERTKV_RETURN_IF_ERROR(
      place_.runtime->PinHost(mirror->host, size_bytes, DeviceRuntime::HostAccess::kReadWrite));
  mirror->is_pinned = true;
  return absl::OkStatus();
}

void DeviceSealer::FreeMirror(const Mirror& mirror) {
  if (mirror.is_pinned) place_.runtime->UnpinHost(mirror.host);
  std::free(mirror.host);
  if (mirror.device != nullptr) place_.runtime->Free(mirror.device);
}

absl::Status DeviceSealer::Write(const Cache& cache, const StagingArea& staging,
                                 absl::Span<BlockWrite> blocks, ComputePool* pool,
                                 Outcome* outcome) {
  std::vector<BlockWrite> staged;
  std::vector<size_t> staged_indices;
  std::vector<size_t> host_indices;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const bool is_staged = blocks[i].staging_slot >= 0;
    (is_staged ? staged_indices : host_indices).push_back(i);
    if (is_staged) staged.push_back(blocks[i]);
  }
  for (size_t done = 0; done < staged.size();) {
    const size_t count = std::min(staged.size() - done, static_cast<size_t>(batch_blocks_));
    const Batch batch{cache, absl::MakeSpan(staged).subspan(done, count),
                      SlabLayout(spec_, SlabKind::kStaging, static_cast<int32_t>(count)),
                      SlabLayout(spec_, SlabKind::kDevice, static_cast<int32_t>(count)), pool};
    absl::MutexLock lock(&mutex_);
    if (staging.is_abandoned()) return SealAbandoned();
    const absl::Status brought = BringOriginals(staging, batch);
    if (!brought.ok()) {
      // What was queued reads staging memory, which may go after this.
      place_.runtime->Wait(stream_).IgnoreError();
      return brought;
    }
    CERTKV_RETURN_IF_ERROR(KeepOriginals(batch));
    absl::Status sealed = Seal(batch);
    if (sealed.ok()) sealed = KeepRecords(batch);
    if (sealed.ok()) Adopt(batch);
    for (size_t i = done; i < done + count; ++i) {
      blocks[staged_indices[i]] = staged[i];
      if (!sealed.ok()) host_indices.push_back(staged_indices[i]);
    }
    (sealed.ok() ? outcome->sealed_count : outcome->fallen_count) += static_cast<int32_t>(count);
    outcome->why.Update(sealed);
    done += count;
  }
  if (host_indices.empty()) return absl::OkStatus();
  std::vector<BlockWrite> by_host;
  for (const size_t i : host_indices) by_host.push_back(blocks[i]);
  const absl::Status status = WriteBlocks(cache, nullptr, absl::MakeSpan(by_host), pool);
  for (size_t i = 0; i < by_host.size(); ++i) blocks[host_indices[i]] = by_host[i];
  return status;
}

absl::Status DeviceSealer::BringOriginals(const StagingArea& staging, const Batch& batch) {
  const SlabLayout& from = staging.memory()->layout();
  const SlabLayout& to = batch.originals;
  const int64_t begin = to.key_offset(0, 0, 0);
  for (int32_t i = 0; i < to.slot_count(); ++i) {
    const int32_t slot = batch.blocks[i].staging_slot;
    CERTKV_RETURN_IF_ERROR(place_.runtime->CopyOnDevice(
        originals_.device + to.key_offset(i, 0, 0),
        staging.on_device()->base() + from.key_offset(slot, 0, 0), to.slot_bytes(), stream_));
  }
  // After the copies above, which the stream does first, and of what they wrote.
  CERTKV_RETURN_IF_ERROR(place_.runtime->CopyToHost(originals_.host + begin,
                                                    originals_.device + begin,
                                                    to.slot_count() * to.slot_bytes(), stream_));
  return place_.runtime->Wait(stream_);
}

absl::Status DeviceSealer::KeepOriginals(const Batch& batch) {
  const uint8_t* const from = originals_.host;
  const auto keep = [&](int64_t index) -> absl::Status {
    SlotPool::BeginWrite();
    const Plane plane = PlaneAt(spec_, index);
    const BlockWrite& block = batch.blocks[plane.block];
    CopyOriginals(batch.cache, from, batch.originals, static_cast<int32_t>(plane.block), block,
                  plane);
    for (int32_t tile = 0; tile < spec_.tiles_per_block(); ++tile) {
      const absl::Status status = CheckTileOriginals(TileArgs(batch.cache, block, plane, tile, {}));
      if (!status.ok()) return NameTile(status, block, plane, tile);
    }
    return absl::OkStatus();
  };
  return batch.pool->ParallelTry(PlanesPerBlock(spec_) * batch.records.slot_count(), keep);
}

absl::Status DeviceSealer::Seal(const Batch& batch) {
  std::vector<DeviceSeal> seals;
  for (int32_t layer = 0; layer < spec_.layer_count(); ++layer) {
    seals.push_back({&spec_, layer, &batch.records.tile_layout(layer), {}});
  }
  for (int64_t i = 0; i < PlanesPerBlock(spec_) * batch.records.slot_count(); ++i) {
    const Plane plane = PlaneAt(spec_, i);
    for (int32_t tile = 0; tile < spec_.tiles_per_block(); ++tile) {
      const OriginalTile original = OriginalTileAt(originals_.device, batch.originals, spec_,
                                                   static_cast<int32_t>(plane.block), plane, tile);
      const TileTarget target = TileIn(records_.device, batch.records, plane, tile);
      seals[plane.layer].tiles.push_back(
          {original.keys, original.values, plane.kv_head,
           TileIdentityTag(batch.blocks[plane.block].key, plane.layer, plane.kv_head, tile),
           target.scan, target.detail});
    }
  }
  CERTKV_RETURN_IF_ERROR(place_.runtime->Use(place_.device.device));
  CERTKV_RETURN_IF_ERROR(SealOnDevice(seals));
  const int64_t begin = batch.records.scan_offset(0, 0, 0, 0);
  CERTKV_RETURN_IF_ERROR(
      place_.runtime->CopyToHost(records_.host + begin, records_.device + begin,
                                 batch.records.slot_count() * batch.records.slot_bytes(), stream_));
  return place_.runtime->Wait(stream_);
}

absl::Status DeviceSealer::KeepRecords(const Batch& batch) {
  const int64_t tiles = spec_.tiles_per_block();
  const int64_t block_tiles = PlanesPerBlock(spec_) * tiles;
  std::vector<uint64_t> checksums(batch.blocks.size() * static_cast<size_t>(block_tiles));
  uint8_t* const mirror = records_.host;
  const auto keep = [&](int64_t index) -> absl::Status {
    SlotPool::BeginWrite();
    const Plane plane = PlaneAt(spec_, index);
    const BlockWrite& block = batch.blocks[plane.block];
    const TileLayout& layout = batch.records.tile_layout(plane.layer);
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const TileTarget from = TileIn(mirror, batch.records, plane, tile);
      const TileTarget to = SlotTarget(batch.cache, block.device_slot, plane, tile);
      std::memcpy(to.scan, from.scan, static_cast<size_t>(layout.scan_bytes));
      std::memcpy(to.detail, from.detail, static_cast<size_t>(layout.detail_bytes));
      WriteTileChecksums(TileArgs(batch.cache, block, plane, tile, to));
      CERTKV_RETURN_IF_ERROR(
          VerifyWritten(batch.cache, block, plane, tile, to, &checksums[index * tiles + tile]));
      std::memcpy(from.scan, to.scan, sizeof(TileHeader));  // for Adopt
    }
    return absl::OkStatus();
  };
  CERTKV_RETURN_IF_ERROR(
      batch.pool->ParallelTry(PlanesPerBlock(spec_) * batch.records.slot_count(), keep));
  for (size_t i = 0; i < batch.blocks.size(); ++i) {
    batch.blocks[i].originals_digest =
        DigestOfChecksums(checksums.data() + static_cast<int64_t>(i) * block_tiles, block_tiles);
  }
  return absl::OkStatus();
}

void DeviceSealer::Adopt(const Batch& batch) {
  const SlabLayout& from = batch.records;
  const SlabLayout& to = batch.cache.device().layout();
  constexpr auto kHeaderBytes = static_cast<int64_t>(sizeof(TileHeader));
  std::vector<int32_t> slots;
  std::vector<DeviceCopy::Piece> pieces;
  for (const BlockWrite& block : batch.blocks) slots.push_back(block.device_slot);
  for (int64_t i = 0; i < PlanesPerBlock(spec_) * from.slot_count(); ++i) {
    const Plane plane = PlaneAt(spec_, i);
    const auto index = static_cast<int32_t>(plane.block);
    const int32_t slot = batch.blocks[plane.block].device_slot;
    const TileLayout& layout = from.tile_layout(plane.layer);
    for (int32_t tile = 0; tile < spec_.tiles_per_block(); ++tile) {
      const int64_t scan = from.scan_offset(index, plane.layer, plane.kv_head, tile);
      const int64_t to_scan = to.scan_offset(slot, plane.layer, plane.kv_head, tile);
      pieces.push_back({headers_ + scan, to_scan, kHeaderBytes});
      pieces.push_back({records_.device + scan + kHeaderBytes, to_scan + kHeaderBytes,
                        layout.scan_bytes - kHeaderBytes});
    }
    // Those of a block's tiles lie side by side in both.
    pieces.push_back({records_.device + from.detail_offset(index, plane.layer, plane.kv_head, 0),
                      to.detail_offset(slot, plane.layer, plane.kv_head, 0),
                      spec_.tiles_per_block() * layout.detail_bytes});
  }
  batch.cache.device_memory()->device_copy()->Adopt(slots, pieces);
}

}  // namespace certkv::kvstore
