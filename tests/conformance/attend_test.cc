// Attend on every path: what it reports covers the truth, agrees with the reference within the
// roundings that it admits, and isn't vacuous.
#include "kernels/ops/attend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/reference/sequence.h"
#include "kernels/reference/tile_codec.h"
#include "tests/conformance/bound_tally.h"
#include "tests/conformance/path.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

constexpr uint64_t kSeed = 4711;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class AttendTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    const std::string missing = SelectPath(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

// A path's result beside the reference's, for the same sealed bytes.
struct Pair {
  explicit Pair(const AttendArgs& args) : seen(args), expected(args) {}
  ReadResult seen;
  ReadResult expected;
};

void RunBoth(const Path& path, const AttendArgs& args, Pair* pair) {
  pair->seen.Run(path.backend, args);
  pair->expected.Run(Backend::kReference, args);
}

// How far the path's logits of the atom may be from the reference's: what its half-width has above
// the reference's, of which 2^-18 is the reference's own rounding up.
double LogitRounding(const Pair& pair, int g, int32_t atom) {
  const double seen = pair.seen.half_width(g)[atom];
  const double expected = pair.expected.half_width(g)[atom];
  if (expected == kInfinity || seen == kInfinity) return kInfinity;
  return std::max(0.0, seen - expected) + expected * 0x1p-17;
}

double LargestLogitRounding(const Pair& pair, int g) {
  double largest = 0;
  for (int32_t a = 0; a < pair.seen.atom_count(); ++a) {
    largest = std::max(largest, LogitRounding(pair, g, a));
  }
  return largest;
}

void ExpectNear(float seen, float expected, double logit_rounding, float head_lse) {
  if (expected == -kInfinity) {
    EXPECT_EQ(seen, -kInfinity);
    return;
  }
  // Each side is off by its own slack.
  const double limit = logit_rounding + 2 * BlockLseSlackNat(expected);
  if (std::max(seen, expected) < head_lse - kNegligibleNat) return;
  EXPECT_LE(std::fabs(seen - expected), limit);
}

TEST_P(AttendTest, AtomsAgreeWithTheReference) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, AllShapes())) {
    SCOPED_TRACE(named.name);
    const SequenceCase sequence(named.shape, kSeed, Backend::kReference);
    Pair pair(sequence.args());
    ASSERT_NO_FATAL_FAILURE(RunBoth(GetParam(), sequence.args(), &pair));
    for (int g = 0; g < named.shape.group_size; ++g) {
      const float head_lse = pair.expected.view().lse_nat[g];
      for (int32_t a = 0; a < pair.seen.atom_count(); ++a) {
        SCOPED_TRACE(testing::Message() << "head " << g << " atom " << a);
        const double rounding = LogitRounding(pair, g, a);
        ExpectNear(pair.seen.block_lse(g)[a], pair.expected.block_lse(g)[a], rounding, head_lse);
        ExpectNear(pair.seen.block_max_logit(g)[a], pair.expected.block_max_logit(g)[a], rounding,
                   head_lse);
      }
      ExpectNear(pair.seen.view().lse_nat[g], head_lse, LargestLogitRounding(pair, g), -kInfinity);
    }
  }
}

// Of the size of a logit, scale * ||q|| ||k||, what the half-width may add for arithmetic: a path
// may use float sums (d * 2^-23) and 16-bit queries.
constexpr double kArithmeticShare = 0x1p-11;
// Norms whose squares underflow or overflow in float may be known as a bound only, at 2^-63 and as
// +infinity; FP8 keys and witnesses below 2^-96 may count as 2^-96.
constexpr double kNormFloor = 0x1p-60;
constexpr double kNormCeiling = 0x1p60;
constexpr double kKeyFloor = 0x1p-96;

double QueryNorm(const AttendArgs& args, int g) {
  double square = 0;
  for (int i = 0; i < args.layout->head_dim; ++i) {
    const double q = args.queries[g * args.layout->head_dim + i];
    square += q * q;
  }
  return std::sqrt(square);
}

