// BlockIndex: what a cache knows about its sealed blocks, by key and by chain, and in what order
// they go.
#ifndef CERTKV_SERVICES_KVSTORE_BLOCK_INDEX_H_
#define CERTKV_SERVICES_KVSTORE_BLOCK_INDEX_H_

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "kernels/core/ids.h"
#include "services/kvstore/block_record.h"
#include "services/kvstore/eviction_order.h"

namespace certkv::kvstore {

// Invariants:
//  1. A live block is in the table under its key; there is one live block per key.
//  2. The parent of a live block is live. The children lists are the inverse of `parent`.
//  3. The order of eviction holds the idle blocks (EvictionOrder's invariants).
//  4. A held block, a pinned block and a block with children are never erased (pins go first).
//  5. A block's priority is at least its children's.
//
// Threads: the caller serializes.
class BlockIndex {
 public:
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
    uint8_t& credit = MutableGet(id).credit;
    if (credit < EvictionOrder::kCreditMax) ++credit;
  }
  // Raises the block's priority, and that of the blocks before it, to at least `priority`.
  void RaisePriority(BlockId id, BlockPriority priority);

  EvictionOrder& order() { return order_; }
  const EvictionOrder& order() const { return order_; }

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

  BlockRecord& MutableGet(BlockId id) { return records_[static_cast<int32_t>(id)]; }
  void LinkToParent(BlockId id, BlockId parent);
  void UnlinkFromParent(BlockId id);

  const int32_t block_limit_;
  std::vector<BlockRecord> records_;
  std::vector<BlockId> free_ids_;
  absl::flat_hash_set<BlockId, KeyHash, KeyEqual> table_;
  EvictionOrder order_;
  int32_t held_count_ = 0;
  int32_t pinned_count_ = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BLOCK_INDEX_H_
