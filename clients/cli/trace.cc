#include "clients/cli/trace.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "TRACE_INVALID", message);
}

absl::StatusOr<std::string> Text(const SafetensorsFile& file, absl::string_view name) {
  const auto found = file.metadata().find(name);
  if (found == file.metadata().end()) {
    return Invalid(absl::StrCat("trace metadata lacks ", name, "; it isn't a certkv-trace-1 file"));
  }
  return found->second;
}

template <typename T>
absl::StatusOr<T> Number(const SafetensorsFile& file, absl::string_view name) {
  CERTKV_ASSIGN_OR_RETURN(const std::string text, Text(file, name));
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !(value >= 0 && value <= 1e9)) {
    return Invalid(
        absl::StrCat("trace metadata ", name, " is '", text, "', must be a number in [0, 1e9]"));
  }
  return static_cast<T>(value);
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// The tensor's bytes as T, after its dtype and shape were checked; -1 in `shape` accepts any size.
template <typename T>
absl::StatusOr<std::vector<T>> Values(const SafetensorsFile& file, const std::string& name,
                                      TensorDtype dtype, const std::vector<int64_t>& shape) {
  CERTKV_ASSIGN_OR_RETURN(const TensorView tensor, file.Tensor(name));
  bool fits = tensor.dtype == dtype && tensor.shape.size() == shape.size();
  for (size_t i = 0; fits && i < shape.size(); ++i) {
    fits = shape[i] == -1 ? tensor.shape[i] > 0 : tensor.shape[i] == shape[i];
  }
  if (!fits) {
    return Invalid(absl::StrCat("trace tensor ", name, " is ", TensorDtypeName(tensor.dtype), " ",
                                ShapeText(tensor.shape), ", must be ", TensorDtypeName(dtype), " ",
                                ShapeText(shape)));
  }
  std::vector<T> values(tensor.element_count());
  std::memcpy(values.data(), tensor.bytes.data(), tensor.bytes.size());
  return values;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trace>> Trace::Open(absl::string_view path) {
  std::unique_ptr<Trace> trace(new Trace);
  CERTKV_ASSIGN_OR_RETURN(trace->file_, SafetensorsFile::Open(path));
  const absl::Status loaded = trace->Load();
  if (!loaded.ok()) return WithContext(loaded, path);
  return trace;
}

absl::Status Trace::Load() {
  CERTKV_ASSIGN_OR_RETURN(const std::string format, Text(*file_, "format"));
  if (format != "certkv-trace-1") {
    return Invalid(absl::StrCat("trace format is '", format, "', must be certkv-trace-1"));
  }
  CERTKV_RETURN_IF_ERROR(LoadSpec());
  return LoadLayers();
}

absl::Status Trace::LoadSpec() {
  CERTKV_ASSIGN_OR_RETURN(model_, Text(*file_, "model"));
  CERTKV_ASSIGN_OR_RETURN(license_, Text(*file_, "model_license"));
  spec_.model = model_;
  CERTKV_ASSIGN_OR_RETURN(spec_.kv_head_count, Number<int32_t>(*file_, "kv_heads"));
  CERTKV_ASSIGN_OR_RETURN(const auto query_heads, Number<int32_t>(*file_, "query_heads"));
  if (spec_.kv_head_count < 1 || query_heads % spec_.kv_head_count != 0) {
    return Invalid(absl::StrCat("trace has ", query_heads, " query heads and ", spec_.kv_head_count,
                                " KV heads; the first must be a multiple of the second"));
  }
  spec_.group_size = query_heads / spec_.kv_head_count;
  CERTKV_ASSIGN_OR_RETURN(spec_.head_dim, Number<int32_t>(*file_, "head_dim"));
  spec_.value_dim = spec_.head_dim;
  CERTKV_ASSIGN_OR_RETURN(const std::string rope, Text(*file_, "rope"));
  if (rope != "interleaved" && rope != "half_split" && rope != "none") {
    return Invalid(absl::StrCat("trace metadata rope is '", rope,
                                "', must be interleaved, half_split or none"));
  }
  spec_.rope_pairing = rope == "interleaved"  ? RopePairing::kInterleaved
                       : rope == "half_split" ? RopePairing::kHalfSplit
                                              : RopePairing::kNone;
  CERTKV_ASSIGN_OR_RETURN(spec_.rotary_dim, Number<int32_t>(*file_, "rotary_dim"));
  CERTKV_ASSIGN_OR_RETURN(spec_.rope_theta, Number<float>(*file_, "rope_theta"));
  CERTKV_ASSIGN_OR_RETURN(spec_.logit_scale, Number<float>(*file_, "logit_scale"));
  CERTKV_ASSIGN_OR_RETURN(const std::string layers, Text(*file_, "layers"));
  for (const absl::string_view part : absl::StrSplit(layers, ',')) {
    int32_t number = 0;
    if (!absl::SimpleAtoi(part, &number) || number < 0) {
      return Invalid(absl::StrCat("trace metadata layers is '", layers,
                                  "', must be layer numbers with commas between"));
    }
    layer_numbers_.push_back(number);
  }
  spec_.layers.resize(layer_numbers_.size());
  return ValidateCacheSpec(spec_);
}

absl::Status Trace::LoadLayers() {
  CERTKV_ASSIGN_OR_RETURN(token_ids_,
                          Values<int32_t>(*file_, "token_ids", TensorDtype::kI32, {-1}));
  CERTKV_ASSIGN_OR_RETURN(query_positions_,
                          Values<int32_t>(*file_, "query_positions", TensorDtype::kI32, {-1}));
  for (const int32_t position : query_positions_) {
    if (!(position >= 0 && position < token_count())) {
      return Invalid(absl::StrCat("trace query_positions holds ", position, ", must be in [0, ",
                                  token_count(), ")"));
    }
  }
  const int64_t d = spec_.head_dim;
  for (const int32_t number : layer_numbers_) {
    const std::string stem = absl::StrCat("layers.", number, ".");
    const std::vector<int64_t> kv_shape{token_count(), spec_.kv_head_count, d};
    LayerData layer;
    CERTKV_ASSIGN_OR_RETURN(layer.keys,
                            Values<uint16_t>(*file_, stem + "key", TensorDtype::kF16, kv_shape));
    CERTKV_ASSIGN_OR_RETURN(layer.values,
                            Values<uint16_t>(*file_, stem + "value", TensorDtype::kF16, kv_shape));
    CERTKV_ASSIGN_OR_RETURN(layer.queries,
                            Values<uint16_t>(*file_, stem + "query", TensorDtype::kF16,
                                             {query_count(), spec_.query_head_count(), d}));
    layers_.push_back(std::move(layer));
  }
  return absl::OkStatus();
}

CacheSpec Trace::MakeSpec(const FormatChoice& format) const {
  CacheSpec spec = spec_;
  for (LayerSpec& layer : spec.layers) {
    layer.key_format = format.key_format;
    layer.value_format = format.value_format;
    layer.witness_bands = format.witness_bands;
  }
  return spec;
}

std::vector<client::LayerKv> Trace::Layers() const {
  std::vector<client::LayerKv> layers;
  for (const LayerData& layer : layers_) layers.push_back({layer.keys.data(), layer.values.data()});
  return layers;
}

std::vector<float> Trace::Queries(int32_t layer_index, int32_t query_index) const {
  const int64_t count = int64_t{spec_.query_head_count()} * spec_.head_dim;
  const uint16_t* from = layers_[layer_index].queries.data() + query_index * count;
  std::vector<float> queries(count);
  std::transform(from, from + count, queries.begin(), F16ToFloat);
  return queries;
}

absl::StatusOr<FormatChoice> ParseFormat(absl::string_view name) {
  for (const KeyFormat key : {KeyFormat::kK8, KeyFormat::kK8D, KeyFormat::kK6, KeyFormat::kK4}) {
    for (const ValueFormat value : {ValueFormat::kV4, ValueFormat::kV8}) {
      const std::string pair = FormatPairName(key, value);
      if (name == pair) return FormatChoice{key, value};
      for (const int32_t bands : {1, 4}) {
        const bool has_witness = key != KeyFormat::kK8D && name == absl::StrCat(pair, "w", bands);
        if (has_witness) return FormatChoice{key, value, bands};
      }
    }
  }
  if (name == "FP8_E4M3" || name == "FP8_E4M3w4") {
    return FormatChoice{KeyFormat::kFp8E4m3, ValueFormat::kV8, 4};
  }
  if (name == "F16") return FormatChoice{KeyFormat::kF16, ValueFormat::kF16};
  return MakeError(
      absl::StatusCode::kInvalidArgument, "FORMAT_UNKNOWN",
      absl::StrCat("format is '", name,
                   "', must be K8V4, K8V8, K8DV4, K8DV8, K6V4, K6V8, K4V4, K4V8, FP8_E4M3 "
                   "or F16; the affine ones also with the bands of a witness, as in K6V4w1 or "
                   "K6V4w4"));
}

}  // namespace certkv::cli
