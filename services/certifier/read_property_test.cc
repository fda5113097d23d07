// Over thousands of random reads: every head is certified with a true total variation within bound
// and tolerance, or exact with a tiny error, and nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <iostream>
#include <limits>
#include <vector>

#include "services/certifier/read_fixture.h"

namespace certkv::certifier {
namespace {

using ::testing::IsEmpty;

// Picks one of the values.
template <typename T, size_t kCount>
T Pick(const T (&values)[kCount], std::mt19937_64* random) {
  return values[(*random)() % kCount];
}

CacheSpec RandomSpec(std::mt19937_64* random) {
  CacheSpec spec =
      SmallSpec(1, 1 + (*random)() % 2, 1 + (*random)() % 4, Pick({64, 64, 80, 128}, random));
  spec.block_tokens = Pick({64, 64, 128}, random);
  spec.soft_cap = Pick({0.0f, 0.0f, 15.0f}, random);
  LayerSpec& layer = spec.layers[0];
  layer.key_format =
      Pick({KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4, KeyFormat::kFp8E4m3}, random);
  layer.value_format = Pick({ValueFormat::kV4, ValueFormat::kV8}, random);
  layer.witness_bands = layer.key_format == KeyFormat::kFp8E4m3 ? 4 : Pick({0, 1, 4}, random);
  if (layer.key_format == KeyFormat::kFp8E4m3) layer.fp8_key_scale = 0.05f;
  layer.sliding_window = Pick({0, 0, 100}, random);
  if (layer.witness_bands > 0 && layer.value_format == ValueFormat::kV4) {
    for (int32_t i = 0; i < spec.kv_head_count * spec.head_dim; ++i) {
      layer.witness_weights.push_back(0.5f + 0.1f * static_cast<float>(i * 7 % 16));
    }
  }
  return spec;
}

// Gives the first tokens keys that `queries` all look for, so that most others can be skipped.
void PlantFocus(const CacheSpec& spec, std::mt19937_64* random, SequenceData* data,
                std::vector<float>* queries) {
  constexpr int kFocusTokens = 24;
  constexpr float kFocusLogit = 14.0f;
  std::vector<float> direction(spec.head_dim);
  for (float& part : direction) part = (*random)() % 2 == 0 ? 1.0f : -1.0f;
  // The checker knows heads by their queries, so each is a little longer than the one before.
  for (size_t i = 0; i < queries->size(); ++i) {
    (*queries)[i] = direction[i % spec.head_dim] * (1 + 0.01f * (i / spec.head_dim));
  }
  // direction . direction = head_dim
  const float step = kFocusLogit / (spec.logit_scale * static_cast<float>(spec.head_dim));
  for (std::vector<uint16_t>& keys : data->keys) {
    for (int i = 0; i < kFocusTokens * spec.kv_head_count * spec.head_dim; ++i) {
      const float key = OriginalToFloat(spec.original_dtype, keys[i]);
      keys[i] = FloatToOriginal(spec.original_dtype, key + step * direction[i % spec.head_dim]);
    }
  }
}

void MakeDithered(CacheSpec* spec) {
  spec->layers[0].key_format = KeyFormat::kK8D;
  spec->layers[0].witness_bands = 0;
  spec->layers[0].witness_weights.clear();
}

// Of 2e-11: that a bound fails in this test has probability 1e-7.
void GiveShares(PolicyLease* lease) {
  lease->risk_mode = RiskMode::kUnion;
  lease->budget_slice = 1e-6;
}

class ReadPropertyTest : public ::testing::TestWithParam<int> {};

TEST_P(ReadPropertyTest, IsCertifiedWithinToleranceOrExactAndNothingElse) {
  const uint64_t seed = 7919 * GetParam() + 11;
  RecordProperty("seed", static_cast<int>(seed));
  std::mt19937_64 random(seed);
  std::array<int64_t, 6> rungs{};
  int64_t heads = 0;
  int64_t skipping = 0;
  double tightest = 0;
  for (int sequence = 0; sequence < 8; ++sequence) {
    CacheSpec spec = RandomSpec(&random);
    const bool has_focus = sequence % 4 == 3;
    if (has_focus) {
      spec.layers[0].key_format = KeyFormat::kK8;
      spec.layers[0].sliding_window = 0;
    }
    if (sequence % 4 == 1) MakeDithered(&spec);
    ASSERT_TRUE(ValidateCacheSpec(spec).ok()) << ValidateCacheSpec(spec);
    const int64_t token_count = (has_focus ? 400 : 1) + random() % 500;
    SequenceData data = RandomSequence(
        spec, token_count, has_focus ? 0.3f : Pick({0.3f, 1.0f, 3.0f}, &random), &random);
    std::vector<float> focus(spec.query_head_count() * spec.head_dim);
    if (has_focus) PlantFocus(spec, &random, &data, &focus);
    FakeCache fake(spec, 16);
    fake.Put(data);
    ReadChecker checker(&fake, KernelsOf(Backend::kCpu));
    BudgetBook book(1000);
    for (int read = 0; read < 32; ++read) {
      PolicyLease lease = TestLease({.tv_tolerance = Pick({0.3f, 0.1f, 0.02f, 0.003f}, &random),
                                     .value_tolerance = Pick({0.5f, 0.05f, 0.01f}, &random),
                                     .output_tolerance = Pick({0.0f, 0.0f, 1.0f}, &random),
                                     .skip_tolerance = Pick({0.0f, 0.02f, 0.1f, 0.5f}, &random)});
      lease.lease_id = 1 + read;
      if (random() % 4 == 0) {
        lease.risk_mode = RiskMode::kCumulative;
        lease.budget_slice = 0.1;
      } else if (sequence % 4 == 1 && read % 2 == 0) {
        GiveShares(&lease);
      }
      const auto view = fake.OpenView(lease, &book);
      const std::vector<float> queries =
          has_focus ? focus : RandomQueries(spec, Pick({0.0f, 0.2f, 1.0f, 3.0f}, &random), &random);
      std::vector<float> sinks;
      if (random() % 4 == 0) sinks.assign(spec.query_head_count(), 2.0f);
      ReadRequest request;
      request.query_position = random() % token_count;
      request.queries = queries;
      request.sink_logits = sinks;
      const absl::Status status = checker.Read(*view, request);
      ASSERT_TRUE(status.ok()) << status << " seed " << seed;
      ASSERT_THAT(checker.violations(), IsEmpty()) << "seed " << seed;
      for (int32_t head = 0; head < spec.query_head_count(); ++head) {
        const ReadCertificate& certificate = checker.certificates()[head];
        ++heads;
        ++rungs[static_cast<int>(certificate.rung)];
        skipping += certificate.skipped_tokens > 0;
        if (certificate.outcome == Outcome::kExact || certificate.worst_case_tv < 1e-3f) continue;
        tightest = std::max(tightest, checker.true_tv()[head] / certificate.worst_case_tv);
      }
    }
  }
  std::cout << "seed " << seed << ": " << heads << " heads, none " << rungs[1] << ", values "
            << rungs[2] << ", keys " << rungs[3] << ", head " << rungs[4] << ", layer " << rungs[5]
            << ", skipping " << skipping << ", largest true TV / bound " << tightest << "\n";
  EXPECT_LE(tightest, 1.0);
  EXPECT_GT(tightest, 0.02);  // the bound is not vacuous
  EXPECT_GT(skipping, 0);
}

INSTANTIATE_TEST_SUITE_P(Seeds, ReadPropertyTest, ::testing::Range(0, 10));

}  // namespace
}  // namespace certkv::certifier
