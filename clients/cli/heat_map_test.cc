#include "clients/cli/heat_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace certkv::cli {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

gate::v1::RequestRisk RiskOf(int layers, int heads) {
  gate::v1::RequestRisk risk;
  for (int layer = 0; layer < layers; ++layer) {
    for (int head = 0; head < heads; ++head) {
      auto* one = risk.add_heads();
      one->set_layer(layer);
      one->set_query_head(head);
      one->set_max_worst_case_tv(layer == 1 && head == 2 ? 0.7f : 0.001f);
    }
  }
  return risk;
}

TEST(HeatMapTest, ShadesEachHeadByItsLargestBound) {
  const std::string map = HeatMap(RiskOf(2, 4), /*color=*/false, 80);
  EXPECT_THAT(map, HasSubstr("     0 ░░░░\n"));
  EXPECT_THAT(map, HasSubstr("     1 ░░█░\n"));
  EXPECT_THAT(map, Not(HasSubstr("\x1b")));
  EXPECT_THAT(HeatMap(RiskOf(2, 4), /*color=*/true, 80), HasSubstr("\x1b[38;5;196m█"));
}

TEST(HeatMapTest, LeavesHeadsWithoutReadsOpenAndSaysWhatDoesNotFit) {
  gate::v1::RequestRisk risk = RiskOf(1, 40);
  risk.mutable_heads()->DeleteSubrange(5, 1);
  const std::string map = HeatMap(risk, false, 20);
  EXPECT_THAT(map, HasSubstr("░░░░░·░░░░░░░\n"));
  EXPECT_THAT(map, HasSubstr("27 more heads do not fit"));
}

TEST(HeatMapTest, SaysWhenThereIsNothingToSee) {
  EXPECT_EQ(HeatMap({}, false, 80), "no reads yet\n");
}

}  // namespace
}  // namespace certkv::cli