double LargestKeyNorm(const SequenceCase& sequence, const reference::TokenRange& tokens) {
  double square_max = 0;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    double square = 0;
    for (int i = 0; i < sequence.spec().head_dim; ++i) {
      square += double{sequence.OriginalKey(t, i)} * sequence.OriginalKey(t, i);
    }
    square_max = std::max(square_max, square);
  }
  return std::sqrt(square_max);
}

TEST_P(AttendTest, HalfWidthsAreNotMuchAboveTheReference) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, AllShapes())) {
    SCOPED_TRACE(named.name);
    const SequenceCase sequence(named.shape, kSeed, Backend::kReference);
    const AttendArgs& args = sequence.args();
    ReadResult seen(args);
    ASSERT_NO_FATAL_FAILURE(seen.Run(GetParam().backend, args));
    // An atom that the range cuts may use the witnesses of all its tokens.
    AttendArgs whole_args = args;
    whole_args.token_begin = 0;
    whole_args.token_end = sequence.token_count();
    ReadResult whole(whole_args);
    ASSERT_NO_FATAL_FAILURE(whole.Run(Backend::kReference, whole_args));
    for (int g = 0; g < named.shape.group_size; ++g) {
      const double query_size = args.logit_scale * QueryNorm(args, g);
      for (int32_t a = 0; a < seen.atom_count(); ++a) {
        const reference::TokenRange tokens = reference::AtomTokens(args, a);
        if (tokens.begin >= tokens.end) {
          EXPECT_EQ(seen.half_width(g)[a], 0.0f);
          continue;
        }
        const double rounding =
            query_size * (LargestKeyNorm(sequence, tokens) * kArithmeticShare + kKeyFloor) +
            args.soft_cap * 0x1p-16 + 0x1p-12;
        EXPECT_LE(seen.half_width(g)[a], whole.half_width(g)[a] * 1.01 + rounding)
            << "head " << g << " atom " << a;
      }
    }
  }
}

TEST_P(AttendTest, OutputsAgreeWithTheReference) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, AllShapes())) {
    SCOPED_TRACE(named.name);
    const SequenceCase sequence(named.shape, kSeed, Backend::kReference);
    Pair pair(sequence.args());
    ASSERT_NO_FATAL_FAILURE(RunBoth(GetParam(), sequence.args(), &pair));
    for (int g = 0; g < named.shape.group_size; ++g) {
      SCOPED_TRACE(testing::Message() << "head " << g);
      // Two softmaxes of logits that differ by at most a differ by TV <= tanh(a / 2) <= a / 2, and
      // the outputs by 2 TV times the longest decoded value.
      double value_max = pair.expected.view().value_radius[0];
      for (int tile = 0; tile < named.shape.tile_count; ++tile) {
        const TileHeader header = reference::ReadHeader(sequence.args().tiles[tile].scan);
        for (const uint16_t eta : header.value_error_bound) {
          value_max = std::max<double>(value_max, header.value_radius + F16ToFloat(eta));
        }
      }
      const double limit = pair.seen.view().rounding_term[g] +
                           pair.expected.view().rounding_term[g] +
                           value_max * LargestLogitRounding(pair, g);
      const auto expected = pair.expected.output(g);
      const std::vector<double> wide(expected.begin(), expected.end());
      EXPECT_LE(Distance(wide, pair.seen.output(g)), limit);
    }
  }
}

// Rounding that a path may add to an output, of the longest value: 15-bit weights and codes. A
// scale is at least 2^-24, and 255 of it make the smallest reach of a stored value.
constexpr double kOutputRoundingShare = 0x1p-10;
constexpr double kValueReachMin = 0x1p-16;

