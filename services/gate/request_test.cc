#include "services/gate/request.h"

#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/gate/gate_fixture.h"
#include "tests/support/gate_request_fixture.h"

namespace certkv::gate {
namespace {

using ::testing::HasSubstr;

TEST_F(RequestTest, FirstLeaseCarriesThePolicy) {
  const PolicyLease lease = Open(Policy());
  EXPECT_TRUE(ValidatePolicyLease(lease).ok());
  EXPECT_EQ(lease.request, "requests/r");
  EXPECT_EQ(lease.read_mode, ReadMode::kEnforce);
  EXPECT_EQ(lease.tolerances.tv_tolerance, 0.2f);
  EXPECT_EQ(lease.risk_mode, RiskMode::kThreshold);
  EXPECT_EQ(lease.budget_slice, 0);
  EXPECT_EQ(lease.expire_time_ms, kStart + 30'000);
  EXPECT_EQ(lease.policy_version, 1);
  EXPECT_EQ(lease.sequence, 1);
}

TEST_F(RequestTest, CountsABatchOnceHoweverOftenItIsSent) {
  Open(Policy());
  const OwnedBatch batch{.certificates = {Certified(0.125f)}, .failed_read_count = 2};
  for (int i = 0; i < 3; ++i) {
    const auto answer = request_->Report(batch.batch(), policy_, now_ms_);
    ASSERT_TRUE(answer.ok());
    EXPECT_EQ(answer->action, DirectiveAction::kContinue);
    EXPECT_EQ(answer->counted, i == 0);
    EXPECT_TRUE(answer->lease.has_value());
  }
  EXPECT_EQ(request_->Risk(policy_).totals.sums.read_count, 1);
  EXPECT_EQ(request_->Risk(policy_).totals.failed_read_count, 2);
}

TEST_F(RequestTest, RefusesAGapInTheBatchesAndCountsNothing) {
  Open(Policy());
  OwnedBatch batch{.batch_number = 2, .certificates = {Certified(0.125f)}};
  const absl::Status status = request_->Report(batch.batch(), policy_, now_ms_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), "BATCH_GAP");
  EXPECT_THAT(std::string(status.message()), HasSubstr("sent batch 2, expected 1"));
  EXPECT_EQ(request_->Risk(policy_).totals.sums.read_count, 0);
}

TEST_F(RequestTest, NumbersBatchesPerReporter) {
  Open(Policy());
  ASSERT_TRUE(Report({Certified(0.1f)}, 1).ok());
  ASSERT_TRUE(Report({Certified(0.1f)}, 2).ok());
  ASSERT_TRUE(Report({Certified(0.1f)}, 1).ok());
  EXPECT_EQ(request_->Risk(policy_).totals.sums.read_count, 3);
}

TEST_F(RequestTest, RefusesMalformedBatches) {
  Open(Policy());
  const auto reason_after = [this](auto change) {
    OwnedBatch batch;
    change(&batch);
    return ReasonOf(request_->Report(batch.batch(), policy_, now_ms_).status());
  };
  EXPECT_EQ(reason_after([](OwnedBatch* b) { b->reporter_id = 0; }), "REPORT_INVALID");
  EXPECT_EQ(reason_after([](OwnedBatch* b) { b->reporter_id = -1; }), "REPORT_INVALID");
  EXPECT_EQ(reason_after([](OwnedBatch* b) { b->batch_number = 0; }), "REPORT_INVALID");
  EXPECT_EQ(reason_after([](OwnedBatch* b) { b->failed_read_count = -1; }), "REPORT_INVALID");
  EXPECT_EQ(reason_after([](OwnedBatch* b) { b->certificates.resize(65537); }), "REPORT_INVALID");
  EXPECT_EQ(reason_after([](OwnedBatch*) {}), "");
}

TEST_F(RequestTest, LimitsReporters) {
  request_ =
      std::make_unique<Request>("requests/r", "", RequestTerms{}, policy_,
                                Request::Limits{.heads_max = 1, .reporters_max = 2}, now_ms_);
  ASSERT_TRUE(request_->Open({}, policy_, now_ms_).ok());
  ASSERT_TRUE(Report({}, 1).ok());
  ASSERT_TRUE(Report({}, 2).ok());
  EXPECT_EQ(ReasonOf(Report({}, 3).status()), "REPORTER_LIMIT");
}

TEST_F(RequestTest, RenewsALeaseBeforeItEndsUnderTheSameIdWithAHigherSequence) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  const auto same = Report({});
  EXPECT_EQ(same->lease->lease_id, first.lease_id);
  EXPECT_EQ(same->lease->sequence, first.sequence) << "fresh enough";
  now_ms_ += 15'000;
  const auto renewed = Report({});
  EXPECT_EQ(renewed->lease->lease_id, first.lease_id);
  EXPECT_GT(renewed->lease->sequence, first.sequence);
  EXPECT_EQ(renewed->lease->expire_time_ms, now_ms_ + 30'000);
  EXPECT_EQ(renewed->lease->budget_slice, first.budget_slice);
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 1) << "a renewal costs nothing";
}

TEST_F(RequestTest, NeverProlongsAnExpiredLease) {
  const PolicyLease first = Open(CumulativePolicy(10, 0.1));
  now_ms_ = first.expire_time_ms;
  const auto answer = Report({});
  EXPECT_NE(answer->lease->lease_id, first.lease_id);
  EXPECT_EQ(request_->Risk(policy_).budget_committed, 2) << "the unused slice stays spent";
}

TEST_F(RequestTest, SaysHowItReads) {
  Open(Policy(), {std::nullopt, ReadMode::kObserve, "tenant", "model"});
  const RequestRisk risk = request_->Risk(policy_);
  EXPECT_EQ(risk.read_mode, ReadMode::kObserve);
  EXPECT_EQ(risk.tenant, "tenant");
  EXPECT_EQ(risk.model, "model");
}

TEST_F(RequestTest, RefusesToOpenWithOtherTerms) {
  Open(Policy(), {Tolerances{0.1f, 0.05f, 0}, std::nullopt});
  EXPECT_EQ(ReasonOf(request_->Open({}, policy_, now_ms_).status()), "REQUEST_MISMATCH");
  EXPECT_TRUE(request_->Open({Tolerances{0.1f, 0.05f, 0}, std::nullopt}, policy_, now_ms_).ok());
}

TEST_F(RequestTest, AReadOutsideToleranceIsCountedAndForcesExact) {
  Open(Policy());
  const auto answer = Report({Certified(0.1f), Certified(0.21f, 3, 7), Certified(0.5f)});
  EXPECT_EQ(answer->outside_tolerance, 2);
  EXPECT_EQ(answer->action, DirectiveAction::kForceExact);
  EXPECT_EQ(answer->lease->read_mode, ReadMode::kExact);
  EXPECT_THAT(answer->explanation, HasSubstr("layer 3, query head 7"));
  const RequestRisk risk = request_->Risk(policy_);
  EXPECT_TRUE(risk.forced_exact);
  EXPECT_EQ(risk.totals.reads_outside_tolerance, 2);
  EXPECT_EQ(risk.totals.sums.read_count, 3) << "it was served: it is in the sums";
  ASSERT_EQ(risk.events.size(), 1u);
  EXPECT_EQ(risk.events[0].kind, "OUTSIDE_TOLERANCE");
  EXPECT_EQ(Report({Exact(0.1f)})->action, DirectiveAction::kForceExact) << "for good";
}

TEST_F(RequestTest, EveryToleranceCounts) {
  ReadCertificate value = Certified(0.1f);
  value.value_term = 0.11f;
  ReadCertificate output = Certified(0.1f);
  output.output_error_bound = 5;
  ReadCertificate observed = Certified(0.1f);
  observed.outcome = Outcome::kObserved;
  ReadCertificate inexact = Exact(0.5f);
  inexact.worst_case_tv = 0.3f;
  Policy policy;
  policy.tolerances.output_tolerance = 4;
  for (const ReadCertificate& certificate : {value, output, observed, inexact}) {
    batches_.clear();
    Open(policy);
    EXPECT_EQ(Report({certificate})->outside_tolerance, 1) << OutcomeName(certificate.outcome);
  }
}

TEST_F(RequestTest, AnExactReadIsNeverOutside) {
  Policy policy;
  policy.tolerances = {0, 0, 0};
  Open(policy);
  ReadCertificate exact = Exact(1);
  exact.worst_case_tv = 1e-5f;  // what float arithmetic leaves
  EXPECT_EQ(Report({exact})->outside_tolerance, 0);
}

TEST_F(RequestTest, ObservedReadsAreAllowedOnlyWhereTheRequestObserves) {
  Open(Policy(), {std::nullopt, ReadMode::kObserve});
  ReadCertificate observed = Certified(0.9f);
  observed.outcome = Outcome::kObserved;
  const auto answer = Report({observed});
  EXPECT_EQ(answer->outside_tolerance, 0);
  EXPECT_EQ(answer->action, DirectiveAction::kContinue);
  EXPECT_EQ(request_->Risk(policy_).totals.reads_observed, 1);
}

TEST_F(RequestTest, ACertifiedReadIsOutsideWhereTheRequestReadsExact) {
  Open(Policy(), {std::nullopt, ReadMode::kExact});
  EXPECT_EQ(Report({Certified(0.01f)})->outside_tolerance, 1);
}

TEST_F(RequestTest, TightensWhenThePolicyDoes) {
  const PolicyLease first = Open(Policy());
  ASSERT_TRUE(Report({}).ok());
  policy_.tolerances.tv_tolerance = 0.05f;
  policy_.version = 2;
  const auto answer = Report({Certified(0.15f)});  // made under the old lease
  EXPECT_EQ(answer->outside_tolerance, 0);
  EXPECT_EQ(answer->action, DirectiveAction::kTighten);
  EXPECT_EQ(answer->lease->tolerances.tv_tolerance, 0.05f);
  EXPECT_GT(answer->lease->sequence, first.sequence);
  EXPECT_EQ(Report({})->action, DirectiveAction::kContinue) << "said once";
  // When the old lease is long over, the old tolerance is no excuse.
  now_ms_ += 30'000 + kReportGraceMs + 1;
  ASSERT_TRUE(Report({}).ok());
  EXPECT_EQ(Report({Certified(0.15f)})->outside_tolerance, 1);
}

TEST_F(RequestTest, APolicyOfExactReachesOpenRequests) {
  Open(Policy());
  policy_.read_mode = ReadMode::kExact;
  policy_.version = 2;
  EXPECT_EQ(Report({})->lease->read_mode, ReadMode::kExact);
}

TEST_F(RequestTest, AClosedRequestCountsLateReportsAndReleases) {
  Open(Policy());
  request_->Close(now_ms_);
  const auto answer = Report({Certified(0.1f)});
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->action, DirectiveAction::kRelease);
  EXPECT_FALSE(answer->lease.has_value());
  EXPECT_EQ(request_->Risk(policy_).totals.sums.read_count, 1);
  EXPECT_EQ(ReasonOf(request_->Open({}, policy_, now_ms_).status()), "REQUEST_CLOSED");
  EXPECT_EQ(ReasonOf(request_->Decide(Certified(0.1f), policy_, now_ms_).status()),
            "REQUEST_CLOSED");
}

