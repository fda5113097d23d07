// EvictionOrder: which idle block leaves which tier next.
//
// What a block is worth is counted in rounds: a block whose turn comes while it has credit loses
// half of it and goes to the recent end instead: 3 becomes 1 becomes 0. Lookups that find a block
// give it credit, one each, up to 3. A block with children is passed over, so a chain goes from its
// end and parents outlive children. Each block is moved at most three times per hit
// of it and once per round of its list: O(1) amortized, no clock, no heap.
//
// Each tenant has its own lists, one for each priority, because a call may take from some tenants
// only. Of the tenants that may lose a block it is the turn of the one whose oldest block is the
// least recently used; within it the lowest priority goes first.
#ifndef CERTKV_SERVICES_KVSTORE_EVICTION_ORDER_H_
#define CERTKV_SERVICES_KVSTORE_EVICTION_ORDER_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "services/kvstore/block_record.h"

namespace certkv::kvstore {

// What decides which block leaves the store next.
enum class EvictionPolicy : uint8_t {
  kReuse = 1,  // by rounds, as above
  kLru = 2,    // the least recently used one; credit and priority count for nothing
};

// Invariants:
//  1. A block is in its tenant's backing list exactly while it is idle; in the device list exactly
//     while it also has a device slot.
//  2. The counts of each list are those of its blocks, and of those without children.
// Threads: the caller serializes.
class EvictionOrder {
 public:
  static constexpr uint8_t kCreditMax = 3;

  using MayGo = absl::FunctionRef<bool(TenantIndex)>;

  // `records` outlives the order.
  EvictionOrder(std::vector<BlockRecord>* records, EvictionPolicy policy);

  // Brings the lists in line with the record after it changed. A block that enters is the most
  // recent one.
  void Update(BlockId id);
  // `change` is +1 when the block lost its last child, -1 when it got its first.
  void NoteLeaf(BlockId id, int32_t change);
  void SetPriority(BlockId id, BlockPriority priority);

  // The block that should leave the store next, of tenants that may lose one; or kNone.
  BlockId NextEvictable(MayGo may_go);
  // The block that should leave the device tier next; or kNone.
  BlockId NextDemotable(MayGo may_go) const;
  // About the next `count` blocks that leave the store: each after its children. Changes nothing.
  std::vector<BlockId> Preview(int32_t count, MayGo may_go) const;

  // Idle blocks of a tenant: no more can leave in a row.
  int32_t idle_count(TenantIndex tenant) const;
  int32_t idle_device_count(TenantIndex tenant) const;

  // Walks everything and aborts when an invariant does not hold. For tests; O(n).
  void CheckInvariants() const;

 private:
  using List = LruList<BlockRecord, std::vector<BlockRecord>>;
  struct Level {
    explicit Level(std::vector<BlockRecord>* records)
        : backing(records, &BlockRecord::backing_links),
          device(records, &BlockRecord::device_links) {}
    List backing;
    List device;
    int32_t idle_count = 0;
    int32_t leaf_count = 0;  // of `backing`
    int32_t device_count = 0;
  };
  struct Levels {
    explicit Levels(std::vector<BlockRecord>* records)
        : by_priority{Level(records), Level(records), Level(records)} {}
    std::array<Level, kBlockPriorities> by_priority;
  };

  BlockRecord& Get(BlockId id) const { return (*records_)[static_cast<size_t>(id)]; }
  Level& LevelOf(const BlockRecord& record);
  void Remove(BlockId id);
  // Adds to `blocks` those of one priority that go next, with credit or without.
  void PreviewLevel(int32_t priority, bool with_credit, int32_t count, MayGo may_go,
                    std::vector<BlockId>* blocks) const;

  std::vector<BlockRecord>* const records_;
  const EvictionPolicy policy_;
  int64_t stamp_ = 0;
  std::vector<std::unique_ptr<Levels>> tenants_;  // by TenantIndex; null: no blocks yet
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_EVICTION_ORDER_H_
