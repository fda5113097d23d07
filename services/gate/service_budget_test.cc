// Budgets and risk over the wire.
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "tests/support/gate_service_fixture.h"

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

class GateRiskTest : public GateServiceTest {};

TEST_F(GateRiskTest, TellsAllHeadsAndTheWorstReads) {
  Open("a");
  std::vector<ReadCertificate> reads;
  for (int32_t layer = 0; layer < 5; ++layer) {
    for (int32_t head = 0; head < 6; ++head) {
      reads.push_back(gate::Certified(0.005f * static_cast<float>(layer * 6 + head), layer, head));
      reads.back().query_position = 100 + layer;
    }
  }
  ReportCall call(stub_.get());
  v1::ReportResponse response;
  ASSERT_TRUE(call.Exchange(Batch("a", 1, reads), &response));
  EXPECT_EQ(Risk("a").heads_size(), 16);
  v1::GetRequestRiskRequest request;
  request.set_request("requests/a");
  request.set_all_heads(true);
  v1::RequestRisk risk;
  ASSERT_TRUE(Call(&v1::Gate::Stub::GetRequestRisk, request, &risk).ok());
  ASSERT_EQ(risk.heads_size(), 30);
  EXPECT_EQ(risk.heads(29).layer(), 4);
  EXPECT_EQ(risk.heads(29).query_head(), 5);
  ASSERT_EQ(risk.worst_reads_size(), 16);
  EXPECT_EQ(risk.worst_reads(0).layer(), 4);
  EXPECT_EQ(risk.worst_reads(0).query_head(), 5);
  EXPECT_EQ(risk.worst_reads(0).query_position(), 104);
  EXPECT_EQ(risk.worst_reads(0).rung(), type::RUNG_NONE);
  EXPECT_EQ(risk.worst_reads(0).outcome(), type::OUTCOME_CERTIFIED);
}

TEST_F(GateRiskTest, RefusesListsOfUnknownOrderOrFilter) {
  const auto reason = [this](const v1::ListRequestRisksRequest& request) {
    v1::ListRequestRisksResponse page;
    return ReasonOf(Call(&v1::Gate::Stub::ListRequestRisks, request, &page));
  };
  v1::ListRequestRisksRequest request;
  request.set_order(static_cast<v1::RiskOrder>(99));
  EXPECT_EQ(reason(request), "FILTER_INVALID");
  request.set_order(v1::RISK_ORDER_SUM);
  EXPECT_EQ(reason(request), "");
  request.set_risk_score_min(-1);
  EXPECT_EQ(reason(request), "FILTER_INVALID");
  request.clear_risk_score_min();
  request.set_page_token("1.0.0.requests/a");
  EXPECT_EQ(reason(request), "PAGE_TOKEN_INVALID");
}

// Back-pressure: changes that a watcher does not take are not queued for it; it gets the latest.
TEST_F(GateRiskTest, AWatcherThatDoesNotReadIsToldTheLatestWhenItDoes) {
  Open("a");
  grpc::ClientContext context;
  v1::WatchRequestRiskRequest request;
  request.set_request("requests/a");
  auto reader = stub_->WatchRequestRisk(&context, request);
  v1::RequestRisk risk;
  ASSERT_TRUE(reader->Read(&risk));
  ReportCall call(stub_.get());
  v1::ReportResponse response;
  constexpr int64_t kBatches = 2000;
  for (int64_t number = 1; number <= kBatches; ++number) {
    ASSERT_TRUE(call.Exchange(Batch("a", number, {gate::Certified(0.1f)}), &response));
  }
  int message_count = 0;
  do {
    ASSERT_TRUE(reader->Read(&risk));
    ++message_count;
  } while (risk.read_count() < kBatches);
  EXPECT_LT(message_count, 100);
  context.TryCancel();
}

}  // namespace
}  // namespace certkv