TEST_F(RequestTest, DecideAcceptsWithinToleranceAndCounts) {
  Open(Policy());
  const auto decision = request_->Decide(Certified(0.2f), policy_, now_ms_);
  ASSERT_TRUE(decision.ok());
  EXPECT_TRUE(decision->accepted);
  EXPECT_EQ(request_->Risk(policy_).totals.sums.read_count, 1);
}

TEST_F(RequestTest, DecideNamesTheNextRungAndCountsNothing) {
  Open(Policy());
  ReadCertificate value = Certified(0.1f);
  value.value_term = 0.5f;
  const auto next_rung = [this](ReadCertificate certificate, Rung rung) {
    certificate.rung = rung;
    const auto decision = request_->Decide(certificate, policy_, now_ms_);
    EXPECT_FALSE(decision->accepted);
    EXPECT_FALSE(decision->explanation.empty());
    return decision->next_rung;
  };
  EXPECT_EQ(next_rung(value, Rung::kNone), Rung::kValues);
  EXPECT_EQ(next_rung(value, Rung::kValues), Rung::kKeys);
  // Values read again do not move the softmax: the ladder starts at the keys.
  EXPECT_EQ(next_rung(Certified(0.3f), Rung::kNone), Rung::kKeys);
  EXPECT_EQ(next_rung(Certified(0.3f), Rung::kKeys), Rung::kHead);
  EXPECT_EQ(next_rung(Certified(0.3f), Rung::kHead), Rung::kLayer);
  EXPECT_EQ(next_rung(Certified(0.3f), Rung::kLayer), Rung::kLayer);
  EXPECT_EQ(request_->Risk(policy_).totals.sums.read_count, 0);
  EXPECT_TRUE(request_->Decide(Exact(0.3f), policy_, now_ms_)->accepted);
}

