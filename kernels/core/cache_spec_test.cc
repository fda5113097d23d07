#include "kernels/core/cache_spec.h"

#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

CacheSpec ValidSpec() {
  CacheSpec spec;
  spec.model = "test-model";
  spec.kv_head_count = 2;
  spec.group_size = 4;
  spec.head_dim = 128;
  spec.value_dim = 128;
  spec.rotary_dim = 128;
  spec.logit_scale = 0.125f;
  spec.layers.resize(2);
  return spec;
}

struct Edit {
  const char* field;  // as a message names it
  std::function<void(CacheSpec&)> apply;
};

// These bindings stop compiling when a field is added: extend the digest, the checks, and the
// lists of this file with it.
[[maybe_unused]] void KnowsEveryField(const CacheSpec& spec, const LayerSpec& layer) {
  [[maybe_unused]] const auto& [model, kv_heads, group, d, dv, block, pairing, rotary, theta, scale,
                                cap, dtype, layers] = spec;
  [[maybe_unused]] const auto& [key, value, bands, fp8_scale, window, weights] = layer;
}

TEST(CacheSpecTest, AcceptsEveryFormatAndDimension) {
  for (const int32_t dim : {64, 80, 96, 128, 256}) {
    CacheSpec spec = ValidSpec();
    spec.head_dim = dim;
    spec.value_dim = dim;
    spec.rotary_dim = dim;
    spec.block_tokens = 1024;
    spec.layers = {
        {.key_format = KeyFormat::kK8, .value_format = ValueFormat::kV8, .witness_bands = 1},
        {.key_format = KeyFormat::kK6, .value_format = ValueFormat::kV4, .witness_bands = 4},
        {.key_format = KeyFormat::kK4, .value_format = ValueFormat::kV4},
        {.key_format = KeyFormat::kFp8E4m3, .value_format = ValueFormat::kV8, .witness_bands = 4},
        {.key_format = KeyFormat::kK8D, .value_format = ValueFormat::kV8},
        {.key_format = KeyFormat::kF16, .value_format = ValueFormat::kF16, .sliding_window = 1}};
    EXPECT_TRUE(ValidateCacheSpec(spec).ok()) << ValidateCacheSpec(spec);
  }
}

TEST(CacheSpecTest, AcceptsTheEndsOfEveryRange) {
  const std::vector<Edit> edits = {
      {"model", [](CacheSpec& s) { s.model = std::string(256, 'm'); }},
      {"kv_head_count", [](CacheSpec& s) { s.kv_head_count = 256; }},
      {"kv_head_count", [](CacheSpec& s) { s.kv_head_count = 1; }},
      {"group_size", [](CacheSpec& s) { s.group_size = 16; }},
      {"group_size", [](CacheSpec& s) { s.group_size = 1; }},
      {"rotary_dim", [](CacheSpec& s) { s.rotary_dim = 2; }},
      {"rope_pairing", [](CacheSpec& s) { s.rope_pairing = RopePairing::kNone, s.rotary_dim = 0; }},
      {"layers", [](CacheSpec& s) { s.layers.resize(256); }},
      {"layers", [](CacheSpec& s) { s.layers.resize(1); }},
      {"sliding_window", [](CacheSpec& s) { s.layers[0].sliding_window = 1 << 24; }}};
  for (const Edit& edit : edits) {
    CacheSpec spec = ValidSpec();
    edit.apply(spec);
    EXPECT_TRUE(ValidateCacheSpec(spec).ok()) << edit.field << ": " << ValidateCacheSpec(spec);
  }
}

