#include "clients/cli/witness_weights.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/bounds/witness_weights.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::cli {
namespace {

absl::Status Invalid(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "TRACE_INVALID", message);
}

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

// Of k - k^ over the whole tiles of one KV head's keys.
absl::StatusOr<std::vector<double>> ResidualRms(const CacheSpec& spec, int32_t layer,
                                                const client::LayerKv& originals, int32_t kv_head,
                                                int32_t tile_count) {
  const TileLayout layout = MakeTileLayout(spec, layer);
  std::vector<Line> record(static_cast<size_t>(layout.tile_bytes() / 64));
  std::vector<float> decoded(static_cast<size_t>(kTileTokens) * spec.head_dim);
  ChannelRms rms(spec.head_dim);
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
        rms.Add(i, double{key} - decoded[static_cast<size_t>(t) * spec.head_dim + i]);
      }
      rms.EndRow();
    }
  }
  return rms.Values();
}

// Of the queries of one KV head's group, each divided by its norm.
std::vector<double> QueryRms(const CacheSpec& spec, int32_t kv_head,
                             const std::vector<std::vector<float>>& queries) {
  ChannelRms rms(spec.head_dim);
  for (const std::vector<float>& heads : queries) {
    for (int32_t g = 0; g < spec.group_size; ++g) {
      const float* query = heads.data() + (int64_t{kv_head} * spec.group_size + g) * spec.head_dim;
      double square = 0;
      for (int32_t i = 0; i < spec.head_dim; ++i) square += double{query[i]} * query[i];
      if (!(square > 0)) continue;
      for (int32_t i = 0; i < spec.head_dim; ++i) rms.Add(i, query[i] / std::sqrt(square));
      rms.EndRow();
    }
  }
  return rms.Values();
}

}  // namespace

absl::StatusOr<std::vector<std::vector<float>>> ChooseWeights(
    const Trace& trace, const FormatChoice& format, const std::function<bool(int32_t)>& chooses) {
  const CacheSpec spec = trace.MakeSpec(format);
  const int32_t tile_count = trace.token_count() / kTileTokens;
  if (tile_count == 0) {
    return Invalid(absl::StrCat("the trace has ", trace.token_count(), " tokens, must have ",
                                kTileTokens, " at least to choose weights from"));
  }
  std::vector<int32_t> chosen;
  for (int32_t i = 0; i < trace.query_count(); ++i) {
    if (chooses(i)) chosen.push_back(i);
  }
  if (chosen.empty()) {
    return Invalid(absl::StrCat("none of the trace's ", trace.query_count(),
                                " queries is there to choose weights from"));
  }
  const std::vector<client::LayerKv> originals = trace.Layers();
  std::vector<std::vector<float>> weights(trace.layer_count());
  for (int32_t layer = 0; layer < trace.layer_count(); ++layer) {
    std::vector<std::vector<float>> queries;
    for (const int32_t i : chosen) queries.push_back(trace.Queries(layer, i));
    for (int32_t h = 0; h < spec.kv_head_count; ++h) {
      const auto residual_rms = ResidualRms(spec, layer, originals[layer], h, tile_count);
      if (!residual_rms.ok()) {
        return WithContext(residual_rms.status(), absl::StrCat("layer ", layer, ", KV head ", h));
      }
      const std::vector<float> one =
          ChooseWitnessWeights(QueryRms(spec, h, queries), *residual_rms);
      weights[layer].insert(weights[layer].end(), one.begin(), one.end());
    }
  }
  return weights;
}

}  // namespace certkv::cli