TEST_P(AttendTest, ValueTermsCoverTheReferenceAndAreTight) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, AllShapes())) {
    SCOPED_TRACE(named.name);
    const SequenceCase sequence(named.shape, kSeed, Backend::kReference);
    Pair pair(sequence.args());
    ASSERT_NO_FATAL_FAILURE(RunBoth(GetParam(), sequence.args(), &pair));
    const AttendResult& seen = pair.seen.view();
    const AttendResult& expected = pair.expected.view();
    for (int g = 0; g < named.shape.group_size; ++g) {
      SCOPED_TRACE(testing::Message() << "head " << g);
      // Both use their own p^, which differ by a factor of e^(2 a) at most.
      const double factor = std::exp(2 * LargestLogitRounding(pair, g));
      EXPECT_GE(seen.value_term[g], expected.value_term[g] / factor * (1 - 0x1p-20));
      EXPECT_LE(seen.value_term[g], expected.value_term[g] * factor * (1 + 0x1p-7) + 1e-30);
      for (int tile = 0; tile < named.shape.tile_count; ++tile) {
        const float seen_error = pair.seen.tile_value_error(g)[tile];
        const float expected_error = pair.expected.tile_value_error(g)[tile];
        EXPECT_GE(seen_error, expected_error / factor * (1 - 0x1p-20) - 1e-30);
        EXPECT_LE(seen_error,
                  expected_error * factor * (1 + 0x1p-7) + 1e-20 * expected.value_radius[0]);
      }
      EXPECT_GE(seen.rounding_term[g], 0.0f);
      if (LargestLogitRounding(pair, g) < 1 && expected.value_radius[0] < kNormCeiling) {
        EXPECT_LE(seen.rounding_term[g],
                  expected.rounding_term[g] +
                      kOutputRoundingShare * (expected.value_radius[0] + kValueReachMin));
      }
    }
    EXPECT_GE(seen.value_radius[0], expected.value_radius[0] * (1 - 0x1p-22f));
    if (expected.value_radius[0] < kNormCeiling) {
      EXPECT_LE(seen.value_radius[0], expected.value_radius[0] * (1 + 0x1p-8) + kNormFloor);
    }
  }
}

TEST_P(AttendTest, ValueRadiusCoversTheRange) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, AllShapes())) {
    SCOPED_TRACE(named.name);
    const SequenceCase sequence(named.shape, kSeed, Backend::kReference);
    ReadResult result(sequence.args());
    ASSERT_NO_FATAL_FAILURE(result.Run(GetParam().backend, sequence.args()));
    double radius = 0;
    for (int64_t t = sequence.args().token_begin; t < sequence.args().token_end; ++t) {
      double square = 0;
      for (int i = 0; i < named.shape.value_dim; ++i) {
        square += double{sequence.OriginalValue(t, i)} * sequence.OriginalValue(t, i);
      }
      radius = std::max(radius, std::sqrt(square));
    }
    EXPECT_GE(result.view().value_radius[0], radius * (1 - 0x1p-40));
  }
}

TEST_P(AttendTest, CertificatesCoverTheTruth) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, AllShapes())) {
    SCOPED_TRACE(named.name);
    const SequenceCase sequence(named.shape, kSeed, Backend::kReference);
    BoundTally tally;
    ASSERT_NO_FATAL_FAILURE(AddRead(GetParam().backend, sequence, &tally));
    EXPECT_EQ(tally.violations(), 0) << tally.Summary();
  }
}

TEST_P(AttendTest, NoResultIsNanWhenLogitsOverflow) {
  for (const KeyFormat format : {KeyFormat::kK8, KeyFormat::kFp8E4m3, KeyFormat::kF16}) {
    SequenceShape shape;
    shape.key_format = format;
    shape.value_format = format == KeyFormat::kF16 ? ValueFormat::kF16 : ValueFormat::kV4;
    shape.witness_bands = format == KeyFormat::kFp8E4m3 ? 4 : 0;
    shape.content = Content::kHuge;
    SCOPED_TRACE(KeyFormatName(format));
    SequenceCase sequence(shape, kSeed, Backend::kReference);
    std::vector<float> queries(shape.group_size * shape.head_dim);
    for (size_t n = 0; n < queries.size(); ++n) queries[n] = n % 3 == 0 ? 3e38f : -2e38f;
    sequence.SetQueries(queries);
    ReadResult result(sequence.args());
    ASSERT_NO_FATAL_FAILURE(result.Run(GetParam().backend, sequence.args()));
    FinishWorkspace workspace;
    for (int g = 0; g < shape.group_size; ++g) {
      for (const float half_width : result.half_width(g)) EXPECT_GE(half_width, 0.0f);
      EXPECT_GE(result.view().value_term[g], 0.0f);
      EXPECT_GE(result.view().rounding_term[g], 0.0f);
      const Certificate certificate =
          FinishHead(GetParam().backend, sequence.args(), g, result, 0.2f, &workspace);
      EXPECT_EQ(certificate.worst_case_tv, 1.0f);
    }
    EXPECT_GE(result.view().value_radius[0], 0.0f);
  }
}

