#include "clients/c/convert.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "clients/c/boundary.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::capi {
namespace {

// `value`, or `fallback` where it is 0.
template <typename T>
T Or(T value, T fallback) {
  return value == T{} ? fallback : value;
}

// An enumerator by its number, which ValidateCacheSpec judges. Numbers that no byte holds become
// one that is never valid.
template <typename Enum>
Enum EnumOf(int32_t number, Enum fallback) {
  if (number == 0) return fallback;
  return static_cast<Enum>(number > 0 && number < 255 ? number : 255);
}

// Witness weights of a layer; 0 where the geometry is not valid, which ValidateCacheSpec says.
int64_t WeightCount(const certkv_cache_spec& spec) {
  const bool is_valid = spec.kv_head_count >= 1 && spec.kv_head_count <= kKvHeadsMax &&
                        spec.head_dim >= 1 && spec.head_dim <= kHeadDimMax;
  return is_valid ? int64_t{spec.kv_head_count} * spec.head_dim : 0;
}

absl::StatusOr<LayerSpec> LayerOf(const certkv_layer_spec* layer, int32_t index,
                                  int64_t weight_count) {
  CERTKV_ASSIGN_OR_RETURN(const certkv_layer_spec in,
                          ReadStruct(layer, absl::StrCat("layers[", index, "]")));
  LayerSpec out;
  out.key_format = EnumOf(in.key_format, out.key_format);
  out.value_format = EnumOf(in.value_format, out.value_format);
  out.witness_bands = in.witness_bands;
  out.sliding_window = in.sliding_window;
  out.fp8_key_scale = Or(in.fp8_key_scale, out.fp8_key_scale);
  if (in.witness_weights != nullptr) {
    out.witness_weights.assign(in.witness_weights, in.witness_weights + weight_count);
  }
  return out;
}

}  // namespace

std::string TextOf(const char* text) { return text == nullptr ? "" : text; }

absl::StatusOr<client::Options> OptionsOf(const certkv_options* options) {
  CERTKV_ASSIGN_OR_RETURN(const certkv_options in, ReadStruct(options, "options"));
  client::Options out;
  out.kvstore_target = TextOf(in.kvstore_target);
  out.certifier_target = TextOf(in.certifier_target);
  out.gate_target = TextOf(in.gate_target);
  if (in.worker_name != nullptr) out.worker_name = in.worker_name;
  out.tenant = TextOf(in.tenant);
  out.ca_file = TextOf(in.ca_file);
  out.certificate_file = TextOf(in.certificate_file);
  out.key_file = TextOf(in.key_file);
  out.token_file = TextOf(in.token_file);
  out.rpc_timeout_ms = Or(in.rpc_timeout_ms, out.rpc_timeout_ms);
  out.seal_timeout_ms = Or(in.seal_timeout_ms, out.seal_timeout_ms);
  out.lease_duration_ms = Or(in.lease_duration_ms, out.lease_duration_ms);
  out.pressure_wait_ms = std::max<int64_t>(Or(in.pressure_wait_ms, out.pressure_wait_ms), 0);
  out.staging_slot_count = in.staging_slot_count;
  return out;
}

absl::StatusOr<CacheSpec> SpecOf(const certkv_cache_spec* spec) {
  CERTKV_ASSIGN_OR_RETURN(const certkv_cache_spec in, ReadStruct(spec, "spec"));
  CERTKV_RETURN_IF_ERROR(RequirePointer(in.model, "spec.model"));
  if (!(in.layer_count >= 1 && in.layer_count <= kLayersMax)) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "CACHE_SPEC_INVALID",
        absl::StrCat("layer_count is ", in.layer_count, ", must be in [1, ", kLayersMax, "]"));
  }
  CacheSpec out;
  out.model = in.model;
  out.kv_head_count = in.kv_head_count;
  out.group_size = in.group_size;
  out.head_dim = in.head_dim;
  out.value_dim = Or(in.value_dim, in.head_dim);
  out.block_tokens = Or(in.block_tokens, out.block_tokens);
  out.rope_pairing = EnumOf(in.rope_pairing, out.rope_pairing);
  out.rotary_dim = in.rotary_dim;
  out.rope_theta = Or(in.rope_theta, out.rope_theta);
  // As everybody computes it: the float that is nearest.
  out.logit_scale = Or(in.logit_scale, static_cast<float>(1 / std::sqrt(double{1} * in.head_dim)));
  out.soft_cap = in.soft_cap;
  out.original_dtype = EnumOf(in.original_dtype, out.original_dtype);
  out.layers.resize(in.layer_count);
  for (int32_t i = 0; in.layers != nullptr && i < in.layer_count; ++i) {
    const certkv_layer_spec* layer = ElementAt(in.layers, in.layers->struct_size, i);
    CERTKV_ASSIGN_OR_RETURN(out.layers[i], LayerOf(layer, i, WeightCount(in)));
  }
  CERTKV_RETURN_IF_ERROR(ValidateCacheSpec(out));
  return out;
}

