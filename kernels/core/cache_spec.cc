#include "kernels/core/cache_spec.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/sha256.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

// A spec without witness weights is encoded as before there were any.
constexpr absl::string_view kSpecDomain = "certkv.cache_spec.v1";
constexpr absl::string_view kWeightedSpecDomain = "certkv.cache_spec.v2";

template <typename... Args>
absl::Status Invalid(const Args&... args) {
  return MakeError(absl::StatusCode::kInvalidArgument, "CACHE_SPEC_INVALID", absl::StrCat(args...));
}

bool IsHeadDim(int32_t dim) {
  return dim == 64 || dim == 80 || dim == 96 || dim == 128 || dim == 256;
}

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return Invalid("CacheSpec.", field, " is ", value, ", must be in [", low, ", ", high, "]");
}

bool IsFloatFormat(KeyFormat format) {
  return format == KeyFormat::kF16 || format == KeyFormat::kBf16;
}

absl::Status CheckLayerFormats(const CacheSpec& spec, const LayerSpec& layer,
                               absl::string_view where) {
  const absl::string_view key_name = KeyFormatName(layer.key_format);
  const absl::string_view value_name = ValueFormatName(layer.value_format);
  if (key_name == "?" || value_name == "?") {
    return Invalid(where, "key_format is ", static_cast<int>(layer.key_format),
                   " and value_format is ", static_cast<int>(layer.value_format),
                   ", must be formats of docs/formats.md");
  }
  if (IsFloatFormat(layer.key_format)) {
    if (key_name != value_name) {
      return Invalid(where, "key_format is ", key_name, " but value_format is ", value_name,
                     "; a 16-bit format is used for both");
    }
    const bool f16 = layer.key_format == KeyFormat::kF16;
    if (f16 != (spec.original_dtype == OriginalDtype::kF16)) {
      return Invalid(where, "key_format ", key_name, " differs from original_dtype ",
                     f16 ? "BF16" : "F16", "; 16-bit blocks hold the original bits");
    }
  } else if (layer.value_format != ValueFormat::kV4 && layer.value_format != ValueFormat::kV8) {
    return Invalid(where, "value_format is ", value_name, ", must be V4 or V8 beside ", key_name);
  }
  const int32_t bands = layer.witness_bands;
  if (layer.key_format == KeyFormat::kFp8E4m3 && bands != 4) {
    return Invalid(where, "witness_bands is ", bands,
                   ", must be 4 for FP8_E4M3: its residuals are known from the witness alone");
  }
  const bool has_none = IsFloatFormat(layer.key_format) || layer.key_format == KeyFormat::kK8D;
  if (has_none ? bands != 0 : bands != 0 && bands != 1 && bands != 4) {
    return Invalid(where, "witness_bands is ", bands,
                   ", must be 0, 1 or 4 (0 for K8D and 16-bit formats)");
  }
  return absl::OkStatus();
}

absl::Status CheckWitnessWeights(const CacheSpec& spec, const LayerSpec& layer,
                                 absl::string_view where) {
  const std::vector<float>& weights = layer.witness_weights;
  if (weights.empty()) return absl::OkStatus();
  if (layer.witness_bands == 0) {
    return Invalid(where,
                   "witness_weights are set with witness_bands 0; there is no witness to "
                   "weight: leave them empty");
  }
  const auto expected = static_cast<size_t>(spec.kv_head_count) * spec.head_dim;
  if (weights.size() != expected) {
    return Invalid(where, "witness_weights has ", weights.size(), " numbers, must have ", expected,
                   " (kv_head_count x head_dim), or none");
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] >= kWitnessWeightMin && weights[i] <= kWitnessWeightMax) continue;
    return Invalid(where, "witness_weights of KV head ", i / spec.head_dim, ", channel ",
                   i % spec.head_dim, " is ", weights[i], ", must be in [", kWitnessWeightMin, ", ",
                   kWitnessWeightMax, "]");
  }
  return absl::OkStatus();
}