TEST_P(AttendTest, OutputsAreOptional) {
  SequenceShape shape;
  const SequenceCase sequence(shape, kSeed, Backend::kReference);
  ReadResult with(sequence.args());
  ReadResult without(sequence.args());
  without.mutable_view()->outputs = nullptr;
  ASSERT_NO_FATAL_FAILURE(with.Run(GetParam().backend, sequence.args()));
  ASSERT_NO_FATAL_FAILURE(without.Run(GetParam().backend, sequence.args()));
  for (int g = 0; g < shape.group_size; ++g) {
    EXPECT_EQ(with.view().value_term[g], without.view().value_term[g]);
    EXPECT_EQ(with.view().lse_nat[g], without.view().lse_nat[g]);
  }
}

TEST_P(AttendTest, DoesNotTouchTilesOutsideTheRange) {
  SequenceShape shape;
  shape.tile_count = 5;
  shape.token_begin = 130;
  shape.token_end = 250;
  const SequenceCase sequence(shape, kSeed, Backend::kReference);
  std::vector<AttendTile> tiles(sequence.args().tiles, sequence.args().tiles + 5);
  for (const int outside : {0, 1, 4}) tiles[outside] = AttendTile{};
  AttendArgs args = sequence.args();
  args.tiles = tiles.data();
  ReadResult whole(args);
  ReadResult sparse(args);
  ASSERT_NO_FATAL_FAILURE(whole.Run(GetParam().backend, sequence.args()));
  ASSERT_NO_FATAL_FAILURE(sparse.Run(GetParam().backend, args));
  for (int g = 0; g < shape.group_size; ++g) {
    EXPECT_THAT(sparse.output(g), testing::ElementsAreArray(whole.output(g)));
    EXPECT_THAT(sparse.block_lse(g), testing::ElementsAreArray(whole.block_lse(g)));
  }
}

TEST_P(AttendTest, FullyRepairedReadIsTheExactAttention) {
  SequenceShape shape;
  shape.tile_count = 3;
  const SequenceCase sequence(shape, kSeed, Backend::kReference);
  AttendArgs args = sequence.args();
  const std::vector<uint8_t> sources(shape.group_size * shape.tile_count,
                                     kSourceOriginalKeys | kSourceOriginalValues);
  args.tile_sources = sources.data();
  ReadResult result(args);
  ASSERT_NO_FATAL_FAILURE(result.Run(GetParam().backend, args));
  const SequenceRows rows = OriginalRows(sequence);
  FinishWorkspace workspace;
  for (int g = 0; g < shape.group_size; ++g) {
    EXPECT_EQ(result.view().value_term[g], 0.0f);
    const Certificate certificate =
        FinishHead(GetParam().backend, args, g, result, 0.2f, &workspace);
    // Rounding of masses (2^-14 and more for heavy tokens) and of float logits.
    EXPECT_LE(certificate.worst_case_tv, 2e-3f);
    const double error = Distance(AttendExactly(rows, args, g).output, result.output(g));
    EXPECT_LE(error, certificate.output_error_bound);
    EXPECT_LE(error, 1e-4 * certificate.value_radius);
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, AttendTest, ::testing::ValuesIn(AllPaths()),
                         [](const auto& info) { return PathName(info.param); });

}  // namespace
}  // namespace certkv::conformance
