// Broken certificates and broken tiles must be found by what finds nothing wrong with the real
// ones.
#include <cmath>

#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/reference/tile_codec.h"
#include "tests/conformance/adversary.h"
#include "tests/conformance/bound_tally.h"
#include "tests/conformance/path.h"

namespace certkv::conformance {
namespace {

constexpr uint64_t kSeed = 99;

class CanaryTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    const std::string missing = SelectPath(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

// One tile, read along its own residuals.
std::unique_ptr<SequenceCase> AdversarialSequence(KeyFormat format) {
  SequenceShape shape;
  shape.key_format = format;
  shape.tile_count = 2;
  shape.tail_count = 0;
  shape.head_dim = 128;
  shape.group_size = 8;
  auto sequence = std::make_unique<SequenceCase>(shape, kSeed, Backend::kReference);
  sequence->SetQueries(AdversarialQueries(sequence.get(), 0.8));
  return sequence;
}

TEST_P(CanaryTest, AdversarialQueriesUseMostOfTheHalfWidthAndNoMore) {
  for (const KeyFormat format : {KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4}) {
    SCOPED_TRACE(KeyFormatName(format));
    BoundTally tally;
    AddReadWithCanary(Canary::kNone, GetParam().backend, *AdversarialSequence(format), &tally);
    EXPECT_EQ(tally.violations(), 0) << tally.Summary();
    float tightest = 100;
    for (const float ratio : tally.tightness) tightest = std::min(tightest, ratio);
    EXPECT_LT(tightest, 1.25f);
  }
}

TEST_P(CanaryTest, HalvedHalfWidthIsFound) {
  for (const KeyFormat format : {KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4}) {
    SCOPED_TRACE(KeyFormatName(format));
    BoundTally tally;
    AddReadWithCanary(Canary::kHalfWidth, GetParam().backend, *AdversarialSequence(format), &tally);
    EXPECT_GT(tally.half_width_violations, 0) << tally.Summary();
  }
}

// Two tokens whose residuals are opposite along the query: the corner of the box that TV* assumes.
std::unique_ptr<SequenceCase> OppositeTokens() {
  SequenceShape shape;
  shape.key_format = KeyFormat::kK4;
  shape.value_format = ValueFormat::kV8;
  shape.group_size = 1;
  shape.tile_count = 1;
  shape.tail_count = 0;
  const CacheSpec spec = SpecOfShape(shape);
  // Per channel: codes 0 and 255 span [0, 255]; tokens 0 and 1 sit at both ends of the first step
  // of 16, decoded at its centre 7.5.
  std::vector<uint16_t> keys(kTileTokens * shape.head_dim, FloatToF16(0));
  std::vector<uint16_t> values(kTileTokens * shape.value_dim, FloatToF16(0));
  for (int i = 0; i < shape.head_dim; ++i) {
    keys[1 * shape.head_dim + i] = FloatToF16(15);
    keys[2 * shape.head_dim + i] = FloatToF16(255);
    values[0 * shape.value_dim + i] = FloatToF16(1);
    values[1 * shape.value_dim + i] = FloatToF16(-1);
  }
  auto sequence =
      std::make_unique<SequenceCase>(shape, spec, keys.data(), shape.head_dim, values.data(),
                                     shape.value_dim, kTileTokens, Backend::kReference);
  sequence->SetQueries(std::vector<float>(shape.head_dim, 0.01f));
  sequence->SetRange(0, 2);
  return sequence;
}

TEST_P(CanaryTest, OppositeTokensComeCloseToTheirCertificate) {
  BoundTally tally;
  AddReadWithCanary(Canary::kNone, GetParam().backend, *OppositeTokens(), &tally);
  EXPECT_EQ(tally.violations(), 0) << tally.Summary();
  EXPECT_GT(tally.worst_tv, 0.8 * tally.worst_tv_bound) << tally.Summary();
}

TEST_P(CanaryTest, HalvedTotalVariationIsFound) {
  BoundTally tally;
  AddReadWithCanary(Canary::kWorstCaseTv, GetParam().backend, *OppositeTokens(), &tally);
  EXPECT_GT(tally.tv_violations, 0) << tally.Summary();
}

TEST_P(CanaryTest, HalvedOutputBoundIsFound) {
  BoundTally tally;
  AddReadWithCanary(Canary::kOutputBound, GetParam().backend, *OppositeTokens(), &tally);
  EXPECT_GT(tally.output_violations, 0) << tally.Summary();
}

TEST_P(CanaryTest, FlippedCodeBitIsFoundByTheTally) {
  SequenceShape shape;
  SequenceCase sequence(shape, kSeed, Backend::kReference);
  // The highest bit of one code of token 21, in the channel that head 0 asks most about.
  int channel = 0;
  for (int i = 1; i < shape.head_dim; ++i) {
    if (std::fabs(sequence.args().queries[i]) > std::fabs(sequence.args().queries[channel])) {
      channel = i;
    }
  }
  const uint32_t code =
      reference::ReadKeyCode(sequence.layout(), sequence.scan(0), sequence.detail(0), 21, channel);
  reference::WriteKeyCode(sequence.layout(), sequence.scan(0), sequence.detail(0), 21, channel,
                          code ^ 0x80);
  BoundTally tally;
  AddReadWithCanary(Canary::kNone, GetParam().backend, sequence, &tally);
  EXPECT_GT(tally.half_width_violations, 0) << tally.Summary();
}

INSTANTIATE_TEST_SUITE_P(Paths, CanaryTest, ::testing::ValuesIn(AllPaths()),
                         [](const auto& info) { return PathName(info.param); });

}  // namespace
}  // namespace certkv::conformance
