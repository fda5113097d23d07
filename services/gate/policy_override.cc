#include "services/gate/policy_override.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::gate {
namespace {

constexpr double kBudgetMax = 1e6;  // as in policy.h, which includes this header
constexpr int64_t kTimeMinMs = 100;
constexpr int64_t kTimeMaxMs = 3'600'000;

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "POLICY_INVALID", message);
}

std::string Describe(const PolicyOverride& one) {
  return absl::StrCat("override of tenant '", one.tenant, "', model '", one.model, "', layer ",
                      one.layer, ", query head ", one.query_head);
}

absl::Status ValidateLayer(const PolicyOverride& one) {
  if (one.layer < 0 || one.layer >= kLayersMax || one.query_head < -1 ||
      one.query_head >= kKvHeadsMax * kGroupSizeMax) {
    return Invalid(absl::StrCat(Describe(one), ": a layer is in [0, ", kLayersMax,
                                "), a head in [0, ", kKvHeadsMax * kGroupSizeMax, ") or -1"));
  }
  const bool other_mode = one.read_mode.has_value() && one.read_mode != ReadMode::kExact;
  if (other_mode || one.value_tolerance.has_value() || one.output_tolerance.has_value() ||
      one.cumulative_budget.has_value()) {
    return Invalid(absl::StrCat(Describe(one),
                                ": for a layer or head only tv_tolerance, skip_tolerance and "
                                "read_mode exact can differ"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateOverride(const PolicyOverride& one) {
  if (one.layer != -1 || one.query_head != -1) CERTKV_RETURN_IF_ERROR(ValidateLayer(one));
  if (!one.tv_tolerance.has_value() && !one.value_tolerance.has_value() &&
      !one.output_tolerance.has_value() && !one.read_mode.has_value() &&
      !one.cumulative_budget.has_value() && !one.skip_tolerance.has_value()) {
    return Invalid(absl::StrCat(Describe(one), " changes nothing; say what differs, or drop it"));
  }
  const float tv = one.tv_tolerance.value_or(0);
  const float value = one.value_tolerance.value_or(0);
  const float output = one.output_tolerance.value_or(0);
  const float skip = one.skip_tolerance.value_or(0);
  const double budget = one.cumulative_budget.value_or(1);
  if (!(tv >= 0 && tv <= 1) || !(value >= 0 && std::isfinite(value)) ||
      !(output >= 0 && std::isfinite(output)) || !(budget > 0 && budget <= kBudgetMax) ||
      !(skip >= 0 && skip < 1)) {
    return Invalid(absl::StrCat(
        Describe(one), " has tv_tolerance ", tv, ", value_tolerance ", value, ", output_tolerance ",
        output, ", cumulative_budget ", budget, ", skip_tolerance ", skip,
        "; must be in [0, 1], >= 0, >= 0, in (0, ", kBudgetMax, "] and in [0, 1)"));
  }
  return absl::OkStatus();
}

bool Concerns(const PolicyOverride& one, const std::string& tenant, const std::string& model) {
  return (one.tenant.empty() || one.tenant == tenant) && (one.model.empty() || one.model == model);
}

absl::Status ValidateEscalation(const Escalation& escalation) {
  const auto is_time = [](int64_t ms) { return ms >= kTimeMinMs && ms <= kTimeMaxMs; };
  if (escalation.repairs < 0 || escalation.repairs > 1'000'000 || !is_time(escalation.window_ms) ||
      !is_time(escalation.duration_ms) || escalation.heads_of_a_layer < 1 ||
      escalation.heads_of_a_layer > 1024) {
    return Invalid(absl::StrCat("escalation has repairs ", escalation.repairs, ", window_ms ",
                                escalation.window_ms, ", duration_ms ", escalation.duration_ms,
                                ", heads_of_a_layer ", escalation.heads_of_a_layer,
                                "; must be in [0, 1000000], [", kTimeMinMs, ", ", kTimeMaxMs,
                                "] twice, and [1, 1024]"));
  }
  return absl::OkStatus();
}

}  // namespace certkv::gate
