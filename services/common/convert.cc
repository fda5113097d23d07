#include "services/common/convert.h"

#include <cmath>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

absl::Status Invalid(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

// The enums of the wire have the numbers of the core's; only their range is to be checked.
static_assert(static_cast<int>(KeyFormat::kBf16) == type::KEY_FORMAT_BF16);
static_assert(static_cast<int>(KeyFormat::kFp8E4m3) == type::KEY_FORMAT_FP8_E4M3);
static_assert(static_cast<int>(KeyFormat::kK8D) == type::KEY_FORMAT_K8D);
static_assert(static_cast<int>(ValueFormat::kBf16) == type::VALUE_FORMAT_BF16);
static_assert(static_cast<int>(ValueFormat::kV8) == type::VALUE_FORMAT_V8);
static_assert(static_cast<int>(RopePairing::kHalfSplit) == type::ROPE_PAIRING_HALF_SPLIT);
static_assert(static_cast<int>(ReadMode::kExact) == type::READ_MODE_EXACT);
static_assert(static_cast<int>(RiskMode::kCumulative) == type::RISK_MODE_CUMULATIVE);
static_assert(static_cast<int>(Rung::kLayer) == type::RUNG_LAYER);
static_assert(static_cast<int>(Outcome::kObserved) == type::OUTCOME_OBSERVED);

absl::StatusOr<LayerSpec> LayerFromProto(const type::LayerSpec& proto, int index) {
  // The core's enums are bytes: a number above 255 must not wrap into a known one.
  if (!type::KeyFormat_IsValid(proto.key_format()) ||
      !type::ValueFormat_IsValid(proto.value_format())) {
    return Invalid("CACHE_SPEC_INVALID",
                   absl::StrCat("layers[", index, "] has key_format ", proto.key_format(),
                                " and value_format ", proto.value_format(),
                                ", must be formats that this server knows"));
  }
  LayerSpec layer;
  layer.key_format = static_cast<KeyFormat>(proto.key_format());
  layer.value_format = static_cast<ValueFormat>(proto.value_format());
  layer.witness_bands = proto.witness_bands();
  // Exactly 0 is the unset field; NaN and negative values reach the validation as they are.
  layer.fp8_key_scale = proto.fp8_key_scale() == 0 ? 1.0f : proto.fp8_key_scale();
  layer.sliding_window = proto.sliding_window();
  layer.witness_weights.assign(proto.witness_weights().begin(), proto.witness_weights().end());
  return layer;
}

absl::StatusOr<OriginalDtype> DtypeFromProto(type::OriginalDtype proto) {
  switch (proto) {
    case type::ORIGINAL_DTYPE_F16:
      return OriginalDtype::kF16;
    case type::ORIGINAL_DTYPE_BF16:
      return OriginalDtype::kBf16;
    default:
      return Invalid("CACHE_SPEC_INVALID",
                     absl::StrCat("original_dtype is ", static_cast<int>(proto),
                                  ", must be ORIGINAL_DTYPE_F16 or ORIGINAL_DTYPE_BF16"));
  }
}

absl::StatusOr<SlotRef> SlotRefFromProto(const type::SlotRef& proto, absl::string_view tier) {
  SlotRef ref{.slot = proto.slot(), .generation = static_cast<uint64_t>(proto.generation())};
  if (ref.slot < -1 || proto.generation() < 0 || (ref.present() && ref.generation % 2 != 0)) {
    return Invalid("HANDLE_INVALID",
                   absl::StrCat("block handle's ", tier, " slot is ", proto.slot(), ", generation ",
                                proto.generation(),
                                "; a slot is >= -1 and a sealed generation even and >= 0; use "
                                "handles as the store gave them"));
  }
  return ref;
}

type::SlotRef SlotRefToProto(const SlotRef& ref) {
  type::SlotRef proto;
  proto.set_slot(ref.slot);
  proto.set_generation(static_cast<int64_t>(ref.generation));
  return proto;
}

absl::Status InvalidCertificate(const type::Certificate& proto, absl::string_view field,
                                absl::string_view seen, absl::string_view range) {
  return Invalid("CERTIFICATE_INVALID",
                 absl::StrCat("certificate of layer ", proto.layer(), ", query head ",
                              proto.query_head(), ", position ", proto.query_position(), ": ",
                              field, " is ", seen, ", must be ", range));
}

}  // namespace

