// AttendProgressive on every path: what is skipped is covered by its bound, what is read keeps
// Attend's contract, and the read isn't vacuous in either direction.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "tests/conformance/adversary.h"
#include "tests/conformance/path.h"
#include "tests/conformance/progressive_tally.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

constexpr uint64_t kSeed = 815;

class ProgressiveTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    const std::string missing = SelectPath(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }

  // One read of the sequence, added to the tally.
  void Add(const SequenceCase& sequence, float skip_tolerance, ProgressiveTally* tally) {
    ProgressiveRead read(sequence.args(), skip_tolerance);
    ASSERT_NO_FATAL_FAILURE(read.Run(GetParam().backend));
    AddProgressiveRead(GetParam().backend, read, OriginalRows(sequence),
                       ServedRows(sequence, sequence.args(), 0), tally);
  }
};

SequenceShape LongShape(Content content) {
  SequenceShape shape;
  shape.tile_count = 12;
  shape.tail_count = 20;
  shape.content = content;
  return shape;
}

TEST_P(ProgressiveTest, CoversTheTruthForEveryShapeThatCanSkip) {
  int shapes = 0;
  for (NamedShape named : ShapesOf(GetParam().backend, AllShapes())) {
    if (named.shape.has_sources) continue;
    const SequenceCase sequence(named.shape, kSeed, Backend::kReference);
    if (!CanSkip(sequence.layout())) continue;
    ++shapes;
    for (const float tolerance : {0.02f, 0.1f, 0.6f}) {
      SCOPED_TRACE(absl::StrCat(named.name, " at ", tolerance));
      ProgressiveTally tally;
      ASSERT_NO_FATAL_FAILURE(Add(sequence, tolerance, &tally));
      EXPECT_EQ(tally.violations(), 0) << tally.Summary();
      // Whole tiles whose logits can't be bounded are read, and then nothing is skipped.
      EXPECT_LE(tally.share_max, tolerance * (1 + 1e-4)) << tally.Summary();
    }
  }
  EXPECT_GE(shapes, 30);
}

TEST_P(ProgressiveTest, SkipsMostOfWhatAFewTokensOutweigh) {
  for (const KeyFormat format : {KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4}) {
    for (const int32_t dim : {64, 80, 128, 256}) {
      SCOPED_TRACE(absl::StrCat(KeyFormatName(format), " ", dim));
      SequenceShape shape = LongShape(Content::kNeedle);
      shape.key_format = format;
      shape.head_dim = shape.value_dim = dim;
      const SequenceCase sequence(shape, kSeed, Backend::kReference);
      ProgressiveTally tally;
      ASSERT_NO_FATAL_FAILURE(Add(sequence, 0.1f, &tally));
      EXPECT_EQ(tally.violations(), 0) << tally.Summary();
      EXPECT_LT(tally.ShareRead(), 0.5) << tally.Summary();
      EXPECT_GT(tally.looseness.size(), 0u);
    }
  }
}

// Every head's needle lies in one sub-block; whoever skips it is wrong by its whole mass.
TEST_P(ProgressiveTest, ReadsTheNeedleWhereverItLies) {
  SequenceShape shape;
  shape.tile_count = 4;
  shape.tail_count = 0;
  shape.group_size = 2;
  const CacheSpec spec = SpecOfShape(shape);
  for (int64_t needle = 0; needle < 4 * kTileTokens; needle += 37) {
    SCOPED_TRACE(needle);
    std::vector<uint16_t> keys(4 * kTileTokens * shape.head_dim);
    std::vector<uint16_t> values(keys.size(), FloatToF16(0.5f));
    for (size_t k = 0; k < keys.size(); ++k) {
      keys[k] = FloatToF16(static_cast<float>(k * 7919 % 101) / 100 - 0.5f);
    }
    for (int i = 0; i < shape.head_dim; ++i) {
      keys[needle * shape.head_dim + i] = FloatToF16(i % 2 == 0 ? 2.0f : -2.0f);
    }
    SequenceCase sequence(shape, spec, keys.data(), shape.head_dim, values.data(), shape.value_dim,
                          4 * kTileTokens, Backend::kReference);
    std::vector<float> queries(2 * shape.head_dim);
    for (size_t i = 0; i < queries.size(); ++i) queries[i] = i % 2 == 0 ? 1.0f : -1.0f;
    sequence.SetQueries(queries);
    ProgressiveRead read(sequence.args(), 0.05f);
    ASSERT_NO_FATAL_FAILURE(read.Run(GetParam().backend));
    for (int g = 0; g < 2; ++g) EXPECT_TRUE(read.IsRead(g, needle)) << "head " << g;
    ProgressiveTally tally;
    AddProgressiveRead(GetParam().backend, read, OriginalRows(sequence),
                       ServedRows(sequence, sequence.args(), 0), &tally);
    EXPECT_EQ(tally.violations(), 0) << tally.Summary();
  }
}

