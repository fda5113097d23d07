// The claim of CertKV, counted: over at least 10^7 (token, head) cells of random data and of a real
// model's cache no certificate is false, and the half-widths aren't vacuous. Prints the figures.
#include <cmath>
#include <cstring>
#include <iostream>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/core/safetensors.h"
#include "tests/conformance/bound_tally.h"
#include "tests/conformance/path.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

constexpr char kTraceFile[] = "tests/data/smollm2-135m-4-layers.safetensors";
constexpr int kTraceLayers[] = {0, 9, 19, 29};
constexpr int kHeadDim = 64;
constexpr int kKvHeads = 3;
constexpr int kQueryHeads = 9;
constexpr int kGroupSize = kQueryHeads / kKvHeads;

struct Format {
  const char* name;
  KeyFormat key_format;
  ValueFormat value_format;
  int32_t witness_bands;
};

constexpr Format kFormats[] = {
    {"K8V4", KeyFormat::kK8, ValueFormat::kV4, 0},
    {"K6V4 with witness", KeyFormat::kK6, ValueFormat::kV4, 1},
    {"FP8_E4M3+V8", KeyFormat::kFp8E4m3, ValueFormat::kV8, 4},
    {"K4V4 with witness", KeyFormat::kK4, ValueFormat::kV4, 4},
};

void Print(absl::string_view what, const BoundTally& tally) {
  std::cout << what << ": " << tally.Summary() << "\n";
}

class BoundTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    const std::string missing = SelectPath(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }

  // The half-width in units of the largest error of its block: under sqrt(d), or it says little
  // more than Cauchy-Schwarz would without looking at the block.
  static void ExpectSoundAndTight(const BoundTally& tally) {
    EXPECT_EQ(tally.violations(), 0);
    EXPECT_GE(tally.MedianTightness(), 1.0);
    EXPECT_LT(tally.MedianTightness(), std::sqrt(kHeadDim));
  }
};

const uint16_t* HalfTensor(const SafetensorsFile& file, const std::string& name) {
  const auto tensor = file.Tensor(name);
  EXPECT_TRUE(tensor.ok()) << tensor.status();
  if (!tensor.ok()) return nullptr;
  return reinterpret_cast<const uint16_t*>(tensor->bytes.data());
}

SequenceShape ShapeOf(const Format& format) {
  SequenceShape shape;
  shape.key_format = format.key_format;
  shape.value_format = format.value_format;
  shape.witness_bands = format.witness_bands;
  shape.head_dim = kHeadDim;
  shape.value_dim = kHeadDim;
  shape.group_size = kGroupSize;
  return shape;
}

// Every `query_step`-th query of one KV head of one layer.
void AddTraceHead(const SafetensorsFile& file, const Format& format, Backend backend, int layer,
                  int kv_head, int query_step, BoundTally* tally) {
  const std::string prefix = absl::StrCat("layers.", layer, ".");
  const auto keys = file.Tensor(prefix + "key");
  const auto positions = file.Tensor("query_positions");
  ASSERT_TRUE(keys.ok() && positions.ok());
  const int64_t token_count = keys->shape[0];
  const int64_t stride = kKvHeads * kHeadDim;
  const int64_t offset = kv_head * kHeadDim;
  CacheSpec spec = SpecOfShape(ShapeOf(format));
  spec.logit_scale = 0.125f;
  spec.rotary_dim = kHeadDim;
  SequenceCase sequence(ShapeOf(format), spec, HalfTensor(file, prefix + "key") + offset, stride,
                        HalfTensor(file, prefix + "value") + offset, stride, token_count,
                        Backend::kReference);
  const SequenceRows original = OriginalRows(sequence);
  const SequenceRows served = ServedRows(sequence, sequence.args(), 0);
  const uint16_t* queries = HalfTensor(file, prefix + "query");
  for (int64_t n = 0; n < positions->shape[0]; n += query_step) {
    int32_t position = 0;
    std::memcpy(&position, positions->bytes.data() + 4 * n, sizeof(position));
    std::vector<float> group;
    for (int i = 0; i < kGroupSize * kHeadDim; ++i) {
      group.push_back(F16ToFloat(queries[(n * kQueryHeads + kv_head * kGroupSize) * kHeadDim + i]));
    }
    sequence.SetQueries(group);
    sequence.SetRange(0, position + 1);
    AddRead(backend, sequence, original, served, tally);
  }
}

TEST_P(BoundTest, HoldsOnEveryCellOfARealCache) {
  const auto file = SafetensorsFile::Open(kTraceFile);
  ASSERT_TRUE(file.ok()) << file.status();
  // The reference decodes bit by bit, and CUDA on CPU threads is slow; one query in eight shows as
  // well what they do.
  const bool is_slow = GetParam().backend != Backend::kCpu;
  const int query_step = is_slow ? 8 : 1;
  int64_t cells = 0;
  for (const Format& format : kFormats) {
    SCOPED_TRACE(format.name);
    BoundTally tally;
    for (const int layer : kTraceLayers) {
      for (int kv_head = 0; kv_head < kKvHeads; ++kv_head) {
        AddTraceHead(**file, format, GetParam().backend, layer, kv_head, query_step, &tally);
      }
    }
    Print(format.name, tally);
    ExpectSoundAndTight(tally);
    cells += tally.cells;
  }
  EXPECT_GE(cells, is_slow ? 1'000'000 : 10'000'000);
}

TEST_P(BoundTest, HoldsOnEveryCellOfRandomCaches) {
  for (const Format& format : kFormats) {
    SCOPED_TRACE(format.name);
    BoundTally tally;
    for (const Content content : {Content::kNormal, Content::kOutlier, Content::kNeedle}) {
      SequenceShape shape = ShapeOf(format);
      shape.tile_count = 30;
      shape.tail_count = 40;
      shape.group_size = 16;
      shape.content = content;
      for (uint64_t seed = 1; seed <= (GetParam().backend == Backend::kCpu ? 4 : 1); ++seed) {
        SCOPED_TRACE(seed);
        const SequenceCase sequence(shape, seed, Backend::kReference);
        const SequenceRows served = ServedRows(sequence, sequence.args(), 0);
        AddRead(GetParam().backend, sequence, OriginalRows(sequence), served, &tally);
      }
    }
    Print(format.name, tally);
    ExpectSoundAndTight(tally);
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, BoundTest, ::testing::ValuesIn(AllPaths()),
                         [](const auto& info) { return PathName(info.param); });

}  // namespace
}  // namespace certkv::conformance
