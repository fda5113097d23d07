#include "tests/conformance/sequence_case.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>

#include "gtest/gtest.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::conformance {
namespace {

using Random = std::mt19937_64;

float Normal(Random* random) { return std::normal_distribution<float>(0, 1)(*random); }

uint16_t RandomSign(Random* random) { return (*random)() % 2 == 0 ? 0x8000 : 0; }

// Rows of one kind of content, [token][dim].
std::vector<uint16_t> MakeRows(const SequenceShape& shape, int64_t token_count, int32_t dim,
                               Random* random) {
  std::vector<float> centre(dim);
  std::vector<float> spread(dim);
  for (int i = 0; i < dim; ++i) {
    const bool is_outlier = shape.content == Content::kOutlier && i % 37 == 5;
    centre[i] = Normal(random) * (is_outlier ? 30.0f : 1.0f);
    spread[i] = std::exp(0.5f * Normal(random)) * (is_outlier ? 5.0f : 1.0f);
    if (shape.content == Content::kConstant) spread[i] = 0;
  }
  std::vector<uint16_t> rows(token_count * dim);
  for (int64_t n = 0; n < token_count * dim; ++n) {
    switch (shape.content) {
      case Content::kZero:
        rows[n] = RandomSign(random);
        break;
      case Content::kDenormal:
        rows[n] =
            RandomSign(random) |
            static_cast<uint16_t>((*random)() % (shape.dtype == OriginalDtype::kF16 ? 1024 : 128));
        break;
      case Content::kHuge:
        rows[n] = RandomSign(random) | (shape.dtype == OriginalDtype::kF16 ? 0x7bff : 0x477f);
        break;
      default:
        rows[n] = FloatToOriginal(shape.dtype, centre[n % dim] + spread[n % dim] * Normal(random));
    }
  }
  return rows;
}

std::vector<float> MakeQueries(const SequenceShape& shape, Random* random) {
  // Such that logits stay within tens of nats.
  float size = 1;
  if (shape.content == Content::kHuge) size = 1e-4f;
  if (shape.content == Content::kDenormal) {
    size = shape.dtype == OriginalDtype::kF16 ? 1e4f : 1e30f;
  }
  std::vector<float> queries(int64_t{shape.group_size} * shape.head_dim);
  for (float& q : queries) q = size * Normal(random);
  return queries;
}

// About 1/2 to 2; with outliers both limits of a spec among them.
std::vector<float> RandomWeights(const SequenceShape& shape) {
  Random random(shape.head_dim);
  std::vector<float> weights(shape.head_dim);
  for (float& weight : weights) weight = std::exp2(0.5f * Normal(&random));
  if (shape.content == Content::kOutlier) {
    weights.front() = kWitnessWeightMin;
    weights.back() = kWitnessWeightMax;
  }
  return weights;
}

// Of every case with K8D keys.
constexpr uint64_t kDitherSecret = 0x0123456789abcdef;

}  // namespace

void AlignedFree::operator()(uint8_t* bytes) const { std::free(bytes); }

AlignedBytes AllocateAligned(int64_t size_bytes) {
  const int64_t rounded = (std::max<int64_t>(size_bytes, 1) + 63) / 64 * 64;
  auto* bytes = static_cast<uint8_t*>(std::aligned_alloc(64, rounded));
  CERTKV_CHECK(bytes != nullptr, "the test has memory");
  std::memset(bytes, 0, rounded);
  return AlignedBytes(bytes);
}

