// The engine's small tables: staging slots, leases, sessions, events, threads.
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <numeric>
#include <string>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "kernels/core/status.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/event_hub.h"
#include "services/kvstore/lease_table.h"
#include "services/kvstore/session_table.h"
#include "services/kvstore/staging_area.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

TEST(StagingAreaTest, SlotIsReservedSealedAndFreeAgain) {
  StagingArea area(*SlabMemory::Create(TinySpec(), SlabKind::kStaging, 3));
  const std::vector<int32_t> slots = area.Reserve(2);
  EXPECT_EQ(slots, (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(area.reserved_count(), 2);
  area.BeginSeal(0);
  EXPECT_FALSE(area.IsReserved(0));
  EXPECT_FALSE(area.Abort(0)) << "a running seal reads it";
  EXPECT_TRUE(area.Abort(1));
  EXPECT_FALSE(area.Abort(1));
  EXPECT_EQ(area.free_count(), 2);
  area.FinishSeal(0);
  EXPECT_EQ(area.free_count(), 3);
  EXPECT_FALSE(area.IsReserved(-1));
  EXPECT_FALSE(area.IsReserved(3));
}

TEST(StagingAreaDeathTest, RefusesWrongTransitions) {
  StagingArea area(*SlabMemory::Create(TinySpec(), SlabKind::kStaging, 1));
  EXPECT_DEATH(area.BeginSeal(0), "only reserved");
  EXPECT_DEATH(area.FinishSeal(0), "has begun");
  EXPECT_DEATH((void)area.Reserve(2), "only free");
}

TEST(LeaseTableTest, ExpiresInOrderOfDeadlineAfterRenewal) {
  LeaseTable table;
  const SessionId session{1};
  table.Add(LeaseId{10}, session, {BlockId{0}}, 100);
  table.Add(LeaseId{11}, session, {BlockId{1}}, 200);
  EXPECT_EQ(table.FirstExpired(99), LeaseId{});
  EXPECT_EQ(table.FirstExpired(100), LeaseId{10});
  table.SetDeadline(LeaseId{10}, 300);
  EXPECT_EQ(table.FirstExpired(250), LeaseId{11});
  EXPECT_EQ(table.TakeOut(LeaseId{11}).blocks, std::vector<BlockId>{BlockId{1}});
  EXPECT_EQ(table.FirstExpired(250), LeaseId{});
}

TEST(LeaseTableTest, FindsALeaseForItsOwnSessionOnly) {
  LeaseTable table;
  table.Add(LeaseId{10}, SessionId{1}, {}, 100);
  EXPECT_NE(table.Find(LeaseId{10}, SessionId{1}), nullptr);
  EXPECT_EQ(table.Find(LeaseId{10}, SessionId{2}), nullptr);
  EXPECT_EQ(table.Find(LeaseId{11}, SessionId{1}), nullptr);
}

std::unique_ptr<Session> MakeSession(int64_t id) {
  auto session = std::make_unique<Session>();
  session->id = SessionId{id};
  session->worker_name = "w" + std::to_string(id);
  session->fd_token = std::string(16, static_cast<char>('a' + id));
  session->staging =
      std::make_shared<StagingArea>(*SlabMemory::Create(TinySpec(), SlabKind::kStaging, 1));
  session->staging_id = 100 + id;
  return session;
}

TEST(SessionTableTest, TellsWhyAnEndedSessionIsGone) {
  SessionTable table;
  table.Add(MakeSession(1));
  EXPECT_GT(table.staging_bytes(), 0);
  EXPECT_EQ((*table.Find(SessionId{1}))->worker_name, "w1");
  table.TakeOut(SessionId{1}, "it was tired");
  EXPECT_EQ(table.staging_bytes(), 0);
  const absl::Status ended = table.Find(SessionId{1}).status();
  EXPECT_EQ(ReasonOf(ended), "SESSION_NOT_FOUND");
  EXPECT_NE(ended.message().find("it was tired"), absl::string_view::npos) << ended;
  EXPECT_EQ(table.FindByToken(std::string(16, 'b')), nullptr);
  EXPECT_EQ(table.FindByStagingId(101), nullptr);
  EXPECT_TRUE(absl::IsNotFound(table.Find(SessionId{2}).status()));
}

TEST(SessionTableTest, ListsSessionsThatNeverConnected) {
  SessionTable table;
  table.Add(MakeSession(1));
  table.Add(MakeSession(2));
  (*table.Find(SessionId{1}))->connect_deadline_ns = 50;
  (*table.Find(SessionId{2}))->connect_deadline_ns = 50;
  (*table.Find(SessionId{2}))->connected = true;
  EXPECT_TRUE(table.NeverConnected(49).empty());
  EXPECT_EQ(table.NeverConnected(50), std::vector<SessionId>{SessionId{1}});
}

BlockKey EventKey(int i) { return ChainKey(1, i); }

constexpr int64_t kStoreId = 77;

TEST(EventHubTest, GivesEventsOfTheCacheInOrder) {
  EventHub hub(4, 8, 4, kStoreId);
  const auto all = *hub.Subscribe(CacheId{}, {}, [] {});
  const auto one = *hub.Subscribe(CacheId{2}, {}, [] {});
  hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(0), 5);
  hub.Append(BlockEventKind::kEvicted, CacheId{2}, EventKey(1), 6);
  const auto first = *all->Take();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->key, EventKey(0));
  EXPECT_EQ((*all->Take())->sequence, first->sequence + 1);
  const auto only = *one->Take();
  EXPECT_EQ(only->kind, BlockEventKind::kEvicted);
  EXPECT_EQ(only->time_ms, 6);
  EXPECT_FALSE((*one->Take()).has_value());
}

