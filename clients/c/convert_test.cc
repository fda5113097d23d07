#include "clients/c/convert.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "kernels/core/status.h"

namespace certkv::capi {
namespace {

using ::testing::HasSubstr;

certkv_cache_spec SmallSpec() {
  return {.struct_size = sizeof(certkv_cache_spec),
          .model = "m",
          .layer_count = 3,
          .kv_head_count = 2,
          .group_size = 3,
          .head_dim = 80,
          .rotary_dim = 64};
}

TEST(ConvertTest, ZeroMeansTheDefaultsOfTheCppClient) {
  const certkv_options options = {.struct_size = sizeof(options)};
  const auto converted = OptionsOf(&options);
  ASSERT_TRUE(converted.ok()) << converted.status();
  const client::Options defaults;
  EXPECT_EQ(converted->kvstore_target, "");
  EXPECT_EQ(converted->worker_name, defaults.worker_name);
  EXPECT_EQ(converted->rpc_timeout_ms, defaults.rpc_timeout_ms);
  EXPECT_EQ(converted->seal_timeout_ms, defaults.seal_timeout_ms);
  EXPECT_EQ(converted->lease_duration_ms, defaults.lease_duration_ms);
  EXPECT_EQ(converted->pressure_wait_ms, defaults.pressure_wait_ms);
  EXPECT_EQ(converted->staging_slot_count, defaults.staging_slot_count);
  // As the header says.
  EXPECT_EQ(defaults.rpc_timeout_ms, 10000);
  EXPECT_EQ(defaults.seal_timeout_ms, 120000);
  EXPECT_EQ(defaults.lease_duration_ms, 30000);
  EXPECT_EQ(defaults.pressure_wait_ms, 5000);
}

TEST(ConvertTest, EveryOptionArrives) {
  const certkv_options options = {.struct_size = sizeof(options),
                                  .kvstore_target = "a",
                                  .certifier_target = "b",
                                  .gate_target = "c",
                                  .worker_name = "d",
                                  .tenant = "e",
                                  .ca_file = "f",
                                  .certificate_file = "g",
                                  .key_file = "h",
                                  .token_file = "i",
                                  .rpc_timeout_ms = 1,
                                  .seal_timeout_ms = 2,
                                  .lease_duration_ms = 3,
                                  .pressure_wait_ms = -1,
                                  .staging_slot_count = 4};
  const auto converted = OptionsOf(&options);
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_EQ(converted->kvstore_target + converted->certifier_target + converted->gate_target +
                converted->worker_name + converted->tenant + converted->ca_file +
                converted->certificate_file + converted->key_file + converted->token_file,
            "abcdefghi");
  EXPECT_EQ(converted->rpc_timeout_ms, 1);
  EXPECT_EQ(converted->seal_timeout_ms, 2);
  EXPECT_EQ(converted->lease_duration_ms, 3);
  EXPECT_EQ(converted->pressure_wait_ms, 0);
  EXPECT_EQ(converted->staging_slot_count, 4);
}

TEST(ConvertTest, ASpecWithoutLayersHasDefaultFormatsEverywhere) {
  const certkv_cache_spec spec = SmallSpec();
  const auto converted = SpecOf(&spec);
  ASSERT_TRUE(converted.ok()) << converted.status();
  CacheSpec expected;
  expected.model = "m";
  expected.kv_head_count = 2;
  expected.group_size = 3;
  expected.head_dim = 80;
  expected.value_dim = 80;
  expected.rotary_dim = 64;
  expected.logit_scale = static_cast<float>(1 / std::sqrt(80.0));
  expected.layers.resize(3);
  EXPECT_EQ(DigestCacheSpec(*converted), DigestCacheSpec(expected));
}

TEST(ConvertTest, EveryFieldOfASpecArrives) {
  std::vector<float> weights(4 * 128, 0.5f);
  weights.back() = 2.0f;
  certkv_layer_spec layers[2] = {{.struct_size = sizeof(certkv_layer_spec)},
                                 {.struct_size = sizeof(certkv_layer_spec),
                                  .key_format = CERTKV_KEY_FP8_E4M3,
                                  .value_format = CERTKV_VALUE_V8,
                                  .witness_bands = 4,
                                  .sliding_window = 128,
                                  .fp8_key_scale = 0.5f,
                                  .witness_weights = weights.data()}};
  const certkv_cache_spec spec = {.struct_size = sizeof(spec),
                                  .model = "m",
                                  .layers = layers,
                                  .layer_count = 2,
                                  .kv_head_count = 4,
                                  .group_size = 2,
                                  .head_dim = 128,
                                  .value_dim = 64,
                                  .block_tokens = 128,
                                  .rope_pairing = CERTKV_ROPE_HALF_SPLIT,
                                  .rotary_dim = 32,
                                  .original_dtype = CERTKV_BF16,
                                  .rope_theta = 500000.0f,
                                  .logit_scale = 0.25f,
                                  .soft_cap = 50.0f};
  const auto converted = SpecOf(&spec);
  ASSERT_TRUE(converted.ok()) << converted.status();
  CacheSpec expected;
  expected.model = "m";
  expected.kv_head_count = 4;
  expected.group_size = 2;
  expected.head_dim = 128;
  expected.value_dim = 64;
  expected.block_tokens = 128;
  expected.rope_pairing = RopePairing::kHalfSplit;
  expected.rotary_dim = 32;
  expected.rope_theta = 500000.0f;
  expected.logit_scale = 0.25f;
  expected.soft_cap = 50.0f;
  expected.original_dtype = OriginalDtype::kBf16;
  expected.layers.resize(2);
  expected.layers[1] = {KeyFormat::kFp8E4m3, ValueFormat::kV8, 4, 0.5f, 128, weights};
  EXPECT_EQ(DigestCacheSpec(*converted), DigestCacheSpec(expected));
}

// A caller of before there were weights: what lies behind its struct is not the library's.
TEST(ConvertTest, ALayerSpecOfTheFirstVersionHasNoWeights) {
  const std::vector<float> weights(2 * 80, 0.0f);  // not valid, if anybody looked
  certkv_layer_spec layer = {.struct_size = offsetof(certkv_layer_spec, witness_weights),
                             .key_format = CERTKV_KEY_K6,
                             .witness_bands = 1,
                             .witness_weights = weights.data()};
  certkv_cache_spec spec = SmallSpec();
  spec.layers = &layer;
  spec.layer_count = 1;
  const auto converted = SpecOf(&spec);
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_TRUE(converted->layers[0].witness_weights.empty());
  layer.struct_size = sizeof(layer);
  EXPECT_EQ(ReasonOf(SpecOf(&spec).status()), "CACHE_SPEC_INVALID");
}

TEST(ConvertTest, SpecsThatAreWrongAreRefusedByName) {
  const std::vector<std::pair<std::function<void(certkv_cache_spec*)>, std::string>> cases = {
      {[](certkv_cache_spec* s) { s->layer_count = 0; }, "layer_count is 0"},
      {[](certkv_cache_spec* s) { s->layer_count = std::numeric_limits<int32_t>::max(); },
       "layer_count is 2147483647"},
      {[](certkv_cache_spec* s) { s->layer_count = -1; }, "layer_count is -1"},
      {[](certkv_cache_spec* s) { s->head_dim = 65; }, "head_dim"},
      {[](certkv_cache_spec* s) { s->head_dim = -64; }, "head_dim"},
      {[](certkv_cache_spec* s) { s->rope_pairing = 257; }, "rope_pairing"},
      {[](certkv_cache_spec* s) { s->original_dtype = 258; }, "original_dtype"},
      {[](certkv_cache_spec* s) { s->logit_scale = std::nanf(""); }, "logit_scale"},
      {[](certkv_cache_spec* s) { s->model = ""; }, "model"}};
  for (const auto& [change, name] : cases) {
    certkv_cache_spec spec = SmallSpec();
    change(&spec);
    const absl::Status status = SpecOf(&spec).status();
    EXPECT_EQ(ReasonOf(status), "CACHE_SPEC_INVALID") << name;
    EXPECT_THAT(std::string(status.message()), HasSubstr(name));
  }
  certkv_cache_spec spec = SmallSpec();
  spec.model = nullptr;
  EXPECT_EQ(ReasonOf(SpecOf(&spec).status()), "ARGUMENT_MISSING");
  certkv_layer_spec layer = {.struct_size = 3};
  spec = SmallSpec();
  spec.layers = &layer;
  EXPECT_EQ(ReasonOf(SpecOf(&spec).status()), "STRUCT_SIZE_INVALID");
}

TEST(ConvertTest, TolerancesAreAskedForOnPurpose) {
  certkv_request_terms terms = {.struct_size = sizeof(terms), .tv_tolerance = 0.1f};
  EXPECT_EQ(ReasonOf(TermsOf(&terms).status()), "TOLERANCE_INVALID");
  terms.has_tolerances = 1;
  auto converted = TermsOf(&terms);
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_TRUE(converted->has_tolerances);
  EXPECT_EQ(converted->tolerances.tv_tolerance, 0.1f);
  terms.tv_tolerance = std::nanf("");
  EXPECT_EQ(ReasonOf(TermsOf(&terms).status()), "TOLERANCE_INVALID");
  terms = {.struct_size = sizeof(terms)};
  converted = TermsOf(&terms);
  ASSERT_TRUE(converted.ok()) << converted.status();
  EXPECT_FALSE(converted->has_tolerances);
  terms.read_mode = 4;
  EXPECT_EQ(ReasonOf(TermsOf(&terms).status()), "READ_MODE_UNKNOWN");
  EXPECT_TRUE(TermsOf(nullptr).ok());
}

TEST(ConvertTest, EveryFieldOfACertificateArrives) {
  ReadCertificate c;
  c.layer = 1;
  c.query_head = 2;
  c.query_position = 3;
  c.worst_case_tv = 0.4f;
  c.value_term = 0.5f;
  c.output_error_bound = 0.6f;
  c.value_radius = 0.7f;
  c.rung = Rung::kHead;
  c.outcome = Outcome::kExact;
  c.first_worst_case_tv = 0.8f;
  c.repair_bytes = 9;
  c.failure_probability = 0.1f;
  c.key_format = 7;
  c.value_format = 2;
  c.read_tokens = 10;
  c.skipped_tokens = 11;
  c.read_bytes = 12;
  c.skipped_share = 0.2f;
  const certkv_certificate out = CertificateOf(c);
  EXPECT_EQ(out.layer, 1);
  EXPECT_EQ(out.query_head, 2);
  EXPECT_EQ(out.query_position, 3);
  EXPECT_EQ(out.worst_case_tv, 0.4f);
  EXPECT_EQ(out.value_term, 0.5f);
  EXPECT_EQ(out.output_error_bound, 0.6f);
  EXPECT_EQ(out.value_radius, 0.7f);
  EXPECT_EQ(out.rung, CERTKV_RUNG_HEAD);
  EXPECT_EQ(out.outcome, CERTKV_EXACT);
  EXPECT_EQ(out.first_worst_case_tv, 0.8f);
  EXPECT_EQ(out.repair_bytes, 9);
  EXPECT_EQ(out.failure_probability, 0.1f);
  EXPECT_EQ(out.key_format, CERTKV_KEY_K8D);
  EXPECT_EQ(out.value_format, CERTKV_VALUE_V8);
  EXPECT_EQ(out.read_tokens, 10);
  EXPECT_EQ(out.skipped_tokens, 11);
  EXPECT_EQ(out.read_bytes, 12);
  EXPECT_EQ(out.skipped_share, 0.2f);
}

}  // namespace
}  // namespace certkv::capi