absl::StatusOr<CacheSpec> CacheSpecFromProto(const type::CacheSpec& proto) {
  CacheSpec spec;
  spec.model = proto.model();
  spec.kv_head_count = proto.kv_head_count();
  spec.group_size = proto.group_size();
  spec.head_dim = proto.head_dim();
  spec.value_dim = proto.value_dim();
  spec.block_tokens =
      proto.block_tokens() == 0 ? CacheSpec::kDefaultBlockTokens : proto.block_tokens();
  if (!type::RopePairing_IsValid(proto.rope_pairing())) {
    return Invalid("CACHE_SPEC_INVALID", absl::StrCat("rope_pairing is ", proto.rope_pairing(),
                                                      ", must be NONE, INTERLEAVED or HALF_SPLIT"));
  }
  spec.rope_pairing = static_cast<RopePairing>(proto.rope_pairing());
  spec.rotary_dim = proto.rotary_dim();
  spec.rope_theta = proto.rope_theta() == 0 ? 10000.0f : proto.rope_theta();
  spec.logit_scale = proto.logit_scale();
  spec.soft_cap = proto.soft_cap();
  CERTKV_ASSIGN_OR_RETURN(spec.original_dtype, DtypeFromProto(proto.original_dtype()));
  if (proto.layers_size() > kLayersMax) {
    return Invalid("CACHE_SPEC_INVALID", absl::StrCat("layers has ", proto.layers_size(),
                                                      " entries, must have 1 to ", kLayersMax));
  }
  spec.layers.reserve(proto.layers_size());
  for (int i = 0; i < proto.layers_size(); ++i) {
    CERTKV_ASSIGN_OR_RETURN(LayerSpec layer, LayerFromProto(proto.layers(i), i));
    spec.layers.push_back(layer);
  }
  CERTKV_RETURN_IF_ERROR(ValidateCacheSpec(spec));
  return spec;
}

type::CacheSpec CacheSpecToProto(const CacheSpec& spec) {
  type::CacheSpec proto;
  proto.set_model(spec.model);
  proto.set_kv_head_count(spec.kv_head_count);
  proto.set_group_size(spec.group_size);
  proto.set_head_dim(spec.head_dim);
  proto.set_value_dim(spec.value_dim);
  proto.set_block_tokens(spec.block_tokens);
  proto.set_rope_pairing(static_cast<type::RopePairing>(spec.rope_pairing));
  proto.set_rotary_dim(spec.rotary_dim);
  proto.set_rope_theta(spec.rope_theta);
  proto.set_logit_scale(spec.logit_scale);
  proto.set_soft_cap(spec.soft_cap);
  proto.set_original_dtype(spec.original_dtype == OriginalDtype::kF16 ? type::ORIGINAL_DTYPE_F16
                                                                      : type::ORIGINAL_DTYPE_BF16);
  for (const LayerSpec& layer : spec.layers) {
    type::LayerSpec* out = proto.add_layers();
    out->set_key_format(static_cast<type::KeyFormat>(layer.key_format));
    out->set_value_format(static_cast<type::ValueFormat>(layer.value_format));
    out->set_witness_bands(layer.witness_bands);
    out->set_fp8_key_scale(layer.fp8_key_scale);
    out->set_sliding_window(layer.sliding_window);
    out->mutable_witness_weights()->Add(layer.witness_weights.begin(), layer.witness_weights.end());
  }
  return proto;
}

absl::StatusOr<BlockHandle> BlockHandleFromProto(const type::BlockHandle& proto) {
  BlockHandle handle;
  CERTKV_ASSIGN_OR_RETURN(handle.key, BlockKeyFromBytes(proto.block_key()));
  // An absent message would read as slot 0.
  if (proto.has_device()) {
    CERTKV_ASSIGN_OR_RETURN(handle.device, SlotRefFromProto(proto.device(), "device"));
  }
  if (proto.has_backing()) {
    CERTKV_ASSIGN_OR_RETURN(handle.backing, SlotRefFromProto(proto.backing(), "backing"));
  }
  return handle;
}