// Equal logits: nothing may be skipped beyond the tolerance, and that much may.
TEST_P(ProgressiveTest, ReadsNearlyAllOfWhatIsEqual) {
  for (const Content content : {Content::kConstant, Content::kZero}) {
    const SequenceCase sequence(LongShape(content), kSeed, Backend::kReference);
    ProgressiveTally tally;
    ASSERT_NO_FATAL_FAILURE(Add(sequence, 0.2f, &tally));
    EXPECT_EQ(tally.violations(), 0) << tally.Summary();
    EXPECT_GE(tally.ShareRead(), 0.75) << tally.Summary();
  }
}

// The scan's references are raised, and the bounds of tiles before it brought to the last one.
TEST_P(ProgressiveTest, CoversTheTruthWhereLogitsRiseOrFallByHundredsOfNatsFromTileToTile) {
  constexpr int32_t kTiles = 12;
  SequenceShape shape;
  shape.tile_count = kTiles;
  shape.tail_count = 0;
  const CacheSpec spec = SpecOfShape(shape);
  for (const float step_nat : {-200.0f, -30.0f, -2.0f, 2.0f, 30.0f, 200.0f}) {
    SCOPED_TRACE(step_nat);
    std::vector<uint16_t> keys(int64_t{kTiles} * kTileTokens * shape.head_dim);
    std::vector<uint16_t> values(keys.size());
    const float scale = std::sqrt(static_cast<float>(shape.head_dim));
    for (size_t k = 0; k < keys.size(); ++k) {
      const auto tile = static_cast<float>(k / (kTileTokens * shape.head_dim));
      const float noise = static_cast<float>(k * 7919 % 101) / 100 - 0.5f;
      keys[k] = FloatToF16((tile - kTiles / 2.0f) * step_nat / scale + noise);
      values[k] = FloatToF16(static_cast<float>(k * 104729 % 211) / 100 - 1);
    }
    SequenceCase sequence(shape, spec, keys.data(), shape.head_dim, values.data(), shape.value_dim,
                          int64_t{kTiles} * kTileTokens, Backend::kReference);
    sequence.SetQueries(std::vector<float>(shape.group_size * shape.head_dim, 1.0f));
    ProgressiveTally tally;
    ASSERT_NO_FATAL_FAILURE(Add(sequence, 0.1f, &tally));
    EXPECT_EQ(tally.violations(), 0) << tally.Summary();
    const bool steep = std::fabs(step_nat) > 2;  // one tile has it all
    EXPECT_LE(tally.ShareRead(), steep ? 1.01 / kTiles : 1.0) << tally.Summary();
    EXPECT_GE(tally.ShareRead(), 0.5 / kTiles) << tally.Summary();
  }
}

TEST_P(ProgressiveTest, HoldsForOutliersAHundredTimesAsLargeDenormalsAndHugeNumbers) {
  for (const Content content : {Content::kOutlier, Content::kDenormal, Content::kHuge}) {
    for (const float factor : {1.0f, 100.0f}) {
      SCOPED_TRACE(absl::StrCat(static_cast<int>(content), " times ", factor));
      SequenceShape shape = LongShape(content);
      shape.head_dim = 80;
      SequenceCase sequence(shape, kSeed, Backend::kReference);
      std::vector<float> queries(sequence.args().queries,
                                 sequence.args().queries + shape.group_size * shape.head_dim);
      for (size_t i = 0; i < queries.size(); i += 5) queries[i] *= factor;
      sequence.SetQueries(queries);
      ProgressiveTally tally;
      ASSERT_NO_FATAL_FAILURE(Add(sequence, 0.1f, &tally));
      EXPECT_EQ(tally.violations(), 0) << tally.Summary();
    }
  }
}

