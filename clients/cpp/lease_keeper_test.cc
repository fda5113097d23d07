#include "clients/cpp/lease_keeper.h"

#include <gtest/gtest.h>

#include <atomic>

#include "absl/time/clock.h"
#include "clients/cpp/lease_book.h"
#include "clients/cpp/now.h"
#include "kernels/core/status.h"

namespace certkv::client {
namespace {

TEST(LeaseExpireTimeTest, TheStoresTimeHoldsWhereClocksAgree) {
  EXPECT_EQ(LeaseExpireTime(1000, 1020, 500, 1510), 1510);
  EXPECT_EQ(LeaseExpireTime(1000, 1020, 500, 1500), 1500);
  EXPECT_EQ(LeaseExpireTime(1000, 1020, 500, 1520), 1520);
}

TEST(LeaseExpireTimeTest, OfAnotherClockTheEarliestEndIsTaken) {
  for (const int64_t skew_ms : {int64_t{-600'000}, int64_t{-11}, int64_t{11}, int64_t{600'000}}) {
    EXPECT_EQ(LeaseExpireTime(1000, 1020, 500, 1510 + skew_ms), 1500) << skew_ms;
  }
}

TEST(LeaseExpireTimeTest, WithoutADurationTheStoresTimeIsAllThatIsKnown) {
  EXPECT_EQ(LeaseExpireTime(1000, 1020, 0, 601'000), 601'000);
}

TEST(LeaseKeeperTest, RenewsALeaseWellBeforeItsDeadline) {
  std::atomic<int> renewals{0};
  LeaseKeeper keeper(300, [&](LeaseId) -> absl::StatusOr<int64_t> {
    ++renewals;
    return NowMs() + 300;
  });
  keeper.Add(LeaseId{1}, NowMs() + 300);
  absl::SleepFor(absl::Milliseconds(900));
  EXPECT_TRUE(keeper.Check(LeaseId{1}).ok());
  EXPECT_GE(renewals, 2);
}

TEST(LeaseKeeperTest, ALeaseThatTheStoreForgotIsLostAtOnce) {
  LeaseKeeper keeper(300, [&](LeaseId) -> absl::StatusOr<int64_t> {
    return MakeError(absl::StatusCode::kNotFound, "LEASE_NOT_FOUND", "gone");
  });
  keeper.Add(LeaseId{1}, NowMs() + 150);  // due at once
  absl::Status status;
  for (int i = 0; i < 100 && status.ok(); ++i) {
    status = keeper.Check(LeaseId{1});
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(ReasonOf(status), "LEASE_LOST") << status;
}

TEST(LeaseKeeperTest, ALeaseStaysLostAlsoWhenTheStoreComesBack) {
  std::atomic<bool> reachable{false};
  LeaseKeeper keeper(200, [&](LeaseId) -> absl::StatusOr<int64_t> {
    if (!reachable) return absl::UnavailableError("down");
    return NowMs() + 200;
  });
  keeper.Add(LeaseId{1}, NowMs() + 200);
  absl::SleepFor(absl::Milliseconds(400));
  EXPECT_EQ(ReasonOf(keeper.Check(LeaseId{1})), "LEASE_LOST");
  reachable = true;
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_EQ(ReasonOf(keeper.Check(LeaseId{1})), "LEASE_LOST");
}

TEST(LeaseKeeperTest, OneFailedRenewalIsMadeGoodBeforeTheDeadline) {
  std::atomic<int> calls{0};
  LeaseKeeper keeper(500, [&](LeaseId) -> absl::StatusOr<int64_t> {
    if (++calls == 1) return absl::UnavailableError("a hiccup");
    return NowMs() + 500;
  });
  keeper.Add(LeaseId{1}, NowMs() + 500);
  absl::SleepFor(absl::Milliseconds(1200));
  EXPECT_TRUE(keeper.Check(LeaseId{1}).ok());
  EXPECT_GE(calls, 2);
}

TEST(LeaseKeeperTest, AReleasedLeaseIsNotHeld) {
  LeaseKeeper keeper(300, [&](LeaseId) -> absl::StatusOr<int64_t> { return NowMs() + 300; });
  keeper.Add(LeaseId{1}, NowMs() + 300);
  keeper.Remove(LeaseId{1});
  EXPECT_EQ(ReasonOf(keeper.Check(LeaseId{1})), "LEASE_LOST");
}

}  // namespace
}  // namespace certkv::client
