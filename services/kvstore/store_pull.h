// Blocks between stores, as StoreEngine gives and takes them.
#ifndef CERTKV_SERVICES_KVSTORE_STORE_PULL_H_
#define CERTKV_SERVICES_KVSTORE_STORE_PULL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
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
  std::string tenant_name;
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

// When blocks become visible.
enum class PullOrder : uint8_t {
  kWhole,           // once planes and originals are there
  kOriginalsLater,  // once planes are there; originals follow, and reads that need them meanwhile
                    // get errors
  kOriginalsOnly,   // once originals are there and planes were made of them
};

struct PullRequest {
  SessionId session{};
  std::string peer;            // one of config.peers
  bool is_member = false;      // it is not, but a node of the cluster
  std::vector<BlockKey> keys;  // of a chain, from its beginning or after blocks that are here
  PullOrder order = PullOrder::kWhole;
  std::function<bool()> is_cancelled = nullptr;  // nobody waits; not called after the answer
};

struct PullResult {
  int32_t pulled_count = 0;  // blocks that were not here before
  int64_t pulled_bytes = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_STORE_PULL_H_
