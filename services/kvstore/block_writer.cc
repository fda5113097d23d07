#include "services/kvstore/block_writer.h"

#include <xxhash.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/block_key.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "services/kvstore/block_planes.h"

namespace certkv::kvstore {
namespace {

// The first error by order of the work, whatever the order of the threads.
class FirstError {
 public:
  // False when an earlier piece of work has failed, so that this one need not be done.
  bool IsNeeded(int64_t index) const { return index < index_.load(std::memory_order_relaxed); }
  void Report(int64_t index, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    if (index >= index_.load(std::memory_order_relaxed)) return;
    index_.store(index, std::memory_order_relaxed);
    status_ = status;
  }
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return status_;
  }

 private:
  std::atomic<int64_t> index_{std::numeric_limits<int64_t>::max()};
  mutable absl::Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
};

void CopyOriginals(const Cache& cache, const SlabMemory& staging, const BlockWrite& block,
                   const Plane& plane) {
  const CacheSpec& spec = cache.spec();
  const SlabLayout& from = staging.layout();
  const SlabMemory& backing = *cache.backing_memory();
  const SlabLayout& to = backing.layout();
  std::memcpy(backing.base() + to.key_offset(block.backing_slot, plane.layer, plane.kv_head),
              staging.base() + from.key_offset(block.staging_slot, plane.layer, plane.kv_head),
              size_t{2} * spec.block_tokens * spec.head_dim);
  std::memcpy(backing.base() + to.value_offset(block.backing_slot, plane.layer, plane.kv_head),
              staging.base() + from.value_offset(block.staging_slot, plane.layer, plane.kv_head),
              size_t{2} * spec.block_tokens * spec.value_dim);
}

// The tiles of a plane, into the block's device slot; `checksums` [tiles_per_block] out.
absl::Status WritePlane(const Cache& cache, const BlockWrite& block, const Plane& plane,
                        uint64_t* checksums) {
  for (int32_t tile = 0; tile < cache.spec().tiles_per_block(); ++tile) {
    const TileTarget target = SlotTarget(cache, block.device_slot, plane, tile);
    CERTKV_RETURN_IF_ERROR(WriteTile(cache, block, plane, tile, target, checksums + tile));
  }
  return absl::OkStatus();
}

absl::Status Abandoned() {
  return MakeError(absl::StatusCode::kNotFound, "SESSION_NOT_FOUND",
                   "the session ended while its blocks were sealed; attach again");
}

}  // namespace

TileTarget SlotTarget(const Cache& cache, int32_t slot, const Plane& plane, int32_t tile) {
  const SlabMemory& device = *cache.device_memory();
  const SlabLayout& layout = device.layout();
  return {device.base() + layout.scan_offset(slot, plane.layer, plane.kv_head, tile),
          device.base() + layout.detail_offset(slot, plane.layer, plane.kv_head, tile)};
}

absl::Status WriteTile(const Cache& cache, const BlockWrite& block, const Plane& plane,
                       int32_t tile, const TileTarget& target, uint64_t* checksum) {
  const CacheSpec& spec = cache.spec();
  const SlabMemory& backing = *cache.backing_memory();
  const OriginalTile original =
      OriginalTileAt(backing.base(), backing.layout(), spec, block.backing_slot, plane, tile);
  QuantizeTileArgs args{};
  args.spec = &spec;
  args.layer = plane.layer;
  args.layout = &cache.device().layout().tile_layout(plane.layer);
  args.keys = original.keys;
  args.values = original.values;
  args.witness_weights = WitnessWeightsOf(spec, plane.layer, plane.kv_head);
  args.key_stride = spec.head_dim;
  args.value_stride = spec.value_dim;
  args.identity_tag = TileIdentityTag(block.key, plane.layer, plane.kv_head, tile);
  args.scan = target.scan;
  args.detail = target.detail;
  absl::Status status = QuantizeTile(Backend::kCpu, args);
  if (status.ok()) {
    status = VerifyTile(*args.layout, args.scan, args.detail, original.keys, original.values);
  }
  if (!status.ok()) {
    return WithContext(
        status, absl::StrCat("block ", ToHex(block.key.view(), 8), ", layer ", plane.layer,
                             ", KV head ", plane.kv_head, ", tokens from ", tile * kTileTokens));
  }
  TileHeader header;
  std::memcpy(&header, args.scan, sizeof(header));
  *checksum = header.original_checksum;
  return absl::OkStatus();
}

uint64_t DigestOfChecksums(const uint64_t* checksums, int64_t count) {
  return XXH3_64bits(checksums, static_cast<size_t>(count) * sizeof(uint64_t));
}

absl::Status OriginalLost(const BlockKey& key) {
  return MakeError(absl::StatusCode::kDataLoss, "ORIGINAL_LOST",
                   absl::StrCat("originals of block ", ToHex(key.view(), 8),
                                " do not have the checksum of when they were sealed; the block is "
                                "no longer found by lookups, seal it again"));
}

