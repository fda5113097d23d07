// BlockRecord: what a cache knows about one sealed block.
#ifndef CERTKV_SERVICES_KVSTORE_BLOCK_RECORD_H_
#define CERTKV_SERVICES_KVSTORE_BLOCK_RECORD_H_

#include <cstdint>

#include "kernels/core/ids.h"
#include "services/kvstore/lru_list.h"

namespace certkv::kvstore {

// A tenant's place in the store's TenantTable. 0 is the tenant without a name.
enum class TenantIndex : uint16_t {};

// Of one tenant's blocks, those of a lower priority leave first, however lately they were used.
// Between tenants it decides nothing.
enum class BlockPriority : uint8_t { kLow = 0, kNormal = 1, kHigh = 2 };
inline constexpr int kBlockPriorities = 3;

// Times are milliseconds since the Unix epoch.
struct BlockRecord {
  BlockKey key;
  SlotRef device;   // not present: the block is in the backing tier only
  SlotRef backing;  // always present while the block lives; generation 0: originals pending
  int64_t seal_time_ms = 0;
  int64_t last_use_time_ms = 0;
  uint64_t originals_digest = 0;  // over the checksums of its original tiles, see block_writer.h
  int64_t order_stamp = 0;        // rises with each entry into the order of eviction
  LruLinks device_links;
  LruLinks backing_links;
  BlockId parent = BlockId::kNone;
  BlockId first_child = BlockId::kNone;
  BlockId next_sibling = BlockId::kNone;
  BlockId previous_sibling = BlockId::kNone;
  int32_t hold_count = 0;  // leases that cover the block, and calls at work on it
  TenantIndex tenant{};    // whose quota it counts to: who sealed it first, or brought it back
  uint8_t credit = 0;      // rounds in the order of eviction, see EvictionOrder
  uint8_t priority : 2 = static_cast<uint8_t>(BlockPriority::kNormal);
  bool pinned : 1 = false;
  bool damaged : 1 = false;    // its originals are not what was sealed; lookups do not find it
  bool pending : 1 = false;    // its originals are still on their way from another store
  bool promoting : 1 = false;  // a call is making its device tier planes, also again
  bool live : 1 = false;

  bool is_leaf() const { return first_child == BlockId::kNone; }
  // Nobody holds it, so that it may leave a tier.
  bool is_idle() const { return live && hold_count == 0 && !pinned; }
};
// With 5 bytes for each place of the hash set (7/8 full at most, half full at least after growth)
// and 4 bytes for each lease that covers it, a block costs under 155 bytes beside its slots.
static_assert(sizeof(BlockRecord) <= 136);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BLOCK_RECORD_H_
