// BlockIndex: what a cache knows about its sealed blocks, by key, by chain and by last use.
#ifndef CERTKV_SERVICES_KVSTORE_BLOCK_INDEX_H_
#define CERTKV_SERVICES_KVSTORE_BLOCK_INDEX_H_

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "kernels/core/ids.h"
#include "services/kvstore/lru_list.h"

namespace certkv::kvstore {

// What decides which block leaves the store next.
enum class EvictionPolicy : uint8_t {
  kReuse = 1,  // a block that lookups have found gets further rounds before it goes
  kLru = 2,    // the least recently used one
};

// One sealed block. Times are milliseconds since the Unix epoch.
struct BlockRecord {
  BlockKey key;
  SlotRef device;   // not present: the block is in the backing tier only
  SlotRef backing;  // always present while the block lives
  int64_t seal_time_ms = 0;
  int64_t last_use_time_ms = 0;
  uint64_t originals_digest = 0;  // over the checksums of its original tiles, see block_writer.h
  LruLinks device_links;
  LruLinks backing_links;
  BlockId parent = BlockId::kNone;
  BlockId first_child = BlockId::kNone;
  BlockId next_sibling = BlockId::kNone;
  BlockId previous_sibling = BlockId::kNone;
  int32_t hold_count = 0;  // leases that cover the block, and calls at work on it
  uint8_t reuse_count =
      0;  // lookups that found it, up to kReuseCountMax; ages, see OldestEvictable
  bool pinned : 1 = false;
  bool damaged : 1 = false;  // its originals are not what was sealed; lookups do not find it
  bool promoting : 1 =
      false;  // a call is making its device tier planes, for the first time or again
  bool live : 1 = false;
};
// With 5 bytes for each place of the hash set (7/8 full at most, half full at least after growth)
// and 4 bytes for each lease that covers it, a block costs under 145 bytes beside its slots.
static_assert(sizeof(BlockRecord) <= 128);

// Invariants:
//  1. A live block is in the table under its key; there is one live block per key.
//  2. The parent of a live block is live. The children lists are the inverse of `parent`.
//  3. A block is in the backing order exactly while it is live, not held and not pinned; in the
//     device order exactly while it also has a device slot.
//  4. evictable_leaf_count_ is the number of blocks in the backing order that have no children.
//  5. A held block, a pinned block and a block with children are never erased (pins go first).
//
// Threads: the caller serializes.
class BlockIndex {
 public:
  static constexpr uint8_t kReuseCountMax = 3;

  // At most `block_limit` blocks.
  explicit BlockIndex(int32_t block_limit, EvictionPolicy policy = EvictionPolicy::kReuse);
  BlockIndex(const BlockIndex&) = delete;
  BlockIndex& operator=(const BlockIndex&) = delete;

  int32_t size() const { return static_cast<int32_t>(table_.size()); }
  int32_t held_count() const { return held_count_; }
  int32_t pinned_count() const { return pinned_count_; }

  BlockId Find(const BlockKey& key) const;
  const BlockRecord& Get(BlockId id) const { return records_[static_cast<int32_t>(id)]; }
  // The key of the block's parent, zeros for the first of a chain.
  BlockKey ParentKeyOf(BlockId id) const;
  // The first live block at or after `id`, or kNone. Ids are stable, so walking them sees every
  // block that lives throughout, once.
  BlockId FirstLiveFrom(int32_t id) const;
  // Adds the block and all that depend on it to `blocks`, but for those that are in it already,
  // whose dependents are taken to be there too.
  void AddSubtree(BlockId id, absl::flat_hash_set<BlockId>* blocks) const;

  // Adds a sealed block, held once by the caller. `parent` is live or kNone.
  BlockId Insert(const BlockRecord& block, BlockId parent);
  // Forgets a block that isn't held and has no children.
  void Erase(BlockId id);

  // Keeps a block from demotion and eviction until the same number of Unhold calls; the last one
  // makes it the most recently used.
  void Hold(BlockId id);
  void Unhold(BlockId id);
  void SetPinned(BlockId id, bool pinned);
  void SetDevice(BlockId id, const SlotRef& device);  // not present: demoted
  void SetOriginals(BlockId id, const SlotRef& backing, uint64_t originals_digest);
  void SetDamaged(BlockId id, bool damaged) { MutableGet(id).damaged = damaged; }
  void SetPromoting(BlockId id, bool promoting) { MutableGet(id).promoting = promoting; }
  void SetLastUse(BlockId id, int64_t time_ms) { MutableGet(id).last_use_time_ms = time_ms; }
  void NoteHit(BlockId id) {
    uint8_t& count = MutableGet(id).reuse_count;
    if (count < kReuseCountMax) ++count;
  }

  // The block that should leave the device tier next, or kNone.
  BlockId OldestDemotable() const { return device_order_.oldest(); }
  // The block that should leave the store next, or kNone. A chain goes from its end: a block with
  // children that has become the oldest is moved to the recent end instead, so that it outlives
  // them. With kReuse, so is a leaf that lookups have found, and its reuse_count is halved: 3
  // becomes 1 becomes 0. Each block is moved at most three times per hit of it and once per round
  // of the list: O(1) amortized.
  BlockId OldestEvictable();
  // A walk over the blocks that are neither held nor pinned, the least recently used first.
  BlockId OldestInOrder() const { return backing_order_.oldest(); }
  BlockId NewerInOrder(BlockId id) const { return backing_order_.NewerThan(id); }
  // How many blocks are neither held nor pinned: no more can be evicted in a row.
  int32_t unheld_count() const { return unheld_count_; }

  // Walks everything and aborts when an invariant does not hold. For tests; O(n).
  void CheckInvariants() const;

 private:
  struct KeyHash {
    using is_transparent = void;
    const std::vector<BlockRecord>* records;
    size_t operator()(const BlockKey& key) const { return absl::Hash<BlockKey>()(key); }
    size_t operator()(BlockId id) const { return (*this)((*records)[static_cast<int>(id)].key); }
  };
  struct KeyEqual {
    using is_transparent = void;
    const std::vector<BlockRecord>* records;
    bool operator()(BlockId a, BlockId b) const { return a == b; }
    bool operator()(BlockId a, const BlockKey& b) const {
      return (*records)[static_cast<int>(a)].key == b;
    }
    bool operator()(const BlockKey& a, BlockId b) const { return (*this)(b, a); }
  };
  using Order = LruList<BlockRecord, std::vector<BlockRecord>>;

  BlockRecord& MutableGet(BlockId id) { return records_[static_cast<int32_t>(id)]; }
  static bool BelongsInOrder(const BlockRecord& record) {
    return record.live && record.hold_count == 0 && !record.pinned;
  }
  static bool IsLeaf(const BlockRecord& record) { return record.first_child == BlockId::kNone; }
  // Brings the orders and counts in line with the record after it changed.
  void UpdateOrders(BlockId id);
  void LinkToParent(BlockId id, BlockId parent);
  void UnlinkFromParent(BlockId id);

  const int32_t block_limit_;
  const EvictionPolicy policy_;
  std::vector<BlockRecord> records_;
  std::vector<BlockId> free_ids_;
  absl::flat_hash_set<BlockId, KeyHash, KeyEqual> table_;
  Order device_order_;
  Order backing_order_;
  int32_t evictable_leaf_count_ = 0;
  int32_t unheld_count_ = 0;
  int32_t held_count_ = 0;
  int32_t pinned_count_ = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BLOCK_INDEX_H_
