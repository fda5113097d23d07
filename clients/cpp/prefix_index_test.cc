#include "clients/cpp/prefix_index.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace certkv::client {
namespace {

namespace v1 = certkv::kvstore::v1;

BlockKey Key(int number) { return *BlockKeyFromBytes(std::string(32, static_cast<char>(number))); }

std::vector<BlockKey> Chain(int count) {
  std::vector<BlockKey> keys;
  for (int i = 1; i <= count; ++i) keys.push_back(Key(i));
  return keys;
}

v1::BlockEvent Event(v1::BlockEvent::Kind kind, int number) {
  v1::BlockEvent event;
  event.set_kind(kind);
  event.set_block_key(std::string(Key(number).view()));
  return event;
}

v1::Block Listed(int number, v1::BlockTier tier = v1::BLOCK_TIER_DEVICE) {
  v1::Block block;
  block.set_block_key(std::string(Key(number).view()));
  block.set_tier(tier);
  return block;
}

TEST(PrefixIndexTest, CountsLeadingBlocksByWhereTheyAre) {
  PrefixIndex index;
  for (int i = 1; i <= 6; ++i) index.Apply(Event(v1::BlockEvent::KIND_SEALED, i));
  EXPECT_EQ(index.Count(Chain(8)), (PrefixCounts{6, 6, 6}));
  index.Apply(Event(v1::BlockEvent::KIND_DEMOTED, 3));
  index.Apply(Event(v1::BlockEvent::KIND_SPILLED, 5));
  // What comes after a block that is not on the device can't be read there before it.
  EXPECT_EQ(index.Count(Chain(8)), (PrefixCounts{2, 4, 6}));
  index.Apply(Event(v1::BlockEvent::KIND_PROMOTED, 3));
  index.Apply(Event(v1::BlockEvent::KIND_RESTORED, 5));
  EXPECT_EQ(index.Count(Chain(8)), (PrefixCounts{4, 6, 6}));
  EXPECT_EQ(index.Count({}), PrefixCounts{});
}

TEST(PrefixIndexTest, BlocksThatGoEndThePrefix) {
  for (const auto kind :
       {v1::BlockEvent::KIND_EVICTED, v1::BlockEvent::KIND_DROPPED, v1::BlockEvent::KIND_LOST}) {
    PrefixIndex index;
    for (int i = 1; i <= 4; ++i) index.Apply(Event(v1::BlockEvent::KIND_SEALED, i));
    index.Apply(Event(kind, 2));
    EXPECT_EQ(index.Count(Chain(4)), (PrefixCounts{1, 1, 1})) << kind;
    EXPECT_EQ(index.size(), 3u);
  }
}

TEST(PrefixIndexTest, EventsOfTheTimeOfAListWinOverIt) {
  PrefixIndex index;
  index.Apply(Event(v1::BlockEvent::KIND_SEALED, 9));  // of before: the list decides
  index.BeginList();
  EXPECT_FALSE(index.is_complete());
  index.Apply(Event(v1::BlockEvent::KIND_EVICTED, 2));
  index.Apply(Event(v1::BlockEvent::KIND_DEMOTED, 1));
  index.Apply(Event(v1::BlockEvent::KIND_SEALED, 3));
  for (int i = 1; i <= 2; ++i) index.AddListed(Listed(i));  // read before these events
  index.EndList();
  EXPECT_TRUE(index.is_complete());
  EXPECT_EQ(index.Count(Chain(3)), (PrefixCounts{0, 1, 1}));
  EXPECT_EQ(index.size(), 2u);
  // After the list the next event counts again.
  index.Apply(Event(v1::BlockEvent::KIND_SEALED, 2));
  EXPECT_EQ(index.Count(Chain(3)), (PrefixCounts{0, 3, 3}));
}

TEST(PrefixIndexTest, PassesOverWhatIsNoBlock) {
  PrefixIndex index;
  v1::BlockEvent event = Event(v1::BlockEvent::KIND_SEALED, 1);
  event.set_block_key("short");
  index.Apply(event);
  index.Apply(Event(v1::BlockEvent::KIND_BEGUN, 1));
  index.Apply(Event(static_cast<v1::BlockEvent::Kind>(99), 1));
  v1::Block lost = Listed(1);
  lost.set_lost(true);
  index.AddListed(lost);
  EXPECT_EQ(index.size(), 0u);
  index.AddListed(Listed(1, v1::BLOCK_TIER_BACKING_ONLY));
  EXPECT_EQ(index.Count(Chain(1)), (PrefixCounts{0, 1, 1}));
}

}  // namespace
}  // namespace certkv::client