CacheSpec SpecOfShape(const SequenceShape& shape) {
  CacheSpec spec;
  spec.model = "conformance";
  spec.kv_head_count = 1;
  spec.group_size = shape.group_size;
  spec.head_dim = shape.head_dim;
  spec.value_dim = shape.value_dim;
  spec.rope_pairing = shape.pairing;
  spec.rotary_dim = shape.pairing == RopePairing::kNone ? 0 : shape.head_dim / 2;
  spec.logit_scale = shape.logit_scale > 0 ? shape.logit_scale
                                           : 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  spec.soft_cap = shape.soft_cap;
  spec.original_dtype = shape.dtype;
  LayerSpec layer;
  layer.key_format = shape.key_format;
  layer.value_format = shape.value_format;
  layer.witness_bands = shape.witness_bands;
  if (shape.is_weighted) layer.witness_weights = RandomWeights(shape);
  layer.fp8_key_scale = shape.content == Content::kHuge ? 200.0f : 0.03f;
  spec.layers = {layer};
  const absl::Status status = ValidateCacheSpec(spec);
  CERTKV_CHECK(status.ok(), "a test's shape is a valid spec");
  return spec;
}

SequenceCase::SequenceCase(const SequenceShape& shape, uint64_t seed, Backend quantizer)
    : spec_(SpecOfShape(shape)),
      layout_(MakeTileLayout(spec_, 0, kDitherSecret)),
      token_count_(int64_t{shape.tile_count} * kTileTokens + shape.tail_count) {
  Random random(seed);
  keys_ = MakeRows(shape, token_count_, shape.head_dim, &random);
  values_ = MakeRows(shape, token_count_, shape.value_dim, &random);
  queries_ = MakeQueries(shape, &random);
  if (shape.content == Content::kNeedle) {
    for (int i = 0; i < shape.head_dim; ++i) {
      float sum = 0;
      for (int g = 0; g < shape.group_size; ++g) sum += queries_[g * shape.head_dim + i];
      keys_[token_count_ / 2 * shape.head_dim + i] = FloatToOriginal(shape.dtype, 2 * sum);
    }
  }
  if (shape.content == Content::kUnbounded) {
    for (uint16_t& value : values_) value = FloatToBf16(Normal(&random) * 1e37f);
  }
  if (shape.has_sink) {
    for (int g = 0; g < shape.group_size; ++g) {
      sinks_.push_back(g % 4 == 3 ? -std::numeric_limits<float>::infinity() : Normal(&random));
    }
  }
  if (shape.has_sources) {
    for (int n = 0; n < shape.group_size * shape.tile_count; ++n) {
      sources_.push_back(static_cast<uint8_t>(random() % 4));
    }
  }
  SealTiles(shape.tile_count, quantizer);
  BuildTail(shape.tail_count, shape.padding);
  args_.queries = queries_.data();
  args_.sink_logits = sinks_.empty() ? nullptr : sinks_.data();
  args_.tile_sources = sources_.empty() ? nullptr : sources_.data();
  SetRange(shape.token_begin, shape.token_end < 0 ? token_count_ : shape.token_end);
}

SequenceCase::SequenceCase(const SequenceShape& shape, const CacheSpec& spec, const uint16_t* keys,
                           int64_t key_stride, const uint16_t* values, int64_t value_stride,
                           int64_t token_count, Backend quantizer)
    : spec_(spec), layout_(MakeTileLayout(spec_, 0, kDitherSecret)), token_count_(token_count) {
  for (int64_t t = 0; t < token_count; ++t) {
    keys_.insert(keys_.end(), keys + t * key_stride, keys + t * key_stride + spec.head_dim);
    values_.insert(values_.end(), values + t * value_stride,
                   values + t * value_stride + spec.value_dim);
  }
  SealTiles(static_cast<int32_t>(token_count / kTileTokens), quantizer);
  BuildTail(static_cast<int32_t>(token_count % kTileTokens), shape.padding);
  SetQueries(std::vector<float>(int64_t{spec.group_size} * spec.head_dim, 1.0f));
  SetRange(0, token_count);
}

