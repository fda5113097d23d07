#include "clients/cli/truth.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/core/half.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "kernels/ops/attend_progressive.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::cli {
namespace {

double Logit(const CacheSpec& spec, double dot) {
  const double logit = double{spec.logit_scale} * dot;
  return spec.soft_cap > 0 ? spec.soft_cap * std::tanh(logit / spec.soft_cap) : logit;
}

// Logits to probabilities, in place.
void Softmax(std::vector<double>& logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double& value : logits) {
    value = std::exp(value - largest);
    sum += value;
  }
  for (double& value : logits) value /= sum;
}

double OriginalDot(const CacheSpec& spec, const uint16_t* key, const float* query) {
  double dot = 0;
  for (int32_t i = 0; i < spec.head_dim; ++i) {
    dot += double{query[i]} * OriginalToFloat(spec.original_dtype, key[i]);
  }
  return dot;
}

}  // namespace

HeadTruth ComputeHeadTruth(const CacheSpec& spec, const client::LayerKv& layer, int32_t query_head,
                           const float* query, int64_t token_begin, int64_t token_end) {
  const int32_t kv_head = query_head / spec.group_size;
  HeadTruth truth;
  for (int64_t t = token_begin; t < token_end; ++t) {
    const int64_t row = t * spec.kv_head_count + kv_head;
    truth.probabilities.push_back(
        Logit(spec, OriginalDot(spec, layer.keys + row * spec.head_dim, query)));
  }
  Softmax(truth.probabilities);
  truth.output.assign(spec.value_dim, 0.0);
  for (int64_t t = token_begin; t < token_end; ++t) {
    const uint16_t* value =
        layer.values + (t * spec.kv_head_count + kv_head) * int64_t{spec.value_dim};
    const double weight = truth.probabilities[t - token_begin];
    for (int32_t i = 0; i < spec.value_dim; ++i) {
      truth.output[i] += weight * OriginalToFloat(spec.original_dtype, value[i]);
    }
  }
  return truth;
}

absl::StatusOr<std::vector<float>> DecodeServedKeys(const client::Worker& worker,
                                                    const client::Sequence& sequence,
                                                    const client::LayerKv& layer,
                                                    int32_t layer_index, int32_t kv_head) {
  const CacheSpec& spec = worker.spec();
  const SlabLayout& device = worker.device_layout();
  const int64_t d = spec.head_dim;
  std::vector<float> keys(sequence.token_count() * d);
  int64_t token = 0;
  for (const BlockHandle& block : sequence.blocks()) {
    for (int32_t tile = 0; tile < device.tiles_per_block(); ++tile, token += kTileTokens) {
      const int32_t slot = block.device.slot;
      CERTKV_RETURN_IF_ERROR(DequantizeTile(
          device.tile_layout(layer_index),
          worker.device_base() + device.scan_offset(slot, layer_index, kv_head, tile),
          worker.device_base() + device.detail_offset(slot, layer_index, kv_head, tile),
          keys.data() + token * d, nullptr));
    }
  }
  for (; token < sequence.token_count(); ++token) {
    const uint16_t* row = layer.keys + (token * spec.kv_head_count + kv_head) * d;
    for (int64_t i = 0; i < d; ++i) {
      keys[token * d + i] = OriginalToFloat(spec.original_dtype, row[i]);
    }
  }
  return keys;
}

std::vector<double> ComputeServedSoftmax(const CacheSpec& spec, const client::LayerKv& layer,
                                         int32_t query_head, const float* query,
                                         absl::Span<const float> decoded,
                                         absl::Span<const uint8_t> tile_sources,
                                         int64_t token_end) {
  const int32_t kv_head = query_head / spec.group_size;
  std::vector<double> logits;
  logits.reserve(token_end);
  for (int64_t t = 0; t < token_end; ++t) {
    const auto tile = static_cast<size_t>(t / kTileTokens);
    const int source = tile < tile_sources.size() ? tile_sources[tile] : 0;
    if ((source >> (kSkippedShift + t % kTileTokens / kSubBlockTokens) & 1) != 0) {
      logits.push_back(-std::numeric_limits<double>::infinity());
      continue;
    }
    double dot = 0;
    if ((source & kSourceOriginalKeys) != 0) {
      const int64_t row = t * spec.kv_head_count + kv_head;
      dot = OriginalDot(spec, layer.keys + row * spec.head_dim, query);
    } else {
      const float* key = decoded.data() + t * spec.head_dim;
      for (int32_t i = 0; i < spec.head_dim; ++i) dot += double{query[i]} * key[i];
    }
    logits.push_back(Logit(spec, dot));
  }
  Softmax(logits);
  return logits;
}

double TotalVariation(absl::Span<const double> p, absl::Span<const double> q) {
  double sum = 0;
  for (size_t i = 0; i < p.size(); ++i) sum += std::fabs(p[i] - q[i]);
  return sum / 2;
}

double Distance(absl::Span<const double> exact, absl::Span<const float> served) {
  double sum = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    const double difference = exact[i] - served[i];
    sum += difference * difference;
  }
  return std::sqrt(sum);
}

double Norm(absl::Span<const double> values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

}  // namespace certkv::cli
