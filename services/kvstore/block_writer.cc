#include "services/kvstore/block_writer.h"

#include <xxhash.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/block_key.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/tile_checksum.h"
#include "services/kvstore/block_planes.h"

namespace certkv::kvstore {
namespace {

// The tiles of a plane, into the block's device slot; `checksums` [tiles_per_block] out.
absl::Status WritePlane(const Cache& cache, const BlockWrite& block, const Plane& plane,
                        uint64_t* checksums) {
  for (int32_t tile = 0; tile < cache.spec().tiles_per_block(); ++tile) {
    const TileTarget target = SlotTarget(cache, block.device_slot, plane, tile);
    CERTKV_RETURN_IF_ERROR(WriteTile(cache, block, plane, tile, target, checksums + tile));
  }
  return absl::OkStatus();
}

// Is a scan record the one that was sealed? Whoever sealed it may have rounded its bounds otherwise
// than `made`, which this thread made of the same originals: a device, another machine, a release
// before this one.
bool IsIntactScan(const TileLayout& layout, const uint8_t* scan, const uint8_t* made) {
  TileHeader seen;
  TileHeader expected;
  std::memcpy(&seen, scan, sizeof(seen));
  std::memcpy(&expected, made, sizeof(expected));
  return CheckTile(layout, scan).ok() && seen.scan_checksum == ScanChecksum(layout, scan) &&
         seen.identity_tag == expected.identity_tag && seen.key_check == expected.key_check &&
         seen.key_scale == expected.key_scale &&
         seen.original_checksum == expected.original_checksum &&
         seen.detail_checksum == expected.detail_checksum;
}

}  // namespace

absl::Status SealAbandoned() {
  return MakeError(absl::StatusCode::kNotFound, "SESSION_NOT_FOUND",
                   "the session ended while its blocks were sealed; attach again");
}

void CopyOriginals(const Cache& cache, const uint8_t* base, const SlabLayout& from, int32_t slot,
                   const BlockWrite& block, const Plane& plane) {
  const CacheSpec& spec = cache.spec();
  const SlabMemory& backing = *cache.backing_memory();
  const SlabLayout& to = backing.layout();
  std::memcpy(backing.base() + to.key_offset(block.backing_slot, plane.layer, plane.kv_head),
              base + from.key_offset(slot, plane.layer, plane.kv_head),
              size_t{2} * spec.block_tokens * spec.head_dim);
  std::memcpy(backing.base() + to.value_offset(block.backing_slot, plane.layer, plane.kv_head),
              base + from.value_offset(slot, plane.layer, plane.kv_head),
              size_t{2} * spec.block_tokens * spec.value_dim);
}

TileTarget SlotTarget(const Cache& cache, int32_t slot, const Plane& plane, int32_t tile) {
  const SlabMemory& device = *cache.device_memory();
  const SlabLayout& layout = device.layout();
  return {device.base() + layout.scan_offset(slot, plane.layer, plane.kv_head, tile),
          device.base() + layout.detail_offset(slot, plane.layer, plane.kv_head, tile)};
}

QuantizeTileArgs TileArgs(const Cache& cache, const BlockWrite& block, const Plane& plane,
                          int32_t tile, const TileTarget& target) {
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
  return args;
}

absl::Status NameTile(const absl::Status& status, const BlockWrite& block, const Plane& plane,
                      int32_t tile) {
  return WithContext(
      status, absl::StrCat("block ", ToHex(block.key.view(), 8), ", layer ", plane.layer,
                           ", KV head ", plane.kv_head, ", tokens from ", tile * kTileTokens));
}

absl::Status VerifyWritten(const Cache& cache, const BlockWrite& block, const Plane& plane,
                           int32_t tile, const TileTarget& target, uint64_t* checksum) {
  const QuantizeTileArgs args = TileArgs(cache, block, plane, tile, target);
  const absl::Status status =
      VerifyTile(*args.layout, args.scan, args.detail, args.keys, args.values);
  if (!status.ok()) return NameTile(status, block, plane, tile);
  TileHeader header;
  std::memcpy(&header, args.scan, sizeof(header));
  *checksum = header.original_checksum;
  return absl::OkStatus();
}

absl::Status WriteTile(const Cache& cache, const BlockWrite& block, const Plane& plane,
                       int32_t tile, const TileTarget& target, uint64_t* checksum) {
  const absl::Status status =
      QuantizeTile(Backend::kCpu, TileArgs(cache, block, plane, tile, target));
  if (!status.ok()) return NameTile(status, block, plane, tile);
  return VerifyWritten(cache, block, plane, tile, target, checksum);
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
  const auto write = [&](int64_t index) -> absl::Status {
    if (staging != nullptr && staging->is_abandoned()) return SealAbandoned();
    SlotPool::BeginWrite();
    const Plane plane = PlaneAt(spec, index);
    const BlockWrite& block = blocks[plane.block];
    if (block.staging_slot >= 0 && staging != nullptr) {
      const SlabMemory& from = *staging->memory();
      CopyOriginals(cache, from.base(), from.layout(), block.staging_slot, block, plane);
    }
    const absl::Status status = WritePlane(cache, block, plane, checksums.data() + index * tiles);
    // Originals that were sealed were finite; a promotion that meets others has another digest.
    return block.staging_slot >= 0 ? status : absl::OkStatus();
  };
  CERTKV_RETURN_IF_ERROR(pool->ParallelTry(plane_count, write));
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
  const auto make = [&](int64_t index) -> absl::Status {
    const Plane plane = PlaneAt(spec, index);
    const TileLayout& tile_layout = layout.tile_layout(plane.layer);
    made[index].resize(static_cast<size_t>(tiles * tile_layout.tile_bytes() / sizeof(Line)));
    for (int32_t tile = 0; tile < tiles; ++tile) {
      CERTKV_RETURN_IF_ERROR(WriteTile(cache, block, plane, tile,
                                       target_at(index, tile_layout, tile),
                                       &checksums[index * tiles + tile]));
    }
    return absl::OkStatus();
  };
  const bool is_made = pool->ParallelTry(plane_count, make).ok();
  const uint64_t digest = DigestOfChecksums(checksums.data(), plane_count * tiles);
  if (!is_made || digest != block.originals_digest) return OriginalLost(block.key);
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
      rewrite(to.detail, from.detail, tile_layout.detail_bytes);
      if (!IsIntactScan(tile_layout, to.scan, from.scan)) {
        rewrite(to.scan, from.scan, tile_layout.scan_bytes);
      }
    }
  }
  DeviceCopy* const copy = cache.device_memory()->device_copy();
  if (copy == nullptr) return rewritten;
  if (rewritten == 0 && copy->Differs(block.device_slot)) ++rewritten;
  copy->Upload({block.device_slot});
  return rewritten;
}

}  // namespace certkv::kvstore
