#include "services/kvstore/block_index.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

class BlockIndexTest : public testing::Test {
 protected:
  // Adds block `index` of `chain`, in both tiers, and lets it go.
  BlockId Add(int32_t chain, int32_t index) {
    const BlockId id = AddHeld(chain, index);
    index_.Unhold(id);
    return id;
  }
  BlockId AddHeld(int32_t chain, int32_t index) {
    BlockRecord record;
    record.key = ChainKey(chain, index);
    record.backing = SlotRef{next_slot_, 2};
    record.device = SlotRef{next_slot_++, 2};
    return index_.Insert(record, index_.Find(ChainParent(chain, index)));
  }

  static bool All(TenantIndex /*tenant*/) { return true; }
  BlockId Evictable() { return index_.order().NextEvictable(All); }
  BlockId Demotable() { return index_.order().NextDemotable(All); }

  int32_t next_slot_ = 0;
  BlockIndex index_{64};
};

TEST_F(BlockIndexTest, FindsWhatWasInsertedUntilItIsErased) {
  EXPECT_EQ(index_.Find(ChainKey(1, 0)), BlockId::kNone);
  const BlockId id = Add(1, 0);
  EXPECT_EQ(index_.Find(ChainKey(1, 0)), id);
  EXPECT_EQ(index_.ParentKeyOf(id), BlockKey{});
  index_.Erase(id);
  EXPECT_EQ(index_.Find(ChainKey(1, 0)), BlockId::kNone);
  EXPECT_EQ(index_.size(), 0);
  index_.CheckInvariants();
}

TEST_F(BlockIndexTest, CostsAtMost200BytesPerBlock) {
  EXPECT_LE(sizeof(BlockRecord), 136u);
  // 4 bytes and a control byte per place of the set, half full at worst; 4 per lease of a block.
  EXPECT_LE(sizeof(BlockRecord) + 2 * (sizeof(BlockId) + 1) + sizeof(BlockId), 200u);
}

TEST_F(BlockIndexTest, OldestIsTheLeastRecentlyLetGo) {
  const BlockId first = Add(1, 0);
  const BlockId second = Add(2, 0);
  EXPECT_EQ(Demotable(), first);
  EXPECT_EQ(Evictable(), first);
  index_.Hold(first);
  EXPECT_EQ(Evictable(), second);
  index_.Unhold(first);
  EXPECT_EQ(Demotable(), second);
  EXPECT_EQ(Evictable(), second);
}

TEST_F(BlockIndexTest, HeldAndPinnedBlocksAreInNoOrder) {
  const BlockId id = AddHeld(1, 0);
  EXPECT_EQ(Evictable(), BlockId::kNone);
  EXPECT_EQ(Demotable(), BlockId::kNone);
  index_.SetPinned(id, true);
  index_.Unhold(id);
  EXPECT_EQ(Evictable(), BlockId::kNone);
  EXPECT_EQ(index_.pinned_count(), 1);
  index_.SetPinned(id, false);
  EXPECT_EQ(Evictable(), id);
}

TEST_F(BlockIndexTest, DemotedBlockIsEvictableButNotDemotable) {
  const BlockId id = Add(1, 0);
  index_.SetDevice(id, SlotRef{});
  EXPECT_EQ(Demotable(), BlockId::kNone);
  EXPECT_EQ(Evictable(), id);
  index_.CheckInvariants();
}

TEST_F(BlockIndexTest, ChainIsEvictableFromItsEndOnlyHoweverOldItsParentsAre) {
  // The worst order: parents were let go before their children.
  std::vector<BlockId> chain;
  for (int i = 0; i < 6; ++i) chain.push_back(Add(1, i));
  for (int i = 5; i >= 0; --i) {
    ASSERT_EQ(Evictable(), chain[i]);
    index_.Erase(chain[i]);
    index_.CheckInvariants();
  }
  EXPECT_EQ(Evictable(), BlockId::kNone);
}

TEST_F(BlockIndexTest, ParentOfAHeldChildIsNotEvictable) {
  Add(1, 0);
  Add(1, 1);
  const BlockId leaf = AddHeld(1, 2);
  EXPECT_EQ(index_.order().idle_count(TenantIndex{}), 2);
  EXPECT_EQ(Evictable(), BlockId::kNone);
  index_.Unhold(leaf);
  EXPECT_EQ(Evictable(), leaf);
}

TEST_F(BlockIndexTest, ABlockThatLookupsFoundOutlivesOnesThatTheyDidNot) {
  const BlockId found = Add(1, 0);
  for (int i = 0; i < 5; ++i) index_.NoteHit(found);
  EXPECT_EQ(index_.Get(found).credit, EvictionOrder::kCreditMax);
  std::vector<BlockId> others;
  for (int chain = 2; chain < 6; ++chain) others.push_back(Add(chain, 0));
  for (const BlockId id : others) {
    ASSERT_EQ(Evictable(), id);
    index_.Erase(id);
  }
  EXPECT_EQ(Evictable(), found) << "its rounds are over when nothing else is left";
  index_.CheckInvariants();
}

