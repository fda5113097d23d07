#include "services/gate/policy_override.h"

#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/gate/config.h"
#include "services/gate/gate_fixture.h"
#include "services/gate/policy_trial.h"
#include "tests/support/gate_request_fixture.h"

namespace certkv::gate {
namespace {

using ::testing::HasSubstr;

TEST(PolicyOverrideTest, RefusesWhatMakesNoSense) {
  const auto reason = [](const PolicyOverride& one) { return ReasonOf(ValidateOverride(one)); };
  EXPECT_EQ(reason({.tenant = "a"}), "POLICY_INVALID") << "changes nothing";
  EXPECT_EQ(reason({.tv_tolerance = 1.5f}), "POLICY_INVALID");
  EXPECT_EQ(reason({.tv_tolerance = std::nanf("")}), "POLICY_INVALID");
  EXPECT_EQ(reason({.query_head = 3, .tv_tolerance = 0.1f}), "POLICY_INVALID") << "no layer";
  EXPECT_EQ(reason({.layer = 1024, .tv_tolerance = 0.1f}), "POLICY_INVALID");
  EXPECT_EQ(reason({.layer = 1, .value_tolerance = 0.1f}), "POLICY_INVALID");
  EXPECT_EQ(reason({.layer = 1, .read_mode = ReadMode::kObserve}), "POLICY_INVALID");
  EXPECT_EQ(reason({.cumulative_budget = 0}), "POLICY_INVALID");
  EXPECT_EQ(reason({.layer = 1, .read_mode = ReadMode::kExact}), "");
  EXPECT_EQ(reason({.layer = 1, .query_head = 2, .tv_tolerance = 0.1f}), "");
  EXPECT_EQ(reason({.layer = 1, .query_head = 2, .skip_tolerance = 0.0f}), "");
  EXPECT_EQ(reason({.skip_tolerance = 1.0f}), "POLICY_INVALID");
  EXPECT_EQ(reason({.skip_tolerance = std::nanf("")}), "POLICY_INVALID");
  EXPECT_EQ(reason({.tenant = "a", .read_mode = ReadMode::kObserve}), "");
}

TEST(PolicyOverrideTest, LimitsTheirNumber) {
  Policy policy;
  policy.overrides.assign(kLayerOverridesMax + 1, {.layer = 1, .tv_tolerance = 0.1f});
  EXPECT_EQ(ReasonOf(ValidatePolicy(policy)), "POLICY_INVALID");
  policy.overrides.assign(kOverridesMax + 1, {.tv_tolerance = 0.1f});
  EXPECT_EQ(ReasonOf(ValidatePolicy(policy)), "POLICY_INVALID");
  policy.overrides.assign(kOverridesMax, {.tv_tolerance = 0.1f});
  EXPECT_TRUE(ValidatePolicy(policy).ok());
}

TEST(PolicyOverrideTest, TheLaterOfTwoHoldsAndOnlyForWhomItConcerns) {
  Policy policy;
  policy.overrides = {{.tenant = "a", .tv_tolerance = 0.1f},
                      {.tenant = "a", .model = "m", .tv_tolerance = 0.3f},
                      {.model = "m", .read_mode = ReadMode::kExact},
                      {.tenant = "b", .layer = 4, .tv_tolerance = 0.05f}};
  EXPECT_EQ(ResolvePolicy(policy, "a", "").tolerances.tv_tolerance, 0.1f);
  EXPECT_EQ(ResolvePolicy(policy, "a", "m").tolerances.tv_tolerance, 0.3f);
  EXPECT_EQ(ResolvePolicy(policy, "a", "m").read_mode, ReadMode::kExact);
  EXPECT_EQ(ResolvePolicy(policy, "c", "").tolerances.tv_tolerance, 0.2f);
  EXPECT_TRUE(ResolvePolicy(policy, "a", "").overrides.empty());
  const auto rules = HeadRulesOf(ResolvePolicy(policy, "b", ""));
  ASSERT_EQ(rules.size(), 1u);
  EXPECT_EQ(rules[0], (HeadRule{.layer = 4, .query_head = -1, .tv_tolerance = 0.05f}));
  policy.tolerances.skip_tolerance = 0.1f;
  policy.overrides = {{.tenant = "a", .skip_tolerance = 0.05f},
                      {.tenant = "a", .layer = 3, .query_head = 1, .skip_tolerance = 0.0f}};
  EXPECT_EQ(ResolvePolicy(policy, "a", "").tolerances.skip_tolerance, 0.05f);
  EXPECT_EQ(ResolvePolicy(policy, "b", "").tolerances.skip_tolerance, 0.1f);
  EXPECT_EQ(HeadRulesOf(ResolvePolicy(policy, "a", "")),
            (std::vector<HeadRule>{{.layer = 3, .query_head = 1, .skip_tolerance = 0.0f}}));
}

TEST(PolicyOverrideTest, RefusesTenantsThatAreNotListedWhenOnlyThoseMayCome) {
  Policy policy;
  policy.only_listed_tenants = true;
  policy.overrides = {{.tenant = "a", .tv_tolerance = 0.1f}};
  const auto reason = [&policy](const std::string& tenant) {
    return ReasonOf(CheckTerms(policy, {std::nullopt, std::nullopt, tenant}));
  };
  EXPECT_EQ(reason("a"), "");
  EXPECT_EQ(reason("b"), "TENANT_UNKNOWN");
  EXPECT_EQ(reason(""), "TENANT_UNKNOWN");
}

TEST(PolicyOverrideTest, AFileListsThem) {
  GateConfig config;
  ConfigReader reader;
  reader.AddSection(GateConfigSection(&config));
  reader.AddList(GateOverridesList(&config));
  const char text[] =
      "gate:\n  escalation_repairs: 5\n"
      "gate_overrides:\n"
      "  - tenant: a\n    tv_tolerance: 0.1\n"
      "  - layer: 3\n    query_head: 5\n    read_mode: exact\n";
  const absl::Status status = reader.ReadText("gate.yaml", text);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.policy.escalation.repairs, 5);
  const std::vector<PolicyOverride> expected = {
      {.tenant = "a", .tv_tolerance = 0.1f},
      {.layer = 3, .query_head = 5, .read_mode = ReadMode::kExact}};
  EXPECT_EQ(config.policy.overrides, expected);
  // What is printed is read back.
  GateConfig again;
  ConfigReader second;
  second.AddSection(GateConfigSection(&again));
  second.AddList(GateOverridesList(&again));
  ASSERT_TRUE(second.ReadText("printed", reader.ToYaml()).ok()) << reader.ToYaml();
  EXPECT_EQ(again.policy.overrides, expected);
  const auto message = [&reader](const char* bad) {
    return std::string(reader.ReadText("gate.yaml", bad).message());
  };
  EXPECT_THAT(message("gate_overrides: 5"), HasSubstr("gate.yaml:1: gate_overrides is 5, must be"));
  EXPECT_THAT(message("gate_overrides: [5]"), HasSubstr("an element of gate_overrides is 5"));
  EXPECT_THAT(message("gate_overrides:\n  - tenat: a\n"), HasSubstr("did you mean tenant"));
  EXPECT_THAT(message("gate_overrides:\n  - tenant: a\n"), HasSubstr("changes nothing"));
}

class RequestOverrideTest : public RequestTest {};

TEST_F(RequestOverrideTest, LeasesCarryRulesOfLayersAndReportsAreJudgedByThem) {
  Policy policy;
  policy.overrides = {{.layer = 3, .tv_tolerance = 0.5f},
                      {.layer = 4, .query_head = 1, .read_mode = ReadMode::kExact},
                      {.tenant = "other", .layer = 5, .tv_tolerance = 0.01f}};
  const PolicyLease lease = Open(policy);
  ASSERT_EQ(lease.head_rules.size(), 2u);
  EXPECT_TRUE(ValidatePolicyLease(lease).ok());
  EXPECT_TRUE(TermsOf(lease, 4, 1).exact);
  EXPECT_FALSE(TermsOf(lease, 4, 2).exact);
  EXPECT_EQ(TermsOf(lease, 3, 7).tolerances.tv_tolerance, 0.5f);
  EXPECT_EQ(TermsOf(lease, 2, 7).tolerances.tv_tolerance, 0.2f);
  EXPECT_EQ(Report({Certified(0.4f, 3, 0), Certified(0.1f, 4, 2)})->outside_tolerance, 0);
  EXPECT_EQ(Report({Certified(0.1f, 4, 1)})->outside_tolerance, 1) << "it should be exact";
}

TEST_F(RequestOverrideTest, ARequestsOwnToleranceIsNeverLoosened) {
  Policy policy;
  policy.overrides = {{.layer = 3, .tv_tolerance = 0.5f}};
  const PolicyLease lease = Open(policy, {Tolerances{0.1f, 0.05f, 0}, std::nullopt});
  EXPECT_EQ(TermsOf(lease, 3, 0).tolerances.tv_tolerance, 0.1f);
}

TEST_F(RequestOverrideTest, RepairsEscalateAHeadForAWhile) {
  Policy policy;
  policy.escalation.repairs = 3;
  const PolicyLease first = Open(policy);
  ReadCertificate repaired = Certified(0.1f, 2, 6);
  repaired.rung = Rung::kKeys;
  repaired.first_worst_case_tv = 0.4f;
  EXPECT_EQ(Report({repaired, repaired})->lease->sequence, first.sequence);
  const auto answer = Report({repaired});
  EXPECT_EQ(LastEvent(), "ESCALATED");
  EXPECT_GT(answer->lease->sequence, first.sequence);
  EXPECT_TRUE(TermsOf(*answer->lease, 2, 6).exact);
  EXPECT_EQ(request_->Decide(Certified(0.01f, 2, 6), policy_, now_ms_)->next_rung, Rung::kHead);
  // Its exact reads are no repairs: they do not prolong it.
  ReadCertificate exact = Exact(0);
  exact.layer = 2;
  exact.query_head = 6;
  now_ms_ += policy.escalation.duration_ms;
  ASSERT_TRUE(Report(std::vector<ReadCertificate>(10, exact)).ok());
  EXPECT_FALSE(TermsOf(*Report({})->lease, 2, 6).exact);
}

TEST(PolicyTrialTest, ReplaysRecordedReadsUnderAnotherPolicy) {
  PolicyTrialSample sample;
  ReadCertificate repaired = Certified(0.01f, 1, 0);
  repaired.first_worst_case_tv = 0.3f;
  repaired.rung = Rung::kHead;
  repaired.repair_bytes = 1000;
  sample.Add("a", "", {Certified(0.05f, 0, 0), Certified(0.15f, 0, 1), repaired});
  Policy policy;
  PolicyTrial trial = sample.Try(policy);
  EXPECT_EQ(trial.read_count, 3);
  EXPECT_EQ(trial.recorded_first, 2);
  EXPECT_EQ(trial.recorded_repaired, 1);
  EXPECT_EQ(trial.recorded_bytes, 1000);
  EXPECT_EQ(trial.tried_first, 2);
  EXPECT_EQ(trial.tried_bytes, 1000);
  EXPECT_EQ(trial.estimated_count, 0) << "the policy it was recorded under";
  policy.tolerances.tv_tolerance = 0.4f;
  EXPECT_EQ(sample.Try(policy).tried_first, 3);
  policy.tolerances.tv_tolerance = 0.1f;
  trial = sample.Try(policy);
  EXPECT_EQ(trial.tried_repaired, 2);
  EXPECT_EQ(trial.tried_bytes, 2000);
  EXPECT_EQ(trial.estimated_count, 1);
  policy.overrides = {{.tenant = "a", .layer = 0, .read_mode = ReadMode::kExact}};
  trial = sample.Try(policy);
  EXPECT_EQ(trial.tried_exact, 2);
  EXPECT_EQ(trial.tried_repaired, 1);
}

TEST(PolicyTrialTest, KeepsTheLatestReads) {
  PolicyTrialSample sample;
  for (int i = 0; i < kSampledReadsMax / kSampledPerBatchMax + 100; ++i) {
    sample.Add("", "", std::vector<ReadCertificate>(1000, Certified(0.1f)));
  }
  EXPECT_EQ(sample.Try(Policy()).read_count, kSampledReadsMax);
}

}  // namespace
}  // namespace certkv::gate
