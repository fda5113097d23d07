// Budgets over the wire.
#include <limits>

#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/gate/service_fixture.h"

namespace certkv {
namespace {

namespace v1 = gate::v1;

class GateBudgetTest : public GateServiceTest {};

TEST_F(GateBudgetTest, TakesSlicesBackAndRefusesMalformedReturns) {
  v1::Policy policy;
  ASSERT_TRUE(Call(&v1::Gate::Stub::GetPolicy, v1::GetPolicyRequest(), &policy).ok());
  policy.set_risk_mode(type::RISK_MODE_ANYTIME);
  policy.set_failure_probability(0.01);
  v1::UpdatePolicyRequest update;
  *update.mutable_policy() = policy;
  ASSERT_TRUE(Call(&v1::Gate::Stub::UpdatePolicy, update, &policy).ok());
  EXPECT_EQ(policy.failure_probability(), 0.01);
  const type::PolicyLease lease = Open("a");
  EXPECT_EQ(lease.risk_mode(), type::RISK_MODE_ANYTIME);
  EXPECT_EQ(Risk("a").budget_committed(), lease.budget_slice());
  const auto reason_of = [&](double spent, int count) {
    v1::ReportRequest batch = Batch("a", 1, {});
    for (int i = 0; i < count; ++i) {
      batch.add_returned_slices()->set_lease_id(lease.lease_id());
      batch.mutable_returned_slices(i)->set_spent(spent);
    }
    ReportCall call(stub_.get());
    v1::ReportResponse response;
    call.Exchange(batch, &response);
    return ReasonOf(call.End());
  };
  EXPECT_EQ(reason_of(-1, 1), "REPORT_INVALID");
  EXPECT_EQ(reason_of(std::numeric_limits<double>::quiet_NaN(), 1), "REPORT_INVALID");
  EXPECT_EQ(reason_of(0, 2), "REPORT_INVALID") << "one lease twice";
  v1::ReportRequest batch = Batch("a", 1, {gate::Certified(0.125f)});
  batch.set_lease_id(lease.lease_id());
  batch.add_returned_slices()->set_lease_id(lease.lease_id());
  batch.mutable_returned_slices(0)->set_spent(0.125);
  batch.set_is_last(true);
  ReportCall call(stub_.get());
  v1::ReportResponse response;
  ASSERT_TRUE(call.Exchange(batch, &response));
  EXPECT_FALSE(response.has_lease());
  const v1::RequestRisk risk = Risk("a");
  EXPECT_EQ(risk.budget_committed(), 0.125);
  EXPECT_EQ(risk.budget_left(), risk.budget() - 0.125);
  EXPECT_GT(risk.loss_bound(), 0.125);
  EXPECT_EQ(risk.read_mode(), type::READ_MODE_ENFORCE);
}

}  // namespace
}  // namespace certkv
