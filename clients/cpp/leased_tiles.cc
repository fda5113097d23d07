#include "clients/cpp/leased_tiles.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/block_key.h"
#include "kernels/core/slab_layout.h"
#include "kernels/core/status.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::client {

absl::Status CheckGenerations(const Worker& worker, const BlockHandle& block, int64_t index,
                              bool after) {
  const auto matches = after ? GenerationStillMatches : GenerationMatches;
  if (!block.device.present() || !block.backing.present() ||
      !matches(worker.device_base(), worker.device_layout(), block.device) ||
      !matches(worker.backing_base(), worker.backing_layout(), block.backing)) {
    return MakeError(absl::StatusCode::kAborted, "BLOCK_REUSED",
                     absl::StrCat("block ", index, " (", ToHex(block.key.view(), 8),
                                  "...) was reused since its lookup; look the blocks up again"));
  }
  return absl::OkStatus();
}

absl::Status VerifyLeasedTile(const Worker& worker, const BlockKey& key, const TilePlace& place,
                              const AttendTile& tile) {
  absl::Status status = VerifyTile(worker.device_layout().tile_layout(place.layer), tile.scan,
                                   tile.detail, tile.original_keys, tile.original_values);
  TileHeader header;
  std::memcpy(&header, tile.scan, sizeof(header));
  if (status.ok() &&
      header.identity_tag != TileIdentityTag(key, place.layer, place.kv_head, place.tile)) {
    status = MakeError(absl::StatusCode::kDataLoss, "TILE_IDENTITY_MISMATCH",
                       "the slot holds another block's tile");
  }
  if (status.ok()) return status;
  return WithContext(status,
                     absl::StrCat("block ", place.block, " (", ToHex(key.view(), 8), "...), layer ",
                                  place.layer, ", KV head ", place.kv_head, ", tile ", place.tile));
}

}  // namespace certkv::client
