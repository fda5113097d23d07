#include "services/gate/config.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/gate/ledger_address.h"

namespace certkv {
namespace {

void AddPolicyFields(gate::Policy* policy, ConfigSection* section) {
  section->AddDouble("tv_tolerance", &policy->tolerances.tv_tolerance, {.min = 0, .max = 1}, "",
                     "largest worst_case_tv of a read: the bound on the total variation between "
                     "the exact and the served softmax");
  section->AddDouble("value_tolerance", &policy->tolerances.value_tolerance, {.min = 0, .max = 1e6},
                     "",
                     "largest bound on what value quantization changed, as a share of the value "
                     "radius");
  section->AddDouble("output_tolerance", &policy->tolerances.output_tolerance,
                     {.min = 0, .max = 1e30}, "value units",
                     "largest bound on the whole output error; 0 means none");
  section->AddDouble("skip_tolerance", &policy->tolerances.skip_tolerance, {.min = 0, .max = 0.99},
                     "",
                     "part of tv_tolerance that a read may spend on not reading tokens in full; "
                     "at most half of tv_tolerance is used, and 0 reads everything "
                     "(docs/bounds.md, section 9)");
  section->AddEnum<ReadMode>("read_mode", &policy->read_mode,
                             {{"enforce", ReadMode::kEnforce},
                              {"observe", ReadMode::kObserve},
                              {"exact", ReadMode::kExact}},
                             "what a read outside its tolerance becomes: repaired, measured only, "
                             "or never tried (originals only, whatever a request asks for)");
  section->AddEnum<RiskMode>(
      "risk_mode", &policy->risk_mode,
      {{"threshold", RiskMode::kThreshold},
       {"cumulative", RiskMode::kCumulative},
       {"union", RiskMode::kUnion},
       {"anytime", RiskMode::kAnytime}},
      "how a request's risk is accounted: each read within tv_tolerance; or also the sum of "
      "worst_case_tv within cumulative_budget; or also the certificates' chances to fail within "
      "failure_probability; or also losses below cumulative_budget at every moment but for "
      "failure_probability (docs/bounds.md, section 6)");
  section->AddDouble("cumulative_budget", &policy->cumulative_budget,
                     {.min = 0, .max = gate::kBudgetMax, .min_excluded = true}, "",
                     "cumulative: largest sum of worst_case_tv over all reads of a request; "
                     "anytime: limit of their losses");
  section->AddDouble("budget_slice_share", &policy->budget_slice_share,
                     {.min = 0, .max = 1, .min_excluded = true}, "",
                     "cumulative and anytime: share of the budget that one policy lease carries");
  section->AddDouble("failure_probability", &policy->failure_probability,
                     {.min = gate::kFailureProbabilityMin, .max = gate::kFailureProbabilityMax}, "",
                     "union and anytime: chance that what the mode promises of a request fails");
  section->AddDouble(
      "tenant_budget", &policy->tenant_budget, {.min = 0, .max = gate::kBudgetMax}, "",
      "cumulative and anytime: largest sum of worst_case_tv that the requests of one "
      "tenant may commit in tenant_window; 0 means no limit");
  section->AddDuration("tenant_window", &policy->tenant_window_ms,
                       {.min = gate::kTenantWindowMinMs, .max = gate::kTenantWindowMaxMs},
                       "after this time a tenant's budget is whole again");
  section->AddDuration("lease_duration", &policy->lease_duration_ms,
                       {.min = gate::kLeaseDurationMinMs, .max = gate::kLeaseDurationMaxMs},
                       "how long a policy lease holds; without gate reads are exact after it");
}

void AddEscalationFields(gate::Policy* policy, ConfigSection* section) {
  section->AddInteger("escalation_repairs", &policy->escalation.repairs,
                      {.min = 0, .max = 1'000'000}, "repairs",
                      "repairs of a head of a request in escalation_window after which it is read "
                      "exactly for escalation_duration; 0 means never");
  section->AddDuration("escalation_window", &policy->escalation.window_ms,
                       {.min = 100, .max = 3'600'000}, "in which repairs are counted");
  section->AddDuration("escalation_duration", &policy->escalation.duration_ms,
                       {.min = 100, .max = 3'600'000},
                       "how long an escalated head is read exactly");
  section->AddInteger("escalation_heads_of_a_layer", &policy->escalation.heads_of_a_layer,
                      {.min = 1, .max = 1024}, "heads",
                      "with so many of its heads escalated, the whole layer is");
  section->AddDouble("canary_share", &policy->canary_share, {.min = 0, .max = 1}, "",
                     "share of reads whose outputs engines tell as they used them, to be compared "
                     "with exact attention; 0 means none");
  section->AddBool("only_listed_tenants", &policy->only_listed_tenants,
                   "requests of tenants that no override names are refused");
}

ConfigSection OverrideSection(PolicyOverrideText* one) {
  using Mode = PolicyOverrideText::Mode;
  ConfigSection section("gate_overrides", "Parts of the policy that differ.");
  section.AddString("tenant", &one->tenant, 64, "only requests of this tenant; empty means all");
  section.AddString("model", &one->model, 128, "only requests of this model; empty means all");
  section.AddInteger("layer", &one->layer, {.min = -1, .max = 1023}, "",
                     "only reads of this layer; -1 means none in particular");
  section.AddInteger("query_head", &one->query_head, {.min = -1, .max = 8191}, "",
                     "with a layer: only this head; -1 means all");
  section.AddDouble("tv_tolerance", &one->tv_tolerance, {.min = -1, .max = 1}, "",
                    "instead of the policy's; -1 means as there");
  section.AddDouble("skip_tolerance", &one->skip_tolerance, {.min = -1, .max = 0.99}, "",
                    "instead of the policy's; -1 means as there");
  section.AddDouble("value_tolerance", &one->value_tolerance, {.min = -1, .max = 1e6}, "",
                    "instead of the policy's; -1 means as there; not with a layer");
  section.AddDouble("output_tolerance", &one->output_tolerance, {.min = -1, .max = 1e30},
                    "value units", "instead of the policy's; -1 means as there; not with a layer");
  section.AddDouble("cumulative_budget", &one->cumulative_budget,
                    {.min = -1, .max = gate::kBudgetMax}, "",
                    "instead of the policy's; -1 means as there; not with a layer");
  section.AddEnum<Mode>("read_mode", &one->read_mode,
                        {{"policy", Mode::kPolicy},
                         {"enforce", Mode::kEnforce},
                         {"observe", Mode::kObserve},
                         {"exact", Mode::kExact}},
                        "instead of the policy's; with a layer only exact");
  return section;
}

gate::PolicyOverride FromText(const PolicyOverrideText& text) {
  gate::PolicyOverride one;
  one.tenant = text.tenant;
  one.model = text.model;
  one.layer = text.layer;
  one.query_head = text.query_head;
  if (text.tv_tolerance >= 0) one.tv_tolerance = static_cast<float>(text.tv_tolerance);
  if (text.skip_tolerance >= 0) one.skip_tolerance = static_cast<float>(text.skip_tolerance);
  if (text.value_tolerance >= 0) one.value_tolerance = static_cast<float>(text.value_tolerance);
  if (text.output_tolerance >= 0) one.output_tolerance = static_cast<float>(text.output_tolerance);
  if (text.cumulative_budget >= 0) one.cumulative_budget = text.cumulative_budget;
  if (text.read_mode != PolicyOverrideText::Mode::kPolicy) {
    one.read_mode = static_cast<ReadMode>(text.read_mode);
  }
  return one;
}
static_assert(static_cast<int>(PolicyOverrideText::Mode::kExact) ==
              static_cast<int>(ReadMode::kExact));

void AddLedgerFields(GateConfig* config, ConfigSection* section) {
  section->AddString("ledger_redis", &config->ledger_redis, 128,
                     "unix:PATH or IP:PORT of a Redis server in which several replicas of gate "
                     "share budgets and what was reported; empty keeps both in this process");
  section->AddString("ledger_password_file", &config->ledger_password_file, 4096,
                     "file with that server's password, 32 to 256 characters; empty means none");
  section->AddDuration("ledger_timeout", &config->ledger_timeout_ms, {.min = 5, .max = 1000},
                       "how long a call may wait for the shared ledger; then it is refused, or "
                       "the read is exact");
  section->AddInteger("ledger_threads", &config->ledger_threads, {.min = 1, .max = 64}, "threads",
                      "calls that wait for the shared ledger at a time, each with a connection");
  section->AddCheck([config] {
    if (config->ledger_redis.empty()) return absl::OkStatus();
    return gate::CheckRedisAddress(config->ledger_redis);
  });
}

}  // namespace

ConfigList GateOverridesList(GateConfig* config) {
  auto* texts = &config->override_texts;
  // Outlives the list as the program does: a sample of what an element is by default.
  static PolicyOverrideText sample;
  return {.name = "gate_overrides",
          .description =
              "What differs from gate's policy for a tenant, a model, a layer or a "
              "head; of two that set the same, the later holds.",
          .count_max = gate::kOverridesMax,
          .clear = [texts] { texts->clear(); },
          .add = [texts] { return OverrideSection(&texts->emplace_back()); },
          .elements =
              [texts] {
                std::vector<ConfigSection> sections;
                for (PolicyOverrideText& one : *texts) sections.push_back(OverrideSection(&one));
                return sections;
              },
          .sample = OverrideSection(&sample)};
}

ConfigSection GateConfigSection(GateConfig* config) {
  ConfigSection section("gate",
                        "Decides what reads must satisfy and keeps the risk of each request. The "
                        "first seventeen settings and gate_overrides are the policy at start; "
                        "UpdatePolicy replaces it, and SIGHUP reads it from the file again; with "
                        "ledger_redis both hold at all replicas.");
  AddPolicyFields(&config->policy, &section);
  AddEscalationFields(&config->policy, &section);
  section.AddInteger("request_limit", &config->request_limit, {.min = 1, .max = 1'000'000},
                     "requests",
                     "requests kept, open and closed; a new one takes the place of the oldest "
                     "closed one, and is refused when all are open");
  section.AddInteger("heads_per_request_max", &config->heads_per_request_max,
                     {.min = 1, .max = 1 << 20}, "heads",
                     "pairs of layer and query head that a request keeps apart; what exceeds it is "
                     "in the request's totals only");
  section.AddInteger("reporters_per_request_max", &config->reporters_per_request_max,
                     {.min = 1, .max = 65536}, "reporters", "reporters that one request may have");
  section.AddInteger("tenant_limit", &config->tenant_limit, {.min = 1, .max = 65536}, "tenants",
                     "tenants whose budgets are kept; a request of one more is refused");
  section.AddDuration("idle_timeout", &config->idle_timeout_ms, {.min = 1000, .max = 86'400'000},
                      "how long a request may be silent before it is closed; at least "
                      "lease_duration");
  section.AddDuration("retention", &config->retention_ms, {.min = 0, .max = 604'800'000},
                      "how long the risk of a closed request stays readable");
  section.AddInteger("retained_limit", &config->retained_limit, {.min = 0, .max = 1'000'000},
                     "requests", "closed requests kept; beyond it the oldest are forgotten");
  section.AddString(
      "store_socket", &config->store_socket, 107,
      "path of the store's gRPC socket, for the dashboard's capacity and tiers; empty "
      "means kvstore.sock in the runtime directory, or in certkvd its own socket");
  section.AddString("store_token_file", &config->store_token_file, 4096,
                    "file of the token that it shows to the store, where that asks for one at its "
                    "Unix socket: with the scope read, for all tenants; empty means none");
  section.AddInteger("watcher_limit", &config->watcher_limit, {.min = 1, .max = 65536}, "streams",
                     "WatchRequestRisk streams at a time");
  AddLedgerFields(config, &section);
  section.AddCheck([config] {
    config->policy.overrides.clear();
    for (const PolicyOverrideText& text : config->override_texts) {
      config->policy.overrides.push_back(FromText(text));
    }
    return gate::ValidatePolicy(config->policy);
  });
  section.AddCheck([config] {
    if (config->idle_timeout_ms >= config->policy.lease_duration_ms) return absl::OkStatus();
    return MakeError(
        absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
        absl::StrCat("idle_timeout is ", config->idle_timeout_ms,
                     "ms, must be at least lease_duration, ", config->policy.lease_duration_ms,
                     "ms: a request with a live lease is not idle"));
  });
  return section;
}

}  // namespace certkv
