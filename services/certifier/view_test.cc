#include "services/certifier/view.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "kernels/core/status.h"
#include "services/certifier/fake_cache.h"
#include "services/certifier/view_table.h"

namespace certkv::certifier {
namespace {

class ViewTest : public ::testing::Test {
 protected:
  ViewTest() : fake_(SmallSpec(1, 1, 1, 64), 8), book_(8) {
    std::mt19937_64 random(5);
    fake_.Put(RandomSequence(fake_.spec(), 4 * 64 + 20, 1.0f, &random));
  }

  absl::Status Validate() { return ValidateHandles(*fake_.cache(), fake_.blocks()); }
  std::shared_ptr<View> Open() { return fake_.OpenView(TestLease({}), &book_); }

  FakeCache fake_;
  BudgetBook book_;
};

TEST_F(ViewTest, AcceptsHandlesAsTheStoreGaveThem) {
  EXPECT_TRUE(Validate().ok());
  EXPECT_EQ(Open()->Snapshot().token_count, 4 * 64 + 20);
}

TEST_F(ViewTest, RefusesASlotOutsideItsSlab) {
  for (const int32_t slot : {-1, -2, 8, 1 << 30}) {
    fake_.mutable_block(1)->device.slot = slot;
    const absl::Status status = Validate();
    EXPECT_EQ(ReasonOf(status), "HANDLE_INVALID") << slot;
    EXPECT_NE(status.message().find("block 1"), absl::string_view::npos) << status;
  }
}

TEST_F(ViewTest, RefusesABackingSlotOutsideItsSlab) {
  fake_.mutable_block(2)->backing.slot = 8;
  EXPECT_EQ(ReasonOf(Validate()), "HANDLE_INVALID");
}

TEST_F(ViewTest, AcceptsABlockWithoutOriginals) {
  fake_.mutable_block(2)->backing = SlotRef();
  EXPECT_TRUE(Validate().ok());
}

TEST_F(ViewTest, RefusesAnOddGeneration) {
  ++fake_.mutable_block(0)->device.generation;
  EXPECT_EQ(ReasonOf(Validate()), "HANDLE_INVALID");
}

TEST_F(ViewTest, RefusesAGenerationThatMovedOn) {
  fake_.BumpDeviceGeneration(3);
  const absl::Status status = Validate();
  EXPECT_EQ(ReasonOf(status), "BLOCK_REUSED");
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
}

TEST_F(ViewTest, RefusesABackingGenerationThatMovedOn) {
  fake_.BumpBackingGeneration(3);
  EXPECT_EQ(ReasonOf(Validate()), "BLOCK_REUSED");
}

TEST_F(ViewTest, RefusesATailOutsideTheStagingMemory) {
  const auto reason = [&](int32_t slot, int32_t token_count) {
    return ReasonOf(MakeTail(*fake_.cache(), fake_.staging(), slot, token_count).status());
  };
  EXPECT_EQ(reason(-1, 1), "TAIL_INVALID");
  EXPECT_EQ(reason(4, 1), "TAIL_INVALID");
  EXPECT_EQ(reason(0, -1), "TAIL_INVALID");
  EXPECT_EQ(reason(0, 64), "TAIL_INVALID");
  EXPECT_EQ(reason(0, 63), "");
  EXPECT_EQ(ReasonOf(MakeTail(*fake_.cache(), nullptr, 0, 1).status()), "TAIL_INVALID");
}

TEST_F(ViewTest, RefusesEverythingOnceTheStoreIsGone) {
  const auto view = Open();
  fake_.cache()->MarkDead();
  EXPECT_EQ(ReasonOf(view->Update({}, 0)), "STORE_UNREACHABLE");
  const auto opened = View::Create(fake_.cache(), {}, ViewTail(), TestLease({}), &book_, 0);
  EXPECT_EQ(ReasonOf(opened.status()), "STORE_UNREACHABLE");
}

TEST_F(ViewTest, AppendsBlocksAndMovesTheTailAtOnce) {
  const auto blocks = absl::MakeConstSpan(fake_.blocks());
  auto view =
      View::Create(fake_.cache(), blocks.subspan(0, 2), ViewTail(), TestLease({}), &book_, 0);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ((*view)->Snapshot().token_count, 128);
  ViewUpdate update;
  update.appended_blocks = blocks.subspan(2);
  update.tail = fake_.tail();
  ASSERT_TRUE((*view)->Update(update, 0).ok());
  const ViewSnapshot snapshot = (*view)->Snapshot();
  EXPECT_EQ(snapshot.token_count, 4 * 64 + 20);
  EXPECT_EQ(snapshot.tail.token_count, 20);
  ASSERT_EQ(snapshot.blocks->size(), 4u);
  EXPECT_EQ((*snapshot.blocks)[3].key, blocks[3].key);
}

TEST_F(ViewTest, ChangesNothingWhenAnUpdateFails) {
  const auto view = Open();
  fake_.BumpDeviceGeneration(0);
  ViewUpdate update;
  update.appended_blocks = absl::MakeConstSpan(fake_.blocks()).subspan(0, 1);
  update.tail = ViewTail();
  EXPECT_EQ(ReasonOf(view->Update(update, 0)), "BLOCK_REUSED");
  EXPECT_EQ(view->Snapshot().token_count, 4 * 64 + 20);
}

TEST_F(ViewTest, KeepsTheLeaseOfTheHighestSequence) {
  const auto view = Open();
  PolicyLease newer = TestLease({.tv_tolerance = 0.01f});
  newer.lease_id = 2;
  newer.sequence = 5;
  ViewUpdate update;
  update.policy = newer;
  ASSERT_TRUE(view->Update(update, 0).ok());
  EXPECT_EQ(view->Snapshot().policy->lease_id, 2);
  PolicyLease older = TestLease({.tv_tolerance = 0.9f});
  older.lease_id = 3;
  older.sequence = 4;
  update.policy = older;
  EXPECT_TRUE(view->Update(update, 0).ok());
  EXPECT_EQ(view->Snapshot().policy->lease_id, 2);
}

TEST_F(ViewTest, RefusesTheLeaseOfAnotherRequest) {
  const auto view = Open();
  PolicyLease other = TestLease({});
  other.request = "requests/other";
  other.sequence = 9;
  ViewUpdate update;
  update.policy = other;
  EXPECT_EQ(ReasonOf(view->Update(update, 0)), "POLICY_LEASE_INVALID");
}

TEST_F(ViewTest, ShowsReadersOneStateWhileItIsUpdated) {
  const auto blocks = absl::MakeConstSpan(fake_.blocks());
  auto view = View::Create(fake_.cache(), {}, fake_.tail(), TestLease({}), &book_, 0);
  ASSERT_TRUE(view.ok());
  std::atomic<bool> done{false};
  std::atomic<int> seen{0};
  std::thread reader([&] {
    while (!done) {
      ++seen;
      const ViewSnapshot snapshot = (*view)->Snapshot();
      // Blocks are appended in pairs with the tail's length: 20 tokens without, none with.
      const int64_t expected = snapshot.blocks->size() % 2 == 0 ? 20 : 0;
      ASSERT_EQ(snapshot.tail.token_count, expected);
      ASSERT_EQ(snapshot.token_count,
                static_cast<int64_t>(snapshot.blocks->size()) * 64 + expected);
    }
  });
  for (int step = 0; step < 400 || (seen < 400 && step < 20000); ++step) {
    ViewUpdate update;
    update.appended_blocks = blocks.subspan(step % 4, 1);
    update.tail = step % 2 == 0 ? ViewTail() : fake_.tail();
    ASSERT_TRUE((*view)->Update(update, 0).ok());
  }
  done = true;
  reader.join();
}

TEST_F(ViewTest, TableRefusesMoreViewsThanItsLimit) {
  ViewTable table(2);
  const auto view = Open();
  ASSERT_TRUE(table.Insert(ViewId{1}, view).ok());
  ASSERT_TRUE(table.Insert(ViewId{2}, view).ok());
  EXPECT_EQ(ReasonOf(table.CheckRoom()), "VIEW_LIMIT");
  EXPECT_EQ(ReasonOf(table.Insert(ViewId{3}, view)), "VIEW_LIMIT");
  EXPECT_TRUE(table.Erase(ViewId{1}));
  EXPECT_FALSE(table.Erase(ViewId{1}));
  EXPECT_TRUE(table.Insert(ViewId{3}, view).ok());
  EXPECT_EQ(ReasonOf(table.Find(ViewId{1}).status()), "VIEW_NOT_FOUND");
}

TEST_F(ViewTest, TableForgetsIdleViewsAndThoseOfADeadStore) {
  ViewTable table(4);
  const auto idle = Open();
  const auto used = Open();
  ASSERT_TRUE(table.Insert(ViewId{1}, idle).ok());
  ASSERT_TRUE(table.Insert(ViewId{2}, used).ok());
  idle->Touch(100);
  used->Touch(200);
  EXPECT_EQ(table.EraseIdle(150), 1);
  EXPECT_TRUE(table.Find(ViewId{2}).ok());
  fake_.cache()->MarkDead();
  EXPECT_EQ(table.EraseIdle(150), 1);
  EXPECT_EQ(table.size(), 0);
}

}  // namespace
}  // namespace certkv::certifier
