// Workers that die, are stopped, or leave their socket to a child: what they held comes back.
#include "tests/system/reclaim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::StartsWith;

class ReclaimTest : public SystemTest {
 protected:
  // Waits until the cache of `model` has nothing leased; false after 10 s.
  bool WaitUntilNothingIsLeased(const std::string& model) {
    for (int i = 0; i < 2000; ++i) {
      const auto held = HoldingsOf(*cluster_, model);
      if (held.ok() && held->blocks_leased == 0) return true;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return false;
  }
};

TEST_P(ReclaimTest, TwoHundredKillsUnderLoadReleaseEverything) {
  StartCluster();
  const auto result = MeasureReclaim(*cluster_, {});
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->milliseconds.size(), 200u);
  std::printf(
      "reclaim after SIGKILL: p50 %.2f ms, p99 %.2f ms, worst %.2f ms; %d of 200 met "
      "leases, %d half-written blocks\n",
      result->Percentile(50), result->Percentile(99), result->Percentile(100),
      result->kills_with_leases, result->kills_while_writing);
  EXPECT_GT(result->kills_with_leases, 100);
  EXPECT_GT(result->kills_while_writing, 0) << "some kill must meet a seal that runs";
  EXPECT_LT(result->Percentile(50), 1000) << "generous: machines that run tests are shared";
}

TEST_P(ReclaimTest, ASocketLeftToAChildDoesNotKeepTheSession) {
  StartCluster();
  auto worker = WorkerProcess::Start(*cluster_, "forker", "fork", 600'000);
  ASSERT_TRUE(worker.ok()) << worker.status();
  const auto child_text = (*worker)->WaitFor("child ");
  ASSERT_TRUE(child_text.ok()) << child_text.status();
  int child = 0;
  ASSERT_TRUE(absl::SimpleAtoi(*child_text, &child));
  ASSERT_GT(HoldingsOf(*cluster_, "forker")->blocks_leased, 0);
  (*worker)->Kill();
  EXPECT_TRUE(WaitUntilNothingIsLeased("forker"));
  EXPECT_EQ(HoldingsOf(*cluster_, "forker")->session_count, 0);
  EXPECT_EQ(kill(child, 0), 0) << "the child, and so the socket, is still there";
  kill(child, SIGKILL);
}

TEST_P(ReclaimTest, AStoppedWorkerLosesItsLeasesByDeadlineAndIsTold) {
  StartCluster();
  auto worker = WorkerProcess::Start(*cluster_, "frozen", "hold", 500);
  ASSERT_TRUE(worker.ok()) << worker.status();
  absl::SleepFor(absl::Milliseconds(1200));
  EXPECT_GT(HoldingsOf(*cluster_, "frozen")->blocks_leased, 0) << "renewed while it runs";
  kill((*worker)->pid(), SIGSTOP);
  EXPECT_TRUE(WaitUntilNothingIsLeased("frozen"));
  EXPECT_EQ(HoldingsOf(*cluster_, "frozen")->session_count, 1) << "it is not dead";
  kill((*worker)->pid(), SIGCONT);
  const auto lost = (*worker)->WaitFor("lost ");
  ASSERT_TRUE(lost.ok()) << lost.status();
  EXPECT_THAT(*lost, StartsWith("LEASE_LOST"));
  const auto found = (*worker)->WaitFor("found ");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, "32") << "sealed blocks stay, and it may look them up again";
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReclaimTest, ::testing::Values(ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
