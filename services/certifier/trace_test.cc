// Reads of a real model's keys, values and queries.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/core/half.h"
#include "kernels/core/safetensors.h"
#include "services/certifier/fake_cache.h"
#include "services/certifier/read_checker.h"

namespace certkv::certifier {
namespace {

using ::testing::IsEmpty;

constexpr int32_t kTraceLayers[] = {0, 9, 19, 29};
constexpr int32_t kHeadDim = 64;
constexpr int32_t kQueryHeads = 9;

std::vector<uint16_t> Words(const SafetensorsFile& file, const std::string& name) {
  const auto tensor = file.Tensor(name);
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  std::vector<uint16_t> words(tensor->bytes.size() / sizeof(uint16_t));
  std::memcpy(words.data(), tensor->bytes.data(), tensor->bytes.size());
  return words;
}

class TraceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto file = SafetensorsFile::Open("tests/data/smollm2-135m-4-layers.safetensors");
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = std::move(*file);
    const auto positions = file_->Tensor("query_positions");
    ASSERT_TRUE(positions.ok());
    positions_.resize(positions->bytes.size() / sizeof(int32_t));
    std::memcpy(positions_.data(), positions->bytes.data(), positions->bytes.size());
  }

  static CacheSpec Spec(KeyFormat key_format) {
    CacheSpec spec = SmallSpec(4, 3, 3, kHeadDim);
    spec.rope_pairing = RopePairing::kInterleaved;
    spec.rotary_dim = kHeadDim;
    for (LayerSpec& layer : spec.layers) {
      layer.key_format = key_format;
      if (key_format != KeyFormat::kFp8E4m3) continue;
      layer.witness_bands = 4;
      layer.value_format = ValueFormat::kV8;
    }
    return spec;
  }

  // Every 16th position, all layers and heads. Returns heads by rung.
  std::array<int64_t, 6> ReadAll(KeyFormat key_format, const Tolerances& tolerances) {
    const CacheSpec spec = Spec(key_format);
    SequenceData data;
    data.token_count = 1743;
    for (const int32_t layer : kTraceLayers) {
      data.keys.push_back(Words(*file_, absl::StrCat("layers.", layer, ".key")));
      data.values.push_back(Words(*file_, absl::StrCat("layers.", layer, ".value")));
    }
    FakeCache fake(spec, 32);
    fake.Put(data);
    ReadChecker checker(&fake, KernelsOf(Backend::kCpu));
    BudgetBook book(1);
    const auto view = fake.OpenView(TestLease(tolerances), &book);
    std::array<int64_t, 6> rungs{};
    share_read_.clear();
    for (int32_t layer = 0; layer < 4; ++layer) {
      int64_t tokens = 0;
      int64_t read_tokens = 0;
      const auto words = Words(*file_, absl::StrCat("layers.", kTraceLayers[layer], ".query"));
      for (size_t i = 0; i < positions_.size(); i += 16) {
        std::vector<float> queries(kQueryHeads * kHeadDim);
        for (size_t k = 0; k < queries.size(); ++k) {
          queries[k] = F16ToFloat(words[i * queries.size() + k]);
        }
        ReadRequest request;
        request.layer = layer;
        request.query_position = positions_[i];
        request.queries = queries;
        const absl::Status status = checker.Read(*view, request);
        EXPECT_TRUE(status.ok()) << status;
        for (const auto& certificate : checker.certificates()) {
          ++rungs[static_cast<int>(certificate.rung)];
          read_tokens += certificate.read_tokens;
          tokens += certificate.read_tokens + certificate.skipped_tokens;
        }
      }
      share_read_.push_back(static_cast<double>(read_tokens) / static_cast<double>(tokens));
    }
    EXPECT_THAT(checker.violations(), IsEmpty());
    std::cout << KeyFormatName(key_format) << " at " << tolerances.tv_tolerance << ": none "
              << rungs[1] << ", values " << rungs[2] << ", keys " << rungs[3] << ", head "
              << rungs[4] << ", layer " << rungs[5] << ", bytes read again "
              << checker.counters().repair_bytes << "; skip " << tolerances.skip_tolerance
              << ": share read by layer " << absl::StrJoin(share_read_, ", ") << ", misses "
              << checker.counters().skip_misses << "\n";
    return rungs;
  }

  std::unique_ptr<SafetensorsFile> file_;
  std::vector<int32_t> positions_;
  std::vector<double> share_read_;  // of the tokens of the last ReadAll, by layer
};

TEST_F(TraceTest, K8IsCertifiedAtFirstSightAtTheDefaultTolerance) {
  const auto rungs = ReadAll(KeyFormat::kK8, {.tv_tolerance = 0.2f, .value_tolerance = 1});
  EXPECT_GE(rungs[1], 4 * 4 * kQueryHeads * 99 / 100);
}

// The same contract for reads that skip; ReadAll checks each against the truth.
TEST_F(TraceTest, ReadsOfARealModelSkipWithinTheirTolerance) {
  for (const KeyFormat format : {KeyFormat::kK8, KeyFormat::kK6}) {
    for (const float skip : {0.05f, 0.1f}) {
      const auto rungs =
          ReadAll(format, {.tv_tolerance = 0.2f, .value_tolerance = 1, .skip_tolerance = skip});
      // K6 has little room left at this tolerance; it repairs as it does without skipping.
      EXPECT_GE(rungs[1], 4 * 4 * kQueryHeads * (format == KeyFormat::kK8 ? 9 : 5) / 10);
      EXPECT_LT(*std::min_element(share_read_.begin(), share_read_.end()), 0.9);
    }
  }
}

TEST_F(TraceTest, K8ClimbsAtATightTolerance) {
  const auto rungs = ReadAll(KeyFormat::kK8, {.tv_tolerance = 0.02f, .value_tolerance = 0.05f});
  EXPECT_GT(rungs[static_cast<int>(Rung::kKeys)], 0);
}

TEST_F(TraceTest, K4ClimbsAtTheDefaultTolerance) {
  const auto rungs = ReadAll(KeyFormat::kK4, {.tv_tolerance = 0.2f, .value_tolerance = 0.05f});
  EXPECT_GT(rungs[static_cast<int>(Rung::kKeys)], 0);
}

TEST_F(TraceTest, Fp8ClimbsAtTheDefaultTolerance) {
  const auto rungs = ReadAll(KeyFormat::kFp8E4m3, {.tv_tolerance = 0.2f, .value_tolerance = 0.05f});
  EXPECT_GT(rungs[static_cast<int>(Rung::kKeys)], 0);
}

}  // namespace
}  // namespace certkv::certifier
