#include "services/kvstore/block_checker.h"

#include <cstring>
#include <vector>

#include "kernels/core/block_key.h"
#include "kernels/core/slab_layout.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/tile_checksum.h"
#include "services/kvstore/block_planes.h"

namespace certkv::kvstore {
namespace {

bool IsTileGood(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail, uint64_t tag,
                uint64_t original_checksum) {
  if (!VerifyTile(layout, scan, detail, nullptr, nullptr).ok()) return false;
  TileHeader header;
  std::memcpy(&header, scan, sizeof(header));
  return header.identity_tag == tag && header.original_checksum == original_checksum;
}

void CheckBlock(const Cache& cache, BlockCheck* block) {
  const CacheSpec& spec = cache.spec();
  const SlabLayout& backing = cache.backing().layout();
  const SlabLayout& device = cache.device().layout();
  const uint8_t* originals = cache.backing_memory()->reader_base();
  const uint8_t* planes = cache.device_memory()->reader_base();
  const bool has_planes = block->device.present();
  if (!GenerationMatches(originals, backing, block->backing) ||
      (has_planes && !GenerationMatches(planes, device, block->device))) {
    block->moved = true;
    return;
  }
  std::vector<uint64_t> checksums;
  checksums.reserve(static_cast<size_t>(PlanesPerBlock(spec) * spec.tiles_per_block()));
  for (int64_t i = 0; i < PlanesPerBlock(spec); ++i) {
    const Plane plane = PlaneAt(spec, i);
    const TileLayout& layout = device.tile_layout(plane.layer);
    for (int32_t tile = 0; tile < spec.tiles_per_block(); ++tile) {
      const OriginalTile original =
          OriginalTileAt(originals, backing, spec, block->backing.slot, plane, tile);
      checksums.push_back(
          OriginalChecksum(layout, original.keys, spec.head_dim, original.values, spec.value_dim));
      if (!has_planes || !block->planes_ok) continue;
      const int32_t slot = block->device.slot;
      block->planes_ok = IsTileGood(
          layout, planes + device.scan_offset(slot, plane.layer, plane.kv_head, tile),
          planes + device.detail_offset(slot, plane.layer, plane.kv_head, tile),
          TileIdentityTag(block->key, plane.layer, plane.kv_head, tile), checksums.back());
    }
  }
  DeviceCopy* const copy = cache.device_memory()->device_copy();
  if (copy != nullptr && has_planes && block->planes_ok) {
    block->planes_ok = !copy->Differs(block->device.slot);
  }
  block->originals_ok =
      DigestOfChecksums(checksums.data(), static_cast<int64_t>(checksums.size())) ==
      block->originals_digest;
  block->moved = !GenerationStillMatches(originals, backing, block->backing) ||
                 (has_planes && !GenerationStillMatches(planes, device, block->device));
}

}  // namespace

void CheckBlocks(const Cache& cache, absl::Span<BlockCheck> blocks, ComputePool* pool) {
  if (pool == nullptr) {
    for (BlockCheck& block : blocks) CheckBlock(cache, &block);
    return;
  }
  pool->ParallelFor(static_cast<int64_t>(blocks.size()),
                    [&](int64_t index) { CheckBlock(cache, &blocks[index]); });
}

}  // namespace certkv::kvstore
