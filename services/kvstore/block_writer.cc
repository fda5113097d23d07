#include "services/kvstore/block_writer.h"

#include <xxhash.h>

#include <atomic>
#include <cstring>
#include <limits>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/block_key.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/tile_checksum.h"

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

// One layer and KV head of one block: the piece of work that a thread takes.
struct Plane {
  int64_t block;
  int32_t layer;
  int32_t kv_head;
};

int64_t PlanesPerBlock(const CacheSpec& spec) {
  return int64_t{spec.layer_count()} * spec.kv_head_count;
}

Plane PlaneAt(const CacheSpec& spec, int64_t index) {
  const int64_t in_block = index % PlanesPerBlock(spec);
  return Plane{index / PlanesPerBlock(spec), static_cast<int32_t>(in_block / spec.kv_head_count),
               static_cast<int32_t>(in_block % spec.kv_head_count)};
}

const uint16_t* Halves(const uint8_t* bytes) { return reinterpret_cast<const uint16_t*>(bytes); }

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

// Quantizes the tiles of a plane from the backing slot; `checksums` [tiles_per_block] out.
absl::Status QuantizePlane(const Cache& cache, const BlockWrite& block, const Plane& plane,
                           uint64_t* checksums) {
  const CacheSpec& spec = cache.spec();
  const SlabMemory& device = *cache.device_memory();
  const SlabMemory& backing = *cache.backing_memory();
  const uint16_t* keys = Halves(
      backing.base() + backing.layout().key_offset(block.backing_slot, plane.layer, plane.kv_head));
  const uint16_t* values =
      Halves(backing.base() +
             backing.layout().value_offset(block.backing_slot, plane.layer, plane.kv_head));
  for (int32_t tile = 0; tile < spec.tiles_per_block(); ++tile) {
    QuantizeTileArgs args{};
    args.spec = &spec;
    args.layer = plane.layer;
    args.layout = &device.layout().tile_layout(plane.layer);
    args.keys = keys + int64_t{tile} * kTileTokens * spec.head_dim;
    args.values = values + int64_t{tile} * kTileTokens * spec.value_dim;
    args.key_stride = spec.head_dim;
    args.value_stride = spec.value_dim;
    args.identity_tag = TileIdentityTag(block.key, plane.layer, plane.kv_head, tile);
    args.scan = device.base() +
                device.layout().scan_offset(block.device_slot, plane.layer, plane.kv_head, tile);
    args.detail = device.base() + device.layout().detail_offset(block.device_slot, plane.layer,
                                                                plane.kv_head, tile);
    const absl::Status status = QuantizeTile(Backend::kCpu, args);
    if (!status.ok()) {
      return WithContext(
          status, absl::StrCat("block ", ToHex(block.key.view(), 8), ", layer ", plane.layer,
                               ", KV head ", plane.kv_head, ", tokens from ", tile * kTileTokens));
    }
    TileHeader header;
    std::memcpy(&header, args.scan, sizeof(header));
    checksums[tile] = header.original_checksum;
  }
  return absl::OkStatus();
}

absl::Status Abandoned() {
  return MakeError(absl::StatusCode::kNotFound, "SESSION_NOT_FOUND",
                   "the session ended while its blocks were sealed; attach again");
}

uint64_t DigestOf(const std::vector<uint64_t>& checksums, int64_t first, int64_t count) {
  return XXH3_64bits(checksums.data() + first, static_cast<size_t>(count) * sizeof(uint64_t));
}

}  // namespace

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
    const absl::Status status =
        QuantizePlane(cache, block, plane, checksums.data() + index * tiles);
    // Originals that were sealed were finite; a promotion that meets others has another digest.
    if (!status.ok() && block.staging_slot >= 0) error.Report(index, status);
  });
  CERTKV_RETURN_IF_ERROR(error.status());
  const int64_t block_tiles = PlanesPerBlock(spec) * tiles;
  absl::Status lost;
  for (size_t i = 0; i < blocks.size(); ++i) {
    BlockWrite& block = blocks[i];
    const uint64_t digest = DigestOf(checksums, static_cast<int64_t>(i) * block_tiles, block_tiles);
    if (block.staging_slot >= 0) {
      block.originals_digest = digest;
    } else if (block.originals_digest != digest) {
      block.digest_matches = false;
      lost.Update(OriginalLost(block.key));
    }
  }
  return lost;
}

void CheckOriginals(const Cache& cache, absl::Span<OriginalsCheck> blocks, ComputePool* pool) {
  const CacheSpec& spec = cache.spec();
  const SlabMemory& backing = *cache.backing_memory();
  const int64_t block_tiles = PlanesPerBlock(spec) * spec.tiles_per_block();
  pool->ParallelFor(static_cast<int64_t>(blocks.size()), [&](int64_t index) {
    OriginalsCheck& block = blocks[index];
    std::vector<uint64_t> checksums;
    checksums.reserve(static_cast<size_t>(block_tiles));
    for (int64_t i = 0; i < PlanesPerBlock(spec); ++i) {
      const Plane plane = PlaneAt(spec, i);
      const SlabLayout& layout = backing.layout();
      const uint8_t* keys =
          backing.base() + layout.key_offset(block.backing_slot, plane.layer, plane.kv_head);
      const uint8_t* values =
          backing.base() + layout.value_offset(block.backing_slot, plane.layer, plane.kv_head);
      for (int32_t tile = 0; tile < spec.tiles_per_block(); ++tile) {
        checksums.push_back(OriginalChecksum(
            layout.tile_layout(plane.layer), Halves(keys + tile * OriginalKeyBytes(spec)),
            spec.head_dim, Halves(values + tile * OriginalValueBytes(spec)), spec.value_dim));
      }
    }
    block.matches = DigestOf(checksums, 0, block_tiles) == block.originals_digest;
  });
}

}  // namespace certkv::kvstore
