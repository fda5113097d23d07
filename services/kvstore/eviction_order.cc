#include "services/kvstore/eviction_order.h"

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "kernels/core/check.h"

namespace certkv::kvstore {

EvictionOrder::EvictionOrder(std::vector<BlockRecord>* records, EvictionPolicy policy)
    : records_(records), policy_(policy) {}

EvictionOrder::Level& EvictionOrder::LevelOf(const BlockRecord& record) {
  const auto tenant = static_cast<size_t>(record.tenant);
  if (tenants_.size() <= tenant) tenants_.resize(tenant + 1);
  if (tenants_[tenant] == nullptr) tenants_[tenant] = std::make_unique<Levels>(records_);
  const bool by_priority = policy_ == EvictionPolicy::kReuse;
  return tenants_[tenant]->by_priority[by_priority ? record.priority : 0];
}

void EvictionOrder::Update(BlockId id) {
  BlockRecord& record = Get(id);
  const bool in_backing = record.is_idle();
  const bool in_device = in_backing && record.device.present();
  if (in_backing == record.backing_links.linked() && in_device == record.device_links.linked()) {
    return;
  }
  Level& level = LevelOf(record);
  if (in_backing != record.backing_links.linked()) {
    const int32_t change = in_backing ? 1 : -1;
    if (in_backing) record.order_stamp = ++stamp_;
    in_backing ? level.backing.Add(id) : level.backing.Remove(id);
    level.idle_count += change;
    if (record.is_leaf()) level.leaf_count += change;
  }
  if (in_device != record.device_links.linked()) {
    in_device ? level.device.Add(id) : level.device.Remove(id);
    level.device_count += in_device ? 1 : -1;
  }
}

void EvictionOrder::NoteLeaf(BlockId id, int32_t change) {
  const BlockRecord& record = Get(id);
  if (record.backing_links.linked()) LevelOf(record).leaf_count += change;
}

void EvictionOrder::Remove(BlockId id) {
  BlockRecord& record = Get(id);
  Level& level = LevelOf(record);
  if (record.backing_links.linked()) {
    level.backing.Remove(id);
    --level.idle_count;
    if (record.is_leaf()) --level.leaf_count;
  }
  if (record.device_links.linked()) {
    level.device.Remove(id);
    --level.device_count;
  }
}

void EvictionOrder::SetPriority(BlockId id, BlockPriority priority) {
  Remove(id);
  Get(id).priority = static_cast<uint8_t>(priority) & 3;
  Update(id);
}

BlockId EvictionOrder::NextEvictable(MayGo may_go) {
  // Ends: the level that is chosen has a leaf, and each step moves one other block of it behind
  // that leaf or halves a credit that nothing raises meanwhile.
  while (true) {
    Level* chosen = nullptr;
    int64_t chosen_stamp = std::numeric_limits<int64_t>::max();
    for (size_t i = 0; i < tenants_.size(); ++i) {
      if (tenants_[i] == nullptr || !may_go(TenantIndex{static_cast<uint16_t>(i)})) continue;
      Level* lowest = nullptr;
      int64_t oldest = std::numeric_limits<int64_t>::max();
      for (Level& level : tenants_[i]->by_priority) {
        if (level.leaf_count == 0) continue;
        if (lowest == nullptr) lowest = &level;
        oldest = std::min(oldest, Get(level.backing.oldest()).order_stamp);
      }
      if (lowest == nullptr || oldest >= chosen_stamp) continue;
      chosen = lowest;
      chosen_stamp = oldest;
    }
    if (chosen == nullptr) return BlockId::kNone;
    const BlockId id = chosen->backing.oldest();
    BlockRecord& record = Get(id);
    if (record.is_leaf()) {
      if (record.credit == 0 || policy_ == EvictionPolicy::kLru) return id;
      record.credit /= 2;
    }
    chosen->backing.Remove(id);
    chosen->backing.Add(id);
    record.order_stamp = ++stamp_;
  }
}

BlockId EvictionOrder::NextDemotable(MayGo may_go) const {
  BlockId chosen = BlockId::kNone;
  int64_t chosen_stamp = std::numeric_limits<int64_t>::max();
  for (size_t i = 0; i < tenants_.size(); ++i) {
    if (tenants_[i] == nullptr || !may_go(TenantIndex{static_cast<uint16_t>(i)})) continue;
    BlockId lowest = BlockId::kNone;
    int64_t oldest = std::numeric_limits<int64_t>::max();
    for (const Level& level : tenants_[i]->by_priority) {
      if (level.device.empty()) continue;
      if (lowest == BlockId::kNone) lowest = level.device.oldest();
      oldest = std::min(oldest, Get(level.device.oldest()).order_stamp);
    }
    if (lowest == BlockId::kNone || oldest >= chosen_stamp) continue;
    chosen = lowest;
    chosen_stamp = oldest;
  }
  return chosen;
}

std::vector<BlockId> EvictionOrder::Preview(int32_t count, MayGo may_go) const {
  std::vector<BlockId> blocks;
  for (int32_t priority = 0; priority < kBlockPriorities; ++priority) {
    for (const bool with_credit : {false, true}) {
      PreviewLevel(priority, with_credit, count, may_go, &blocks);
    }
  }
  return blocks;
}

void EvictionOrder::PreviewLevel(int32_t priority, bool with_credit, int32_t count, MayGo may_go,
                                 std::vector<BlockId>* blocks) const {
  absl::flat_hash_set<BlockId> going(blocks->begin(), blocks->end());
  std::vector<BlockId> cursors(tenants_.size(), BlockId::kNone);
  for (size_t i = 0; i < tenants_.size(); ++i) {
    if (tenants_[i] == nullptr || !may_go(TenantIndex{static_cast<uint16_t>(i)})) continue;
    cursors[i] = tenants_[i]->by_priority[priority].backing.oldest();
  }
  // A few more than `count` are looked at, because a parent that is older than its children waits
  // for them.
  int64_t steps = int64_t{4} * count + 64;
  for (; steps > 0 && static_cast<int32_t>(blocks->size()) < count; --steps) {
    size_t oldest = cursors.size();
    for (size_t i = 0; i < cursors.size(); ++i) {
      if (cursors[i] == BlockId::kNone) continue;
      const bool is_older = oldest == cursors.size() ||
                            Get(cursors[i]).order_stamp < Get(cursors[oldest]).order_stamp;
      if (is_older) oldest = i;
    }
    if (oldest == cursors.size()) return;
    const BlockId id = cursors[oldest];
    cursors[oldest] = tenants_[oldest]->by_priority[priority].backing.NewerThan(id);
    const BlockRecord& record = Get(id);
    const bool counts_credit = policy_ == EvictionPolicy::kReuse;
    bool goes = !going.contains(id) && (with_credit || !counts_credit || record.credit == 0);
    for (BlockId child = record.first_child; child != BlockId::kNone && goes;
         child = Get(child).next_sibling) {
      goes = going.contains(child);
    }
    if (!goes) continue;
    going.insert(id);
    blocks->push_back(id);
  }
}

int32_t EvictionOrder::idle_count(TenantIndex tenant) const {
  const auto index = static_cast<size_t>(tenant);
  if (index >= tenants_.size() || tenants_[index] == nullptr) return 0;
  int32_t count = 0;
  for (const Level& level : tenants_[index]->by_priority) count += level.idle_count;
  return count;
}

int32_t EvictionOrder::idle_device_count(TenantIndex tenant) const {
  const auto index = static_cast<size_t>(tenant);
  if (index >= tenants_.size() || tenants_[index] == nullptr) return 0;
  int32_t count = 0;
  for (const Level& level : tenants_[index]->by_priority) count += level.device_count;
  return count;
}

void EvictionOrder::CheckInvariants() const {
  int32_t idle = 0;
  int32_t leaves = 0;
  int32_t in_device = 0;
  for (const BlockRecord& record : *records_) {
    CERTKV_CHECK(record.backing_links.linked() == record.is_idle(), "invariant 1, backing");
    CERTKV_CHECK(record.device_links.linked() == (record.is_idle() && record.device.present()),
                 "invariant 1, device");
    if (!record.is_idle()) continue;
    ++idle;
    leaves += record.is_leaf() ? 1 : 0;
    in_device += record.device.present() ? 1 : 0;
  }
  for (const auto& tenant : tenants_) {
    if (tenant == nullptr) continue;
    for (const Level& level : tenant->by_priority) {
      int32_t listed = 0;
      int32_t listed_leaves = 0;
      for (BlockId id = level.backing.oldest(); id != BlockId::kNone;
           id = level.backing.NewerThan(id)) {
        ++listed;
        listed_leaves += Get(id).is_leaf() ? 1 : 0;
      }
      CERTKV_CHECK(listed == level.idle_count && listed_leaves == level.leaf_count, "invariant 2");
      idle -= level.idle_count;
      leaves -= level.leaf_count;
      in_device -= level.device_count;
    }
  }
  CERTKV_CHECK(idle == 0 && leaves == 0 && in_device == 0, "invariant 2, in all");
}

}  // namespace certkv::kvstore