absl::Status CheckLayer(const CacheSpec& spec, size_t index) {
  const LayerSpec& layer = spec.layers[index];
  const std::string where = absl::StrCat("CacheSpec.layers[", index, "].");
  CERTKV_RETURN_IF_ERROR(CheckLayerFormats(spec, layer, where));
  if (!(layer.fp8_key_scale > 0 && std::isfinite(layer.fp8_key_scale))) {
    return Invalid(where, "fp8_key_scale is ", layer.fp8_key_scale, ", must be finite and > 0");
  }
  CERTKV_RETURN_IF_ERROR(CheckWitnessWeights(spec, layer, where));
  return CheckRange(absl::StrCat("layers[", index, "].sliding_window"), layer.sliding_window, 0,
                    kSequenceTokensMax);
}

absl::Status CheckRope(const CacheSpec& spec) {
  if (spec.rope_pairing != RopePairing::kNone && spec.rope_pairing != RopePairing::kInterleaved &&
      spec.rope_pairing != RopePairing::kHalfSplit) {
    return Invalid("CacheSpec.rope_pairing is ", static_cast<int>(spec.rope_pairing),
                   ", must be NONE, INTERLEAVED or HALF_SPLIT");
  }
  CERTKV_RETURN_IF_ERROR(CheckRange("rotary_dim", spec.rotary_dim, 0, spec.head_dim));
  if (spec.rotary_dim % 2 != 0 ||
      (spec.rotary_dim == 0) != (spec.rope_pairing == RopePairing::kNone)) {
    return Invalid("CacheSpec.rotary_dim is ", spec.rotary_dim,
                   ", must be even, and 0 exactly when rope_pairing is NONE");
  }
  if (!(spec.rope_theta > 0 && std::isfinite(spec.rope_theta))) {
    return Invalid("CacheSpec.rope_theta is ", spec.rope_theta, ", must be finite and > 0");
  }
  return absl::OkStatus();
}

}  // namespace

const char* KeyFormatName(KeyFormat format) {
  switch (format) {
    case KeyFormat::kK8:
      return "K8";
    case KeyFormat::kK6:
      return "K6";
    case KeyFormat::kK4:
      return "K4";
    case KeyFormat::kFp8E4m3:
      return "FP8_E4M3";
    case KeyFormat::kF16:
      return "F16";
    case KeyFormat::kBf16:
      return "BF16";
    case KeyFormat::kK8D:
      return "K8D";
  }
  return "?";
}

const char* ValueFormatName(ValueFormat format) {
  switch (format) {
    case ValueFormat::kV4:
      return "V4";
    case ValueFormat::kV8:
      return "V8";
    case ValueFormat::kF16:
      return "F16";
    case ValueFormat::kBf16:
      return "BF16";
  }
  return "?";
}

std::string FormatPairName(KeyFormat key_format, ValueFormat value_format) {
  const absl::string_view key = KeyFormatName(key_format);
  const absl::string_view value = ValueFormatName(value_format);
  if (key == value) return std::string(key);
  return absl::StrCat(key, key_format == KeyFormat::kFp8E4m3 ? "+" : "", value);
}