TEST(EventHubTest, CutsASlowWatcherOffRatherThanLeavingAGap) {
  EventHub hub(4, 3, 4, kStoreId);
  const auto slow = *hub.Subscribe(CacheId{}, {}, [] {});
  for (int i = 0; i < 4; ++i) hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(i), 0);
  EXPECT_EQ(ReasonOf(slow->Take().status()), "EVENTS_LOST");
  hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(5), 0);
  EXPECT_EQ(ReasonOf(slow->Take().status()), "EVENTS_LOST") << "and stays so";
}

TEST(EventHubTest, AWatcherThatComesBackMissesNothing) {
  EventHub hub(8, 8, 4, kStoreId);
  const auto append = [&hub](int number, int64_t cache) {
    hub.Append(BlockEventKind::kSealed, CacheId{cache}, EventKey(number), 0);
  };
  for (int i = 1; i <= 6; ++i) append(i, i % 2);
  // Of sequences 1 to 6 the last four are kept.
  auto back = *hub.Subscribe(CacheId{}, {kStoreId, 2}, [] {});
  const auto of_one = *hub.Subscribe(CacheId{1}, {kStoreId, 3}, [] {});
  const auto up_to_date = *hub.Subscribe(CacheId{}, {kStoreId, 6}, [] {});
  append(7, 1);
  for (int64_t sequence = 3; sequence <= 7; ++sequence) {
    const auto event = *back->Take();
    ASSERT_TRUE(event.has_value()) << sequence;
    EXPECT_EQ(event->sequence, sequence);
    EXPECT_EQ(event->key, EventKey(static_cast<int>(sequence)));
    EXPECT_EQ(event->store_id, kStoreId);
  }
  EXPECT_FALSE((*back->Take()).has_value());
  EXPECT_EQ((*of_one->Take())->sequence, 5);
  EXPECT_EQ((*of_one->Take())->sequence, 7);
  EXPECT_EQ((*up_to_date->Take())->sequence, 7);
}
TEST(EventHubTest, RefusesACursorWhoseNextEventsAreGone) {
  EventHub hub(8, 8, 4, kStoreId);
  for (int i = 1; i <= 6; ++i) hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(i), 0);
  for (const EventCursor cursor :
       {EventCursor{kStoreId, 1}, EventCursor{kStoreId, 7}, EventCursor{kStoreId, -1},
        EventCursor{kStoreId, std::numeric_limits<int64_t>::max()}, EventCursor{kStoreId + 1, 6}}) {
    const absl::Status status = hub.Subscribe(CacheId{}, cursor, [] {}).status();
    EXPECT_EQ(ReasonOf(status), "EVENTS_GONE") << cursor.sequence;
    EXPECT_TRUE(absl::IsOutOfRange(status));
  }
}
TEST(EventHubTest, WhatWasMissedDoesNotCountToTheQueue) {
  EventHub hub(8, /*queue_limit=*/2, /*history_limit=*/4, kStoreId);
  for (int i = 1; i <= 4; ++i) hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(i), 0);
  const auto back = *hub.Subscribe(CacheId{}, {kStoreId, 0}, [] {});
  for (int i = 5; i <= 6; ++i) hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(i), 0);
  for (int64_t sequence = 1; sequence <= 6; ++sequence) {
    EXPECT_EQ((*back->Take())->sequence, sequence);
  }
}
TEST(EventHubTest, NotifiesOnlyAWatcherThatFoundNothing) {
  EventHub hub(4, 8, 4, kStoreId);
  int calls = 0;
  const auto watcher = *hub.Subscribe(CacheId{}, {}, [&calls] { ++calls; });
  hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(0), 0);
  hub.Notify();
  EXPECT_EQ(calls, 0);
  ASSERT_TRUE((*watcher->Take()).has_value());
  ASSERT_FALSE((*watcher->Take()).has_value());
  hub.Notify();
  EXPECT_EQ(calls, 0);
  hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(1), 0);
  hub.Notify();
  hub.Notify();
  EXPECT_EQ(calls, 1);
}

