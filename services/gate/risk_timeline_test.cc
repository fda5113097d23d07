#include "services/gate/risk_timeline.h"

#include <gtest/gtest.h>

#include "services/gate/gate_fixture.h"

namespace certkv::gate {
namespace {

int64_t ReadsOf(const RiskTimeline& timeline) {
  int64_t reads = 0;
  for (const RiskTimeline::Bucket& bucket : timeline.buckets()) reads += bucket.reads;
  return reads;
}

TEST(RiskTimelineTest, PutsAReadIntoItsStep) {
  RiskTimeline timeline;
  timeline.Add(Certified(0.1f), 5'000);
  ReadCertificate repaired = Certified(0.05f);
  repaired.first_worst_case_tv = 0.4f;
  repaired.rung = Rung::kKeys;
  repaired.repair_bytes = 100;
  timeline.Add(repaired, 5'000 + RiskTimeline::kFirstBucketMs);
  ASSERT_EQ(timeline.buckets().size(), 2u);
  EXPECT_EQ(timeline.begin_ms(), 5'000);
  EXPECT_EQ(timeline.buckets()[0].repairs, 0u);
  EXPECT_EQ(timeline.buckets()[1].repairs, 1u);
  EXPECT_FLOAT_EQ(timeline.buckets()[1].first_tv_max, 0.4f);
  EXPECT_FLOAT_EQ(timeline.buckets()[1].served_tv_max, 0.05f);
  EXPECT_EQ(timeline.buckets()[1].repair_bytes, 100);
}

TEST(RiskTimelineTest, KeepsEveryReadWhenStepsGetLonger) {
  RiskTimeline timeline;
  timeline.Add(Certified(0.3f), 0);
  for (int64_t i = 1; i < 1000; ++i) timeline.Add(Certified(0.1f), i * 40);
  timeline.Add(Certified(0.2f), int64_t{100} * 86'400'000);
  EXPECT_EQ(ReadsOf(timeline), 1001);
  EXPECT_LE(timeline.buckets().size(), static_cast<size_t>(RiskTimeline::kBucketCountMax));
  EXPECT_FLOAT_EQ(timeline.buckets()[0].served_tv_max, 0.3f);
  EXPECT_FLOAT_EQ(timeline.buckets().back().served_tv_max, 0.2f);
}

TEST(RiskTimelineTest, TakesAClockThatIsSetBack) {
  RiskTimeline timeline;
  timeline.Add(Certified(0.1f), 10'000);
  timeline.Add(Certified(0.2f), 1);
  ASSERT_EQ(timeline.buckets().size(), 1u);
  EXPECT_EQ(ReadsOf(timeline), 2);
}

}  // namespace
}  // namespace certkv::gate
