// Broken certificates and broken tiles must be found by what finds nothing wrong with the real
// ones.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
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

struct AdversaryFormat {
  KeyFormat key_format;
  int32_t witness_bands;
  bool is_weighted = false;
};

constexpr AdversaryFormat kAdversaryFormats[] = {
    {KeyFormat::kK8, 0},       {KeyFormat::kK6, 0},
    {KeyFormat::kK4, 0},       {KeyFormat::kK8, 4},
    {KeyFormat::kK6, 1},       {KeyFormat::kK4, 4},
    {KeyFormat::kFp8E4m3, 4},  {KeyFormat::kK6, 1, true},
    {KeyFormat::kK8, 4, true}, {KeyFormat::kFp8E4m3, 4, true},
};

// Two tiles, read along the residuals of eight of their tokens.
std::unique_ptr<SequenceCase> AdversarialSequence(const AdversaryFormat& format) {
  SequenceShape shape;
  shape.key_format = format.key_format;
  shape.witness_bands = format.witness_bands;
  shape.is_weighted = format.is_weighted;
  shape.tile_count = 2;
  shape.tail_count = 0;
  shape.head_dim = 128;
  shape.group_size = 8;
  auto sequence = std::make_unique<SequenceCase>(shape, kSeed, Backend::kReference);
  sequence->SetQueries(format.witness_bands == 0 ? QueriesAgainstScales(sequence.get(), 0.8)
                                                 : QueriesAgainstWitness(sequence.get()));
  return sequence;
}

TEST_P(CanaryTest, AdversarialQueriesUseMostOfTheHalfWidthAndNoMore) {
  for (const AdversaryFormat& format : kAdversaryFormats) {
    SCOPED_TRACE(absl::StrCat(KeyFormatName(format.key_format), " ", format.witness_bands,
                              format.is_weighted ? " weighted" : ""));
    BoundTally tally;
    AddReadWithCanary(Canary::kNone, GetParam().backend, *AdversarialSequence(format), &tally);
    EXPECT_EQ(tally.violations(), 0) << tally.Summary();
    // Of the atom that a head asks about; others are looser.
    EXPECT_LT(*std::min_element(tally.tightness.begin(), tally.tightness.end()), 1.25f);
  }
}

TEST_P(CanaryTest, HalvedHalfWidthIsFound) {
  for (const AdversaryFormat& format : kAdversaryFormats) {
    SCOPED_TRACE(absl::StrCat(KeyFormatName(format.key_format), " ", format.witness_bands,
                              format.is_weighted ? " weighted" : ""));
    BoundTally tally;
    AddReadWithCanary(Canary::kHalfWidth, GetParam().backend, *AdversarialSequence(format), &tally);
    EXPECT_GT(tally.half_width_violations, 0) << tally.Summary();
  }
}

// The half-width of a token that has the largest logit of its sub-block is its own.
TEST_P(CanaryTest, HalvedHalfWidthOfATopTokenIsFound) {
  for (const AdversaryFormat& format : kAdversaryFormats) {
    if (format.witness_bands == 0) continue;
    SCOPED_TRACE(absl::StrCat(KeyFormatName(format.key_format), " ", format.witness_bands,
                              format.is_weighted ? " weighted" : ""));
    const auto sequence = AdversarialSequence(format);
    sequence->SetQueries(QueriesAgainstTopTokens(sequence.get()));
    BoundTally tally;
    AddReadWithCanary(Canary::kNone, GetParam().backend, *sequence, &tally);
    EXPECT_EQ(tally.violations(), 0) << tally.Summary();
    EXPECT_GT(tally.own_tops, 0) << "not vacuous";
    AddReadWithCanary(Canary::kTopHalfWidth, GetParam().backend, *sequence, &tally);
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
  // Per channel: keys span [0, 240], so that scale is 1 and zero -7.5; tokens 0 and 1 sit at both
  // ends of the codes 16 to 31, which are decoded at 16.
  std::vector<uint16_t> keys(kTileTokens * shape.head_dim, FloatToF16(0));
  std::vector<uint16_t> values(kTileTokens * shape.value_dim, FloatToF16(0));
  for (int i = 0; i < shape.head_dim; ++i) {
    keys[0 * shape.head_dim + i] = FloatToF16(8.125f);
    keys[1 * shape.head_dim + i] = FloatToF16(23.75f);
    keys[2 * shape.head_dim + i] = FloatToF16(240);
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
