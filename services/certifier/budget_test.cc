#include "services/certifier/budget.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <thread>
#include <vector>

#include "kernels/core/status.h"

namespace certkv::certifier {
namespace {

PolicyLease CumulativeLease(int64_t lease_id, double slice, int64_t expire_time_ms) {
  PolicyLease lease;
  lease.request = "requests/a";
  lease.lease_id = lease_id;
  lease.risk_mode = RiskMode::kCumulative;
  lease.budget_slice = slice;
  lease.expire_time_ms = expire_time_ms;
  return lease;
}

TEST(BudgetAccountTest, TakesUntilTheSliceIsSpent) {
  BudgetAccount account(0.5);
  EXPECT_GT(account.Reserve(0.25f), 0);
  EXPECT_GT(account.Reserve(0.25f), 0);
  EXPECT_EQ(account.Reserve(1e-6f), -1);
  EXPECT_EQ(account.Reserve(0.0f), 0);  // nothing fits always
  EXPECT_EQ(account.spent(), 0.5);
}

TEST(BudgetAccountTest, GivesBackWhatWasNotServed) {
  BudgetAccount account(0.5);
  const int64_t units = account.Reserve(0.5f);
  EXPECT_EQ(account.Reserve(0.1f), -1);
  account.Refund(units);
  EXPECT_EQ(account.spent(), 0);
  EXPECT_GT(account.Reserve(0.1f), 0);
}

TEST(BudgetAccountTest, RefusesWhatIsNoTotalVariation) {
  BudgetAccount account(1e300);
  EXPECT_EQ(account.Reserve(std::numeric_limits<float>::quiet_NaN()), -1);
  EXPECT_EQ(account.Reserve(-0.5f), -1);
  EXPECT_EQ(account.Reserve(1.5f), -1);
  EXPECT_GT(account.Reserve(1.0f), 0);
}

TEST(BudgetAccountTest, RoundsAmountsUpAndTheSliceDown) {
  // Each of these is below a unit of 2^-40, and each takes a whole one.
  BudgetAccount account(2.5 * 0x1p-40);
  EXPECT_EQ(account.Reserve(0x1p-60f), 1);
  EXPECT_EQ(account.Reserve(0x1p-60f), 1);
  EXPECT_EQ(account.Reserve(0x1p-60f), -1);
}

TEST(BudgetAccountTest, SharesOfAFailureProbabilityAddUpToTheSliceAtMost) {
  BudgetAccount account(1e-9);
  int64_t count = 0;
  while (account.TakeShare() > 0) ++count;
  EXPECT_EQ(count, 1099);  // of one unit each, as a part in 2^16 is less
  EXPECT_LE(account.spent(), 1e-9);
  EXPECT_EQ(account.TakeShare(), 0);
  BudgetAccount large(0.25);
  EXPECT_EQ(large.TakeShare(), 0x1p-18f);
  EXPECT_EQ(large.spent(), 0x1p-18);
  EXPECT_EQ(BudgetAccount(0).TakeShare(), 0);
}

TEST(BudgetAccountTest, IsNeverOverspentByConcurrentHeads) {
  static constexpr double kSlice = 10;
  static constexpr float kTv = 0.013f;
  BudgetAccount account(kSlice);
  std::atomic<int> served{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&account, &served, i] {
      for (int step = 0; step < 20000; ++step) {
        const int64_t units = account.Reserve(kTv);
        EXPECT_LE(account.spent(), kSlice);
        if (units < 0) continue;
        if ((step + i) % 7 == 0) {
          account.Refund(units);  // this read failed
        } else {
          ++served;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(served * double{kTv}, kSlice);
  // Not vacuous: all that fits was served.
  EXPECT_EQ(served, static_cast<int>(std::floor(kSlice / double{kTv})));
}

TEST(BudgetBookTest, SharesOneAccountPerLease) {
  BudgetBook book(4);
  const auto lease = CumulativeLease(7, 1, 1000);
  const auto first = book.AccountOf(lease, 0);
  const auto second = book.AccountOf(lease, 0);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(*first, *second);
  EXPECT_NE(*first, *book.AccountOf(CumulativeLease(8, 1, 1000), 0));
}

TEST(BudgetBookTest, HasNoAccountOfAThresholdLease) {
  BudgetBook book(1);
  auto lease = CumulativeLease(7, 1, 1000);
  lease.risk_mode = RiskMode::kThreshold;
  EXPECT_EQ(*book.AccountOf(lease, 0), nullptr);
}

TEST(BudgetBookTest, RefusesALeaseWhoseSliceChanged) {
  BudgetBook book(4);
  ASSERT_TRUE(book.AccountOf(CumulativeLease(7, 1, 1000), 0).ok());
  const auto forged = book.AccountOf(CumulativeLease(7, 2, 1000), 0);
  EXPECT_EQ(ReasonOf(forged.status()), "POLICY_LEASE_INVALID");
}

TEST(BudgetBookTest, ForgetsOnlyExpiredLeases) {
  BudgetBook book(2);
  ASSERT_TRUE(book.AccountOf(CumulativeLease(1, 1, 100), 0).ok());
  ASSERT_TRUE(book.AccountOf(CumulativeLease(2, 1, 500), 0).ok());
  const auto refused = book.AccountOf(CumulativeLease(3, 1, 500), 99);
  EXPECT_EQ(ReasonOf(refused.status()), "BUDGET_ACCOUNT_LIMIT");
  EXPECT_TRUE(book.AccountOf(CumulativeLease(3, 1, 500), 100).ok());
}

}  // namespace
}  // namespace certkv::certifier
