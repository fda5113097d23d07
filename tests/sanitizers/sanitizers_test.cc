// Canaries of the sanitizer builds: a planted fault must end the program, and code that is ordered
// by Abseil's locks must not (cmake/tsan_abseil.cc makes that order visible).

#include <gmock/gmock.h>

#include <array>
#include <limits>
#include <thread>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace certkv {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr bool kHasAddressSanitizer = true;
#else
constexpr bool kHasAddressSanitizer = false;
#endif
#ifdef __SANITIZE_THREAD__
constexpr bool kHasThreadSanitizer = true;
#else
constexpr bool kHasThreadSanitizer = false;
#endif

class SanitizersTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

int ReadPastTheEnd(int index) {
  const std::vector<char> bytes(7);
  const volatile char* data = bytes.data();
  return data[index];
}

TEST_F(SanitizersTest, AddressSanitizerStopsAReadPastTheEnd) {
  if (!kHasAddressSanitizer) GTEST_SKIP() << "needs the preset asan";
  EXPECT_DEATH(ReadPastTheEnd(7), "heap-buffer-overflow|insufficient space");
}

TEST_F(SanitizersTest, UndefinedBehaviorSanitizerStopsAnOverflow) {
  if (!kHasAddressSanitizer) GTEST_SKIP() << "needs the preset asan";
  volatile int value = std::numeric_limits<int>::max();
  EXPECT_DEATH(value = value + 1, "signed integer overflow");
}

// Two threads write without an order; returns when both are done.
void Race() {
  int value = 0;
  std::thread other([&value] { value = 1; });
  value = 2;
  other.join();
  volatile int kept = value;
  static_cast<void>(kept);
}

TEST_F(SanitizersTest, ThreadSanitizerReportsARace) {
  if (!kHasThreadSanitizer) GTEST_SKIP() << "needs the preset tsan";
  // The report sets the exit code when the program ends.
  EXPECT_EXIT((Race(), std::exit(0)), testing::ExitedWithCode(66), "data race");
}

TEST_F(SanitizersTest, MutexOrdersWriters) {
  int value = 0;
  absl::Mutex mutex;
  const auto add = [&] {
    for (int i = 0; i < 10000; ++i) {
      absl::MutexLock lock(&mutex);
      ++value;
    }
  };
  std::thread other(add);
  add();
  other.join();
  EXPECT_EQ(value, 20000);
}

TEST_F(SanitizersTest, ConditionsOrderTheirReaders) {
  constexpr int kThreadCount = 4;
  constexpr int kRoundCount = 500;
  int turn = 0;
  absl::Mutex mutex;
  std::vector<std::thread> threads;
  for (int id = 0; id < kThreadCount; ++id) {
    threads.emplace_back([&, id] {
      const auto is_my_turn = [&turn, id] { return turn % kThreadCount == id; };
      for (int round = 0; round < kRoundCount; ++round) {
        absl::MutexLock lock(&mutex);
        mutex.Await(absl::Condition(&is_my_turn));
        ++turn;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(turn, kThreadCount * kRoundCount);
}

TEST_F(SanitizersTest, CondVarOrdersWhatWasWrittenBeforeTheSignal) {
  int value = 0;
  bool done = false;
  absl::Mutex mutex;
  absl::CondVar changed;
  std::thread other([&] {
    value = 4;
    absl::MutexLock lock(&mutex);
    done = true;
    changed.SignalAll();
  });
  {
    absl::MutexLock lock(&mutex);
    while (!done) changed.WaitWithTimeout(&mutex, absl::Seconds(1));
  }
  EXPECT_EQ(value, 4);
  other.join();
}

TEST_F(SanitizersTest, NotificationAndCounterOrderWhatCameBefore) {
  std::array<int, 3> values{};
  absl::Notification started;
  absl::BlockingCounter finished(3);
  std::vector<std::thread> threads;
  int start = 0;
  for (int id = 0; id < 3; ++id) {
    threads.emplace_back([&, id] {
      started.WaitForNotification();
      values[id] = start + id;
      finished.DecrementCount();
    });
  }
  start = 10;
  started.Notify();
  finished.Wait();
  EXPECT_THAT(values, testing::ElementsAre(10, 11, 12));
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace certkv
