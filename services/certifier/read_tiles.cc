#include "services/certifier/read_tiles.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/block_key.h"
#include "kernels/core/half.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/tile_checksum.h"

namespace certkv::certifier {
namespace {

absl::Status Reused(absl::string_view tier, int32_t block, int32_t slot) {
  return MakeError(absl::StatusCode::kAborted, "BLOCK_REUSED",
                   absl::StrCat("block ", block, " of the view: ", tier, " slot ", slot,
                                " was given to another block; nothing was returned, look the "
                                "blocks up again and keep their lease"));
}

const uint16_t* At16(const uint8_t* base, int64_t offset) {
  return reinterpret_cast<const uint16_t*>(base + offset);
}

bool AllFinite(OriginalDtype dtype, const uint16_t* words, int64_t count) {
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) finite &= IsFiniteOriginal(dtype, words[i]);
  return finite;
}

}  // namespace

ReadTiles::ReadTiles(const ReadPlan& plan, int32_t kv_head, bool verify_always,
                     CertifierCounters* counters, ReadWorkspace* workspace)
    : plan_(plan),
      kv_head_(kv_head),
      verify_always_(verify_always),
      counters_(counters),
      workspace_(workspace) {}

absl::Status ReadTiles::Open() {
  CERTKV_RETURN_IF_ERROR(plan_.cache->CheckAlive());
  std::fill_n(workspace_->original_held.begin(), plan_.tile_count, uint8_t{0});
  for (int32_t block = plan_.first_block; block < plan_.block_end; ++block) {
    const absl::Status status = OpenBlock(block);
    if (!status.ok()) return Explain(status);
  }
  return CheckTail();
}

absl::Status ReadTiles::OpenBlock(int32_t block) {
  const BlockHandle& handle = (*plan_.snapshot.blocks)[block];
  const MappedSlab& slab = plan_.cache->device();
  const SlabLayout& layout = slab.layout();
  const int32_t layer = plan_.request.layer;
  const int32_t slot = handle.device.slot;
  if (!slab.Matches(handle.device)) return Reused("device", block, slot);
  const int32_t first_tile = tile_of_block(block);
  for (int32_t i = 0; i < plan_.tiles_per_block(); ++i) {
    AttendTile& tile = workspace_->tiles[first_tile + i];
    tile.scan = slab.base() + layout.scan_offset(slot, layer, kv_head_, i);
    tile.detail = slab.base() + layout.detail_offset(slot, layer, kv_head_, i);
    tile.original_keys = nullptr;
    tile.original_values = nullptr;
    uint64_t tag = 0;
    std::memcpy(&tag, tile.scan + offsetof(TileHeader, identity_tag), sizeof(tag));
    if (tag == TileIdentityTag(handle.key, layer, kv_head_, i)) continue;
    return MakeError(
        absl::StatusCode::kDataLoss, "TILE_IDENTITY_MISMATCH",
        absl::StrCat("block ", block, " of the view, layer ", layer, ", KV head ", kv_head_,
                     ", tile ", i, ": device slot ", slot, " holds another block's tile than key ",
                     ToHex(handle.key.view(), 8), " names; drop the block and seal it again"));
  }
  if (!verify_always_ && plan_.cache->verified_tiles()->Contains(layer, kv_head_, handle.device)) {
    return absl::OkStatus();
  }
  return VerifyBlock(block);
}

absl::Status ReadTiles::VerifyBlock(int32_t block) {
  const BlockHandle& handle = (*plan_.snapshot.blocks)[block];
  const int32_t first_tile = tile_of_block(block);
  for (int32_t i = 0; i < plan_.tiles_per_block(); ++i) {
    const AttendTile& tile = workspace_->tiles[first_tile + i];
    const absl::Status status =
        VerifyTile(plan_.tile_layout(), tile.scan, tile.detail, nullptr, nullptr);
    if (status.ok()) continue;
    return WithContext(status,
                       absl::StrCat("block ", block, " of the view, layer ", plan_.request.layer,
                                    ", KV head ", kv_head_, ", tile ", i));
  }
  counters_->tiles_verified.fetch_add(plan_.tiles_per_block(), std::memory_order_relaxed);
  if (!plan_.cache->device().StillMatches(handle.device)) {
    return Reused("device", block, handle.device.slot);
  }
  plan_.cache->verified_tiles()->Add(plan_.request.layer, kv_head_, handle.device);
  return absl::OkStatus();
}

absl::Status ReadTiles::CheckTail() const {
  if (plan_.tail_count == 0) return absl::OkStatus();
  const CacheSpec& spec = plan_.cache->spec();
  const int64_t key_words = int64_t{plan_.tail_count} * spec.head_dim;
  const int64_t value_words = int64_t{plan_.tail_count} * spec.value_dim;
  if (AllFinite(spec.original_dtype, tail_keys(), key_words) &&
      AllFinite(spec.original_dtype, tail_values(), value_words)) {
    return absl::OkStatus();
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "TAIL_NOT_FINITE",
                   absl::StrCat("a key or value of the tail's first ", plan_.tail_count,
                                " tokens, layer ", plan_.request.layer, ", KV head ", kv_head_,
                                ", is an infinity or NaN; find out where the engine made it"));
}