type::BlockHandle BlockHandleToProto(const BlockHandle& handle) {
  type::BlockHandle proto;
  proto.set_block_key(std::string(handle.key.view()));
  *proto.mutable_device() = SlotRefToProto(handle.device);
  *proto.mutable_backing() = SlotRefToProto(handle.backing);
  return proto;
}

absl::StatusOr<Tolerances> TolerancesFromProto(const type::Tolerances& proto) {
  const Tolerances tolerances{.tv_tolerance = proto.tv_tolerance(),
                              .value_tolerance = proto.value_tolerance(),
                              .output_tolerance = proto.output_tolerance(),
                              .skip_tolerance = proto.skip_tolerance()};
  CERTKV_RETURN_IF_ERROR(ValidateTolerances(tolerances));
  return tolerances;
}

type::Tolerances TolerancesToProto(const Tolerances& tolerances) {
  type::Tolerances proto;
  proto.set_tv_tolerance(tolerances.tv_tolerance);
  proto.set_value_tolerance(tolerances.value_tolerance);
  proto.set_output_tolerance(tolerances.output_tolerance);
  proto.set_skip_tolerance(tolerances.skip_tolerance);
  return proto;
}

absl::StatusOr<ReadMode> ReadModeFromProto(type::ReadMode proto) {
  if (proto == type::READ_MODE_UNSPECIFIED || !type::ReadMode_IsValid(proto)) {
    return Invalid("READ_MODE_INVALID", absl::StrCat("read_mode is ", static_cast<int>(proto),
                                                     ", must be ENFORCE, OBSERVE or EXACT"));
  }
  return static_cast<ReadMode>(proto);
}

type::ReadMode ReadModeToProto(ReadMode mode) { return static_cast<type::ReadMode>(mode); }

absl::StatusOr<RiskMode> RiskModeFromProto(type::RiskMode proto) {
  if (proto == type::RISK_MODE_UNSPECIFIED || !type::RiskMode_IsValid(proto)) {
    return Invalid("RISK_MODE_INVALID",
                   absl::StrCat("risk_mode is ", static_cast<int>(proto),
                                ", must be THRESHOLD, CUMULATIVE, UNION or ANYTIME"));
  }
  return static_cast<RiskMode>(proto);
}

type::RiskMode RiskModeToProto(RiskMode mode) { return static_cast<type::RiskMode>(mode); }

type::Rung RungToProto(Rung rung) { return static_cast<type::Rung>(rung); }

namespace {

constexpr double kTimeLeftMsMax = 0x1p40;

// By the reader's clock.
absl::StatusOr<int64_t> ExpireTimeFromProto(const type::PolicyLease& proto, int64_t asked_ms) {
  if (!proto.has_time_left_ms()) return proto.expire_time_ms();
  if (std::abs(static_cast<double>(proto.time_left_ms())) <= kTimeLeftMsMax) {
    return asked_ms + proto.time_left_ms();
  }
  return Invalid(
      "POLICY_LEASE_INVALID",
      absl::StrCat("policy lease of ", proto.request(), " has time_left_ms ", proto.time_left_ms(),
                   ", must be in [-2^40, 2^40]; use the lease as gate gave it"));
}

}  // namespace

absl::StatusOr<PolicyLease> PolicyLeaseFromProto(const type::PolicyLease& proto, int64_t asked_ms) {
  PolicyLease lease;
  lease.request = proto.request();
  lease.lease_id = proto.lease_id();
  auto read_mode = ReadModeFromProto(proto.read_mode());
  auto risk_mode = RiskModeFromProto(proto.risk_mode());
  if (!read_mode.ok() || !risk_mode.ok()) {
    return Invalid("POLICY_LEASE_INVALID",
                   absl::StrCat("policy lease of ", proto.request(), " has read_mode ",
                                static_cast<int>(proto.read_mode()), " and risk_mode ",
                                static_cast<int>(proto.risk_mode()),
                                ", must be known modes; use the lease as gate gave it"));
  }
  lease.read_mode = *read_mode;
  lease.risk_mode = *risk_mode;
  CERTKV_ASSIGN_OR_RETURN(lease.tolerances, TolerancesFromProto(proto.tolerances()));
  lease.budget_slice = proto.budget_slice();
  CERTKV_ASSIGN_OR_RETURN(lease.expire_time_ms, ExpireTimeFromProto(proto, asked_ms));
  lease.policy_version = proto.policy_version();
  lease.sequence = proto.sequence();
  if (!(proto.canary_share() >= 0 && proto.canary_share() <= 1)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "POLICY_LEASE_INVALID",
                     absl::StrCat("canary_share is ", proto.canary_share(), ", must be in [0, 1]"));
  }
  lease.canary_share = proto.canary_share();
  for (const type::HeadRule& rule : proto.head_rules()) {
    lease.head_rules.push_back(
        {.layer = rule.layer(),
         .query_head = rule.query_head(),
         .exact = rule.exact(),
         .tv_tolerance = rule.tv_tolerance(),
         .skip_tolerance = rule.has_skip_tolerance() ? rule.skip_tolerance() : -1.0f});
  }
  CERTKV_RETURN_IF_ERROR(ValidatePolicyLease(lease));
  return lease;
}

