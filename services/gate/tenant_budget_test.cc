#include "services/gate/tenant_budget.h"

#include <memory>

#include "gtest/gtest.h"
#include "services/gate/budget.h"
#include "services/gate/budget_units.h"
#include "services/gate/policy.h"

namespace certkv::gate {
namespace {

constexpr int64_t kOne = int64_t{1} << 40;

TEST(TenantBudgetTest, GrantsUpToItsLimitAndNoMore) {
  TenantBudget tenant(2.5);
  EXPECT_EQ(tenant.Take(kOne, 1).units, kOne);
  EXPECT_EQ(tenant.Take(kOne, 1).units, kOne);
  EXPECT_EQ(tenant.Take(kOne, kOne).units, 0) << "a half is left, one was asked";
  EXPECT_EQ(tenant.Take(kOne, 1).units, kOne / 2);
  EXPECT_EQ(tenant.Take(1, 1).units, 0);
  EXPECT_EQ(tenant.committed(), 2.5);
}

TEST(TenantBudgetTest, NoLimitGrantsEverythingAndStillCounts) {
  TenantBudget tenant(0);
  EXPECT_EQ(tenant.limit(), 0);
  EXPECT_EQ(tenant.Take(1000 * kOne, 1).units, 1000 * kOne);
  EXPECT_EQ(tenant.committed(), 1000);
}

TEST(TenantBudgetTest, AWindowNeverHasMoreThanItsLimit) {
  TenantBudget tenant(1);
  const TenantBudget::Grant old = tenant.Take(kOne, 1);
  tenant.BeginWindow();
  EXPECT_EQ(tenant.Take(kOne, 1).units, kOne);
  tenant.GiveBack(old);
  EXPECT_EQ(tenant.Take(1, 1).units, 0) << "it was taken from another window";
}

TEST(TenantBudgetTest, WhatIsGivenBackIsGrantedAgain) {
  TenantBudget tenant(1);
  const TenantBudget::Grant grant = tenant.Take(kOne, 1);
  tenant.GiveBack({grant.units / 4, grant.window});
  EXPECT_EQ(tenant.Take(kOne, 1).units, kOne / 4);
}

TEST(TenantBudgetTest, ALowerLimitLeavesNothingUntilItIsMet) {
  TenantBudget tenant(4);
  tenant.Take(3 * kOne, 1);
  tenant.SetLimit(2);
  EXPECT_EQ(tenant.left_units(), 0);
  EXPECT_EQ(tenant.Take(1, 1).units, 0);
  tenant.SetLimit(3.5);
  EXPECT_EQ(tenant.left_units(), kOne / 2);
}

TEST(TenantBudgetTest, ChargesNeverOverflow) {
  TenantBudget tenant(1);
  for (int i = 0; i < 3; ++i) tenant.Charge(kUnitsMax);
  EXPECT_EQ(tenant.left_units(), 0);
}

TEST(TenantBudgetTest, RequestsShareItAndReturnToIt) {
  const auto tenant = std::make_shared<TenantBudget>(1.0);
  Budget first(10, 0.06, SliceSchedule::kShare, tenant);
  Budget second(10, 0.06, SliceSchedule::kShare, tenant);
  const Slice slice = first.GiveSlice();
  EXPECT_EQ(slice.amount(), ToAmount(LimitUnits(10 * 0.06)));
  EXPECT_LE(second.GiveSlice().amount(), 0.4 + 1e-9) << "what the tenant has left";
  EXPECT_FALSE(first.HasSlice());
  EXPECT_FALSE(second.Decide(0.01)) << "the tenant has nothing left";
  ASSERT_TRUE(first.ReturnSlice(slice, SpentUnits(0.25)));
  EXPECT_NEAR(tenant->committed(), 0.65, 1e-9);
  EXPECT_TRUE(second.Decide(0.25));
  EXPECT_FALSE(second.Decide(0.25));
}

TEST(TenantBudgetTest, ExactReadsAndOverrunsAreChargedBeyondTheLimit) {
  const auto tenant = std::make_shared<TenantBudget>(0.5);
  Budget budget(10, 0.01, SliceSchedule::kShare, tenant);
  budget.GiveSlice();
  budget.ReportExact(0.5);
  EXPECT_NEAR(tenant->committed(), 0.6, 1e-9);
  budget.ReportCertified(0.25);  // of which 0.1 was in the slice
  EXPECT_NEAR(tenant->committed(), 0.75, 1e-9);
}

}  // namespace
}  // namespace certkv::gate