TEST_P(ProgressiveTest, HoldsForEveryRangeOfARaggedSequence) {
  SequenceShape shape = LongShape(Content::kNormal);
  shape.tile_count = 3;
  shape.tail_count = 41;
  shape.soft_cap = 5;
  shape.has_sink = true;
  SequenceCase sequence(shape, kSeed, Backend::kReference);
  ProgressiveTally tally;
  for (int64_t begin = 0; begin < 230; begin += 23) {
    for (int64_t end = begin + 1; end <= sequence.token_count(); end += 31) {
      sequence.SetRange(begin, end);
      ASSERT_NO_FATAL_FAILURE(Add(sequence, 0.3f, &tally));
    }
  }
  EXPECT_EQ(tally.violations(), 0) << tally.Summary();
  EXPECT_LT(tally.ShareRead(), 0.95) << tally.Summary();
}

// The path may choose otherwise than the definition, but not read much more.
TEST_P(ProgressiveTest, ReadsAboutAsMuchAsTheDefinition) {
  SequenceShape shape = LongShape(Content::kNormal);
  shape.tile_count = 24;
  shape.head_dim = 128;
  const SequenceCase sequence(shape, kSeed, Backend::kReference);
  const SequenceRows original = OriginalRows(sequence);
  const SequenceRows served = ServedRows(sequence, sequence.args(), 0);
  for (const float tolerance : {0.05f, 0.2f}) {
    ProgressiveTally tally;
    ProgressiveTally reference;
    ProgressiveRead read(sequence.args(), tolerance);
    ASSERT_NO_FATAL_FAILURE(read.Run(GetParam().backend));
    AddProgressiveRead(GetParam().backend, read, original, served, &tally);
    ProgressiveRead defined(sequence.args(), tolerance);
    ASSERT_NO_FATAL_FAILURE(defined.Run(Backend::kReference));
    AddProgressiveRead(Backend::kReference, defined, original, served, &reference);
    EXPECT_LE(tally.ShareRead(), 1.15 * reference.ShareRead() + 0.03) << tally.Summary() << "\n"
                                                                      << reference.Summary();
  }
}

TEST_P(ProgressiveTest, RefusesWhatItCannotBound) {
  SequenceShape shape;
  SequenceCase sequence(shape, kSeed, Backend::kReference);
  for (const float tolerance : {0.0f, 1.0f, -0.1f, std::nanf("")}) {
    ProgressiveRead read(sequence.args(), tolerance);
    EXPECT_EQ(ReasonOf(read.TryRun(GetParam().backend)), "ATTEND_ARGS_INVALID") << tolerance;
  }
  {
    AttendArgs args = sequence.args();
    const std::vector<uint8_t> sources(args.group_size * args.tile_count, kSourceQuantized);
    args.tile_sources = sources.data();
    ProgressiveRead read(args, 0.1f);
    EXPECT_EQ(ReasonOf(read.TryRun(GetParam().backend)), "ATTEND_ARGS_INVALID");
  }
  {
    SequenceShape fp8;
    fp8.key_format = KeyFormat::kFp8E4m3;
    fp8.witness_bands = 4;
    const SequenceCase other(fp8, kSeed, Backend::kReference);
    ProgressiveRead read(other.args(), 0.1f);
    EXPECT_EQ(ReasonOf(read.TryRun(GetParam().backend)), "ATTEND_ARGS_INVALID");
  }
  std::vector<float> queries(shape.group_size * shape.head_dim, 1.0f);
  queries[70] = std::nanf("");
  sequence.SetQueries(queries);
  ProgressiveRead read(sequence.args(), 0.1f);
  EXPECT_EQ(ReasonOf(read.TryRun(GetParam().backend)), "ATTEND_ARGS_INVALID");
}

