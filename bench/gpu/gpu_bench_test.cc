// Everything that certkv-bench-gpu does, at small sizes on CPU threads, so that its first run on a
// GPU measures. Times mean nothing here.
#include "bench/gpu/gpu_bench.h"

#include <cmath>
#include <vector>

#include "bench/gpu/device_cache.h"
#include "bench/gpu/read_launch.h"
#include "bench/kernels/bench_data.h"
#include "gtest/gtest.h"
#include "kernels/core/half.h"

namespace certkv::bench {
namespace {

// Softmax attention over the originals, in double.
std::vector<double> ExactOutput(const std::vector<uint16_t>& keys,
                                const std::vector<uint16_t>& values, const float* query, int dim) {
  const size_t tokens = keys.size() / dim;
  std::vector<double> weights;
  double total = 0;
  for (size_t t = 0; t < tokens; ++t) {
    double dot = 0;
    for (int i = 0; i < dim; ++i) {
      dot += double{F16ToFloat(FloatToF16(query[i]))} * F16ToFloat(keys[t * dim + i]);
    }
    weights.push_back(std::exp(dot / std::sqrt(dim)));
    total += weights.back();
  }
  std::vector<double> output(dim, 0.0);
  for (size_t t = 0; t < tokens; ++t) {
    for (int i = 0; i < dim; ++i) {
      output[i] += weights[t] / total * F16ToFloat(values[t * dim + i]);
    }
  }
  return output;
}

TEST(GpuBenchTest, DecodeOverPagesIsExactAttention) {
  for (const int32_t dim : {64, 128}) {
    for (const int32_t group_size : {1, 3, 8}) {
      SCOPED_TRACE(testing::Message() << "d " << dim << ", " << group_size << " heads");
      absl::StatusOr<cuda::Stream> stream = cuda::Stream::Create();
      ASSERT_TRUE(stream.ok());
      const absl::StatusOr<DeviceOriginals> originals = DeviceOriginals::Make(*stream, dim, 6);
      ASSERT_TRUE(originals.ok()) << originals.status();
      const ReadShape shape{2, 3, group_size, 2, 0.05f, 0.1f};
      const auto launch = PagedLaunch::Make(*originals, shape, dim);
      ASSERT_TRUE(launch.ok()) << launch.status();
      ASSERT_EQ((*launch)->Decode(stream->get()), 0);
      const size_t elements = size_t{3} * kPageTokens * dim;
      const std::vector<float> queries = BenchQueries(group_size, dim);
      for (int r = 0; r < 2; ++r) {
        const uint16_t* const keys = originals->keys.As<uint16_t>() + r * elements;
        const uint16_t* const values = originals->values.As<uint16_t>() + r * elements;
        for (int g = 0; g < group_size; ++g) {
          const std::vector<double> expected = ExactOutput(
              {keys, keys + elements}, {values, values + elements}, queries.data() + g * dim, dim);
          for (int i = 0; i < dim; ++i) {
            ASSERT_NEAR((*launch)->outputs()[(r * group_size + g) * dim + i], expected[i], 1e-4);
          }
        }
      }
    }
  }
}

TEST(GpuBenchTest, MeasuresEverythingThatItReports) {
  const absl::StatusOr<nlohmann::json> report = RunGpuBench(SmallSizes());
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_GT((*report)["copy"]["gb_per_s"].get<double>(), 0);
  ASSERT_EQ((*report)["reads"].size(), 2u);
  for (const nlohmann::json& row : (*report)["reads"]) {
    EXPECT_GT(row["fp16_paged"]["seconds"].get<double>(), 0);
    ASSERT_EQ(row["formats"].size(), 5u);
    for (const auto& [name, format] : row["formats"].items()) {
      SCOPED_TRACE(name);
      for (const char* field :
           {"seconds", "gb_per_s", "share_of_copy", "speed_over_fp16_paged", "certificate_seconds",
            "speed_with_certificate", "graph_seconds", "worst_case_tv_max"}) {
        EXPECT_GT(format[field].get<double>(), 0) << field;
      }
      // A certificate that says something, so that sealing and reading have worked.
      EXPECT_LT(format["worst_case_tv_max"].get<double>(), 1.0);
      EXPECT_EQ(format.contains("progressive"), name != "F16");
      if (name == "F16") continue;
      EXPECT_GT(format["progressive"]["share_read"].get<double>(), 0);
    }
  }
  EXPECT_EQ((*report)["sealing"].size(), 5u);
  EXPECT_EQ((*report)["repair"].size(), 2u);
}

}  // namespace
}  // namespace certkv::bench
