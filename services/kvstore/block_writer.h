// Writes blocks into slots: copies originals, quantizes them, and says whether they are what they
// were.
#ifndef CERTKV_SERVICES_KVSTORE_BLOCK_WRITER_H_
#define CERTKV_SERVICES_KVSTORE_BLOCK_WRITER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/ids.h"
#include "kernels/ops/quantize_tile.h"
#include "services/kvstore/block_planes.h"
#include "services/kvstore/cache.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/staging_area.h"

namespace certkv::kvstore {

// One block to be written. The slots are being written by the caller, or sealed where only read.
struct BlockWrite {
  BlockKey key;
  int32_t staging_slot = -1;  // -1: the originals are in the backing slot already (promotion)
  int32_t backing_slot = -1;  // in when promoted, out when sealed
  int32_t device_slot = -1;   // out
  // DigestOfChecksums of block_planes.h. In when promoted: what it must be. Out when sealed.
  uint64_t originals_digest = 0;
  bool digest_matches = true;  // out, promotions
};

// Copies each block's originals from `staging` into its backing slot first, and checks and
// quantizes that copy: the worker can still write its staging memory. `staging` null: they are
// there already. Every tile is read back and compared with its checksums. Layers and KV heads run
// in parallel on `pool` and the calling thread. Errors: InvalidArgument [NON_FINITE_KEY |
// NON_FINITE_VALUE | KEY_OUT_OF_RANGE], naming block,
//         layer, KV head, token and channel of the first bad number; DataLoss [SCAN_CHECKSUM |
//         DETAIL_CHECKSUM | ORIGINAL_CHECKSUM_MISMATCH], a tile does not read back as written, or
//         [ORIGINAL_LOST], a promoted block's originals have another digest (digest_matches says
//         which); NotFound [SESSION_NOT_FOUND], `staging` was abandoned meanwhile. The slots then
//         hold anything and must not be sealed.
// Threads: concurrent calls are safe when their slots differ. Takes no lock of the engine.
absl::Status WriteBlocks(const Cache& cache, const StagingArea* staging,
                         absl::Span<BlockWrite> blocks, ComputePool* pool);

// NotFound [SESSION_NOT_FOUND], of a seal whose session has ended.
absl::Status SealAbandoned();
// DataLoss [ORIGINAL_LOST], naming the block.
absl::Status OriginalLost(const BlockKey& key);

// Where the records of a tile go.
struct TileTarget {
  uint8_t* scan;
  uint8_t* detail;
};
TileTarget SlotTarget(const Cache& cache, int32_t device_slot, const Plane& plane, int32_t tile);

// Copies a plane's originals into the block's backing slot, from a slot of memory at `base` that is
// laid out as `from`, a staging slab.
void CopyOriginals(const Cache& cache, const uint8_t* base, const SlabLayout& from, int32_t slot,
                   const BlockWrite& block, const Plane& plane);
// A tile of the block, with the originals of its backing slot.
QuantizeTileArgs TileArgs(const Cache& cache, const BlockWrite& block, const Plane& plane,
                          int32_t tile, const TileTarget& target);
// Says of an error which tile it is of.
absl::Status NameTile(const absl::Status& status, const BlockWrite& block, const Plane& plane,
                      int32_t tile);
// Reads back what was written as that tile; `checksum`, of the originals, out. Errors: DataLoss, as
// WriteBlocks.
absl::Status VerifyWritten(const Cache& cache, const BlockWrite& block, const Plane& plane,
                           int32_t tile, const TileTarget& target, uint64_t* checksum);

// Quantizes one tile from the block's backing slot, and reads back what was written; `checksum`,
// of the originals, out. Errors: as WriteBlocks.
absl::Status WriteTile(const Cache& cache, const BlockWrite& block, const Plane& plane,
                       int32_t tile, const TileTarget& target, uint64_t* checksum);

// Makes the planes of a sealed block again from its originals and rewrites the records that are
// damaged, in place: equal originals give equal codes, so a byte that was right keeps its value
// under a reader's eyes, and handles stay. A record that is intact stays as it is, also where its
// bounds were rounded otherwise than here. Returns how many records were rewritten, or 1 where only
// a GPU's copy differed.
// Errors: DataLoss [ORIGINAL_LOST], the originals do not have `block.originals_digest`; nothing was
//         written then.
// Threads: the block is held, and no other call writes its slots meanwhile.
absl::StatusOr<int64_t> RebuildPlanes(const Cache& cache, const BlockWrite& block,
                                      ComputePool* pool);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BLOCK_WRITER_H_