absl::Status ReadTiles::HoldOriginal(int32_t tile) {
  if (workspace_->original_held[tile] != 0) return absl::OkStatus();
  const int32_t block = plan_.first_block + tile / plan_.tiles_per_block();
  const BlockHandle& handle = plan_.block_of_tile(tile);
  const MappedSlab& slab = plan_.cache->backing();
  if (!handle.backing.present()) {
    return MakeError(absl::StatusCode::kDataLoss, "ORIGINAL_MISSING",
                     absl::StrCat("block ", block,
                                  " of the view has no original in the backing "
                                  "tier, and the read can't meet its policy without it; compute "
                                  "the block again and seal it"));
  }
  if (!slab.Matches(handle.backing)) return Reused("backing", block, handle.backing.slot);
  const int32_t tile_of_block = tile % plan_.tiles_per_block();
  const SlabLayout& layout = slab.layout();
  const TileLayout& tile_layout = plan_.tile_layout();
  const int64_t token = int64_t{tile_of_block} * kTileTokens;
  const int32_t slot = handle.backing.slot;
  const uint16_t* keys = At16(slab.base(), layout.key_offset(slot, plan_.request.layer, kv_head_)) +
                         token * tile_layout.head_dim;
  const uint16_t* values =
      At16(slab.base(), layout.value_offset(slot, plan_.request.layer, kv_head_)) +
      token * tile_layout.value_dim;
  AttendTile& data = workspace_->tiles[tile];
  uint64_t expected = 0;
  std::memcpy(&expected, data.scan + offsetof(TileHeader, original_checksum), sizeof(expected));
  counters_->originals_verified.fetch_add(1, std::memory_order_relaxed);
  if (OriginalChecksum(tile_layout, keys, tile_layout.head_dim, values, tile_layout.value_dim) !=
      expected) {
    return MakeError(
        absl::StatusCode::kDataLoss, "ORIGINAL_CHECKSUM_MISMATCH",
        absl::StrCat("block ", block, " of the view, layer ", plan_.request.layer, ", KV head ",
                     kv_head_, ", tile ", tile_of_block, ": the originals in backing slot ", slot,
                     " are not the ones that were sealed; drop the block, compute it "
                     "again and seal it"));
  }
  data.original_keys = keys;
  data.original_values = values;
  workspace_->original_held[tile] = 1;
  return absl::OkStatus();
}

absl::Status ReadTiles::CheckBlocks(bool with_backing) const {
  for (int32_t block = plan_.first_block; block < plan_.block_end; ++block) {
    const BlockHandle& handle = (*plan_.snapshot.blocks)[block];
    if (!plan_.cache->device().StillMatches(handle.device)) {
      return Reused("device", block, handle.device.slot);
    }
    if (!with_backing || !handle.backing.present()) continue;
    const auto held = workspace_->original_held.begin() + tile_of_block(block);
    const bool was_read = std::any_of(held, held + plan_.tiles_per_block(),
                                      [](uint8_t tile_held) { return tile_held != 0; });
    if (was_read && !plan_.cache->backing().StillMatches(handle.backing)) {
      return Reused("backing", block, handle.backing.slot);
    }
  }
  return absl::OkStatus();
}

absl::Status ReadTiles::CheckUnchanged() const {
  CERTKV_RETURN_IF_ERROR(CheckBlocks(/*with_backing=*/true));
  const ViewTail& tail = plan_.snapshot.tail;
  if (plan_.tail_count > 0 &&
      !tail.staging->slab.StillMatches({.slot = tail.slot, .generation = tail.generation})) {
    return MakeError(absl::StatusCode::kAborted, "BLOCK_REUSED",
                     absl::StrCat("staging slot ", tail.slot,
                                  " of the tail was given back during the read; update the view "
                                  "before sealing its tail"));
  }
  return plan_.cache->CheckAlive();
}

absl::Status ReadTiles::Explain(const absl::Status& error) const {
  const absl::Status unchanged = CheckUnchanged();
  return unchanged.ok() ? error : unchanged;
}

const uint16_t* ReadTiles::tail_keys() const {
  if (plan_.tail_count == 0) return nullptr;
  const MappedSlab& slab = plan_.snapshot.tail.staging->slab;
  return At16(slab.base(),
              slab.layout().key_offset(plan_.snapshot.tail.slot, plan_.request.layer, kv_head_));
}

const uint16_t* ReadTiles::tail_values() const {
  if (plan_.tail_count == 0) return nullptr;
  const MappedSlab& slab = plan_.snapshot.tail.staging->slab;
  return At16(slab.base(),
              slab.layout().value_offset(plan_.snapshot.tail.slot, plan_.request.layer, kv_head_));
}

}  // namespace certkv::certifier