// Tokens of code 15 (of 255) lie at the top of the first coarse step, and the query is positive in
// every channel: their exact logits are the corner of the coarse box, up to a sixteenth of it.
std::unique_ptr<SequenceCase> TokensAtTheCorner() {
  SequenceShape shape;
  shape.group_size = 1;
  const CacheSpec spec = SpecOfShape(shape);
  std::vector<uint16_t> keys(kTileTokens * shape.head_dim);
  std::vector<uint16_t> values(keys.size());
  for (int t = 0; t < kTileTokens; ++t) {
    const float key = t == 0 ? 0.0f : t < 48 ? 15.0f : 255.0f;
    for (int i = 0; i < shape.head_dim; ++i) {
      keys[t * shape.head_dim + i] = FloatToF16(key);
      values[t * shape.value_dim + i] = FloatToF16(t < 48 ? 100.0f : 1.0f);
    }
  }
  auto sequence =
      std::make_unique<SequenceCase>(shape, spec, keys.data(), shape.head_dim, values.data(),
                                     shape.value_dim, kTileTokens, Backend::kReference);
  sequence->SetQueries(std::vector<float>(shape.head_dim, 0.003f));
  return sequence;
}

TEST_P(ProgressiveTest, BoundOfTheSkippedMassIsMetByTheCornerOfItsBox) {
  const auto sequence = TokensAtTheCorner();
  ProgressiveTally tally;
  ASSERT_NO_FATAL_FAILURE(Add(*sequence, 0.2f, &tally));
  EXPECT_EQ(tally.violations(), 0) << tally.Summary();
  ASSERT_EQ(tally.looseness.size(), 1u);
  EXPECT_LT(tally.looseness[0], 0.05f) << tally.Summary();
}

TEST_P(ProgressiveTest, BoundOfTheSkippedMassIsNearlyMetAtTheEndsOfCoarseSteps) {
  ProgressiveTally tally;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const auto sequence = SequenceAgainstCoarseScan(seed, Backend::kReference);
    ASSERT_NO_FATAL_FAILURE(Add(*sequence, 0.2f, &tally));
  }
  EXPECT_EQ(tally.violations(), 0) << tally.Summary();
  ASSERT_GT(tally.looseness.size(), 24u) << "something is skipped";
  EXPECT_LT(*std::min_element(tally.looseness.begin(), tally.looseness.end()), 0.01f)
      << tally.Summary();
}

TEST_P(ProgressiveTest, CanaryOfALoweredSkipBoundIsFound) {
  const auto sequence = TokensAtTheCorner();
  ProgressiveRead read(sequence->args(), 0.2f);
  ASSERT_NO_FATAL_FAILURE(read.Run(GetParam().backend));
  read.mutable_view()->skipped_lse_nat[0] -= 0.1f;  // a tenth of the bound left out
  ProgressiveTally tally;
  AddProgressiveRead(GetParam().backend, read, OriginalRows(*sequence),
                     ServedRows(*sequence, sequence->args(), 0), &tally);
  EXPECT_GT(tally.skip_violations, 0) << tally.Summary();
}

TEST_P(ProgressiveTest, CanaryOfASkippedMassLeftOutOfTheCertificateIsFound) {
  const auto sequence = TokensAtTheCorner();
  ProgressiveRead read(sequence->args(), 0.2f);
  ASSERT_NO_FATAL_FAILURE(read.Run(GetParam().backend));
  read.mutable_view()->skipped_lse_nat[0] = -std::numeric_limits<float>::infinity();
  ProgressiveTally tally;
  AddProgressiveRead(GetParam().backend, read, OriginalRows(*sequence),
                     ServedRows(*sequence, sequence->args(), 0), &tally);
  EXPECT_GT(tally.share_violations, 0) << tally.Summary();
  EXPECT_GT(tally.tv_violations, 0) << tally.Summary();
}

// The values of what is skipped are a hundred times as large as those of what is read.
TEST_P(ProgressiveTest, CanaryOfARadiusOfTheReadTokensAloneIsFound) {
  const auto sequence = TokensAtTheCorner();
  ProgressiveRead read(sequence->args(), 0.2f);
  ASSERT_NO_FATAL_FAILURE(read.Run(GetParam().backend));
  read.mutable_view()->value_radius[0] = 8.5f;
  ProgressiveTally tally;
  AddProgressiveRead(GetParam().backend, read, OriginalRows(*sequence),
                     ServedRows(*sequence, sequence->args(), 0), &tally);
  EXPECT_GT(tally.radius_violations, 0) << tally.Summary();
  EXPECT_GT(tally.output_violations, 0) << tally.Summary();
}

INSTANTIATE_TEST_SUITE_P(Paths, ProgressiveTest, ::testing::ValuesIn(AllPaths()),
                         [](const auto& info) { return PathName(info.param); });

}  // namespace
}  // namespace certkv::conformance
