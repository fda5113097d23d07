#include "services/gate/escalator.h"

#include "gtest/gtest.h"

namespace certkv::gate {
namespace {

constexpr Escalation kTerms{
    .repairs = 3, .window_ms = 1000, .duration_ms = 5000, .heads_of_a_layer = 2};

TEST(EscalatorTest, AHeadIsEscalatedAfterItsRepairsInAWindowAndForAWhile) {
  Escalator escalator;
  EXPECT_FALSE(escalator.AddRepair(1, 2, kTerms, 10'000));
  EXPECT_FALSE(escalator.AddRepair(1, 2, kTerms, 10'500));
  EXPECT_TRUE(escalator.AddRepair(1, 2, kTerms, 10'999));
  const auto rules = escalator.Rules(11'000);
  ASSERT_EQ(rules.size(), 1u);
  EXPECT_EQ(rules[0].layer, 1);
  EXPECT_EQ(rules[0].query_head, 2);
  EXPECT_TRUE(rules[0].exact);
  EXPECT_EQ(escalator.Rules(15'998).size(), 1u);
  EXPECT_TRUE(escalator.Rules(15'999).empty());
  EXPECT_TRUE(escalator.Expire(15'999));
  EXPECT_FALSE(escalator.Expire(15'999));
}

TEST(EscalatorTest, ANewWindowCountsAnew) {
  Escalator escalator;
  escalator.AddRepair(1, 2, kTerms, 10'000);
  escalator.AddRepair(1, 2, kTerms, 10'100);
  EXPECT_FALSE(escalator.AddRepair(1, 2, kTerms, 11'000));
  EXPECT_FALSE(escalator.AddRepair(1, 2, kTerms, 500)) << "a clock that was set back";
}

TEST(EscalatorTest, HeadsCountApart) {
  Escalator escalator;
  for (int32_t head = 0; head < 8; ++head) {
    EXPECT_FALSE(escalator.AddRepair(1, head, kTerms, 10));
    EXPECT_FALSE(escalator.AddRepair(1, head, kTerms, 10));
  }
  EXPECT_TRUE(escalator.Rules(10).empty());
}

TEST(EscalatorTest, ManyHeadsOfALayerEscalateIt) {
  Escalator escalator;
  for (int32_t head = 0; head < 2; ++head) {
    for (int i = 0; i < 3; ++i) escalator.AddRepair(7, head, kTerms, 10);
  }
  const auto rules = escalator.Rules(10);
  ASSERT_EQ(rules.size(), 1u);
  EXPECT_EQ(rules[0].layer, 7);
  EXPECT_EQ(rules[0].query_head, -1);
}

TEST(EscalatorTest, NeverHoldsMoreRulesThanALeaseHasRoomFor) {
  Escalator escalator;
  Escalation terms = kTerms;
  terms.heads_of_a_layer = 1024;
  for (int32_t head = 0; head < 100; ++head) {
    for (int i = 0; i < 3; ++i) escalator.AddRepair(head, head, terms, 10);
    ASSERT_LE(escalator.Rules(10).size(), static_cast<size_t>(kEscalatedMax));
  }
  EXPECT_EQ(escalator.Rules(10).size(), static_cast<size_t>(kEscalatedMax));
}

TEST(EscalatorTest, ZeroRepairsMeanOff) {
  Escalator escalator;
  for (int i = 0; i < 1000; ++i) EXPECT_FALSE(escalator.AddRepair(0, 0, Escalation(), 10));
}

}  // namespace
}  // namespace certkv::gate
