#include "services/gate/policy.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/bounds/risk_budget.h"
#include "kernels/core/status.h"

namespace certkv::gate {
namespace {

absl::Status Invalid(absl::string_view field, const absl::AlphaNum& seen, absl::string_view range) {
  return MakeError(absl::StatusCode::kInvalidArgument, "POLICY_INVALID",
                   absl::StrCat("policy's ", field, " is ", seen, ", must be ", range));
}

// "tv 0.2, value 0.1, output none"
std::string Describe(const Tolerances& tolerances) {
  return absl::StrCat(
      "tv ", tolerances.tv_tolerance, ", value ", tolerances.value_tolerance, ", output ",
      tolerances.output_tolerance == 0 ? "none" : absl::StrCat(tolerances.output_tolerance));
}

}  // namespace

absl::Status ValidatePolicy(const Policy& policy) {
  if (const absl::Status status = ValidateTolerances(policy.tolerances); !status.ok()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "POLICY_INVALID",
                     absl::StrCat("policy's ", status.message()));
  }
  if (!(policy.lease_duration_ms >= kLeaseDurationMinMs &&
        policy.lease_duration_ms <= kLeaseDurationMaxMs)) {
    return Invalid("lease_duration_ms", policy.lease_duration_ms,
                   absl::StrCat("in [", kLeaseDurationMinMs, ", ", kLeaseDurationMaxMs, "]"));
  }
  if (!(policy.failure_probability >= kFailureProbabilityMin &&
        policy.failure_probability <= kFailureProbabilityMax)) {
    return Invalid("failure_probability", policy.failure_probability,
                   absl::StrCat("in [", kFailureProbabilityMin, ", ", kFailureProbabilityMax, "]"));
  }
  if (!(policy.tenant_budget >= 0 && policy.tenant_budget <= kBudgetMax)) {
    return Invalid("tenant_budget", policy.tenant_budget,
                   absl::StrCat("in [0, ", kBudgetMax, "] (0 = no limit)"));
  }
  if (!(policy.tenant_window_ms >= kTenantWindowMinMs &&
        policy.tenant_window_ms <= kTenantWindowMaxMs)) {
    return Invalid("tenant_window_ms", policy.tenant_window_ms,
                   absl::StrCat("in [", kTenantWindowMinMs, ", ", kTenantWindowMaxMs, "]"));
  }
  if (!SpendsTv(policy.risk_mode)) return absl::OkStatus();
  if (!(policy.cumulative_budget > 0 && policy.cumulative_budget <= kBudgetMax)) {
    return Invalid("cumulative_budget", policy.cumulative_budget,
                   absl::StrCat("in (0, ", kBudgetMax, "]"));
  }
  if (!(policy.budget_slice_share > 0 && policy.budget_slice_share <= 1)) {
    return Invalid("budget_slice_share", policy.budget_slice_share, "in (0, 1]");
  }
  return absl::OkStatus();
}

double BudgetLimit(const Policy& policy) {
  switch (policy.risk_mode) {
    case RiskMode::kThreshold:
      return 0;
    case RiskMode::kCumulative:
      return policy.cumulative_budget;
    case RiskMode::kUnion:
      return policy.failure_probability;
    case RiskMode::kAnytime:
      return AnytimeSumLimit(policy.cumulative_budget, policy.failure_probability);
  }
  return 0;
}

bool IsAsTightAs(const Tolerances& a, const Tolerances& b) {
  const bool output_is_tight = b.output_tolerance == 0 ||
                               (a.output_tolerance > 0 && a.output_tolerance <= b.output_tolerance);
  return a.tv_tolerance <= b.tv_tolerance && a.value_tolerance <= b.value_tolerance &&
         output_is_tight;
}

Tolerances Tightest(const Tolerances& a, const Tolerances& b) {
  Tolerances tightest;
  tightest.tv_tolerance = std::min(a.tv_tolerance, b.tv_tolerance);
  tightest.value_tolerance = std::min(a.value_tolerance, b.value_tolerance);
  tightest.output_tolerance = a.output_tolerance == 0 ? b.output_tolerance
                              : b.output_tolerance == 0
                                  ? a.output_tolerance
                                  : std::min(a.output_tolerance, b.output_tolerance);
  return tightest;
}

ReadMode EffectiveReadMode(const Policy& policy, const RequestTerms& terms) {
  if (policy.read_mode == ReadMode::kExact) return ReadMode::kExact;
  return terms.read_mode.value_or(policy.read_mode);
}

Tolerances EffectiveTolerances(const Policy& policy, const RequestTerms& terms) {
  if (!terms.tolerances.has_value()) return policy.tolerances;
  if (EffectiveReadMode(policy, terms) == ReadMode::kObserve) return *terms.tolerances;
  return Tightest(*terms.tolerances, policy.tolerances);
}

absl::Status CheckTerms(const Policy& policy, const RequestTerms& terms) {
  if (!terms.tolerances.has_value() || EffectiveReadMode(policy, terms) == ReadMode::kObserve ||
      IsAsTightAs(*terms.tolerances, policy.tolerances)) {
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kInvalidArgument, "TOLERANCE_INVALID",
      absl::StrCat("the request asks for tolerances (", Describe(*terms.tolerances),
                   ") looser than the policy's (", Describe(policy.tolerances),
                   "); ask for tighter ones, or for read_mode OBSERVE to only measure"));
}

}  // namespace certkv::gate