TEST_F(RequestTest, DecideKeepsToTheBudget) {
  Open(CumulativePolicy(1, 0.5));  // the opener's lease has half of it
  int accepted = 0;
  while (request_->Decide(Certified(0.125f), policy_, now_ms_)->accepted) ++accepted;
  EXPECT_EQ(accepted, 4);
  const auto refused = request_->Decide(Certified(0.125f), policy_, now_ms_);
  EXPECT_EQ(refused->next_rung, Rung::kHead);
  EXPECT_THAT(refused->explanation, HasSubstr("does not fit what is left of the budget"));
}

TEST_F(RequestTest, DecideObservesWithoutRefusing) {
  Open(Policy(), {std::nullopt, ReadMode::kObserve});
  EXPECT_TRUE(request_->Decide(Certified(0.9f), policy_, now_ms_)->accepted);
  EXPECT_EQ(request_->Risk(policy_).totals.reads_observed, 1);
}

// Holders with certifier-like accounts, reports that are late or lost, leases that run out: the sum
// of what was served quantized stays within the budget, and gate's committed amount covers it.
TEST_F(RequestTest, CumulativeBudgetHoldsWhateverHoldersDo) {
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(0, 1);
    batches_.clear();
    const double budget = 0.5 + 5 * uniform(generator);
    const PolicyLease opened = Open(CumulativePolicy(budget, 0.05 + 0.5 * uniform(generator)));
    struct Holder {
      int64_t reporter;
      PolicyLease lease;
      std::map<int64_t, double> spent;  // by lease id, as a certifier's accounts
      std::vector<ReadCertificate> unreported;
    };
    std::vector<Holder> holders = {{1, opened, {}, {}}, {2, {}, {}, {}}, {3, {}, {}, {}}};
    int64_t next_reporter = 4;
    double served = 0;
    for (int step = 0; step < 400; ++step) {
      Holder& holder = holders[generator() % holders.size()];
      now_ms_ += static_cast<int64_t>(generator() % 3000);
      const float tv = 0.2f * uniform(generator);
      const double units = std::ceil(double{tv} * 0x1p40) * 0x1p-40;
      const bool may_read = holder.lease.lease_id != 0 && now_ms_ < holder.lease.expire_time_ms &&
                            holder.lease.read_mode == ReadMode::kEnforce;
      const float choice = uniform(generator);
      if (choice < 0.7f && may_read) {
        double& spent = holder.spent[holder.lease.lease_id];
        const bool fits = spent + units <= holder.lease.budget_slice;
        holder.unreported.push_back(fits ? Certified(tv) : Exact(tv));
        if (fits) {
          spent += units;
          served += tv;
        }
      } else if (choice < 0.75f) {
        // The holder dies with what it has not reported; another opens the request in its place.
        const auto lease = request_->Open({}, policy_, now_ms_);
        ASSERT_TRUE(lease.ok());
        holder = {next_reporter++, *lease, {}, {}};
        lease_ids_[holder.reporter] = lease->lease_id;
      } else {
        const auto answer = Report(std::exchange(holder.unreported, {}), holder.reporter);
        ASSERT_TRUE(answer.ok()) << answer.status();
        ASSERT_EQ(answer->outside_tolerance, 0);
        holder.lease = *answer->lease;
      }
      const RequestRisk risk = request_->Risk(policy_);
      ASSERT_LE(served, risk.budget_committed + 1e-9);
      ASSERT_LE(risk.budget_committed, budget);
      ASSERT_FALSE(risk.forced_exact);
    }
    ASSERT_GT(served, 0);
  }
}

}  // namespace
}  // namespace certkv::gate
