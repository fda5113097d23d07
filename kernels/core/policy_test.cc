#include "kernels/core/policy.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kFloatMax = std::numeric_limits<float>::max();

TEST(TolerancesTest, DefaultsAndTheEndsOfTheRangesAreValid) {
  EXPECT_TRUE(ValidateTolerances({}).ok());
  EXPECT_TRUE(ValidateTolerances({0, 0, 0}).ok());
  EXPECT_TRUE(ValidateTolerances({1, kFloatMax, kFloatMax}).ok());
}

TEST(TolerancesTest, RefusalNamesTheField) {
  const std::vector<std::pair<const char*, Tolerances>> bad = {
      {"tv_tolerance is -0.1", {.tv_tolerance = -0.1f}},
      {"tv_tolerance is 1.5", {.tv_tolerance = 1.5f}},
      {"tv_tolerance is nan", {.tv_tolerance = kNan}},
      {"value_tolerance is -1", {.value_tolerance = -1}},
      {"value_tolerance is nan", {.value_tolerance = kNan}},
      {"value_tolerance is inf", {.value_tolerance = kInf}},
      {"output_tolerance is -1", {.output_tolerance = -1}},
      {"output_tolerance is nan", {.output_tolerance = kNan}},
      {"output_tolerance is inf", {.output_tolerance = kInf}}};
  for (const auto& [message, tolerances] : bad) {
    const absl::Status status = ValidateTolerances(tolerances);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << message;
    EXPECT_EQ(ReasonOf(status), "TOLERANCE_INVALID");
    EXPECT_THAT(std::string(status.message()), StartsWith(message));
  }
}

PolicyLease ValidLease() {
  PolicyLease lease;
  lease.request = "requests/r1";
  lease.lease_id = 7;
  return lease;
}

