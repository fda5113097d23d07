// Budgets, slices and returns of one request.
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "services/gate/gate_fixture.h"
#include "services/gate/request.h"
#include "tests/support/gate_request_fixture.h"

namespace certkv::gate {
namespace {

using ::testing::HasSubstr;

class RequestBudgetTest : public RequestTest {};

TEST_F(RequestBudgetTest, GivesTheNextSliceWhenTheLastIsReportedUsed) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  std::vector<ReadCertificate> reads(8, Certified(0.1f));
  EXPECT_EQ(Report(reads)->lease->lease_id, first.lease_id);
  const auto answer = Report({Certified(0.15f)});  // 0.95 of 1
  EXPECT_NE(answer->lease->lease_id, first.lease_id);
  EXPECT_EQ(answer->lease->budget_slice, 1);
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 2);
}

TEST_F(RequestBudgetTest, GivesTheNextSliceWhenAReadDidNotFitTheLast) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.02));  // slices of 0.2
  // 0.15 leaves 0.05; a read of 0.1 is then exact although it was within tolerance.
  const auto answer = Report({Certified(0.15f), Exact(0.1f)});
  EXPECT_NE(answer->lease->lease_id, first.lease_id);
  // An exact read that would have fitted was exact for another reason: no new slice.
  const auto next = Report({Exact(0.1f)});
  EXPECT_EQ(next->lease->lease_id, answer->lease->lease_id);
  // One whose first read was out of tolerance neither.
  const auto last = Report({Exact(0.9f)});
  EXPECT_EQ(last->lease->lease_id, answer->lease->lease_id);
}

TEST_F(RequestBudgetTest, ForcesExactWhenTheBudgetIsUsedUp) {
  Open(CumulativePolicy(1, 0.5));
  ASSERT_EQ(Report(std::vector<ReadCertificate>(3, Certified(0.16f)))->action,
            DirectiveAction::kContinue);
  const auto answer = Report(std::vector<ReadCertificate>(3, Certified(0.16f)));
  EXPECT_EQ(answer->action, DirectiveAction::kForceExact);
  EXPECT_EQ(answer->lease->read_mode, ReadMode::kExact);
  EXPECT_THAT(answer->explanation, HasSubstr("the budget of 1 is used up"));
  EXPECT_EQ(LastEvent(), "BUDGET_EXHAUSTED");
  // It stays so, and the lease does not change with every report.
  const auto again = Report({Exact(0.1f)});
  EXPECT_EQ(again->action, DirectiveAction::kForceExact);
  EXPECT_EQ(again->lease->sequence, answer->lease->sequence);
  EXPECT_EQ(request_->Risk(policy_).events.size(), 1u);
}

TEST_F(RequestBudgetTest, EveryOpenerGetsItsOwnSlice) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  const auto second = request_->Open({}, policy_, now_ms_);
  ASSERT_TRUE(second.ok());
  EXPECT_NE(second->lease_id, first.lease_id);
  EXPECT_EQ(second->budget_slice, 1);
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 2);
  lease_ids_ = {{1, second->lease_id}, {2, first.lease_id}};
  EXPECT_EQ(Report({}, 1)->lease->lease_id, second->lease_id);
  EXPECT_EQ(Report({}, 2)->lease->lease_id, first.lease_id);
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 2);
}

TEST_F(RequestBudgetTest, AReporterThatNamesNoLeaseGetsOneOfItsOwn) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  EXPECT_NE(Report({}, 7)->lease->lease_id, first.lease_id);
  EXPECT_EQ(Report({}, 1)->lease->lease_id, first.lease_id) << "the opener's stays the opener's";
}

TEST_F(RequestBudgetTest, TwoReportersNeverShareASlice) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  EXPECT_EQ(Report({}, 1)->lease->lease_id, first.lease_id);
  lease_ids_[2] = first.lease_id;
  EXPECT_NE(Report({}, 2)->lease->lease_id, first.lease_id);
}

TEST_F(RequestBudgetTest, GivesLeasesWithoutASliceWhenNothingIsLeft) {
  Open(CumulativePolicy(1, 1));
  const auto lease = request_->Open({}, policy_, now_ms_);
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(lease->budget_slice, 0) << "reads under it are exact";
  EXPECT_EQ(lease->risk_mode, RiskMode::kCumulative);
}

TEST_F(RequestBudgetTest, AReturnedSliceIsGivenAnewAndTheAnswerHasANewLease) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  OwnedBatch batch{.batch_number = 1,
                   .lease_id = first.lease_id,
                   .certificates = {Certified(0.125f)},
                   .returned = {{first.lease_id, SpentUnits(0.25)}}};
  const auto answer = request_->Report(batch.batch(), policy_, now_ms_);
  ASSERT_TRUE(answer.ok());
  EXPECT_NE(answer->lease->lease_id, first.lease_id);
  EXPECT_EQ(answer->lease->budget_slice, 1);
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 1.25);
  // Sent again, it gives nothing back twice.
  EXPECT_FALSE(request_->Report(batch.batch(), policy_, now_ms_)->counted);
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 1.25);
}

TEST_F(RequestBudgetTest, OnlyTheHolderOfASliceReturnsItAndOnlyOnce) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  ASSERT_TRUE(Report({}, 1).ok());
  OwnedBatch other{.reporter_id = 2, .returned = {{first.lease_id, 0}}};
  ASSERT_TRUE(request_->Report(other.batch(), policy_, now_ms_).ok());
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 2) << "and it got a slice of its own";
  for (int64_t number = 2; number <= 3; ++number) {
    OwnedBatch mine{.batch_number = number, .returned = {{first.lease_id, 0}}, .is_last = true};
    ASSERT_TRUE(request_->Report(mine.batch(), policy_, now_ms_).ok());
    EXPECT_EQ(request_->Risk(policy_).budget_committed, 1);
  }
}

