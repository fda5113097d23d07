#include "services/kvstore/block_payload.h"

#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/block_key.h"
#include "kernels/core/slab_layout.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/tile_checksum.h"
#include "services/kvstore/block_planes.h"

namespace certkv::kvstore {
namespace {

// visit(layer, KV head, tile, offset in the payload) for each tile of the planes.
template <typename Visit>
void VisitTiles(const Cache& cache, const Visit& visit) {
  const CacheSpec& spec = cache.spec();
  int64_t offset = 0;
  for (int64_t i = 0; i < PlanesPerBlock(spec); ++i) {
    const Plane plane = PlaneAt(spec, i);
    for (int32_t tile = 0; tile < spec.tiles_per_block(); ++tile) {
      visit(plane, tile, offset);
      offset += cache.device().layout().tile_layout(plane.layer).tile_bytes();
    }
  }
}

// visit(offset in the backing slab, offset in the originals, bytes) for each run of originals.
template <typename Visit>
void VisitOriginals(const Cache& cache, int32_t slot, const Visit& visit) {
  const CacheSpec& spec = cache.spec();
  const SlabLayout& layout = cache.backing().layout();
  const int64_t key_bytes = spec.tiles_per_block() * OriginalKeyBytes(spec);
  const int64_t value_bytes = spec.tiles_per_block() * OriginalValueBytes(spec);
  int64_t offset = 0;
  for (int64_t i = 0; i < PlanesPerBlock(spec); ++i) {
    const Plane plane = PlaneAt(spec, i);
    visit(layout.key_offset(slot, plane.layer, plane.kv_head), offset, key_bytes);
    visit(layout.value_offset(slot, plane.layer, plane.kv_head), offset + key_bytes, value_bytes);
    offset += key_bytes + value_bytes;
  }
}

bool IsGood(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail,
            const OriginalTile& original, uint64_t tag) {
  TileHeader header;
  std::memcpy(&header, scan, sizeof(header));
  return header.identity_tag == tag &&
         VerifyTile(layout, scan, detail, original.keys, original.values).ok();
}

// Appends a run of bytes, to the run before it where that ends there.
void Append(uint8_t* data, int64_t bytes, std::vector<absl::Span<uint8_t>>* spans) {
  const auto size = static_cast<size_t>(bytes);
  if (!spans->empty() && spans->back().data() + spans->back().size() == data) {
    spans->back() = absl::Span<uint8_t>(spans->back().data(), spans->back().size() + size);
  } else {
    spans->emplace_back(data, size);
  }
}

absl::Status PayloadDamaged(const BlockKey& key, absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "SPILL_DAMAGED",
                   absl::StrCat("block ", ToHex(key.view(), 8), " on disk ", what,
                                "; it is forgotten, seal it again"));
}

}  // namespace

int64_t PlaneBytesOf(const Cache& cache) {
  int64_t bytes = 0;
  VisitTiles(cache, [&](const Plane& plane, int32_t /*tile*/, int64_t /*offset*/) {
    bytes += cache.device().layout().tile_layout(plane.layer).tile_bytes();
  });
  return bytes;
}

int64_t OriginalBytesOf(const Cache& cache) {
  const CacheSpec& spec = cache.spec();
  return PlanesPerBlock(spec) * spec.tiles_per_block() *
         (OriginalKeyBytes(spec) + OriginalValueBytes(spec));
}

std::vector<absl::Span<uint8_t>> PayloadSpans(const Cache& cache, const BlockWrite& block,
                                              bool with_planes, bool with_originals) {
  std::vector<absl::Span<uint8_t>> spans;
  if (with_planes) {
    VisitTiles(cache, [&](const Plane& plane, int32_t tile, int64_t /*offset*/) {
      const TileLayout& layout = cache.device().layout().tile_layout(plane.layer);
      const TileTarget at = SlotTarget(cache, block.device_slot, plane, tile);
      Append(at.scan, layout.scan_bytes, &spans);
      Append(at.detail, layout.detail_bytes, &spans);
    });
  }
  if (with_originals) {
    uint8_t* originals = cache.backing_memory()->base();
    VisitOriginals(cache, block.backing_slot, [&](int64_t at, int64_t /*offset*/, int64_t bytes) {
      Append(originals + at, bytes, &spans);
    });
  }
  return spans;
}

bool ArePlanesOf(const Cache& cache, const BlockWrite& block) {
  std::vector<uint64_t> checksums;
  bool is_good = true;
  VisitTiles(cache, [&](const Plane& plane, int32_t tile, int64_t /*offset*/) {
    const TileLayout& layout = cache.device().layout().tile_layout(plane.layer);
    const TileTarget at = SlotTarget(cache, block.device_slot, plane, tile);
    TileHeader header;
    std::memcpy(&header, at.scan, sizeof(header));
    checksums.push_back(header.original_checksum);
    is_good = is_good &&
              header.identity_tag == TileIdentityTag(block.key, plane.layer, plane.kv_head, tile) &&
              VerifyTile(layout, at.scan, at.detail, nullptr, nullptr).ok();
  });
  return is_good && DigestOfChecksums(checksums.data(), static_cast<int64_t>(checksums.size())) ==
                        block.originals_digest;
}

