#include "services/gate/ledger_record.h"

#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::gate {
namespace {

using nlohmann::json;

constexpr int kVersion = 1;

// The number of that name, or 2^60, which no check of ours lets pass.
double NumberOf(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_number() ? found->get<double>() : 0x1p60;
}

std::string TextOf(const json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

float FloatOf(const json& object, const char* name) {
  return static_cast<float>(NumberOf(object, name));
}

absl::Status NoRecord(const std::string& text) {
  return MakeError(absl::StatusCode::kUnavailable, "LEDGER_UNAVAILABLE",
                   absl::StrCat("the shared ledger's record of the request is \"",
                                absl::CHexEscape(text.substr(0, 64)),
                                "...\", which this version can't read; run one version of gate at "
                                "a ledger, or give this one another prefix"));
}

}  // namespace

LedgerRecord MakeLedgerRecord(const std::string& label, const RequestTerms& terms,
                              const Policy& policy) {
  return {.label = label,
          .terms = terms,
          .risk_mode = policy.risk_mode,
          .cumulative_budget = policy.cumulative_budget,
          .budget_slice_share = policy.budget_slice_share,
          .failure_probability = policy.failure_probability};
}

Policy PolicyOfRecord(const LedgerRecord& record, const Policy& policy) {
  Policy merged = policy;
  merged.overrides.clear();
  merged.risk_mode = record.risk_mode;
  merged.cumulative_budget = record.cumulative_budget;
  merged.budget_slice_share = record.budget_slice_share;
  merged.failure_probability = record.failure_probability;
  return merged;
}

std::string EncodeLedgerRecord(const LedgerRecord& record) {
  json object = {{"version", kVersion},
                 {"label", record.label},
                 {"tenant", record.terms.tenant},
                 {"model", record.terms.model},
                 {"risk_mode", static_cast<int>(record.risk_mode)},
                 {"cumulative_budget", record.cumulative_budget},
                 {"budget_slice_share", record.budget_slice_share},
                 {"failure_probability", record.failure_probability}};
  if (record.terms.read_mode.has_value()) {
    object["read_mode"] = static_cast<int>(*record.terms.read_mode);
  }
  if (record.terms.tolerances.has_value()) {
    const Tolerances& tolerances = *record.terms.tolerances;
    object["tolerances"] = {{"tv", tolerances.tv_tolerance},
                            {"value", tolerances.value_tolerance},
                            {"output", tolerances.output_tolerance},
                            {"skip", tolerances.skip_tolerance}};
  }
  return object.dump(-1, ' ', false, json::error_handler_t::replace);
}

absl::StatusOr<LedgerRecord> DecodeLedgerRecord(const std::string& text) {
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object() || NumberOf(object, "version") != kVersion) return NoRecord(text);
  LedgerRecord record;
  record.label = TextOf(object, "label");
  record.terms.tenant = TextOf(object, "tenant");
  record.terms.model = TextOf(object, "model");
  const double risk_mode = NumberOf(object, "risk_mode");
  if (!(risk_mode >= 1 && risk_mode <= 4)) return NoRecord(text);
  record.risk_mode = static_cast<RiskMode>(risk_mode);
  record.cumulative_budget = NumberOf(object, "cumulative_budget");
  record.budget_slice_share = NumberOf(object, "budget_slice_share");
  record.failure_probability = NumberOf(object, "failure_probability");
  if (object.contains("read_mode")) {
    const double mode = NumberOf(object, "read_mode");
    if (!(mode >= 1 && mode <= 3)) return NoRecord(text);
    record.terms.read_mode = static_cast<ReadMode>(mode);
  }
  if (object.contains("tolerances")) {
    const json& told = object["tolerances"];
    if (!told.is_object()) return NoRecord(text);
    const Tolerances tolerances{.tv_tolerance = FloatOf(told, "tv"),
                                .value_tolerance = FloatOf(told, "value"),
                                .output_tolerance = FloatOf(told, "output"),
                                .skip_tolerance = FloatOf(told, "skip")};
    if (!ValidateTolerances(tolerances).ok()) return NoRecord(text);
    record.terms.tolerances = tolerances;
  }
  if (!ValidatePolicy(PolicyOfRecord(record, Policy())).ok()) return NoRecord(text);
  return record;
}

}  // namespace certkv::gate
