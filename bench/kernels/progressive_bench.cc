#include "bench/kernels/progressive_bench.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/kernels/attend_variants.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/core/safetensors.h"
#include "kernels/ops/attend_progressive.h"

namespace certkv::bench {
namespace {

constexpr float kSkipTolerance = 0.1f;
// Nearly everything may be skipped: what is left is the scan and the choice.
constexpr float kScanOnly = 0.999f;
// Tried for the baseline, beside its own.
const std::vector<cpu::PrefetchSchedule> kSchedules = {{1, 1}, {1, 2}, {2, 1}, {2, 2},
                                                       {2, 3}, {3, 3}, {4, 4}};
constexpr int kScheduleRepeats = 3;

// A progressive read of K8V4, as it ships.
class ProgressiveVariant {
 public:
  ProgressiveVariant(std::shared_ptr<SealedCache> cache, const AttendArgs& args,
                     float skip_tolerance)
      : cache_(std::move(cache)), tolerances_(args.group_size, skip_tolerance) {
    args_ = {args, tolerances_.data()};
    const int64_t heads = args.group_size;
    const int64_t atoms = heads * ProgressiveAtomsMax(args);
    floats_.resize(heads * args.layout->value_dim + 4 * heads + 3 * atoms + 1);
    counts_.resize(heads);
    masks_.resize(heads * args.tile_count);
    float* at = floats_.data();
    const auto take = [&at](int64_t count) { return std::exchange(at, at + count); };
    result_ = {.outputs = take(heads * args.layout->value_dim),
               .lse_nat = take(heads),
               .atom_count = counts_.data(),
               .block_lse = take(atoms),
               .block_max_logit = take(atoms),
               .logit_half_width = take(atoms),
               .value_term = take(heads),
               .rounding_term = take(heads),
               .value_radius = take(1),
               .skipped_lse_nat = take(heads),
               .sub_blocks_read = masks_.data()};
    workspace_ = std::make_unique<HugeBuffer>(ProgressiveWorkspaceBytes(args));
  }

  Clocks Read(const float* queries) {
    args_.read.queries = queries;
    args_.read.tiles = cache_->NextHead().data();
    const Clocks begin = ReadClocks();
    const absl::Status status =
        AttendProgressive(Backend::kCpu, args_, result_, workspace_->data());
    const Clocks end = ReadClocks();
    CERTKV_CHECK(status.ok(), "the benchmark's reads succeed");
    for (const uint8_t mask : masks_) sub_blocks_read_ += std::popcount(mask);
    sub_blocks_ += static_cast<int64_t>(masks_.size()) * kSubBlocksPerTile;
    return {end.wall_ns - begin.wall_ns, end.thread_ns - begin.thread_ns};
  }

  // Of the sub-blocks, over heads and reads.
  double share_read() const {
    return static_cast<double>(sub_blocks_read_) / static_cast<double>(sub_blocks_);
  }
  std::vector<double> thread_ns;  // per token, one entry a round