void SequenceCase::SealTiles(int32_t tile_count, Backend quantizer) {
  tiles_ = AllocateAligned(tile_count * layout_.tile_bytes());
  for (int32_t tile = 0; tile < tile_count; ++tile) {
    const uint16_t* keys = keys_.data() + int64_t{tile} * kTileTokens * spec_.head_dim;
    const uint16_t* values = values_.data() + int64_t{tile} * kTileTokens * spec_.value_dim;
    QuantizeTileArgs args{};
    args.spec = &spec_;
    args.layout = &layout_;
    args.keys = keys;
    args.values = values;
    args.witness_weights = WitnessWeightsOf(spec_, 0, 0);
    args.key_stride = spec_.head_dim;
    args.value_stride = spec_.value_dim;
    args.identity_tag = 1000 + tile;
    args.scan = scan(tile);
    args.detail = detail(tile);
    const absl::Status status = QuantizeTile(quantizer, args);
    EXPECT_TRUE(status.ok()) << status;
    tile_views_.push_back({scan(tile), detail(tile), keys, values});
  }
  args_.layout = &layout_;
  args_.original_dtype = spec_.original_dtype;
  args_.logit_scale = spec_.logit_scale;
  args_.soft_cap = spec_.soft_cap;
  args_.group_size = spec_.group_size;
  args_.witness_weights = WitnessWeightsOf(spec_, 0, 0);
  args_.tiles = tile_views_.data();
  args_.tile_count = tile_count;
}

void SequenceCase::BuildTail(int32_t tail_count, int32_t padding) {
  const int64_t first = token_count_ - tail_count;
  args_.tail_count = tail_count;
  args_.tail_key_stride = spec_.head_dim + padding;
  args_.tail_value_stride = spec_.value_dim + padding;
  // What lies between rows is never read; NaN would show it.
  tail_keys_.assign(padding + tail_count * args_.tail_key_stride, 0x7fff);
  tail_values_.assign(padding + tail_count * args_.tail_value_stride, 0x7fff);
  for (int64_t t = 0; t < tail_count; ++t) {
    std::copy_n(&keys_[(first + t) * spec_.head_dim], spec_.head_dim,
                &tail_keys_[padding + t * args_.tail_key_stride]);
    std::copy_n(&values_[(first + t) * spec_.value_dim], spec_.value_dim,
                &tail_values_[padding + t * args_.tail_value_stride]);
  }
  args_.tail_keys = tail_count > 0 ? tail_keys_.data() + padding : nullptr;
  args_.tail_values = tail_count > 0 ? tail_values_.data() + padding : nullptr;
}

void SequenceCase::SetQueries(std::vector<float> queries) {
  queries_ = std::move(queries);
  args_.queries = queries_.data();
}

void SequenceCase::SetRange(int64_t token_begin, int64_t token_end) {
  args_.token_begin = token_begin;
  args_.token_end = token_end;
}

ReadResult::ReadResult(const AttendArgs& args)
    : atom_count_(AttendAtomCount(args)),
      tile_count_(args.tile_count),
      value_dim_(args.layout->value_dim) {
  const int64_t heads = args.group_size;
  const int64_t sizes[] = {heads * value_dim_,
                           heads,
                           heads * atom_count_,
                           heads * atom_count_,
                           heads * atom_count_,
                           heads * atom_count_,
                           heads * tile_count_,
                           heads,
                           heads,
                           1};
  float** const arrays[] = {&view_.outputs,          &view_.lse_nat,          &view_.block_lse,
                            &view_.block_max_logit,  &view_.logit_half_width, &view_.top_half_width,
                            &view_.tile_value_error, &view_.value_term,       &view_.rounding_term,
                            &view_.value_radius};
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  // NaN, so that an element which isn't written is seen.
  memory_.assign(total, std::numeric_limits<float>::quiet_NaN());
  float* next = memory_.data();
  for (size_t n = 0; n < std::size(sizes); ++n) {
    *arrays[n] = next;
    next += sizes[n];
  }
}

void ReadResult::Run(Backend backend, const AttendArgs& args) {
  const int64_t workspace_bytes = AttendWorkspaceBytes(args);
  const AlignedBytes workspace = AllocateAligned(workspace_bytes);
  std::memset(workspace.get(), 0xff, workspace_bytes);  // a workspace may hold anything
  const absl::Status status = Attend(backend, args, view_, workspace.get());
  ASSERT_TRUE(status.ok()) << status;
}

}  // namespace certkv::conformance
