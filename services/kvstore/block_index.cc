#include "services/kvstore/block_index.h"

#include "kernels/core/check.h"

namespace certkv::kvstore {

BlockIndex::BlockIndex(int32_t block_limit, EvictionPolicy policy)
    : block_limit_(block_limit),
      table_(0, KeyHash{&records_}, KeyEqual{&records_}),
      order_(&records_, policy) {
  // Address space only; pages become resident as blocks are sealed.
  records_.reserve(block_limit);
}

BlockId BlockIndex::Find(const BlockKey& key) const {
  const auto it = table_.find(key);
  return it == table_.end() ? BlockId::kNone : *it;
}

BlockKey BlockIndex::ParentKeyOf(BlockId id) const {
  const BlockId parent = Get(id).parent;
  return parent == BlockId::kNone ? BlockKey{} : Get(parent).key;
}

BlockId BlockIndex::FirstLiveFrom(int32_t id) const {
  for (auto i = static_cast<size_t>(id); i < records_.size(); ++i) {
    if (records_[i].live) return BlockId{static_cast<int32_t>(i)};
  }
  return BlockId::kNone;
}

void BlockIndex::AddSubtree(BlockId id, absl::flat_hash_set<BlockId>* blocks) const {
  std::vector<BlockId> open = {id};
  while (!open.empty()) {
    const BlockId next = open.back();
    open.pop_back();
    if (!blocks->insert(next).second) continue;
    for (BlockId child = Get(next).first_child; child != BlockId::kNone;
         child = Get(child).next_sibling) {
      open.push_back(child);
    }
  }
}

BlockId BlockIndex::Insert(const BlockRecord& block, BlockId parent) {
  CERTKV_CHECK(Find(block.key) == BlockId::kNone, "one live block per key");
  CERTKV_CHECK(block.backing.present(), "a sealed block has its originals");
  CERTKV_CHECK(parent == BlockId::kNone || Get(parent).live, "the parent of a live block is live");
  BlockId id;
  if (!free_ids_.empty()) {
    id = free_ids_.back();
    free_ids_.pop_back();
  } else {
    CERTKV_CHECK(static_cast<int32_t>(records_.size()) < block_limit_,
                 "no more blocks than backing slots");
    id = BlockId{static_cast<int32_t>(records_.size())};
    records_.emplace_back();
  }
  BlockRecord& record = MutableGet(id);
  record = block;
  record.device_links = LruLinks{};
  record.backing_links = LruLinks{};
  record.first_child = record.next_sibling = record.previous_sibling = BlockId::kNone;
  record.hold_count = 1;
  record.live = true;
  ++held_count_;
  if (record.pinned) ++pinned_count_;
  table_.insert(id);
  LinkToParent(id, parent);
  RaisePriority(parent, BlockPriority{record.priority});
  return id;
}

void BlockIndex::Erase(BlockId id) {
  BlockRecord& record = MutableGet(id);
  CERTKV_CHECK(record.live && record.hold_count == 0, "only a live block that nobody holds goes");
  CERTKV_CHECK(record.is_leaf(), "a parent is not erased before its children");
  CERTKV_CHECK(!record.pinned, "a pinned block is not erased");
  UnlinkFromParent(id);
  table_.erase(id);
  record.live = false;
  order_.Update(id);
  record = BlockRecord{};
  free_ids_.push_back(id);
}

void BlockIndex::Hold(BlockId id) {
  BlockRecord& record = MutableGet(id);
  CERTKV_CHECK(record.live, "only live blocks are held");
  if (record.hold_count++ > 0) return;
  ++held_count_;
  order_.Update(id);
}

void BlockIndex::Unhold(BlockId id) {
  BlockRecord& record = MutableGet(id);
  CERTKV_CHECK(record.live && record.hold_count > 0, "only held blocks are let go");
  if (--record.hold_count > 0) return;
  --held_count_;
  order_.Update(id);
}

void BlockIndex::SetPinned(BlockId id, bool pinned) {
  BlockRecord& record = MutableGet(id);
  CERTKV_CHECK(record.live, "only live blocks are pinned");
  if (record.pinned == pinned) return;
  record.pinned = pinned;
  pinned_count_ += pinned ? 1 : -1;
  order_.Update(id);
}

void BlockIndex::SetDevice(BlockId id, const SlotRef& device) {
  MutableGet(id).device = device;
  order_.Update(id);
}

void BlockIndex::SetOriginals(BlockId id, const SlotRef& backing, uint64_t originals_digest) {
  CERTKV_CHECK(backing.present(), "a sealed block has its originals");
  BlockRecord& record = MutableGet(id);
  record.backing = backing;
  record.originals_digest = originals_digest;
  record.pending = false;
}

void BlockIndex::RaisePriority(BlockId id, BlockPriority priority) {
  while (id != BlockId::kNone && Get(id).priority < static_cast<uint8_t>(priority)) {
    order_.SetPriority(id, priority);
    id = Get(id).parent;
  }
}

void BlockIndex::LinkToParent(BlockId id, BlockId parent) {
  BlockRecord& record = MutableGet(id);
  record.parent = parent;
  if (parent == BlockId::kNone) return;
  BlockRecord& parent_record = MutableGet(parent);
  if (parent_record.is_leaf()) order_.NoteLeaf(parent, -1);
  record.next_sibling = parent_record.first_child;
  if (record.next_sibling != BlockId::kNone) MutableGet(record.next_sibling).previous_sibling = id;
  parent_record.first_child = id;
}

void BlockIndex::UnlinkFromParent(BlockId id) {
  const BlockRecord& record = Get(id);
  if (record.next_sibling != BlockId::kNone) {
    MutableGet(record.next_sibling).previous_sibling = record.previous_sibling;
  }
  if (record.previous_sibling != BlockId::kNone) {
    MutableGet(record.previous_sibling).next_sibling = record.next_sibling;
    return;
  }
  if (record.parent == BlockId::kNone) return;
  BlockRecord& parent = MutableGet(record.parent);
  parent.first_child = record.next_sibling;
  if (parent.is_leaf()) order_.NoteLeaf(record.parent, +1);
}

void BlockIndex::CheckInvariants() const {
  int32_t live = 0;
  int32_t held = 0;
  int32_t pinned = 0;
  for (size_t i = 0; i < records_.size(); ++i) {
    const BlockRecord& record = records_[i];
    const BlockId id{static_cast<int32_t>(i)};
    if (!record.live) continue;
    ++live;
    held += record.hold_count > 0 ? 1 : 0;
    pinned += record.pinned ? 1 : 0;
    CERTKV_CHECK(Find(record.key) == id, "invariant 1");
    CERTKV_CHECK(record.parent == BlockId::kNone || Get(record.parent).live, "invariant 2");
    for (BlockId child = record.first_child; child != BlockId::kNone;
         child = Get(child).next_sibling) {
      CERTKV_CHECK(Get(child).live && Get(child).parent == id, "invariant 2, inverse");
      CERTKV_CHECK(Get(child).priority <= record.priority, "invariant 5");
    }
  }
  CERTKV_CHECK(live == size() && held == held_count_ && pinned == pinned_count_, "counts");
  order_.CheckInvariants();
}

}  // namespace certkv::kvstore
