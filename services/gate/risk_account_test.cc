#include "services/gate/risk_account.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/gate/gate_fixture.h"

namespace certkv::gate {
namespace {

TEST(RiskAccountTest, SumsEveryKindOfRead) {
  RiskAccount account(100);
  account.Record(Certified(0.125f), false, 1);
  ReadCertificate repaired = Certified(0.0625f);
  repaired.first_worst_case_tv = 0.75f;
  repaired.rung = Rung::kKeys;
  repaired.repair_bytes = 4096;
  account.Record(repaired, false, 2);
  account.Record(Exact(0.5f), false, 3);
  ReadCertificate observed = Certified(0.5f);
  observed.outcome = Outcome::kObserved;
  observed.output_error_bound = std::numeric_limits<float>::infinity();
  account.Record(observed, true, 4);
  account.RecordFailed(3);

  const RiskTotals& totals = account.totals();
  EXPECT_EQ(totals.sums.read_count, 4);
  EXPECT_EQ(totals.sums.tv_sum, 0.6875);
  EXPECT_EQ(totals.sums.tv_max, 0.5);
  EXPECT_EQ(totals.max_first_worst_case_tv, 0.75f);
  EXPECT_EQ(totals.reads_certified_first, 1);
  EXPECT_EQ(totals.reads_by_rung[static_cast<int>(Rung::kKeys)], 1);
  EXPECT_EQ(totals.reads_by_rung[static_cast<int>(Rung::kHead)], 1);
  EXPECT_EQ(totals.reads_exact, 1);
  EXPECT_EQ(totals.reads_observed, 1);
  EXPECT_EQ(totals.reads_outside_tolerance, 1);
  EXPECT_EQ(totals.repair_bytes, 4096);
  EXPECT_EQ(totals.failed_read_count, 3);
  EXPECT_EQ(totals.max_output_error_bound, std::numeric_limits<float>::infinity());
}

TEST(RiskAccountTest, SumIsNeverBelowTheExactSum) {
  RiskAccount account(1);
  // 2^-30 is lost when it is added to 2^24 reads of 1 with rounding to nearest floats; in doubles
  // 0.1f + 2^-60 is the like.
  const float tiny = 0x1p-70f;
  account.Record(Certified(0.5f), false, 0);
  account.Record(Certified(tiny), false, 0);
  EXPECT_GT(account.totals().sums.tv_sum, 0.5);
}

TEST(RiskAccountTest, OrdersHeadsByTheirLargestBound) {
  RiskAccount account(100);
  account.Record(Certified(0.1f, 0, 1), false, 0);
  account.Record(Certified(0.3f, 1, 0), false, 0);
  account.Record(Certified(0.1f, 2, 2), false, 0);
  account.Record(Certified(0.1f, 2, 2), false, 0);
  const auto heads = account.RiskiestHeads(2);
  ASSERT_EQ(heads.size(), 2u);
  EXPECT_EQ(heads[0].layer, 1);
  EXPECT_EQ(heads[1].layer, 2) << "of two with the same maximum the larger sum comes first";
  EXPECT_EQ(heads[1].sums.read_count, 2);
}

TEST(RiskAccountTest, KeepsHeadsBeyondTheLimitInTheTotals) {
  RiskAccount account(2);
  for (int32_t head = 0; head < 5; ++head) account.Record(Certified(0.1f, 0, head), false, 7);
  EXPECT_EQ(account.RiskiestHeads(16).size(), 2u);
  EXPECT_EQ(account.totals().sums.read_count, 5);
  ASSERT_EQ(account.events().size(), 1u) << "said once";
  EXPECT_EQ(account.events()[0].kind, "HEAD_LIMIT");
  EXPECT_EQ(account.events()[0].time_ms, 7);
}

TEST(RiskAccountTest, TellsAllHeadsThatHaveReadsInTheirOrder) {
  RiskAccount account(100);
  account.Record(Certified(0.1f, 1, 2), false, 0);
  account.Record(Certified(0.3f, 0, 5), false, 0);
  account.Record(Certified(0.2f, 1, 0), false, 0);
  const auto heads = account.AllHeads();
  ASSERT_EQ(heads.size(), 3u);
  EXPECT_EQ(heads[0].query_head, 5);
  EXPECT_EQ(heads[1].query_head, 0);
  EXPECT_EQ(heads[2].query_head, 2);
  EXPECT_EQ(heads[2].layer, 1);
  EXPECT_EQ(heads[2].sums.read_count, 1);
  EXPECT_GE(heads[2].sums.tv_sum, double{0.1f});
}

TEST(RiskAccountTest, KeepsTheWorstReadsWithTheirPlace) {
  RiskAccount account(1000);
  for (int i = 0; i < 100; ++i) {
    ReadCertificate read = Certified(0.001f * static_cast<float>((i * 37) % 100), i, 3);
    read.query_position = 1000 + i;
    account.Record(read, false, 0);
  }
  const auto worst = account.WorstReads();
  ASSERT_EQ(worst.size(), static_cast<size_t>(kWorstReadsMax));
  for (size_t i = 0; i < worst.size(); ++i) {
    EXPECT_FLOAT_EQ(worst[i].first_worst_case_tv, 0.001f * static_cast<float>(99 - i));
    EXPECT_EQ(worst[i].query_position, 1000 + worst[i].layer);
  }
}

TEST(RiskAccountTest, ALoneLargeHeadDoesNotTakeMoreThanTheLimit) {
  RiskAccount account(100);
  account.Record(Certified(0.1f, 0, 8191), false, 0);
  EXPECT_TRUE(account.AllHeads().empty());
  EXPECT_EQ(account.events()[0].kind, "HEAD_LIMIT");
  account.Record(Certified(0.1f, 1023, 99), false, 0);
  EXPECT_EQ(account.AllHeads().size(), 1u);
}

TEST(RiskAccountTest, KeepsTheLatestEvents) {
  RiskAccount account(2);
  for (int64_t i = 0; i < 40; ++i) account.AddEvent(i, "KIND", "m");
  EXPECT_EQ(account.events().size(), static_cast<size_t>(kRiskEventsMax));
  EXPECT_EQ(account.events().back().time_ms, 39);
}

TEST(RiskAccountTest, CountersSaturate) {
  RiskAccount account(2);
  account.RecordFailed(std::numeric_limits<int64_t>::max());
  account.RecordFailed(5);
  EXPECT_EQ(account.totals().failed_read_count, std::numeric_limits<int64_t>::max());
}

}  // namespace
}  // namespace certkv::gate
