#include "clients/cli/witness_weights.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kernels/bounds/witness_weights.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::cli {
namespace {

// Root mean squares by channel.
class ChannelRms {
 public:
  explicit ChannelRms(int32_t head_dim) : squares_(head_dim) {}
  void Add(int32_t channel, double x) { squares_[channel] += x * x; }
  void EndRow() { ++rows_; }
  std::vector<double> Values() const {
    std::vector<double> values;
    for (const double square : squares_) {
      values.push_back(std::sqrt(square / static_cast<double>(rows_)));
    }
    return values;
  }

 private:
  std::vector<double> squares_;
  int64_t rows_ = 0;
};

struct alignas(64) Line {
  uint8_t bytes[64];
};

// Adds k - k^ over the whole tiles of one KV head's keys.
absl::Status AddResiduals(const CacheSpec& spec, int32_t layer, const client::LayerKv& originals,
                          int32_t kv_head, int32_t tile_count, ChannelRms* rms) {
  const TileLayout layout = MakeTileLayout(spec, layer);
  std::vector<Line> record(static_cast<size_t>(layout.tile_bytes() / 64));
  std::vector<float> decoded(static_cast<size_t>(kTileTokens) * spec.head_dim);
  QuantizeTileArgs args{};
  args.spec = &spec;
  args.layer = layer;
  args.layout = &layout;
  args.key_stride = int64_t{spec.kv_head_count} * spec.head_dim;
  args.value_stride = int64_t{spec.kv_head_count} * spec.value_dim;
  args.scan = record.data()->bytes;
  args.detail = args.scan + layout.scan_bytes;
  for (int32_t tile = 0; tile < tile_count; ++tile) {
    const int64_t first = int64_t{tile} * kTileTokens;
    args.keys = static_cast<const uint16_t*>(originals.keys) + first * args.key_stride +
                int64_t{kv_head} * spec.head_dim;
    args.values = static_cast<const uint16_t*>(originals.values) + first * args.value_stride +
                  int64_t{kv_head} * spec.value_dim;
    CERTKV_RETURN_IF_ERROR(QuantizeTile(Backend::kCpu, args));
    CERTKV_RETURN_IF_ERROR(DequantizeTile(layout, args.scan, args.detail, decoded.data(), nullptr));
    for (int t = 0; t < kTileTokens; ++t) {
      for (int32_t i = 0; i < spec.head_dim; ++i) {
        const float key = OriginalToFloat(spec.original_dtype, args.keys[t * args.key_stride + i]);
        rms->Add(i, double{key} - decoded[static_cast<size_t>(t) * spec.head_dim + i]);
      }
      rms->EndRow();
    }
  }
  return absl::OkStatus();
}

// Adds the queries of one KV head's group, each divided by its norm. `heads`: [query_heads][d].
void AddQueries(const CacheSpec& spec, int32_t kv_head, const std::vector<float>& heads,
                ChannelRms* rms) {
  for (int32_t g = 0; g < spec.group_size; ++g) {
    const float* query = heads.data() + (int64_t{kv_head} * spec.group_size + g) * spec.head_dim;
    double square = 0;
    for (int32_t i = 0; i < spec.head_dim; ++i) square += double{query[i]} * query[i];
    if (!(square > 0)) continue;
    for (int32_t i = 0; i < spec.head_dim; ++i) rms->Add(i, query[i] / std::sqrt(square));
    rms->EndRow();
  }
}

// The queries of a trace that choose.
std::vector<int32_t> ChoosingQueries(const ChoosingTrace& one) {
  std::vector<int32_t> chosen;
  for (int32_t i = 0; i < one.trace->query_count(); ++i) {
    if (one.chooses(i)) chosen.push_back(i);
  }
  return chosen;
}

absl::Status CheckTraces(absl::Span<const ChoosingTrace> traces) {
  for (const ChoosingTrace& one : traces) {
    if (one.trace->token_count() >= kTileTokens && !ChoosingQueries(one).empty()) {
      return absl::OkStatus();
    }
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "TRACE_INVALID",
                   absl::StrCat("none of ", traces.size(), " traces has ", kTileTokens,
                                " tokens and a query that chooses; weights can't be chosen"));
}

// Of one layer, by KV head.
absl::StatusOr<std::vector<float>> ChooseForLayer(absl::Span<const ChoosingTrace> traces,
                                                  const CacheSpec& spec, int32_t layer) {
  std::vector<ChannelRms> queries(spec.kv_head_count, ChannelRms(spec.head_dim));
  std::vector<ChannelRms> residuals = queries;
  for (const ChoosingTrace& one : traces) {
    const std::vector<int32_t> chosen = ChoosingQueries(one);
    if (chosen.empty()) continue;
    for (const int32_t i : chosen) {
      const std::vector<float> heads = one.trace->Queries(layer, i);
      for (int32_t h = 0; h < spec.kv_head_count; ++h) AddQueries(spec, h, heads, &queries[h]);
    }
    const client::LayerKv originals = one.trace->Layers()[layer];
    for (int32_t h = 0; h < spec.kv_head_count; ++h) {
      const absl::Status status = AddResiduals(
          spec, layer, originals, h, one.trace->token_count() / kTileTokens, &residuals[h]);
      if (!status.ok()) return WithContext(status, absl::StrCat("layer ", layer, ", KV head ", h));
    }
  }
  std::vector<float> weights;
  for (int32_t h = 0; h < spec.kv_head_count; ++h) {
    const std::vector<float> of_head =
        ChooseWitnessWeights(queries[h].Values(), residuals[h].Values());
    weights.insert(weights.end(), of_head.begin(), of_head.end());
  }
  return weights;
}

}  // namespace

absl::StatusOr<WeightedFormat> ParseWeightedFormat(absl::string_view name) {
  absl::string_view plain = name;
  const bool is_weighted = absl::ConsumeSuffix(&plain, "c");
  CERTKV_ASSIGN_OR_RETURN(const FormatChoice format, ParseFormat(plain));
  if (!is_weighted || format.witness_bands > 0) return WeightedFormat{format, is_weighted};
  return MakeError(absl::StatusCode::kInvalidArgument, "FORMAT_UNKNOWN",
                   absl::StrCat("format ", name, " has weights (c) and no witness; write ", plain,
                                ", or bands before the c as in K6V4w1c"));
}

absl::StatusOr<LayerWeights> ChooseWeights(absl::Span<const ChoosingTrace> traces,
                                           const FormatChoice& format) {
  CERTKV_RETURN_IF_ERROR(CheckTraces(traces));
  const CacheSpec spec = traces[0].trace->MakeSpec(format);
  LayerWeights weights;
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    CERTKV_ASSIGN_OR_RETURN(std::vector<float> of_layer, ChooseForLayer(traces, spec, layer));
    weights.push_back(std::move(of_layer));
  }
  return weights;
}

}  // namespace certkv::cli
