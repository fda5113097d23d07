// What gate asks of reads, and the rules by which a request may differ from it.
#ifndef CERTKV_SERVICES_GATE_POLICY_H_
#define CERTKV_SERVICES_GATE_POLICY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/policy.h"
#include "services/gate/policy_override.h"

namespace certkv::gate {

inline constexpr double kBudgetMax = 1e6;  // of a request; far below where Budget would saturate
inline constexpr double kFailureProbabilityMin = 1e-9;
inline constexpr double kFailureProbabilityMax = 0.5;
inline constexpr int64_t kTenantWindowMinMs = 1000;
inline constexpr int64_t kTenantWindowMaxMs = 31 * int64_t{86'400'000};
inline constexpr int64_t kLeaseDurationMinMs = 100;
inline constexpr int64_t kLeaseDurationMaxMs = 3'600'000;

struct Policy {
  int64_t version = 1;
  Tolerances tolerances;
  RiskMode risk_mode = RiskMode::kThreshold;
  // kCumulative: limit of the sum of worst_case_tv of a request; kAnytime: of its losses.
  double cumulative_budget = 100;     // (0, kBudgetMax]
  double budget_slice_share = 0.05;   // kCumulative, kAnytime, (0, 1]
  double failure_probability = 1e-6;  // kUnion, kAnytime, of a request, [1e-9, 0.5]
  // What all requests of a tenant in kCumulative and kAnytime may commit in one window; 0 = no
  // limit.
  double tenant_budget = 0;  // [0, kBudgetMax]
  int64_t tenant_window_ms = 3'600'000;
  int64_t lease_duration_ms = 30'000;
  ReadMode read_mode = ReadMode::kEnforce;
  Escalation escalation;
  // In their order: of two that concern a request and set the same, the later holds. At most
  // kOverridesMax, and of those with a layer kLayerOverridesMax.
  std::vector<PolicyOverride> overrides;
  bool only_listed_tenants = false;  // a tenant that no override names is refused
  double canary_share = 0;  // of reads, [0, 1], whose used outputs are compared with exact ones
};
inline constexpr int32_t kLayerOverridesMax = kHeadRulesMax / 2;
// Errors: InvalidArgument [POLICY_INVALID], naming field, value and range. NaN fails.
absl::Status ValidatePolicy(const Policy& policy);

// The policy for one tenant's requests of one model: overrides of requests are applied, those of
// layers that concern them are left in it.
Policy ResolvePolicy(const Policy& policy, const std::string& tenant, const std::string& model);
// What a resolved policy says of layers and heads.
std::vector<HeadRule> HeadRulesOf(const Policy& resolved);
bool SamePolicy(const Policy& a, const Policy& b);
// One line for people and logs.
std::string DescribePolicy(const Policy& policy);

// Is every tolerance of `a` at most that of `b`? An output tolerance of 0 is no limit at all.
bool IsAsTightAs(const Tolerances& a, const Tolerances& b);
// The smaller of each.
Tolerances Tightest(const Tolerances& a, const Tolerances& b);

// What a request asked for when it was opened.
struct RequestTerms {
  std::optional<Tolerances> tolerances;  // valid
  std::optional<ReadMode> read_mode;
  std::string tenant = {};  // "" = none; shares the budget of its name
  std::string model = {};   // "" = unknown
};

// The limit of a request's budget under `policy`, in what its mode spends; 0 in kThreshold, which
// has none.
double BudgetLimit(const Policy& policy);

// The mode a request reads in under `policy`: its own wish, or the policy's; but a policy of kExact
// holds for all, so that an operator can turn quantized reads off.
ReadMode EffectiveReadMode(const Policy& policy, const RequestTerms& terms);
// The tolerances: the tighter of the request's and the policy's; in kObserve, where nothing is
// repaired, the request's as they are.
Tolerances EffectiveTolerances(const Policy& policy, const RequestTerms& terms);
// Errors: InvalidArgument [TOLERANCE_INVALID], looser than the policy outside kObserve;
// [TENANT_UNKNOWN], and the policy takes listed tenants only. `policy` is not resolved.
absl::Status CheckTerms(const Policy& policy, const RequestTerms& terms);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_POLICY_H_
