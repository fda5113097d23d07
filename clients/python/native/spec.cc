// CacheSpec and options: from Python objects, field by field.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/python/native/objects.h"
#include "kernels/core/cache_spec.h"

namespace certkv::python {

namespace py = pybind11;

namespace {

[[noreturn]] void SpecInvalid(const std::string& message) {
  Throw(MakeError(absl::StatusCode::kInvalidArgument, "CACHE_SPEC_INVALID", message));
}

template <typename T>
T Field(const py::handle& object, const char* name) {
  const py::object value = object.attr(name);
  try {
    return py::cast<T>(value);
  } catch (const py::cast_error&) {
    SpecInvalid(absl::StrCat(name, " is ", py::cast<std::string>(py::repr(value)),
                             ", which is of a wrong type"));
  }
}

// The enumerator whose name is the text of a field.
template <typename Enum, size_t kCount>
Enum Choice(const py::handle& object, const char* field, const std::array<Enum, kCount>& choices,
            const char* (*name_of)(Enum)) {
  const auto text = Field<std::string>(object, field);
  std::string known;
  for (const Enum choice : choices) {
    if (text == name_of(choice)) return choice;
    absl::StrAppend(&known, known.empty() ? "" : ", ", name_of(choice));
  }
  SpecInvalid(absl::StrCat(field, " is '", text, "', must be one of ", known));
}

const char* PairingName(RopePairing pairing) {
  switch (pairing) {
    case RopePairing::kNone:
      return "none";
    case RopePairing::kInterleaved:
      return "interleaved";
    case RopePairing::kHalfSplit:
      return "half_split";
  }
  return "?";
}

const char* DtypeText(OriginalDtype dtype) {
  return dtype == OriginalDtype::kF16 ? "float16" : "bfloat16";
}

LayerSpec LayerOf(const py::handle& layer) {
  static constexpr std::array kKeys = {KeyFormat::kK8,  KeyFormat::kK8D,     KeyFormat::kK6,
                                       KeyFormat::kK4,  KeyFormat::kFp8E4m3, KeyFormat::kF16,
                                       KeyFormat::kBf16};
  static constexpr std::array kValues = {ValueFormat::kV4, ValueFormat::kV8, ValueFormat::kF16,
                                         ValueFormat::kBf16};
  LayerSpec spec;
  spec.key_format = Choice(layer, "key_format", kKeys, &KeyFormatName);
  spec.value_format = Choice(layer, "value_format", kValues, &ValueFormatName);
  spec.witness_bands = Field<int32_t>(layer, "witness_bands");
  spec.fp8_key_scale = Field<float>(layer, "fp8_key_scale");
  spec.sliding_window = Field<int32_t>(layer, "sliding_window");
  for (const auto& head : Field<std::vector<std::vector<float>>>(layer, "witness_weights")) {
    spec.witness_weights.insert(spec.witness_weights.end(), head.begin(), head.end());
  }
  return spec;
}

}  // namespace

CacheSpec SpecOf(const py::object& object) {
  static constexpr std::array kPairings = {RopePairing::kNone, RopePairing::kInterleaved,
                                           RopePairing::kHalfSplit};
  static constexpr std::array kDtypes = {OriginalDtype::kF16, OriginalDtype::kBf16};
  CacheSpec spec;
  spec.model = Field<std::string>(object, "model");
  spec.kv_head_count = Field<int32_t>(object, "kv_head_count");
  spec.group_size = Field<int32_t>(object, "group_size");
  spec.head_dim = Field<int32_t>(object, "head_dim");
  spec.value_dim = Field<int32_t>(object, "value_dim");
  spec.block_tokens = Field<int32_t>(object, "block_tokens");
  spec.rope_pairing = Choice(object, "rope_pairing", kPairings, &PairingName);
  spec.rotary_dim = Field<int32_t>(object, "rotary_dim");
  spec.rope_theta = Field<float>(object, "rope_theta");
  spec.logit_scale = Field<float>(object, "logit_scale");
  spec.soft_cap = Field<float>(object, "soft_cap");
  spec.original_dtype = Choice(object, "original_dtype", kDtypes, &DtypeText);
  for (const py::handle layer : object.attr("layers")) spec.layers.push_back(LayerOf(layer));
  ThrowIfError(ValidateCacheSpec(spec));
  return spec;
}

client::Options OptionsOf(const py::dict& options) {
  client::Options out;
  const auto text = [&](const char* name) { return py::cast<std::string>(options[name]); };
  const auto number = [&](const char* name) { return py::cast<int64_t>(options[name]); };
  out.kvstore_target = text("kvstore_target");
  out.certifier_target = text("certifier_target");
  out.gate_target = text("gate_target");
  out.worker_name = text("worker_name");
  out.tenant = text("tenant");
  out.ca_file = text("ca_file");
  out.certificate_file = text("certificate_file");
  out.key_file = text("key_file");
  out.token_file = text("token_file");
  out.rpc_timeout_ms = number("rpc_timeout_ms");
  out.seal_timeout_ms = number("seal_timeout_ms");
  out.lease_duration_ms = number("lease_duration_ms");
  out.pressure_wait_ms = number("pressure_wait_ms");
  out.staging_slot_count = static_cast<int32_t>(number("staging_slot_count"));
  return out;
}

void DefineSpec(py::module_& module) {
  module.def("describe_spec",
             [](const py::object& spec) { return DescribeCacheSpec(SpecOf(spec)); });
  module.def("digest_spec", [](const py::object& spec) {
    const SpecDigest digest = DigestCacheSpec(SpecOf(spec));
    const absl::string_view view = digest.view();
    return py::bytes(view.data(), view.size());
  });
  module.def("default_target", [] { return client::DefaultTarget(); });
}

}  // namespace certkv::python