TEST(EventHubTest, LimitsWatchersAndFreesTheirPlaces) {
  EventHub hub(1, 8, 4, kStoreId);
  auto watcher = *hub.Subscribe(CacheId{}, {}, [] {});
  EXPECT_EQ(ReasonOf(hub.Subscribe(CacheId{}, {}, [] {}).status()), "WATCHER_LIMIT");
  watcher.reset();
  EXPECT_TRUE(hub.Subscribe(CacheId{}, {}, [] {}).ok());
}

TEST(EventHubTest, GivesWhatIsQueuedThenEndsWhenClosed) {
  EventHub hub(4, 8, 4, kStoreId);
  int calls = 0;
  const auto idle = *hub.Subscribe(CacheId{}, {}, [&calls] { ++calls; });
  ASSERT_FALSE((*idle->Take()).has_value());
  const auto busy = *hub.Subscribe(CacheId{}, {}, [] {});
  hub.Append(BlockEventKind::kSealed, CacheId{1}, EventKey(0), 0);
  hub.CloseAll();
  EXPECT_EQ(calls, 1);
  EXPECT_TRUE((*busy->Take()).has_value());
  EXPECT_EQ(ReasonOf(busy->Take().status()), "STORE_STOPPING");
}

TEST(ComputePoolTest, RunsEachIndexOnce) {
  ComputePool pool(3, 4);
  std::vector<std::atomic<int>> counts(1000);
  pool.ParallelFor(1000, [&](int64_t i) { counts[i].fetch_add(1); });
  for (const auto& count : counts) EXPECT_EQ(count.load(), 1);
  pool.ParallelFor(0, [](int64_t) { FAIL(); });
}

TEST(ComputePoolTest, ParallelForEndsWhileEveryThreadIsBusy) {
  ComputePool pool(1, 4);
  absl::Notification release;
  ASSERT_TRUE(pool.TryPost([&] { release.WaitForNotification(); }));
  std::atomic<int> sum{0};
  pool.ParallelFor(10, [&](int64_t i) { sum += static_cast<int>(i); });
  EXPECT_EQ(sum.load(), 45);
  release.Notify();
}

TEST(ComputePoolTest, FailsWithTheErrorOfTheSmallestIndex) {
  ComputePool pool(3, 4);
  std::atomic<int> ran{0};
  const auto body = [&](int64_t index) -> absl::Status {
    ++ran;
    if (index == 5) absl::SleepFor(absl::Milliseconds(20));  // found after the error of 6
    if (index < 5) return absl::OkStatus();
    return MakeError(absl::StatusCode::kInternal, "OF_INDEX_" + std::to_string(index), "as asked");
  };
  EXPECT_EQ(ReasonOf(pool.ParallelTry(100'000, body)), "OF_INDEX_5");
  EXPECT_GE(ran.load(), 6);
  EXPECT_LT(ran.load(), 100'000) << "what comes after an error is left out";
  EXPECT_TRUE(pool.ParallelTry(5, body).ok());
  EXPECT_TRUE(pool.ParallelTry(0, body).ok());
}

TEST(ComputePoolTest, RefusesJobsOverItsLimitAndAfterJoin) {
  ComputePool pool(1, 2);
  absl::Notification release;
  std::atomic<int> ran{0};
  const auto job = [&] {
    release.WaitForNotification();
    ran.fetch_add(1);
  };
  EXPECT_TRUE(pool.TryPost(job));
  EXPECT_TRUE(pool.TryPost(job));
  EXPECT_FALSE(pool.TryPost(job));
  release.Notify();
  pool.Join();
  EXPECT_EQ(ran.load(), 2);
  EXPECT_FALSE(pool.TryPost(job));
}

}  // namespace
}  // namespace certkv::kvstore
