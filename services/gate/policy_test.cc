#include "services/gate/policy.h"

#include <limits>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/gate/config.h"
#include "services/gate/gate_fixture.h"

namespace certkv::gate {
namespace {

using ::testing::HasSubstr;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(PolicyTest, DefaultIsValid) {
  EXPECT_TRUE(ValidatePolicy(Policy()).ok());
  EXPECT_TRUE(ValidatePolicy(CumulativePolicy(10, 0.1)).ok());
}

TEST(PolicyTest, ValidateNamesTheFieldOutOfRange) {
  const auto message_after = [](auto change) {
    Policy policy = CumulativePolicy(10, 0.1);
    change(&policy);
    const absl::Status status = ValidatePolicy(policy);
    EXPECT_EQ(ReasonOf(status), "POLICY_INVALID");
    return std::string(status.message());
  };
  EXPECT_THAT(message_after([](Policy* p) { p->tolerances.tv_tolerance = 1.5f; }),
              HasSubstr("tv_tolerance is 1.5"));
  EXPECT_THAT(message_after([](Policy* p) { p->tolerances.value_tolerance = -1; }),
              HasSubstr("value_tolerance is -1"));
  EXPECT_THAT(message_after([](Policy* p) { p->lease_duration_ms = 99; }),
              HasSubstr("lease_duration_ms is 99, must be in [100, 3600000]"));
  EXPECT_THAT(message_after([](Policy* p) { p->cumulative_budget = 0; }),
              HasSubstr("cumulative_budget is 0"));
  EXPECT_THAT(message_after([](Policy* p) { p->cumulative_budget = kNan; }),
              HasSubstr("cumulative_budget is nan"));
  EXPECT_THAT(message_after([](Policy* p) { p->cumulative_budget = 1e7; }),
              HasSubstr("cumulative_budget is 1e+07"));
  EXPECT_THAT(message_after([](Policy* p) { p->budget_slice_share = 1.1; }),
              HasSubstr("budget_slice_share is 1.1"));
  EXPECT_THAT(message_after([](Policy* p) { p->failure_probability = 1e-10; }),
              HasSubstr("failure_probability is 1e-10"));
  EXPECT_THAT(message_after([](Policy* p) { p->failure_probability = kNan; }),
              HasSubstr("failure_probability is nan"));
  EXPECT_THAT(message_after([](Policy* p) { p->tenant_budget = -1; }),
              HasSubstr("tenant_budget is -1"));
  EXPECT_THAT(message_after([](Policy* p) { p->tenant_window_ms = 0; }),
              HasSubstr("tenant_window_ms is 0"));
  EXPECT_THAT(message_after([](Policy* p) { p->budget_slice_share = kNan; }),
              HasSubstr("budget_slice_share is nan"));
}

TEST(PolicyTest, NoOutputToleranceIsTheLoosest) {
  const Tolerances none{0.2f, 0.05f, 0};
  const Tolerances some{0.2f, 0.05f, 3};
  EXPECT_TRUE(IsAsTightAs(some, none));
  EXPECT_FALSE(IsAsTightAs(none, some));
  EXPECT_TRUE(IsAsTightAs(none, none));
  EXPECT_EQ(Tightest(none, some).output_tolerance, 3);
  EXPECT_EQ(Tightest(some, none).output_tolerance, 3);
  EXPECT_EQ(Tightest(none, none).output_tolerance, 0);
}

TEST(PolicyTest, RequestsMayOnlyBeTighterUnlessTheyObserve) {
  const Policy policy;  // 0.2, 0.1, none
  const auto reason = [&policy](Tolerances tolerances, std::optional<ReadMode> mode) {
    return ReasonOf(CheckTerms(policy, {tolerances, mode}));
  };
  EXPECT_EQ(reason({0.1f, 0.05f, 0}, std::nullopt), "");
  EXPECT_EQ(reason({0.2f, 0.05f, 7}, ReadMode::kEnforce), "");
  EXPECT_EQ(reason({0.3f, 0.05f, 0}, ReadMode::kEnforce), "TOLERANCE_INVALID");
  EXPECT_EQ(reason({0.1f, 0.11f, 0}, ReadMode::kExact), "TOLERANCE_INVALID");
  EXPECT_EQ(reason({1.0f, 9.0f, 0}, ReadMode::kObserve), "");
  Policy limited;
  limited.tolerances.output_tolerance = 2;
  EXPECT_EQ(ReasonOf(CheckTerms(limited, {Tolerances{0.1f, 0.01f, 0}, std::nullopt})),
            "TOLERANCE_INVALID")
      << "no output tolerance is looser than one of 2";
}

TEST(PolicyTest, APolicyOfExactHoldsForAll) {
  Policy policy;
  policy.read_mode = ReadMode::kExact;
  EXPECT_EQ(EffectiveReadMode(policy, {std::nullopt, ReadMode::kObserve}), ReadMode::kExact);
  policy.read_mode = ReadMode::kObserve;
  EXPECT_EQ(EffectiveReadMode(policy, {std::nullopt, ReadMode::kEnforce}), ReadMode::kEnforce);
  EXPECT_EQ(EffectiveReadMode(policy, {}), ReadMode::kObserve);
}

TEST(PolicyTest, ARequestsOwnToleranceIsCutWhenThePolicyIsTightened) {
  Policy policy;
  policy.tolerances.tv_tolerance = 0.05f;
  const RequestTerms terms{Tolerances{0.1f, 0.01f, 0}, std::nullopt};
  EXPECT_EQ(EffectiveTolerances(policy, terms).tv_tolerance, 0.05f);
  EXPECT_EQ(EffectiveTolerances(policy, terms).value_tolerance, 0.01f);
}

TEST(GateConfigTest, ReadsThePolicyAndRefusesWhatPolicyRefuses) {
  GateConfig config;
  ConfigReader reader;
  reader.AddSection(GateConfigSection(&config));
  ASSERT_TRUE(reader
                  .ReadText("gate.yaml",
                            "gate:\n  tv_tolerance: 0.02\n  risk_mode: cumulative\n"
                            "  cumulative_budget: 3\n  lease_duration: 2s\n")
                  .ok());
  EXPECT_EQ(config.policy.tolerances.tv_tolerance, 0.02f);
  EXPECT_EQ(config.policy.risk_mode, RiskMode::kCumulative);
  EXPECT_EQ(config.policy.cumulative_budget, 3);
  EXPECT_EQ(config.policy.lease_duration_ms, 2000);
  EXPECT_TRUE(ValidatePolicy(config.policy).ok());
  EXPECT_THAT(
      std::string(reader.ReadText("gate.yaml", "gate:\n  tv_tolerance: 1.4\n").message()),
      HasSubstr("gate.yaml:2: gate.tv_tolerance is 1.4, must be in [0, 1]; largest worst_case_tv"));
  EXPECT_THAT(
      std::string(
          reader.ReadText("gate.yaml", "gate: {idle_timeout: 1s, lease_duration: 30s}").message()),
      HasSubstr("must be at least lease_duration"));
}

// The schema's ranges and ValidatePolicy say the same: what the file accepts, the policy accepts.
TEST(GateConfigTest, TheEndsOfAllRangesAreValidPolicies) {
  for (const char* text :
       {"tv_tolerance: 0", "tv_tolerance: 1", "value_tolerance: 0", "value_tolerance: 1e6",
        "output_tolerance: 1e30", "lease_duration: 100ms", "lease_duration: 1h",
        "cumulative_budget: 1e6", "cumulative_budget: 1e-300", "budget_slice_share: 1",
        "failure_probability: 1e-9", "failure_probability: 0.5", "tenant_budget: 1e6",
        "tenant_window: 1s", "tenant_window: 744h"}) {
    GateConfig config;
    ConfigReader reader;
    reader.AddSection(GateConfigSection(&config));
    const absl::Status status = reader.ReadText(
        "gate.yaml", absl::StrCat("gate: {risk_mode: cumulative, idle_timeout: 1h, ", text, "}"));
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(ValidatePolicy(config.policy).ok()) << text;
  }
}

}  // namespace
}  // namespace certkv::gate