TEST(CacheSpecTest, RefusalNamesTheField) {
  const std::vector<Edit> edits = {
      {"CacheSpec.model ", [](CacheSpec& s) { s.model.clear(); }},
      {"CacheSpec.model ", [](CacheSpec& s) { s.model = std::string(257, 'm'); }},
      {"CacheSpec.kv_head_count is 0", [](CacheSpec& s) { s.kv_head_count = 0; }},
      {"CacheSpec.kv_head_count is 257", [](CacheSpec& s) { s.kv_head_count = 257; }},
      {"CacheSpec.group_size is 0", [](CacheSpec& s) { s.group_size = 0; }},
      {"CacheSpec.group_size is 17", [](CacheSpec& s) { s.group_size = 17; }},
      {"CacheSpec.head_dim is 65", [](CacheSpec& s) { s.head_dim = 65; }},
      {"CacheSpec.value_dim is 512", [](CacheSpec& s) { s.value_dim = 512; }},
      {"CacheSpec.block_tokens is 0", [](CacheSpec& s) { s.block_tokens = 0; }},
      {"CacheSpec.block_tokens is 96", [](CacheSpec& s) { s.block_tokens = 96; }},
      {"CacheSpec.block_tokens is 1088", [](CacheSpec& s) { s.block_tokens = 1088; }},
      {"CacheSpec.rope_pairing is 0", [](CacheSpec& s) { s.rope_pairing = RopePairing{0}; }},
      {"CacheSpec.rope_pairing is 4", [](CacheSpec& s) { s.rope_pairing = RopePairing{4}; }},
      {"CacheSpec.rotary_dim is -2", [](CacheSpec& s) { s.rotary_dim = -2; }},
      {"CacheSpec.rotary_dim is 63", [](CacheSpec& s) { s.rotary_dim = 63; }},
      {"CacheSpec.rotary_dim is 130", [](CacheSpec& s) { s.rotary_dim = 130; }},
      {"CacheSpec.rotary_dim is 0", [](CacheSpec& s) { s.rotary_dim = 0; }},
      {"CacheSpec.rotary_dim is 128", [](CacheSpec& s) { s.rope_pairing = RopePairing::kNone; }},
      {"CacheSpec.rope_theta is 0", [](CacheSpec& s) { s.rope_theta = 0; }},
      {"CacheSpec.rope_theta is nan", [](CacheSpec& s) { s.rope_theta = kNan; }},
      {"CacheSpec.rope_theta is inf", [](CacheSpec& s) { s.rope_theta = kInf; }},
      {"CacheSpec.logit_scale is 0", [](CacheSpec& s) { s.logit_scale = 0; }},
      {"CacheSpec.logit_scale is nan", [](CacheSpec& s) { s.logit_scale = kNan; }},
      {"CacheSpec.logit_scale is inf", [](CacheSpec& s) { s.logit_scale = kInf; }},
      {"CacheSpec.soft_cap is -1", [](CacheSpec& s) { s.soft_cap = -1; }},
      {"CacheSpec.soft_cap is nan", [](CacheSpec& s) { s.soft_cap = kNan; }},
      {"CacheSpec.soft_cap is inf", [](CacheSpec& s) { s.soft_cap = kInf; }},
      {"CacheSpec.original_dtype is 3", [](CacheSpec& s) { s.original_dtype = OriginalDtype{3}; }},
      {"CacheSpec.layers size is 0", [](CacheSpec& s) { s.layers.clear(); }},
      {"CacheSpec.layers size is 257", [](CacheSpec& s) { s.layers.resize(257); }}};
  for (const Edit& edit : edits) {
    CacheSpec spec = ValidSpec();
    edit.apply(spec);
    const absl::Status status = ValidateCacheSpec(spec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << edit.field;
    EXPECT_EQ(ReasonOf(status), "CACHE_SPEC_INVALID") << edit.field;
    EXPECT_THAT(std::string(status.message()), StartsWith(edit.field));
    EXPECT_THAT(std::string(status.message()), HasSubstr("must be")) << "the limit";
  }
}

// Weights of 1 for layer 1, but for one channel; one number too few for channel -1.
void SetWeights(CacheSpec* spec, int32_t bands, int channel, float weight) {
  LayerSpec& layer = spec->layers[1];
  layer.witness_bands = bands;
  layer.witness_weights.assign(int64_t{spec->kv_head_count} * spec->head_dim, 1.0f);
  if (channel < 0) {
    layer.witness_weights.pop_back();
  } else {
    layer.witness_weights[channel] = weight;
  }
}

TEST(CacheSpecTest, RefusalNamesTheLayerAndItsField) {
  const std::vector<Edit> edits = {
      {"key_format is 0", [](CacheSpec& s) { s.layers[1].key_format = KeyFormat{0}; }},
      {"value_format is 3", [](CacheSpec& s) { s.layers[1].value_format = ValueFormat{3}; }},
      {"value_format is F16", [](CacheSpec& s) { s.layers[1].value_format = ValueFormat::kF16; }},
      {"key_format is F16 but value_format is V4",
       [](CacheSpec& s) { s.layers[1].key_format = KeyFormat::kF16; }},
      {"key_format BF16 differs from original_dtype F16",
       [](CacheSpec& s) {
         s.layers[1] = {.key_format = KeyFormat::kBf16, .value_format = ValueFormat::kBf16};
       }},
      {"witness_bands is 2", [](CacheSpec& s) { s.layers[1].witness_bands = 2; }},
      {"witness_bands is 5", [](CacheSpec& s) { s.layers[1].witness_bands = 5; }},
      {"witness_bands is -1", [](CacheSpec& s) { s.layers[1].witness_bands = -1; }},
      {"witness_bands is 0, must be 4",
       [](CacheSpec& s) { s.layers[1].key_format = KeyFormat::kFp8E4m3; }},
      {"witness_bands is 1",
       [](CacheSpec& s) {
         s.layers[1] = {
             .key_format = KeyFormat::kF16, .value_format = ValueFormat::kF16, .witness_bands = 1};
       }},
      {"witness_bands is 1",
       [](CacheSpec& s) {
         s.layers[1].key_format = KeyFormat::kK8D, s.layers[1].witness_bands = 1;
       }},
      {"key_format is 8", [](CacheSpec& s) { s.layers[1].key_format = KeyFormat{8}; }},
      {"fp8_key_scale is 0", [](CacheSpec& s) { s.layers[1].fp8_key_scale = 0; }},
      {"fp8_key_scale is nan", [](CacheSpec& s) { s.layers[1].fp8_key_scale = kNan; }},
      {"fp8_key_scale is inf", [](CacheSpec& s) { s.layers[1].fp8_key_scale = kInf; }},
      {"witness_weights are set with witness_bands 0",
       [](CacheSpec& s) { SetWeights(&s, 0, 0, 1); }},
      {"witness_weights has 255 numbers, must have 256",
       [](CacheSpec& s) { SetWeights(&s, 1, -1, 1); }},
      {"witness_weights of KV head 1, channel 2 is 0,",
       [](CacheSpec& s) { SetWeights(&s, 1, 130, 0); }},
      {"witness_weights of KV head 0, channel 5 is nan",
       [](CacheSpec& s) { SetWeights(&s, 4, 5, kNan); }},
      {"witness_weights of KV head 0, channel 5 is 257",
       [](CacheSpec& s) { SetWeights(&s, 4, 5, 257); }},
      {"sliding_window is -1", [](CacheSpec& s) { s.layers[1].sliding_window = -1; }},
      {"sliding_window is 16777217",
       [](CacheSpec& s) { s.layers[1].sliding_window = (1 << 24) + 1; }}};
  for (const Edit& edit : edits) {
    CacheSpec spec = ValidSpec();
    edit.apply(spec);
    const absl::Status status = ValidateCacheSpec(spec);
    EXPECT_EQ(ReasonOf(status), "CACHE_SPEC_INVALID") << edit.field;
    EXPECT_THAT(std::string(status.message()), StartsWith("CacheSpec.layers[1]."));
    EXPECT_THAT(std::string(status.message()), HasSubstr(edit.field));
  }
}

TEST(CacheSpecTest, DigestChangesWithEveryField) {
  const std::vector<Edit> edits = {
      {"model", [](CacheSpec& s) { s.model += "x"; }},
      {"kv_head_count", [](CacheSpec& s) { s.kv_head_count = 3; }},
      {"group_size", [](CacheSpec& s) { s.group_size = 5; }},
      {"head_dim", [](CacheSpec& s) { s.head_dim = 256; }},
      {"value_dim", [](CacheSpec& s) { s.value_dim = 256; }},
      {"block_tokens", [](CacheSpec& s) { s.block_tokens = 128; }},
      {"rope_pairing", [](CacheSpec& s) { s.rope_pairing = RopePairing::kHalfSplit; }},
      {"rotary_dim", [](CacheSpec& s) { s.rotary_dim = 64; }},
      {"rope_theta", [](CacheSpec& s) { s.rope_theta = std::nextafter(s.rope_theta, 0.0f); }},
      {"logit_scale", [](CacheSpec& s) { s.logit_scale = std::nextafter(s.logit_scale, 0.0f); }},
      {"soft_cap", [](CacheSpec& s) { s.soft_cap = 30; }},
      {"original_dtype", [](CacheSpec& s) { s.original_dtype = OriginalDtype::kBf16; }},
      {"layer count", [](CacheSpec& s) { s.layers.emplace_back(); }},
      {"key_format", [](CacheSpec& s) { s.layers[1].key_format = KeyFormat::kK6; }},
      {"layer order", [](CacheSpec& s) { s.layers[0].key_format = KeyFormat::kK6; }},
      {"value_format", [](CacheSpec& s) { s.layers[1].value_format = ValueFormat::kV8; }},
      {"witness_bands", [](CacheSpec& s) { s.layers[1].witness_bands = 1; }},
      {"fp8_key_scale", [](CacheSpec& s) { s.layers[1].fp8_key_scale = 2; }},
      {"witness_weights", [](CacheSpec& s) { SetWeights(&s, 1, 0, 1); }},
      {"one of witness_weights", [](CacheSpec& s) { SetWeights(&s, 1, 200, 2); }},
      {"sliding_window", [](CacheSpec& s) { s.layers[1].sliding_window = 1; }}};
  std::set<SpecDigest> digests = {DigestCacheSpec(ValidSpec())};
  for (const Edit& edit : edits) {
    CacheSpec spec = ValidSpec();
    edit.apply(spec);
    ASSERT_TRUE(ValidateCacheSpec(spec).ok()) << edit.field << ": " << ValidateCacheSpec(spec);
    EXPECT_TRUE(digests.insert(DigestCacheSpec(spec)).second) << edit.field;
  }
}

CacheSpec SpecFromJson(const nlohmann::json& json) {
  CacheSpec spec;
  spec.model = json["model"];
  spec.kv_head_count = json["kv_head_count"];
  spec.group_size = json["group_size"];
  spec.head_dim = json["head_dim"];
  spec.value_dim = json["value_dim"];
  spec.block_tokens = json["block_tokens"];
  spec.rope_pairing = static_cast<RopePairing>(json["rope_pairing"].get<int>());
  spec.rotary_dim = json["rotary_dim"];
  spec.rope_theta = json["rope_theta"];
  spec.logit_scale = json["logit_scale"];
  spec.soft_cap = json["soft_cap"];
  spec.original_dtype = static_cast<OriginalDtype>(json["original_dtype"].get<int>());
  for (const auto& one : json["layers"]) {
    spec.layers.push_back({.key_format = static_cast<KeyFormat>(one["key_format"].get<int>()),
                           .value_format = static_cast<ValueFormat>(one["value_format"].get<int>()),
                           .witness_bands = one["witness_bands"],
                           .fp8_key_scale = one["fp8_key_scale"],
                           .sliding_window = one["sliding_window"],
                           .witness_weights = one["witness_weights"]});
  }
  return spec;
}

TEST(CacheSpecTest, DigestIsTheGoldenOne) {
  std::ifstream file("tests/golden/core_identities.json");
  ASSERT_TRUE(file.good()) << "run from the repository root";
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_GE(golden["specs"].size(), 2u);
  for (const auto& row : golden["specs"]) {
    const CacheSpec spec = SpecFromJson(row["spec"]);
    EXPECT_TRUE(ValidateCacheSpec(spec).ok()) << ValidateCacheSpec(spec);
    EXPECT_EQ(ToHex(DigestCacheSpec(spec).view()), row["digest"]) << DescribeCacheSpec(spec);
  }
}

TEST(CacheSpecTest, DescriptionNamesEachFormatOnce) {
  CacheSpec spec = ValidSpec();
  EXPECT_EQ(DescribeCacheSpec(spec),
            "test-model 2 layers x 2 KV heads x 4, d 128/128, block 64, K8V4");
  spec.layers.push_back(
      {.key_format = KeyFormat::kFp8E4m3, .value_format = ValueFormat::kV8, .witness_bands = 4});
  spec.layers.push_back({.key_format = KeyFormat::kF16, .value_format = ValueFormat::kF16});
  EXPECT_THAT(DescribeCacheSpec(spec), HasSubstr("block 64, K8V4/FP8_E4M3+V8/F16"));
}

TEST(CacheSpecTest, FormatNamesAreDistinctAndUnknownOnesAreMarked) {
  std::set<std::string> names;
  for (int i = 1; i <= 7; ++i) names.insert(KeyFormatName(static_cast<KeyFormat>(i)));
  EXPECT_EQ(names.size(), 7u);
  EXPECT_STREQ(KeyFormatName(KeyFormat{0}), "?");
  EXPECT_STREQ(KeyFormatName(KeyFormat{8}), "?");
  EXPECT_STREQ(ValueFormatName(ValueFormat{3}), "?");
  EXPECT_EQ(FormatPairName(KeyFormat::kK8D, ValueFormat::kV8), "K8DV8");
}

}  // namespace
}  // namespace certkv
