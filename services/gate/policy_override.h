// Parts of a policy that differ for a tenant, a model, a layer or a head.
#ifndef CERTKV_SERVICES_GATE_POLICY_OVERRIDE_H_
#define CERTKV_SERVICES_GATE_POLICY_OVERRIDE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/policy.h"

namespace certkv::gate {

inline constexpr int32_t kOverridesMax = 256;

// What is left out is as in the policy.
struct PolicyOverride {
  // Whom it concerns. One with a layer concerns reads of that layer (or head), others requests.
  std::string tenant = {};  // "" = every
  std::string model = {};   // "" = every
  int32_t layer = -1;       // -1 = no layer in particular
  int32_t query_head = -1;  // with a layer: -1 = all its heads
  // What differs.
  std::optional<float> tv_tolerance = {};
  std::optional<float> skip_tolerance = {};
  std::optional<float> value_tolerance = {};     // not with a layer
  std::optional<float> output_tolerance = {};    // not with a layer
  std::optional<ReadMode> read_mode = {};        // with a layer: kExact only
  std::optional<double> cumulative_budget = {};  // not with a layer

  friend bool operator==(const PolicyOverride&, const PolicyOverride&) = default;
};

// Is the override one that makes sense by itself?
// Errors: InvalidArgument [POLICY_INVALID], naming what and why.
absl::Status ValidateOverride(const PolicyOverride& one);

bool Concerns(const PolicyOverride& one, const std::string& tenant, const std::string& model);

// Repairs of a head in a window after which it is read exactly for a while. Off when repairs is 0.
struct Escalation {
  int32_t repairs = 0;           // [0, 1'000'000]
  int64_t window_ms = 10'000;    // [100, 3'600'000]
  int64_t duration_ms = 60'000;  // [100, 3'600'000]
  int32_t heads_of_a_layer = 4;  // [1, 1024]: with so many escalated, the layer is
  friend bool operator==(const Escalation&, const Escalation&) = default;
};
absl::Status ValidateEscalation(const Escalation& escalation);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_POLICY_OVERRIDE_H_