absl::Status WriteBlocks(const Cache& cache, const StagingArea* staging,
                         absl::Span<BlockWrite> blocks, ComputePool* pool) {
  const CacheSpec& spec = cache.spec();
  const int64_t tiles = spec.tiles_per_block();
  const int64_t plane_count = PlanesPerBlock(spec) * static_cast<int64_t>(blocks.size());
  std::vector<uint64_t> checksums(static_cast<size_t>(plane_count * tiles));
  FirstError error;
  pool->ParallelFor(plane_count, [&](int64_t index) {
    if (!error.IsNeeded(index)) return;
    if (staging != nullptr && staging->is_abandoned()) return error.Report(index, Abandoned());
    SlotPool::BeginWrite();
    const Plane plane = PlaneAt(spec, index);
    const BlockWrite& block = blocks[plane.block];
    if (block.staging_slot >= 0) CopyOriginals(cache, *staging->memory(), block, plane);
    const absl::Status status = WritePlane(cache, block, plane, checksums.data() + index * tiles);
    // Originals that were sealed were finite; a promotion that meets others has another digest.
    if (!status.ok() && block.staging_slot >= 0) error.Report(index, status);
  });
  CERTKV_RETURN_IF_ERROR(error.status());
  std::vector<int32_t> slots;
  for (const BlockWrite& block : blocks) slots.push_back(block.device_slot);
  cache.device_memory()->CopyToDevice(slots);
  const int64_t block_tiles = PlanesPerBlock(spec) * tiles;
  absl::Status lost;
  for (size_t i = 0; i < blocks.size(); ++i) {
    BlockWrite& block = blocks[i];
    const uint64_t digest =
        DigestOfChecksums(checksums.data() + static_cast<int64_t>(i) * block_tiles, block_tiles);
    if (block.staging_slot >= 0) {
      block.originals_digest = digest;
    } else if (block.originals_digest != digest) {
      block.digest_matches = false;
      lost.Update(OriginalLost(block.key));
    }
  }
  return lost;
}

absl::StatusOr<int64_t> RebuildPlanes(const Cache& cache, const BlockWrite& block,
                                      ComputePool* pool) {
  const CacheSpec& spec = cache.spec();
  const SlabLayout& layout = cache.device().layout();
  const int64_t tiles = spec.tiles_per_block();
  const int64_t plane_count = PlanesPerBlock(spec);
  // Records begin at multiples of 64, the alignment that the kernels want.
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<std::vector<Line>> made(static_cast<size_t>(plane_count));
  std::vector<uint64_t> checksums(static_cast<size_t>(plane_count * tiles));
  const auto target_at = [&](int64_t index, const TileLayout& tile_layout, int64_t tile) {
    uint8_t* record = made[index].data()->bytes + tile * tile_layout.tile_bytes();
    return TileTarget{record, record + tile_layout.scan_bytes};
  };
  FirstError error;
  pool->ParallelFor(plane_count, [&](int64_t index) {
    const Plane plane = PlaneAt(spec, index);
    const TileLayout& tile_layout = layout.tile_layout(plane.layer);
    made[index].resize(static_cast<size_t>(tiles * tile_layout.tile_bytes() / sizeof(Line)));
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const absl::Status status =
          WriteTile(cache, block, plane, tile, target_at(index, tile_layout, tile),
                    &checksums[index * tiles + tile]);
      if (!status.ok()) return error.Report(index, status);
    }
  });
  const uint64_t digest = DigestOfChecksums(checksums.data(), plane_count * tiles);
  if (!error.status().ok() || digest != block.originals_digest) return OriginalLost(block.key);
  int64_t rewritten = 0;
  const auto rewrite = [&rewritten](uint8_t* to, const uint8_t* from, int64_t bytes) {
    if (std::memcmp(to, from, static_cast<size_t>(bytes)) == 0) return;
    std::memcpy(to, from, static_cast<size_t>(bytes));
    ++rewritten;
  };
  for (int64_t index = 0; index < plane_count; ++index) {
    const Plane plane = PlaneAt(spec, index);
    const TileLayout& tile_layout = layout.tile_layout(plane.layer);
    for (int32_t tile = 0; tile < tiles; ++tile) {
      const TileTarget from = target_at(index, tile_layout, tile);
      const TileTarget to = SlotTarget(cache, block.device_slot, plane, tile);
      rewrite(to.scan, from.scan, tile_layout.scan_bytes);
      rewrite(to.detail, from.detail, tile_layout.detail_bytes);
    }
  }
  DeviceCopy* const copy = cache.device_memory()->device_copy();
  if (copy == nullptr) return rewritten;
  if (rewritten == 0 && copy->Differs(block.device_slot)) ++rewritten;
  copy->Upload({block.device_slot});
  return rewritten;
}

}  // namespace certkv::kvstore