TEST_F(BlockIndexTest, ReuseAges) {
  const BlockId found = Add(1, 0);
  index_.NoteHit(found);
  const BlockId other = Add(2, 0);
  EXPECT_EQ(Evictable(), other) << "one round more for the one that was found";
  EXPECT_EQ(index_.Get(found).credit, 0);
  index_.Hold(other);
  index_.Unhold(other);
  EXPECT_EQ(Evictable(), found);
}

TEST_F(BlockIndexTest, WithLruOnlyTheLastUseCounts) {
  BlockIndex lru(8, EvictionPolicy::kLru);
  BlockRecord record;
  record.key = ChainKey(1, 0);
  record.backing = SlotRef{0, 2};
  const BlockId first = lru.Insert(record, BlockId::kNone);
  record.key = ChainKey(2, 0);
  record.backing = SlotRef{1, 2};
  const BlockId second = lru.Insert(record, BlockId::kNone);
  for (int i = 0; i < 3; ++i) lru.NoteHit(first);
  lru.Unhold(first);
  lru.Unhold(second);
  EXPECT_EQ(lru.order().NextEvictable(All), first);
}

TEST_F(BlockIndexTest, SubtreeHoldsAllThatDependOnABlock) {
  const BlockId root = Add(1, 0);
  const BlockId child = Add(1, 1);
  BlockRecord sibling;
  sibling.key = ChainKey(9, 9);
  sibling.backing = SlotRef{40, 2};
  const BlockId other = index_.Insert(sibling, root);
  absl::flat_hash_set<BlockId> blocks;
  index_.AddSubtree(root, &blocks);
  EXPECT_EQ(blocks, (absl::flat_hash_set<BlockId>{root, child, other}));
  index_.CheckInvariants();
}

TEST_F(BlockIndexTest, InvariantsHoldThroughRandomChanges) {
  const uint32_t seed = 20240611;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  std::map<BlockId, int32_t> holds;  // the model: live blocks and how often each is held
  std::vector<int32_t> lengths(6, 0);
  for (int step = 0; step < 20000; ++step) {
    const auto chain = static_cast<int32_t>(random() % lengths.size());
    const uint32_t action = random() % 6;
    if (action == 0 && index_.size() < 64) {
      const BlockId id = AddHeld(chain, lengths[chain]++);
      holds[id] = 1;
    } else if (action == 1 && lengths[chain] > 0) {
      const BlockId id = index_.Find(ChainKey(chain, lengths[chain] - 1));
      if (holds[id] > 0 || index_.Get(id).pinned) continue;
      index_.Erase(id);
      holds.erase(id);
      --lengths[chain];
    } else if (!holds.empty()) {
      auto it = holds.begin();
      std::advance(it, random() % holds.size());
      if (action == 2) index_.Hold(it->first), ++it->second;
      if (action == 3 && it->second > 0) index_.Unhold(it->first), --it->second;
      if (action == 4) index_.SetPinned(it->first, random() % 2 == 0);
      if (action == 5) index_.SetDevice(it->first, random() % 2 == 0 ? SlotRef{1, 2} : SlotRef{});
    }
    if (step % 16 == 0) index_.CheckInvariants();
    const BlockId victim = Evictable();
    if (victim == BlockId::kNone) continue;
    ASSERT_EQ(holds[victim], 0);
    ASSERT_FALSE(index_.Get(victim).pinned);
    ASSERT_EQ(index_.Get(victim).first_child, BlockId::kNone);
  }
}

using BlockIndexDeathTest = BlockIndexTest;

TEST_F(BlockIndexDeathTest, RefusesToBreakItsInvariants) {
  const BlockId root = Add(1, 0);
  const BlockId held = AddHeld(1, 1);
  EXPECT_DEATH(AddHeld(1, 1), "one live block per key");
  EXPECT_DEATH(index_.Erase(held), "nobody holds");
  EXPECT_DEATH(index_.Erase(root), "not erased before its children");
  EXPECT_DEATH(index_.Unhold(root), "only held blocks");
  index_.Unhold(held);
  index_.SetPinned(held, true);
  EXPECT_DEATH(index_.Erase(held), "pinned");
  BlockRecord record;
  record.key = ChainKey(2, 0);
  EXPECT_DEATH((void)index_.Insert(record, BlockId::kNone), "has its originals");
}

}  // namespace
}  // namespace certkv::kvstore
