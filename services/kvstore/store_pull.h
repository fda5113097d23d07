// Blocks between stores, as StoreEngine gives and takes them.
#ifndef CERTKV_SERVICES_KVSTORE_STORE_PULL_H_
#define CERTKV_SERVICES_KVSTORE_STORE_PULL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/core/ids.h"
#include "services/kvstore/block_writer.h"
#include "services/kvstore/cache.h"

namespace certkv::kvstore {

// Blocks of a lease, for another store.
struct SharedBlock {
  BlockKey key;
  BlockKey parent;  // zeros: first of a chain
  uint64_t originals_digest = 0;
  int64_t seal_time_ms = 0;
  BlockWrite slots;  // only read
};
struct SharedBlocks {
  std::shared_ptr<const Cache> cache;
  std::vector<SharedBlock> blocks;
};

// A chain on its way from another store. Belongs to one caller.
struct Pull {
  SessionId session{};
  TenantIndex tenant{};
  std::shared_ptr<Cache> cache;
  std::vector<BlockId> held;  // of the chain, in order
};
// A block that was written into slots of ClaimForPull, and checked: ArePlanesOf, AreOriginalsOf.
struct PulledBlock {
  BlockWrite write;
  BlockKey parent;  // zeros: first of a chain
  int64_t seal_time_ms = 0;
  bool is_pending = false;  // its originals are still to come, and then CompletePulled
};
struct PublishedBlock {
  BlockId id = BlockId::kNone;
  bool is_new = false;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_STORE_PULL_H_