type::PolicyLease PolicyLeaseToProto(const PolicyLease& lease, int64_t now_ms) {
  type::PolicyLease proto;
  proto.set_request(lease.request);
  proto.set_lease_id(lease.lease_id);
  proto.set_read_mode(ReadModeToProto(lease.read_mode));
  *proto.mutable_tolerances() = TolerancesToProto(lease.tolerances);
  proto.set_risk_mode(RiskModeToProto(lease.risk_mode));
  proto.set_budget_slice(lease.budget_slice);
  proto.set_expire_time_ms(lease.expire_time_ms);
  const double left_ms = static_cast<double>(lease.expire_time_ms) - static_cast<double>(now_ms);
  if (std::abs(left_ms) <= kTimeLeftMsMax) {
    proto.set_time_left_ms(lease.expire_time_ms - now_ms);
  }
  proto.set_policy_version(lease.policy_version);
  proto.set_sequence(lease.sequence);
  proto.set_canary_share(lease.canary_share);
  for (const HeadRule& rule : lease.head_rules) {
    type::HeadRule* out = proto.add_head_rules();
    out->set_layer(rule.layer);
    out->set_query_head(rule.query_head);
    out->set_exact(rule.exact);
    out->set_tv_tolerance(rule.tv_tolerance);
    if (rule.skip_tolerance >= 0) out->set_skip_tolerance(rule.skip_tolerance);
  }
  return proto;
}

