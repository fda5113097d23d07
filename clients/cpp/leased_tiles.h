// What reads of leased blocks check: that slots still hold the blocks, and that tiles are theirs.
#ifndef CERTKV_CLIENTS_CPP_LEASED_TILES_H_
#define CERTKV_CLIENTS_CPP_LEASED_TILES_H_

#include <cstdint>

#include "absl/status/status.h"
#include "clients/cpp/worker.h"
#include "kernels/core/ids.h"
#include "kernels/ops/attend.h"

namespace certkv::client {

// Does block `index` of a sequence still lie in both of its slots? Before a read, or (after =
// true) all the time since.
// Errors: Aborted [BLOCK_REUSED].
absl::Status CheckGenerations(const Worker& worker, const BlockHandle& block, int64_t index,
                              bool after);

// Which tile of a block.
struct TilePlace {
  int64_t block;  // in its sequence, for errors
  int32_t layer;
  int32_t kv_head;
  int32_t tile;
};

// Is the tile the one that was sealed under `key`, in both representations? `tile` may point at
// copies.
// Errors: DataLoss [TILE_IDENTITY_MISMATCH], the slot holds another block's tile; as VerifyTile.
absl::Status VerifyLeasedTile(const Worker& worker, const BlockKey& key, const TilePlace& place,
                              const AttendTile& tile);

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_LEASED_TILES_H_
