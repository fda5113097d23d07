// Traces: real keys, values and queries of one prompt, in a safetensors file ("certkv-trace-1").
//
// Metadata: format, model, model_license, layers ("0,9,19,29"), head_dim, kv_heads, query_heads,
// rope
// ("interleaved" | "half_split" | "none"), rotary_dim, rope_theta, logit_scale, dtype. Tensors:
// token_ids I32 [N], query_positions I32 [Q], and per layer L of `layers`:
// layers.L.key F16 [N, kv_heads, d], layers.L.value, layers.L.query F16 [Q, query_heads, d].
// Query i reads tokens 0 .. query_positions[i].
#ifndef CERTKV_CLIENTS_CLI_TRACE_H_
#define CERTKV_CLIENTS_CLI_TRACE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "clients/cpp/worker.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/safetensors.h"

namespace certkv::cli {

// How a layer is stored.
struct FormatChoice {
  KeyFormat key_format = KeyFormat::kK8;
  ValueFormat value_format = ValueFormat::kV4;
  int32_t witness_bands = 0;
};
// "K8V4", "K8V8", "K6V4", "K4V4", "FP8_E4M3" (with V8 and 4 bands), "F16", ...; "K6V4w1", "K6V4w4"
// with the bands of a witness: what the command line takes.
// Errors: InvalidArgument [FORMAT_UNKNOWN] with the list.
absl::StatusOr<FormatChoice> ParseFormat(absl::string_view name);

class Trace {
 public:
  // Errors: those of SafetensorsFile::Open; InvalidArgument [TRACE_INVALID], naming what is missing
  // or doesn't fit.
  static absl::StatusOr<std::unique_ptr<Trace>> Open(absl::string_view path);

  // The cache of this trace's model, every layer in this format.
  CacheSpec MakeSpec(const FormatChoice& format) const;

  const std::string& model() const { return model_; }
  const std::string& license() const { return license_; }
  const std::vector<int32_t>& layer_numbers() const { return layer_numbers_; }  // in the model
  const std::vector<int32_t>& token_ids() const { return token_ids_; }
  const std::vector<int32_t>& query_positions() const { return query_positions_; }
  int32_t layer_count() const { return static_cast<int32_t>(layer_numbers_.size()); }
  int32_t token_count() const { return static_cast<int32_t>(token_ids_.size()); }
  int32_t query_count() const { return static_cast<int32_t>(query_positions_.size()); }

  // Originals per layer, as PutSequence takes them. Borrowed from the trace.
  std::vector<client::LayerKv> Layers() const;
  // The queries of one position, [query_heads][d], widened to float.
  std::vector<float> Queries(int32_t layer_index, int32_t query_index) const;

 private:
  Trace() = default;
  absl::Status Load();
  absl::Status LoadSpec();
  absl::Status LoadLayers();

  std::unique_ptr<SafetensorsFile> file_;
  CacheSpec spec_;
  std::string model_;
  std::string license_;
  std::vector<int32_t> layer_numbers_;
  std::vector<int32_t> token_ids_;
  std::vector<int32_t> query_positions_;
  struct LayerData {
    std::vector<uint16_t> keys, values, queries;
  };
  std::vector<LayerData> layers_;
};

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_TRACE_H_