absl::Status ValidateCacheSpec(const CacheSpec& spec) {
  CERTKV_RETURN_IF_ERROR(CheckRange("model size in bytes", static_cast<int64_t>(spec.model.size()),
                                    1, kModelNameBytesMax));
  CERTKV_RETURN_IF_ERROR(CheckRange("kv_head_count", spec.kv_head_count, 1, kKvHeadsMax));
  CERTKV_RETURN_IF_ERROR(CheckRange("group_size", spec.group_size, 1, kGroupSizeMax));
  for (const auto& [name, dim] : {std::pair<const char*, int32_t>{"head_dim", spec.head_dim},
                                  {"value_dim", spec.value_dim}}) {
    if (!IsHeadDim(dim)) {
      return Invalid("CacheSpec.", name, " is ", dim, ", must be 64, 80, 96, 128 or 256");
    }
  }
  CERTKV_RETURN_IF_ERROR(
      CheckRange("block_tokens", spec.block_tokens, kTileTokens, kBlockTokensMax));
  if (spec.block_tokens % kTileTokens != 0) {
    return Invalid("CacheSpec.block_tokens is ", spec.block_tokens, ", must be a multiple of 64");
  }
  CERTKV_RETURN_IF_ERROR(CheckRope(spec));
  if (!(spec.logit_scale > 0 && std::isfinite(spec.logit_scale))) {
    return Invalid("CacheSpec.logit_scale is ", spec.logit_scale, ", must be finite and > 0");
  }
  if (!(spec.soft_cap >= 0 && std::isfinite(spec.soft_cap))) {
    return Invalid("CacheSpec.soft_cap is ", spec.soft_cap, " nats, must be finite and >= 0");
  }
  if (spec.original_dtype != OriginalDtype::kF16 && spec.original_dtype != OriginalDtype::kBf16) {
    return Invalid("CacheSpec.original_dtype is ", static_cast<int>(spec.original_dtype),
                   ", must be F16 or BF16");
  }
  CERTKV_RETURN_IF_ERROR(CheckRange("layers size", spec.layer_count(), 1, kLayersMax));
  for (size_t i = 0; i < spec.layers.size(); ++i) CERTKV_RETURN_IF_ERROR(CheckLayer(spec, i));
  return absl::OkStatus();
}

bool IsDithered(const CacheSpec& spec) {
  return std::any_of(spec.layers.begin(), spec.layers.end(),
                     [](const LayerSpec& layer) { return layer.key_format == KeyFormat::kK8D; });
}

const float* WitnessWeightsOf(const CacheSpec& spec, int32_t layer, int32_t kv_head) {
  const std::vector<float>& weights = spec.layers[layer].witness_weights;
  return weights.empty() ? nullptr : weights.data() + int64_t{kv_head} * spec.head_dim;
}

SpecDigest DigestCacheSpec(const CacheSpec& spec) {
  const bool is_weighted =
      std::any_of(spec.layers.begin(), spec.layers.end(),
                  [](const LayerSpec& layer) { return !layer.witness_weights.empty(); });
  Sha256 hash;
  hash.AddBytes(is_weighted ? kWeightedSpecDomain : kSpecDomain);
  hash.AddSized(spec.model);
  for (const int32_t value : {spec.kv_head_count, spec.group_size, spec.head_dim, spec.value_dim,
                              spec.block_tokens, static_cast<int32_t>(spec.rope_pairing),
                              spec.rotary_dim, static_cast<int32_t>(spec.original_dtype)}) {
    hash.AddU32(static_cast<uint32_t>(value));
  }
  for (const float value : {spec.rope_theta, spec.logit_scale, spec.soft_cap}) hash.AddF32(value);
  hash.AddU32(static_cast<uint32_t>(spec.layers.size()));
  for (const LayerSpec& layer : spec.layers) {
    hash.AddU32(static_cast<uint32_t>(layer.key_format));
    hash.AddU32(static_cast<uint32_t>(layer.value_format));
    hash.AddU32(static_cast<uint32_t>(layer.witness_bands));
    hash.AddF32(layer.fp8_key_scale);
    hash.AddU32(static_cast<uint32_t>(layer.sliding_window));
    if (!is_weighted) continue;
    hash.AddU32(static_cast<uint32_t>(layer.witness_weights.size()));
    for (const float weight : layer.witness_weights) hash.AddF32(weight);
  }
  return SpecDigest{hash.Finish()};
}

std::string DescribeCacheSpec(const CacheSpec& spec) {
  std::string formats;
  for (const LayerSpec& layer : spec.layers) {
    const std::string name = FormatPairName(layer.key_format, layer.value_format);
    if (!absl::StrContains(formats, name))
      absl::StrAppend(&formats, formats.empty() ? "" : "/", name);
  }
  return absl::StrCat(spec.model, " ", spec.layers.size(), " layers x ", spec.kv_head_count,
                      " KV heads x ", spec.group_size, ", d ", spec.head_dim, "/", spec.value_dim,
                      ", block ", spec.block_tokens, ", ", formats);
}

}  // namespace certkv
