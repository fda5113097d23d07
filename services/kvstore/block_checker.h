// Checks whether sealed blocks still are what was sealed.
#ifndef CERTKV_SERVICES_KVSTORE_BLOCK_CHECKER_H_
#define CERTKV_SERVICES_KVSTORE_BLOCK_CHECKER_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/core/ids.h"
#include "services/kvstore/cache.h"
#include "services/kvstore/compute_pool.h"

namespace certkv::kvstore {

struct BlockCheck {
  BlockKey key;
  SlotRef device;  // not present: the planes are not checked
  SlotRef backing;
  uint64_t originals_digest = 0;
  // For those who pass it on; not looked at.
  BlockKey parent{};
  int64_t seal_time_ms = 0;
  TenantIndex tenant{};
  // Out. `moved`: a slot went to another block meanwhile, and the rest says nothing.
  bool moved = false;
  bool planes_ok = true;
  bool originals_ok = true;
};

// Reads every byte of the blocks as a reader in another process would, through the store's
// read-only maps and with their generations checked, so that the blocks need not be held. Planes
// are good when every tile has its format, identity tag and checksums, and the checksum of the
// originals that are there, and a GPU's copy of them is equal; originals are good when their digest
// is the one given. Threads: on `pool` and the calling thread; null means on the calling thread
// alone.
void CheckBlocks(const Cache& cache, absl::Span<BlockCheck> blocks, ComputePool* pool);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BLOCK_CHECKER_H_