bool AreOriginalsOf(const Cache& cache, const BlockWrite& block) {
  const CacheSpec& spec = cache.spec();
  const SlabLayout& layout = cache.backing().layout();
  std::vector<uint64_t> checksums;
  VisitTiles(cache, [&](const Plane& plane, int32_t tile, int64_t /*offset*/) {
    const OriginalTile original = OriginalTileAt(cache.backing_memory()->base(), layout, spec,
                                                 block.backing_slot, plane, tile);
    checksums.push_back(OriginalChecksum(cache.device().layout().tile_layout(plane.layer),
                                         original.keys, spec.head_dim, original.values,
                                         spec.value_dim));
  });
  return DigestOfChecksums(checksums.data(), static_cast<int64_t>(checksums.size())) ==
         block.originals_digest;
}

bool CopyOut(const Cache& cache, const SlotRef& device, const SlotRef& backing,
             absl::Span<uint8_t> payload) {
  const SlabLayout& device_layout = cache.device().layout();
  const SlabLayout& backing_layout = cache.backing().layout();
  const uint8_t* planes = cache.device_memory()->reader_base();
  const uint8_t* originals = cache.backing_memory()->reader_base();
  const int64_t plane_bytes = static_cast<int64_t>(payload.size()) - OriginalBytesOf(cache);
  if (!GenerationMatches(originals, backing_layout, backing)) return false;
  if (plane_bytes > 0) {
    if (!GenerationMatches(planes, device_layout, device)) return false;
    VisitTiles(cache, [&](const Plane& plane, int32_t tile, int64_t offset) {
      const TileLayout& layout = device_layout.tile_layout(plane.layer);
      uint8_t* to = payload.data() + offset;
      std::memcpy(to,
                  planes + device_layout.scan_offset(device.slot, plane.layer, plane.kv_head, tile),
                  static_cast<size_t>(layout.scan_bytes));
      std::memcpy(
          to + layout.scan_bytes,
          planes + device_layout.detail_offset(device.slot, plane.layer, plane.kv_head, tile),
          static_cast<size_t>(layout.detail_bytes));
    });
    if (!GenerationStillMatches(planes, device_layout, device)) return false;
  }
  VisitOriginals(cache, backing.slot, [&](int64_t from, int64_t offset, int64_t bytes) {
    std::memcpy(payload.data() + plane_bytes + offset, originals + from,
                static_cast<size_t>(bytes));
  });
  return GenerationStillMatches(originals, backing_layout, backing);
}

absl::Status CopyIn(const Cache& cache, const BlockWrite& block,
                    absl::Span<const uint8_t> payload) {
  const CacheSpec& spec = cache.spec();
  const auto size = static_cast<int64_t>(payload.size());
  const int64_t plane_bytes = size - OriginalBytesOf(cache);
  if (plane_bytes < 0) {
    return PayloadDamaged(block.key, absl::StrCat("has ", size, " bytes, and its originals alone ",
                                                  OriginalBytesOf(cache)));
  }
  // Planes of another size are those of another release's tiles.
  const bool has_planes = plane_bytes == PlaneBytesOf(cache);
  SlotPool::BeginWrite();
  uint8_t* originals = cache.backing_memory()->base();
  VisitOriginals(cache, block.backing_slot, [&](int64_t to, int64_t offset, int64_t bytes) {
    std::memcpy(originals + to, payload.data() + plane_bytes + offset, static_cast<size_t>(bytes));
  });
  const SlabLayout& layout = cache.device().layout();
  std::vector<uint64_t> checksums;
  absl::Status status;
  VisitTiles(cache, [&](const Plane& plane, int32_t tile, int64_t offset) {
    const TileLayout& tile_layout = layout.tile_layout(plane.layer);
    const TileTarget to = SlotTarget(cache, block.device_slot, plane, tile);
    const OriginalTile original =
        OriginalTileAt(originals, cache.backing().layout(), spec, block.backing_slot, plane, tile);
    if (has_planes) {
      std::memcpy(to.scan, payload.data() + offset, static_cast<size_t>(tile_layout.scan_bytes));
      std::memcpy(to.detail, payload.data() + offset + tile_layout.scan_bytes,
                  static_cast<size_t>(tile_layout.detail_bytes));
    }
    uint64_t checksum = 0;
    const uint64_t tag = TileIdentityTag(block.key, plane.layer, plane.kv_head, tile);
    if (!has_planes || !IsGood(tile_layout, to.scan, to.detail, original, tag)) {
      status.Update(WriteTile(cache, block, plane, tile, to, &checksum));
    } else {
      TileHeader header;
      std::memcpy(&header, to.scan, sizeof(header));
      checksum = header.original_checksum;
    }
    checksums.push_back(checksum);
  });
  // Originals that were sealed were finite, so an error here is damage too.
  if (!status.ok() || DigestOfChecksums(checksums.data(), static_cast<int64_t>(checksums.size())) !=
                          block.originals_digest) {
    return PayloadDamaged(block.key, "has other originals than were sealed");
  }
  cache.device_memory()->CopyToDevice({block.device_slot});
  return absl::OkStatus();
}

}  // namespace certkv::kvstore