TEST_F(RequestBudgetTest, TheLastBatchIsAnsweredWithoutALease) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  OwnedBatch batch{.lease_id = first.lease_id, .returned = {{first.lease_id, 0}}, .is_last = true};
  const auto answer = request_->Report(batch.batch(), policy_, now_ms_);
  ASSERT_TRUE(answer.ok());
  EXPECT_FALSE(answer->lease.has_value());
  EXPECT_EQ(answer->action, DirectiveAction::kContinue);
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 0);
}

TEST_F(RequestBudgetTest, AReturnOfMoreThanTheSliceIsAnEventAndGivesNothingBack) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  OwnedBatch batch{.lease_id = first.lease_id, .returned = {{first.lease_id, SpentUnits(1) + 1}}};
  ASSERT_TRUE(request_->Report(batch.batch(), policy_, now_ms_).ok());
  EXPECT_EQ(LastEvent(), "SLICE_OVERSPENT");
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 2);
}

TEST_F(RequestBudgetTest, AnytimeLeasesSlicesOfTheSumThatKeepsLossesBelowTheLimit) {
  Policy policy = CumulativePolicy(10, 0.1);
  policy.risk_mode = RiskMode::kAnytime;
  policy.failure_probability = 0.01;
  const PolicyLease lease = Open(policy);
  EXPECT_EQ(lease.risk_mode, RiskMode::kAnytime);
  const RequestRisk before = request_->Risk(policy_);
  EXPECT_LT(before.budget, 6.1) << "P(Poisson(6) >= 10) is over 0.01";
  EXPECT_GT(before.budget, 2.5);
  EXPECT_NEAR(lease.budget_slice, before.budget / 10, 1e-9);
  ASSERT_TRUE(Report({Certified(0.2f)}).ok());
  const RequestRisk risk = request_->Risk(policy_);
  EXPECT_GT(risk.loss_bound, before.loss_bound);
  EXPECT_LT(risk.loss_bound, 10);
}

TEST_F(RequestBudgetTest, UnionChargesFailureProbabilityAndDeterministicReadsNothing) {
  Policy policy;
  policy.risk_mode = RiskMode::kUnion;
  policy.failure_probability = 1e-6;
  const PolicyLease lease = Open(policy);
  EXPECT_LE(lease.budget_slice, 0.5e-6);
  EXPECT_GT(lease.budget_slice, 0.4e-6);
  EXPECT_EQ(Report(std::vector<ReadCertificate>(1000, Certified(0.2f)))->action,
            DirectiveAction::kContinue);
  ReadCertificate may_fail = Certified(0.1f);
  may_fail.failure_probability = 0.4e-6f;
  EXPECT_EQ(Report({may_fail})->action, DirectiveAction::kContinue);
  EXPECT_FALSE(request_->Risk(policy_).forced_exact);
  EXPECT_GE(request_->Risk(policy_).totals.failure_probability_sum, 0.4e-6);
  EXPECT_EQ(Report({may_fail, may_fail, may_fail})->action, DirectiveAction::kForceExact);
  EXPECT_EQ(LastEvent(), "BUDGET_OVERRUN");
}

TEST_F(RequestBudgetTest, UnionChargesAnExactReadWhatItHadTaken) {
  Policy policy;
  policy.risk_mode = RiskMode::kUnion;
  policy.failure_probability = 1e-6;
  policy.tolerances.tv_tolerance = 0;  // which float arithmetic does not meet
  Open(policy);
  ReadCertificate exact = Certified(1e-6f);
  exact.outcome = Outcome::kExact;
  exact.rung = Rung::kHead;
  exact.failure_probability = 0x1p-22f;
  EXPECT_TRUE(request_->Decide(exact, policy_, now_ms_)->accepted);
  EXPECT_EQ(Report({exact})->outside_tolerance, 0);
  EXPECT_EQ(Report({exact})->action, DirectiveAction::kContinue);
  EXPECT_EQ(request_->Risk(policy_).totals.failure_probability_sum, 3 * 0x1p-22);
}

TEST_F(RequestBudgetTest, AReadThatMayFailIsOutsideEveryOtherMode) {
  ReadCertificate may_fail = Certified(0.1f);
  may_fail.failure_probability = 1e-9f;
  for (const RiskMode mode : {RiskMode::kThreshold, RiskMode::kCumulative, RiskMode::kAnytime}) {
    Policy policy = CumulativePolicy(10, 0.1);
    policy.risk_mode = mode;
    batches_.clear();
    Open(policy);
    const auto decision = request_->Decide(may_fail, policy_, now_ms_);
    EXPECT_FALSE(decision->accepted) << RiskModeName(mode);
    EXPECT_EQ(decision->next_rung, Rung::kHead);
    EXPECT_EQ(Report({may_fail})->outside_tolerance, 1) << RiskModeName(mode);
  }
}

TEST_F(RequestBudgetTest, AnOverrunOfTheSlicesForcesExact) {
  Open(CumulativePolicy(10, 0.01));  // slices of 0.1
  const auto answer = Report({Certified(0.08f), Certified(0.08f)});
  EXPECT_EQ(answer->action, DirectiveAction::kForceExact);
  EXPECT_EQ(LastEvent(), "BUDGET_OVERRUN");
  EXPECT_GE(request_->Risk(policy_).budget_committed, 2 * double{0.08f});
}

}  // namespace
}  // namespace certkv::gate
