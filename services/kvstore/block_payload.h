// A block as one run of bytes, for the disk and for other stores.
//
//   planes     by layer, KV head, tile: scan record, detail record (absent when the block is not in
//              the device tier)
//   originals  by layer, KV head: keys [block_tokens][d], values [block_tokens][d_v]
#ifndef CERTKV_SERVICES_KVSTORE_BLOCK_PAYLOAD_H_
#define CERTKV_SERVICES_KVSTORE_BLOCK_PAYLOAD_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "services/kvstore/block_writer.h"
#include "services/kvstore/cache.h"

namespace certkv::kvstore {

int64_t PlaneBytesOf(const Cache& cache);
int64_t OriginalBytesOf(const Cache& cache);

// Copies a sealed block as a reader does. False when a slot was given to another block meanwhile;
// `payload` then holds anything. Its size says whether the planes go along.
bool CopyOut(const Cache& cache, const SlotRef& device, const SlotRef& backing,
             absl::Span<uint8_t> payload);

// Writes a block into slots that are being written: originals as they are, planes as they are when
// they have the size of this release's and every tile is good and of these originals, made anew
// otherwise.
// Errors: DataLoss [SPILL_DAMAGED], the payload is smaller than originals, or its originals' digest
//         is not block.originals_digest; the slots must not be sealed then.
absl::Status CopyIn(const Cache& cache, const BlockWrite& block, absl::Span<const uint8_t> payload);

// Where the bytes of a payload lie in the block's slots, in its order. Nothing is copied.
std::vector<absl::Span<uint8_t>> PayloadSpans(const Cache& cache, const BlockWrite& block,
                                              bool with_planes, bool with_originals);

// Is what lies in the device slot a whole encoding of the originals of block.originals_digest, by
// all its checksums, made for block.key? And in the backing slot those originals? Nobody else
// writes the slots.
bool ArePlanesOf(const Cache& cache, const BlockWrite& block);
bool AreOriginalsOf(const Cache& cache, const BlockWrite& block);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BLOCK_PAYLOAD_H_
