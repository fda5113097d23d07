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

// "tv 0.2, value 0.1, output none, skip 0"
std::string Describe(const Tolerances& tolerances) {
  return absl::StrCat(
      "tv ", tolerances.tv_tolerance, ", value ", tolerances.value_tolerance, ", output ",
      tolerances.output_tolerance == 0 ? "none" : absl::StrCat(tolerances.output_tolerance),
      ", skip ", tolerances.skip_tolerance);
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
  CERTKV_RETURN_IF_ERROR(ValidateEscalation(policy.escalation));
  for (const PolicyOverride& one : policy.overrides) CERTKV_RETURN_IF_ERROR(ValidateOverride(one));
  const auto layer_overrides =
      std::count_if(policy.overrides.begin(), policy.overrides.end(),
                    [](const PolicyOverride& one) { return one.layer >= 0; });
  if (policy.overrides.size() > kOverridesMax || layer_overrides > kLayerOverridesMax) {
    return Invalid(
        "overrides",
        absl::StrCat(policy.overrides.size(), ", ", layer_overrides, " of them with a layer"),
        absl::StrCat("at most ", kOverridesMax, " and ", kLayerOverridesMax));
  }
  if (!SpendsTv(policy.risk_mode)) return absl::OkStatus();
  if (!(policy.cumulative_budget > 0 && policy.cumulative_budget <= kBudgetMax)) {
    return Invalid("cumulative_budget", policy.cumulative_budget,
                   absl::StrCat("in (0, ", kBudgetMax, "]"));
  }
  if (!(policy.canary_share >= 0 && policy.canary_share <= 1)) {
    return Invalid("canary_share", policy.canary_share, "in [0, 1]");
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

Policy ResolvePolicy(const Policy& policy, const std::string& tenant, const std::string& model) {
  Policy resolved = policy;
  resolved.overrides.clear();
  for (const PolicyOverride& one : policy.overrides) {
    if (!Concerns(one, tenant, model)) continue;
    if (one.layer >= 0) {
      resolved.overrides.push_back(one);
      continue;
    }
    Tolerances& tolerances = resolved.tolerances;
    tolerances.tv_tolerance = one.tv_tolerance.value_or(tolerances.tv_tolerance);
    tolerances.value_tolerance = one.value_tolerance.value_or(tolerances.value_tolerance);
    tolerances.output_tolerance = one.output_tolerance.value_or(tolerances.output_tolerance);
    tolerances.skip_tolerance = one.skip_tolerance.value_or(tolerances.skip_tolerance);
    resolved.read_mode = one.read_mode.value_or(resolved.read_mode);
    resolved.cumulative_budget = one.cumulative_budget.value_or(resolved.cumulative_budget);
  }
  return resolved;
}

std::vector<HeadRule> HeadRulesOf(const Policy& resolved) {
  std::vector<HeadRule> rules;
  for (const PolicyOverride& one : resolved.overrides) {
    rules.push_back({.layer = one.layer,
                     .query_head = one.query_head,
                     .exact = one.read_mode == ReadMode::kExact,
                     .tv_tolerance = one.tv_tolerance.value_or(-1),
                     .skip_tolerance = one.skip_tolerance.value_or(-1)});
  }
  return rules;
}

bool SamePolicy(const Policy& a, const Policy& b) {
  return a.version == b.version && IsAsTightAs(a.tolerances, b.tolerances) &&
         IsAsTightAs(b.tolerances, a.tolerances) && a.risk_mode == b.risk_mode &&
         a.read_mode == b.read_mode && a.cumulative_budget == b.cumulative_budget &&
         a.budget_slice_share == b.budget_slice_share &&
         a.failure_probability == b.failure_probability && a.tenant_budget == b.tenant_budget &&
         a.tenant_window_ms == b.tenant_window_ms && a.lease_duration_ms == b.lease_duration_ms &&
         a.escalation == b.escalation && a.overrides == b.overrides &&
         a.only_listed_tenants == b.only_listed_tenants && a.canary_share == b.canary_share;
}

std::string DescribePolicy(const Policy& policy) {
  return absl::StrCat(Describe(policy.tolerances), "; ", ReadModeName(policy.read_mode), "; ",
                      RiskModeName(policy.risk_mode), " budget ", policy.cumulative_budget,
                      ", slices of ", policy.budget_slice_share, ", failure probability ",
                      policy.failure_probability, "; tenant budget ", policy.tenant_budget, " in ",
                      policy.tenant_window_ms, " ms; leases of ", policy.lease_duration_ms,
                      " ms; escalation after ", policy.escalation.repairs, " repairs; ",
                      policy.overrides.size(), " overrides",
                      policy.only_listed_tenants ? "; listed tenants only" : "");
}

bool IsAsTightAs(const Tolerances& a, const Tolerances& b) {
  const bool output_is_tight = b.output_tolerance == 0 ||
                               (a.output_tolerance > 0 && a.output_tolerance <= b.output_tolerance);
  return a.tv_tolerance <= b.tv_tolerance && a.value_tolerance <= b.value_tolerance &&
         output_is_tight && a.skip_tolerance <= b.skip_tolerance;
}

Tolerances Tightest(const Tolerances& a, const Tolerances& b) {
  Tolerances tightest;
  tightest.tv_tolerance = std::min(a.tv_tolerance, b.tv_tolerance);
  tightest.skip_tolerance = std::min(a.skip_tolerance, b.skip_tolerance);
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

absl::Status CheckTerms(const Policy& whole, const RequestTerms& terms) {
  const bool is_listed =
      std::any_of(whole.overrides.begin(), whole.overrides.end(),
                  [&terms](const PolicyOverride& one) { return one.tenant == terms.tenant; });
  if (whole.only_listed_tenants && (terms.tenant.empty() || !is_listed)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TENANT_UNKNOWN",
                     absl::StrCat("tenant '", terms.tenant,
                                  "' is named by no override of the policy, which takes listed "
                                  "tenants only; name one of them, or add it"));
  }
  const Policy policy = ResolvePolicy(whole, terms.tenant, terms.model);
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