 private:
  std::shared_ptr<SealedCache> cache_;
  std::vector<float> tolerances_;
  ProgressiveArgs args_{};
  std::vector<float> floats_;
  std::vector<int32_t> counts_;
  std::vector<uint8_t> masks_;
  ProgressiveResult result_{};
  std::unique_ptr<HugeBuffer> workspace_;
  int64_t sub_blocks_read_ = 0;
  int64_t sub_blocks_ = 0;
};

struct Data {
  int32_t dim;
  int32_t group_size;
  int32_t tile_count;
  FillTile fill;
  std::vector<std::vector<float>> queries;  // [n][G d], in turn
};

double MedianRatio(const std::vector<double>& above, const std::vector<double>& below) {
  std::vector<double> ratios;
  for (size_t i = 0; i < above.size(); ++i) ratios.push_back(above[i] / below[i]);
  return Median(ratios);
}

// Alternates the baseline, the dense and the progressive read, head by head.
nlohmann::json Compare(const std::string& name, const Data& data,
                       const ProgressiveOptions& options) {
  std::vector<float> queries = data.queries[0];  // the variants' own; rewritten for every head
  VariantShape shape{KeyFormat::kF16, ValueFormat::kF16,   0, data.dim, data.group_size,
                     data.tile_count, options.cache_factor};
  Variant baseline("F16", shape, MakeSealedCache(shape, data.fill), queries, CertifiedKernels());
  shape.key_format = KeyFormat::kK8;
  shape.value_format = ValueFormat::kV4;
  const std::shared_ptr<SealedCache> cache = MakeSealedCache(shape, data.fill);
  Variant dense("K8V4", shape, cache, queries, nullptr);
  ProgressiveVariant skipping(cache, dense.args(), kSkipTolerance);
  ProgressiveVariant scanning(cache, dense.args(), kScanOnly);
  baseline.ChooseSchedule(kSchedules, kScheduleRepeats);
  const double tokens =
      static_cast<double>(data.tile_count) * kTileTokens * options.heads_per_round;
  size_t turn = 0;
  for (int round = -1; round < options.rounds; ++round) {  // the first warms up
    double spent[4] = {};
    for (int h = 0; h < options.heads_per_round; ++h) {
      queries = data.queries[turn++ % data.queries.size()];
      spent[0] += static_cast<double>(baseline.Read().thread_ns);
      spent[1] += static_cast<double>(dense.Read().thread_ns);
      spent[2] += static_cast<double>(skipping.Read(queries.data()).thread_ns);
      spent[3] += static_cast<double>(scanning.Read(queries.data()).thread_ns);
    }
    if (round < 0) continue;
    baseline.thread_ns.push_back(spent[0] / tokens);
    dense.thread_ns.push_back(spent[1] / tokens);
    skipping.thread_ns.push_back(spent[2] / tokens);
    scanning.thread_ns.push_back(spent[3] / tokens);
  }
  const TileLayout& layout = *dense.args().layout;
  const double share = skipping.share_read();
  const double bytes = static_cast<double>(layout.scan_bytes) / kTileTokens +
                       share * static_cast<double>(layout.sub_block_bytes) / kSubBlockTokens;
  nlohmann::json row = {
      {"name", name},
      {"head_dim", data.dim},
      {"group_size", data.group_size},
      {"tokens", data.tile_count * kTileTokens},
      {"skip_tolerance", kSkipTolerance},
      {"share_read", share},
      {"ns_per_token", Median(skipping.thread_ns)},
      {"scan_ns_per_token", Median(scanning.thread_ns)},
      {"fp16_ns_per_token", Median(baseline.thread_ns)},
      {"dense_ns_per_token", Median(dense.thread_ns)},
      {"bytes_per_token", bytes},
      {"ratio_to_fp16", MedianRatio(baseline.thread_ns, skipping.thread_ns)},
      {"ratio_to_dense", MedianRatio(dense.thread_ns, skipping.thread_ns)},
      {"scan_ratio_to_fp16", MedianRatio(baseline.thread_ns, scanning.thread_ns)},
  };
  absl::PrintF(
      "%-34s %7.1f %8.2f %7.2f  vs dense %.2f, read %.1f%%, scan %.2f ns (%.2f), F16 %.2f\n", name,
      bytes, row["ns_per_token"].get<double>(), row["ratio_to_fp16"].get<double>(),
      row["ratio_to_dense"].get<double>(), 100 * share, row["scan_ns_per_token"].get<double>(),
      row["scan_ratio_to_fp16"].get<double>(), row["fp16_ns_per_token"].get<double>());
  std::fflush(stdout);
  return row;
}

std::string LengthSuffix(int32_t tokens) {
  return tokens == 32768 ? "" : absl::StrCat("/n", tokens);
}

std::vector<uint16_t> Words(const SafetensorsFile& file, const std::string& name) {
  const auto tensor = file.Tensor(name);
  CERTKV_CHECK(tensor.ok(), "the trace has the tensors of docs/formats.md, section 8");
  std::vector<uint16_t> words(tensor->bytes.size() / sizeof(uint16_t));
  std::memcpy(words.data(), tensor->bytes.data(), tensor->bytes.size());
  return words;
}

// [tokens][dim] of the first KV head, and the noise of each channel.
struct Rows {
  std::vector<float> values;
  std::vector<float> noise;
};

Rows FirstHead(const std::vector<uint16_t>& words, int64_t tokens, int32_t kv_heads, int32_t dim) {
  Rows rows;
  rows.noise.resize(dim);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int i = 0; i < dim; ++i) rows.values.push_back(F16ToFloat(words[t * kv_heads * dim + i]));
  }
  for (int i = 0; i < dim; ++i) {
    double sum = 0;
    double square = 0;
    for (int64_t t = 0; t < tokens; ++t) {
      sum += rows.values[t * dim + i];
      square += double{rows.values[t * dim + i]} * rows.values[t * dim + i];
    }
    const auto n = static_cast<double>(tokens);
    rows.noise[i] =
        static_cast<float>(0.1 * std::sqrt(std::max(0.0, square / n - sum * sum / n / n)));
  }
  return rows;
}

}  // namespace