absl::StatusOr<std::vector<client::LayerKv>> LayersOf(const certkv_layer_kv* layers,
                                                      int32_t layer_count, const CacheSpec& spec) {
  CERTKV_RETURN_IF_ERROR(RequirePointer(layers, "layers"));
  if (layer_count != spec.layer_count()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "SEQUENCE_INVALID",
                     absl::StrCat("keys and values of ", layer_count,
                                  " layers were given, the cache has ", spec.layer_count()));
  }
  std::vector<client::LayerKv> out;
  for (int32_t i = 0; i < layer_count; ++i) {
    CERTKV_RETURN_IF_ERROR(RequirePointer(layers[i].keys, absl::StrCat("layers[", i, "].keys")));
    CERTKV_RETURN_IF_ERROR(
        RequirePointer(layers[i].values, absl::StrCat("layers[", i, "].values")));
    out.push_back({layers[i].keys, layers[i].values});
  }
  return out;
}

absl::StatusOr<RequestTerms> TermsOf(const certkv_request_terms* terms) {
  RequestTerms out;
  if (terms == nullptr) return out;
  CERTKV_ASSIGN_OR_RETURN(const certkv_request_terms in, ReadStruct(terms, "terms"));
  out.options.label = TextOf(in.label);
  out.options.tenant = TextOf(in.tenant);
  out.options.model = TextOf(in.model);
  out.options.traceparent = TextOf(in.traceparent);
  if (!(in.read_mode >= 0 && in.read_mode <= CERTKV_READ_EXACT)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "READ_MODE_UNKNOWN",
                     absl::StrCat("read_mode is ", in.read_mode,
                                  ", must be 1 (ENFORCE), 2 (OBSERVE) or 3 (EXACT)"));
  }
  out.options.read_mode = EnumOf(in.read_mode, out.options.read_mode);
  out.tolerances = {.tv_tolerance = in.tv_tolerance,
                    .value_tolerance = in.value_tolerance,
                    .output_tolerance = in.output_tolerance,
                    .skip_tolerance = in.skip_tolerance};
  out.has_tolerances = in.has_tolerances != 0;
  const bool is_set = !(in.tv_tolerance == 0 && in.value_tolerance == 0 &&
                        in.output_tolerance == 0 && in.skip_tolerance == 0);
  if (!out.has_tolerances && is_set) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TOLERANCE_INVALID",
                     "tolerances are set and has_tolerances is 0; set it to 1 to ask for them");
  }
  if (out.has_tolerances) CERTKV_RETURN_IF_ERROR(ValidateTolerances(out.tolerances));
  return out;
}

certkv_certificate CertificateOf(const ReadCertificate& c) {
  return {.query_position = c.query_position,
          .repair_bytes = c.repair_bytes,
          .read_tokens = c.read_tokens,
          .skipped_tokens = c.skipped_tokens,
          .read_bytes = c.read_bytes,
          .layer = c.layer,
          .query_head = c.query_head,
          .rung = static_cast<int32_t>(c.rung),
          .outcome = static_cast<int32_t>(c.outcome),
          .worst_case_tv = c.worst_case_tv,
          .value_term = c.value_term,
          .output_error_bound = c.output_error_bound,
          .value_radius = c.value_radius,
          .first_worst_case_tv = c.first_worst_case_tv,
          .failure_probability = c.failure_probability,
          .skipped_share = c.skipped_share,
          .key_format = c.key_format,
          .value_format = c.value_format,
          .reserved_zero = 0};
}

certkv_risk RiskOf(const client::RiskSummary& risk) {
  return {.struct_size = sizeof(certkv_risk),
          .read_count = risk.read_count,
          .failed_read_count = risk.failed_read_count,
          .reads_certified_first = risk.reads_certified_first,
          .reads_repaired_values = risk.reads_repaired_values,
          .reads_repaired_keys = risk.reads_repaired_keys,
          .reads_repaired_head = risk.reads_repaired_head,
          .reads_repaired_layer = risk.reads_repaired_layer,
          .reads_exact = risk.reads_exact,
          .reads_observed = risk.reads_observed,
          .repair_bytes = risk.repair_bytes,
          .canary_checks = risk.canary_checks,
          .canary_mismatches = risk.canary_mismatches,
          .sum_worst_case_tv = risk.sum_worst_case_tv,
          .budget = risk.budget,
          .budget_committed = risk.budget_committed,
          .risk_score = risk.risk_score,
          .max_worst_case_tv = risk.max_worst_case_tv,
          .is_closed = risk.closed ? 1 : 0};
}

}  // namespace certkv::capi
