#include "tests/system/sequence_fixture.h"

#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "clients/cli/truth.h"
#include "kernels/core/half.h"

namespace certkv {

CacheSpec SmallSpec(KeyFormat key_format) {
  CacheSpec spec;
  spec.model = "system-test";
  spec.kv_head_count = 2;
  spec.group_size = 3;
  spec.head_dim = 64;
  spec.value_dim = 64;
  spec.rotary_dim = 64;
  spec.logit_scale = 0.125f;
  spec.layers.resize(2);
  for (LayerSpec& layer : spec.layers) {
    layer.key_format = key_format;
    if (key_format == KeyFormat::kFp8E4m3) layer.witness_bands = 4;
  }
  if (key_format == KeyFormat::kFp8E4m3) {  // one layer with weights, others for each KV head
    for (int i = 0; i < spec.kv_head_count * spec.head_dim; ++i) {
      spec.layers[1].witness_weights.push_back(0.5f + 0.01f * static_cast<float>(i));
    }
  }
  return spec;
}

TestSequence::TestSequence(const CacheSpec& cache_spec, int32_t token_count, uint32_t seed)
    : spec(cache_spec) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  const int64_t rows = int64_t{token_count} * spec.kv_head_count;
  for (int32_t t = 0; t < token_count; ++t) {
    token_ids.push_back(t + static_cast<int32_t>(seed) * 1000);
  }
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    keys.emplace_back();
    values.emplace_back();
    for (int64_t i = 0; i < rows * spec.head_dim; ++i) {
      // Some channels are larger than others, as in real keys.
      const float scale = i % 8 == 0 ? 3.0f : 1.0f;
      keys.back().push_back(FloatToF16(normal(random) * scale));
    }
    for (int64_t i = 0; i < rows * spec.value_dim; ++i) {
      values.back().push_back(FloatToF16(normal(random)));
    }
  }
}

std::vector<client::LayerKv> TestSequence::layers() const { return layers_at(0); }

std::vector<client::LayerKv> TestSequence::layers_at(int64_t token) const {
  std::vector<client::LayerKv> result;
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    result.push_back({keys[layer].data() + token * spec.kv_head_count * spec.head_dim,
                      values[layer].data() + token * spec.kv_head_count * spec.value_dim});
  }
  return result;
}

std::vector<float> TestQueries(const CacheSpec& spec, uint32_t seed, float sharpness) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, sharpness);
  std::vector<float> queries(static_cast<size_t>(spec.query_head_count()) * spec.head_dim);
  for (float& value : queries) value = normal(random);
  return queries;
}

std::string CheckReadAgainstTruth(const TestSequence& sequence, const client::ReadRequest& read,
                                  const client::ReadResult& result, const Tolerances& tolerances) {
  const CacheSpec& spec = sequence.spec;
  if (result.certificates.size() != static_cast<size_t>(spec.query_head_count())) {
    return absl::StrCat(result.certificates.size(), " certificates");
  }
  for (int32_t head = 0; head < spec.query_head_count(); ++head) {
    const ReadCertificate& certificate = result.certificates[head];
    const bool certified =
        certificate.outcome == Outcome::kCertified && MeetsTolerances(certificate, tolerances);
    if (!certified && certificate.outcome != Outcome::kExact) {
      return absl::StrCat("head ", head, " is ", OutcomeName(certificate.outcome), " with TV ",
                          certificate.worst_case_tv);
    }
    const cli::HeadTruth truth = cli::ComputeHeadTruth(spec, sequence.layers()[read.layer], head,
                                                       read.queries + int64_t{head} * spec.head_dim,
                                                       0, read.query_position + 1);
    const double error =
        cli::Distance(truth.output, absl::MakeConstSpan(result.outputs)
                                        .subspan(int64_t{head} * spec.value_dim, spec.value_dim));
    if (!(error <= certificate.output_error_bound)) {
      return absl::StrCat("head ", head, " has output error ", error, " above its bound ",
                          certificate.output_error_bound);
    }
    if (certificate.outcome == Outcome::kExact && !(error <= 1e-2 * cli::Norm(truth.output))) {
      return absl::StrCat("head ", head, " is called exact with error ", error, " of ",
                          cli::Norm(truth.output));
    }
  }
  return "";
}

double SumOfTv(const std::vector<client::ReadResult>& results, Outcome outcome) {
  double sum = 0;
  for (const client::ReadResult& result : results) {
    for (const ReadCertificate& certificate : result.certificates) {
      if (certificate.outcome == outcome) {
        sum += std::ceil(double{certificate.worst_case_tv} * 0x1p40) * 0x1p-40;
      }
    }
  }
  return sum;
}

}  // namespace certkv