void AddPlantedRows(const ProgressiveOptions& options, int32_t tokens, int32_t group_size,
                    nlohmann::json* rows) {
  constexpr int32_t kDim = 128;
  constexpr float kBoostNat = 7;  // above the others
  Data data;
  data.dim = kDim;
  data.group_size = group_size;
  data.tile_count = tokens / kTileTokens;
  data.queries = {BenchQueries(group_size, kDim)};
  const std::vector<float>& queries = data.queries[0];
  data.fill = [&queries, group_size](int32_t tile, std::vector<uint16_t>* keys,
                                     std::vector<uint16_t>* values) {
    FillOriginals(tile, kDim, keys, values);
    std::mt19937_64 random(7001 + tile);
    for (int g = 0; g < group_size; ++g) {
      const float* query = queries.data() + g * kDim;
      float square = 0;
      for (int i = 0; i < kDim; ++i) square += query[i] * query[i];
      const float factor = kBoostNat * std::sqrt(static_cast<float>(kDim)) / square;
      for (int b = 0; b < kSubBlocksPerTile; ++b) {
        if (random() % 10 != 0) continue;
        for (int t = b * kSubBlockTokens; t < (b + 1) * kSubBlockTokens; ++t) {
          for (int i = 0; i < kDim; ++i) {
            uint16_t& key = (*keys)[t * kDim + i];
            key = FloatToF16(F16ToFloat(key) + factor * query[i]);
          }
        }
      }
    }
  };
  nlohmann::json row =
      Compare(absl::StrCat("progressive/G", group_size, LengthSuffix(tokens)), data, options);
  row["data"] = "planted";
  rows->push_back(row);
}

void AddTraceRows(const ProgressiveOptions& options, const std::string& path, int32_t tokens,
                  nlohmann::json* rows) {
  const auto file = SafetensorsFile::Open(path);
  CERTKV_CHECK(file.ok(), "--trace names a trace file");
  const auto& metadata = (*file)->metadata();
  const std::vector<std::string> layers = absl::StrSplit(metadata.at("layers"), ',');
  int32_t kv_heads = 0;
  int32_t query_heads = 0;
  int32_t dim = 0;
  CERTKV_CHECK(absl::SimpleAtoi(metadata.at("kv_heads"), &kv_heads) &&
                   absl::SimpleAtoi(metadata.at("query_heads"), &query_heads) &&
                   absl::SimpleAtoi(metadata.at("head_dim"), &dim),
               "the trace's metadata has its shape");
  for (const std::string& layer : layers) {
    const std::string prefix = absl::StrCat("layers.", layer, ".");
    const auto shape = (*file)->Tensor(prefix + "key");
    CERTKV_CHECK(shape.ok(), "the trace has keys");
    const int64_t real_tokens = shape->shape[0];
    const Rows keys = FirstHead(Words(**file, prefix + "key"), real_tokens, kv_heads, dim);
    const Rows values = FirstHead(Words(**file, prefix + "value"), real_tokens, kv_heads, dim);
    Data data;
    data.dim = dim;
    data.group_size = query_heads / kv_heads;
    data.tile_count =
        static_cast<int32_t>(tokens == 0 ? real_tokens / kTileTokens : tokens / kTileTokens);
    const std::vector<uint16_t> queries = Words(**file, prefix + "query");
    const int64_t row = int64_t{query_heads} * dim;
    const int64_t count = static_cast<int64_t>(queries.size()) / row;
    for (int64_t n = std::max<int64_t>(0, count - 8); n < count; ++n) {  // the last positions
      std::vector<float>& group = data.queries.emplace_back();
      for (int64_t i = 0; i < int64_t{data.group_size} * dim; ++i) {
        group.push_back(F16ToFloat(queries[n * row + i]));
      }
    }
    data.fill = [&](int32_t tile, std::vector<uint16_t>* key_words,
                    std::vector<uint16_t>* value_words) {
      std::mt19937_64 random(9001 + tile);
      std::normal_distribution<float> normal;
      key_words->resize(kTileTokens * dim);
      value_words->resize(kTileTokens * dim);
      for (int t = 0; t < kTileTokens; ++t) {
        const int64_t token = int64_t{tile} * kTileTokens + t;
        const float noise = token < real_tokens ? 0.0f : 1.0f;
        for (int i = 0; i < dim; ++i) {
          const int64_t at = token % real_tokens * dim + i;
          (*key_words)[t * dim + i] =
              FloatToF16(keys.values[at] + noise * keys.noise[i] * normal(random));
          (*value_words)[t * dim + i] =
              FloatToF16(values.values[at] + noise * values.noise[i] * normal(random));
        }
      }
    };
    nlohmann::json result =
        Compare(absl::StrCat("progressive/trace/layer", layer, "/n", data.tile_count * kTileTokens),
                data, options);
    result["data"] = tokens == 0 ? "trace" : "trace, repeated with fresh noise";
    result["layer"] = layer;
    rows->push_back(result);
  }
}

}  // namespace certkv::bench