namespace {

// What the record says of how much was read.
absl::Status CheckAmounts(const type::Certificate& proto) {
  if (proto.repair_bytes() < 0) {
    return InvalidCertificate(proto, "repair_bytes", absl::AlphaNum(proto.repair_bytes()).Piece(),
                              ">= 0");
  }
  for (const int64_t count : {proto.read_tokens(), proto.skipped_tokens(), proto.read_bytes()}) {
    if (count < 0) {
      return InvalidCertificate(proto, "read_tokens, skipped_tokens or read_bytes",
                                absl::AlphaNum(count).Piece(), ">= 0");
    }
  }
  if (!(proto.skipped_share() >= 0 && proto.skipped_share() <= 1)) {
    return InvalidCertificate(proto, "skipped_share", absl::AlphaNum(proto.skipped_share()).Piece(),
                              "in [0, 1]");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ReadCertificate> ReadCertificateFromProto(const type::Certificate& proto) {
  constexpr int32_t kQueryHeadsMax = kKvHeadsMax * kGroupSizeMax;
  const auto out_of_range = [&proto](absl::string_view field, const absl::AlphaNum& seen,
                                     absl::string_view range) {
    return InvalidCertificate(proto, field, seen.Piece(), range);
  };
  if (proto.layer() < 0 || proto.layer() >= kLayersMax) {
    return out_of_range("layer", proto.layer(), absl::StrCat("in [0, ", kLayersMax, ")"));
  }
  if (proto.query_head() < 0 || proto.query_head() >= kQueryHeadsMax) {
    return out_of_range("query_head", proto.query_head(),
                        absl::StrCat("in [0, ", kQueryHeadsMax, ")"));
  }
  if (proto.query_position() < 0 || proto.query_position() >= kSequenceTokensMax) {
    return out_of_range("query_position", proto.query_position(),
                        absl::StrCat("in [0, ", kSequenceTokensMax, ")"));
  }
  if (!(proto.worst_case_tv() >= 0 && proto.worst_case_tv() <= 1)) {
    return out_of_range("worst_case_tv", proto.worst_case_tv(), "in [0, 1]");
  }
  if (!(proto.first_worst_case_tv() >= 0 && proto.first_worst_case_tv() <= 1)) {
    return out_of_range("first_worst_case_tv", proto.first_worst_case_tv(), "in [0, 1]");
  }
  if (!(proto.value_term() >= 0)) {
    return out_of_range("value_term", proto.value_term(), ">= 0");
  }
  if (!(proto.output_error_bound() >= 0)) {
    return out_of_range("output_error_bound", proto.output_error_bound(), ">= 0");
  }
  if (!(proto.value_radius() >= 0)) {
    return out_of_range("value_radius", proto.value_radius(), ">= 0");
  }
  if (proto.rung() == type::RUNG_UNSPECIFIED || !type::Rung_IsValid(proto.rung())) {
    return out_of_range("rung", proto.rung(), "a known rung");
  }
  if (proto.outcome() == type::OUTCOME_UNSPECIFIED || !type::Outcome_IsValid(proto.outcome())) {
    return out_of_range("outcome", proto.outcome(), "CERTIFIED, EXACT or OBSERVED");
  }
  if (!type::KeyFormat_IsValid(proto.key_format()) ||
      !type::ValueFormat_IsValid(proto.value_format())) {
    return out_of_range("key_format or value_format",
                        absl::StrCat(proto.key_format(), " or ", proto.value_format()),
                        "a known one, or not set");
  }
  if (!(proto.failure_probability() >= 0 && proto.failure_probability() <= 1)) {
    return out_of_range("failure_probability", proto.failure_probability(), "in [0, 1]");
  }
  CERTKV_RETURN_IF_ERROR(CheckAmounts(proto));
  return ReadCertificate{.layer = proto.layer(),
                         .query_head = proto.query_head(),
                         .query_position = proto.query_position(),
                         .worst_case_tv = proto.worst_case_tv(),
                         .value_term = proto.value_term(),
                         .output_error_bound = proto.output_error_bound(),
                         .value_radius = proto.value_radius(),
                         .rung = static_cast<Rung>(proto.rung()),
                         .outcome = static_cast<Outcome>(proto.outcome()),
                         .first_worst_case_tv = proto.first_worst_case_tv(),
                         .repair_bytes = proto.repair_bytes(),
                         .failure_probability = proto.failure_probability(),
                         .key_format = static_cast<uint8_t>(proto.key_format()),
                         .value_format = static_cast<uint8_t>(proto.value_format()),
                         .read_tokens = proto.read_tokens(),
                         .skipped_tokens = proto.skipped_tokens(),
                         .read_bytes = proto.read_bytes(),
                         .skipped_share = proto.skipped_share()};
}

type::Certificate ReadCertificateToProto(const ReadCertificate& certificate) {
  type::Certificate proto;
  proto.set_layer(certificate.layer);
  proto.set_query_head(certificate.query_head);
  proto.set_query_position(certificate.query_position);
  proto.set_worst_case_tv(certificate.worst_case_tv);
  proto.set_value_term(certificate.value_term);
  proto.set_output_error_bound(certificate.output_error_bound);
  proto.set_value_radius(certificate.value_radius);
  proto.set_rung(RungToProto(certificate.rung));
  proto.set_outcome(static_cast<type::Outcome>(certificate.outcome));
  proto.set_first_worst_case_tv(certificate.first_worst_case_tv);
  proto.set_repair_bytes(certificate.repair_bytes);
  proto.set_failure_probability(certificate.failure_probability);
  proto.set_key_format(static_cast<type::KeyFormat>(certificate.key_format));
  proto.set_value_format(static_cast<type::ValueFormat>(certificate.value_format));
  proto.set_read_tokens(certificate.read_tokens);
  proto.set_skipped_tokens(certificate.skipped_tokens);
  proto.set_read_bytes(certificate.read_bytes);
  proto.set_skipped_share(certificate.skipped_share);
  return proto;
}

}  // namespace certkv