TEST(PolicyLeaseTest, RefusalNamesTheField) {
  EXPECT_TRUE(ValidatePolicyLease(ValidLease()).ok());
  const std::vector<std::pair<const char*, std::function<void(PolicyLease&)>>> edits = {
      {"request has 0 bytes", [](PolicyLease& l) { l.request.clear(); }},
      {"request has 257 bytes", [](PolicyLease& l) { l.request = std::string(257, 'r'); }},
      {"id is 0", [](PolicyLease& l) { l.lease_id = 0; }},
      {"read_mode 0", [](PolicyLease& l) { l.read_mode = ReadMode{0}; }},
      {"read_mode 4", [](PolicyLease& l) { l.read_mode = ReadMode{4}; }},
      {"risk_mode 5", [](PolicyLease& l) { l.risk_mode = RiskMode{5}; }},
      {"budget_slice is -1", [](PolicyLease& l) { l.budget_slice = -1; }},
      {"budget_slice is nan", [](PolicyLease& l) { l.budget_slice = kNan; }},
      {"budget_slice is inf", [](PolicyLease& l) { l.budget_slice = kInf; }}};
  for (const auto& [message, apply] : edits) {
    PolicyLease lease = ValidLease();
    apply(lease);
    const absl::Status status = ValidatePolicyLease(lease);
    EXPECT_EQ(ReasonOf(status), "POLICY_LEASE_INVALID") << message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  PolicyLease lease = ValidLease();
  lease.tolerances.tv_tolerance = 2;
  EXPECT_EQ(ReasonOf(ValidatePolicyLease(lease)), "TOLERANCE_INVALID");
}

ReadCertificate GoodCertificate() {
  ReadCertificate certificate;
  certificate.worst_case_tv = 0.2f;
  certificate.value_term = 0.5f;
  certificate.value_radius = 10;
  certificate.output_error_bound = 4.5f;
  return certificate;
}

TEST(MeetsTolerancesTest, LimitsAreInclusive) {
  const Tolerances tolerances = {0.2f, 0.05f, 4.5f};
  EXPECT_TRUE(MeetsTolerances(GoodCertificate(), tolerances));
  ReadCertificate tv = GoodCertificate();
  tv.worst_case_tv = std::nextafter(0.2f, 1.0f);
  EXPECT_FALSE(MeetsTolerances(tv, tolerances));
  ReadCertificate output = GoodCertificate();
  output.output_error_bound = std::nextafter(4.5f, 5.0f);
  EXPECT_FALSE(MeetsTolerances(output, tolerances));
  ReadCertificate value = GoodCertificate();
  value.value_term = 0.501f;
  EXPECT_FALSE(MeetsTolerances(value, tolerances));
}

TEST(MeetsTolerancesTest, NanNeverMeetsALimit) {
  const Tolerances tolerances = {1, kFloatMax, kFloatMax};
  ReadCertificate tv = GoodCertificate();
  tv.worst_case_tv = kNan;
  EXPECT_FALSE(MeetsTolerances(tv, tolerances));
  ReadCertificate term = GoodCertificate();
  term.value_term = kNan;
  EXPECT_FALSE(MeetsTolerances(term, tolerances));
  ReadCertificate radius = GoodCertificate();
  radius.value_radius = kNan;
  EXPECT_FALSE(MeetsTolerances(radius, tolerances));
  ReadCertificate output = GoodCertificate();
  output.output_error_bound = kNan;
  EXPECT_FALSE(MeetsTolerances(output, tolerances));
}

TEST(MeetsTolerancesTest, InfinityNeverMeetsALimit) {
  const Tolerances tolerances = {1, kFloatMax, kFloatMax};
  ReadCertificate output = GoodCertificate();
  output.output_error_bound = kInf;
  EXPECT_FALSE(MeetsTolerances(output, tolerances));
  for (const float radius : {10.0f, kFloatMax, kInf}) {
    ReadCertificate term = GoodCertificate();
    term.value_term = kInf;
    term.value_radius = radius;
    EXPECT_FALSE(MeetsTolerances(term, tolerances)) << radius;
  }
  ReadCertificate radius = GoodCertificate();
  radius.value_radius = kInf;
  EXPECT_FALSE(MeetsTolerances(radius, tolerances)) << "says nothing about the values' scale";
}

TEST(MeetsTolerancesTest, OnlyAZeroTermMeetsAZeroRadius) {
  ReadCertificate certificate = GoodCertificate();
  certificate.value_radius = 0;
  EXPECT_FALSE(MeetsValueTolerance(certificate, {}));
  certificate.value_term = 0;
  EXPECT_TRUE(MeetsValueTolerance(certificate, {}));
  certificate.value_radius = kInf;
  EXPECT_TRUE(MeetsValueTolerance(certificate, {}));
}

TEST(MeetsTolerancesTest, ZeroOutputToleranceIsNoLimit) {
  ReadCertificate certificate = GoodCertificate();
  certificate.output_error_bound = kInf;
  EXPECT_TRUE(MeetsOutputTolerance(certificate, {.output_tolerance = 0}));
  EXPECT_FALSE(MeetsOutputTolerance(certificate, {.output_tolerance = 1e30f}));
}

TEST(MeetsTolerancesTest, UntouchedCertificateMeetsNothing) {
  EXPECT_FALSE(MeetsTolerances(ReadCertificate{}, Tolerances{}));
}

TEST(FailureShareTest, IsASmallPartOfTheSliceAndAtLeastAUnit) {
  for (const double slice : {1.0, 0.3, 5e-7, 1e-9}) {
    const double share = FailureShare(slice);
    EXPECT_GE(share, 0x1p-40) << slice;
    EXPECT_LE(share, std::max(slice * 0x1p-16, 0x1p-40)) << slice;
    EXPECT_GE(share, slice * 0x1p-16 * (1 - 0x1p-20)) << slice;
  }
  for (const double none : {0.0, 0x1p-41, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(FailureShare(none), 0) << none;
  }
}

TEST(PolicyNamesTest, UnknownValuesAreMarked) {
  EXPECT_STREQ(ReadModeName(ReadMode::kObserve), "OBSERVE");
  EXPECT_STREQ(RiskModeName(RiskMode::kCumulative), "CUMULATIVE");
  EXPECT_STREQ(RiskModeName(RiskMode::kUnion), "UNION");
  EXPECT_STREQ(RiskModeName(RiskMode::kAnytime), "ANYTIME");
  EXPECT_STREQ(RungName(Rung::kLayer), "layer");
  EXPECT_STREQ(OutcomeName(Outcome::kExact), "exact");
  EXPECT_STREQ(RungName(Rung{6}), "?");
  EXPECT_STREQ(OutcomeName(Outcome{0}), "?");
}

TEST(PolicyLeaseTest, OfSeveralRulesTheStrictestHolds) {
  PolicyLease lease;
  lease.tolerances.tv_tolerance = 0.2f;
  lease.head_rules = {{.layer = 1, .tv_tolerance = 0.4f},
                      {.layer = 1, .query_head = 2, .tv_tolerance = 0.3f},
                      {.layer = 2, .query_head = 0, .exact = true}};
  EXPECT_EQ(TermsOf(lease, 0, 0).tolerances.tv_tolerance, 0.2f);
  EXPECT_EQ(TermsOf(lease, 1, 0).tolerances.tv_tolerance, 0.4f);
  EXPECT_EQ(TermsOf(lease, 1, 2).tolerances.tv_tolerance, 0.3f);
  EXPECT_TRUE(TermsOf(lease, 2, 0).exact);
  EXPECT_FALSE(TermsOf(lease, 2, 1).exact);
  lease.read_mode = ReadMode::kExact;
  EXPECT_TRUE(TermsOf(lease, 0, 0).exact);
}

TEST(PolicyLeaseTest, RefusesRulesOutOfRangeAndTooMany) {
  PolicyLease lease;
  lease.request = "requests/r";
  lease.lease_id = 1;
  const auto reason = [&lease](std::vector<HeadRule> rules) {
    lease.head_rules = std::move(rules);
    return ReasonOf(ValidatePolicyLease(lease));
  };
  EXPECT_EQ(reason({{.layer = 5, .tv_tolerance = 1}}), "");
  EXPECT_EQ(reason({{.layer = -1}}), "POLICY_LEASE_INVALID");
  EXPECT_EQ(reason({{.layer = 1 << 20}}), "POLICY_LEASE_INVALID");
  EXPECT_EQ(reason({{.query_head = -2}}), "POLICY_LEASE_INVALID");
  EXPECT_EQ(reason({{.tv_tolerance = 1.5f}}), "POLICY_LEASE_INVALID");
  EXPECT_EQ(reason(std::vector<HeadRule>(kHeadRulesMax + 1)), "POLICY_LEASE_INVALID");
}

}  // namespace
}  // namespace certkv
