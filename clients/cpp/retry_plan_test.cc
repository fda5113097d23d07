#include "clients/cpp/retry_plan.h"

#include <gtest/gtest.h>

#include "kernels/core/status.h"
#include "services/common/retry_delay.h"

namespace certkv::client {
namespace {

absl::Status Full(int64_t delay_ms) {
  return WithRetryDelay(MakeError(absl::StatusCode::kResourceExhausted, "STORE_FULL", "no room"),
                        delay_ms);
}
const absl::Status kGone = absl::UnavailableError("gone");

TEST(RetryPlanTest, UnreachableServerIsAskedAFewTimesWithGrowingWaits) {
  RetryPlan plan(Retry::kIdempotent, 0, 1);
  EXPECT_EQ(plan.NextDelayMs(kGone, 10'000), 20);
  EXPECT_EQ(plan.NextDelayMs(kGone, 10'000), 40);
  EXPECT_EQ(plan.NextDelayMs(kGone, 10'000), 80);
  EXPECT_EQ(plan.NextDelayMs(kGone, 10'000), std::nullopt);
  EXPECT_EQ(RetryPlan(Retry::kIdempotent, 0, 1).NextDelayMs(kGone, 20), std::nullopt);
  EXPECT_EQ(RetryPlan(Retry::kNever, 1000, 1).NextDelayMs(kGone, 10'000), std::nullopt);
}

TEST(RetryPlanTest, RefusedCallComesBackWhenTheServerSaysAlsoWhereItIsNotIdempotent) {
  RetryPlan plan(Retry::kNever, 10'000, 1);
  const auto delay_ms = plan.NextDelayMs(Full(100), 10'000);
  ASSERT_TRUE(delay_ms.has_value());
  EXPECT_GE(*delay_ms, 50);
  EXPECT_LE(*delay_ms, 150);
  EXPECT_EQ(plan.NextDelayMs(absl::ResourceExhaustedError("no delay"), 10'000), std::nullopt);
  EXPECT_EQ(RetryPlan(Retry::kNever, 0, 1).NextDelayMs(Full(1), 10'000), std::nullopt);
}

TEST(RetryPlanTest, WaitsStayWithinDeadlineAndPatienceForEverySeed) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    RetryPlan plan(Retry::kNever, 5000, seed);
    int64_t left_ms = 4000;
    int64_t waited_ms = 0;
    while (const auto delay_ms = plan.NextDelayMs(Full(kRetryDelayMaxMs), left_ms)) {
      ASSERT_GE(*delay_ms, 1);
      ASSERT_LE(*delay_ms, kPressureDelayMaxMs * 3 / 2);
      ASSERT_LT(*delay_ms, left_ms);
      left_ms -= *delay_ms;
      waited_ms += *delay_ms;
    }
    EXPECT_LT(waited_ms, 4000);
    RetryPlan patient(Retry::kNever, 5000, seed);
    waited_ms = 0;
    while (const auto delay_ms = patient.NextDelayMs(Full(100), 1'000'000)) waited_ms += *delay_ms;
    EXPECT_LE(waited_ms, 5000);
    EXPECT_GT(waited_ms, 1000) << "it does wait";
  }
}

TEST(RetryPlanTest, CallersThatWereRefusedTogetherDoNotComeBackTogether) {
  int64_t least = 1'000'000;
  int64_t most = 0;
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const int64_t delay_ms =
        *RetryPlan(Retry::kNever, 10'000, seed).NextDelayMs(Full(1000), 10'000);
    least = std::min(least, delay_ms);
    most = std::max(most, delay_ms);
  }
  EXPECT_LT(least, 700);
  EXPECT_GT(most, 1300);
}

TEST(RetryPlanTest, WaitsGrowWhileTheStoreStaysFull) {
  RetryPlan plan(Retry::kNever, 1'000'000, 7);
  int64_t last = 0;
  for (int i = 0; i < 12; ++i) last = *plan.NextDelayMs(Full(20), 1'000'000);
  EXPECT_GT(last, 500);
}

}  // namespace
}  // namespace certkv::client
