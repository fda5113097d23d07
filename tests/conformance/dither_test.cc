// The dither tier: how often a half-width of the real read path fails, over a million reads of
// sealed K8D tiles, against the probability that it says; and that broken dithers and bounds are
// found out.
#include "kernels/bounds/dither.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/bounds/half_width.h"
#include "kernels/core/half.h"
#include "kernels/core/limits.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/quantize_tile.h"
#include "tests/conformance/sequence_case.h"

namespace certkv::conformance {
namespace {

constexpr uint64_t kSecret = 0x5ec12e7;
// One minus this is the confidence of each statement about a failure rate.
constexpr double kAlpha = 1e-6;

// P(X <= failures) for X ~ Binomial(reads, rate).
double BinomialCdf(int64_t failures, int64_t reads, double rate) {
  double sum = 0;
  const double all = std::lgamma(static_cast<double>(reads) + 1);
  for (int64_t k = 0; k <= failures; ++k) {
    sum += std::exp(all - std::lgamma(static_cast<double>(k) + 1) -
                    std::lgamma(static_cast<double>(reads - k) + 1) +
                    static_cast<double>(k) * std::log(rate) +
                    static_cast<double>(reads - k) * std::log1p(-rate));
  }
  return sum;
}

// The upper end of the one-sided Clopper-Pearson interval: rates above it would give so few
// failures with probability kAlpha at most.
double RateAtMost(int64_t failures, int64_t reads) {
  double low = 0;
  double high = 1;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (BinomialCdf(failures, reads, middle) > kAlpha ? low : high) = middle;
  }
  return high;
}
// The lower end.
double RateAtLeast(int64_t failures, int64_t reads) {
  double low = 0;
  double high = 1;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (1 - BinomialCdf(failures - 1, reads, middle) < kAlpha ? low : high) = middle;
  }
  return low;
}

// One sealed K8D tile and a head of its own for each read of it, through the operations alone.
class DitheredTile {
 public:
  DitheredTile() {
    SequenceShape shape;
    shape.key_format = KeyFormat::kK8D;
    shape.value_format = ValueFormat::kV8;
    spec_ = SpecOfShape(shape);
    layout_ = MakeTileLayout(spec_, 0, kSecret);
    tile_ = AllocateAligned(layout_.tile_bytes());
    values_.resize(kTileTokens * spec_.value_dim);
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = FloatToF16(0.01f * float(i % 97));
    keys_.resize(kTileTokens * spec_.head_dim);
    query_.resize(spec_.head_dim);
    view_.scan = scan();
    view_.detail = detail();
  }

  // Keys about half way between codes of K8: the worst place for a dither that is not taken off.
  void Seal(uint64_t tag, std::mt19937_64* random) {
    layout_.dither_secret = kSecret;
    for (int i = 0; i < d(); ++i) {
      // Of 0 and 255 steps, so that the step is a power of two, and codes in between.
      const float step = 0x1p-7f * static_cast<float>(1 << (i % 3));
      for (int t = 0; t < kTileTokens; ++t) {
        const float code =
            t < 2 ? 255.0f * static_cast<float>(t) : static_cast<float>((*random)() % 254) + 0.5f;
        keys_[t * d() + i] = FloatToF16(step * code);
      }
    }
    QuantizeTileArgs args{};
    args.spec = &spec_;
    args.layer = 0;
    args.layout = &layout_;
    args.keys = keys_.data();
    args.values = values_.data();
    args.key_stride = d();
    args.value_stride = spec_.value_dim;
    args.identity_tag = tag;
    args.scan = scan();
    args.detail = detail();
    ASSERT_TRUE(QuantizeTile(Backend::kCpu, args).ok());
  }

  void SetQuery(std::mt19937_64* random) {
    std::normal_distribution<float> normal;
    for (float& one : query_) one = normal(*random);
  }

  // Reads tokens begin <= t < end at failure probability `delta`.
  struct Read {
    double served = 0;      // log-sum-exp of the served logits
    double exact = 0;       // of those of the originals, in double
    double half_width = 0;  // slack included
  };
  Read ReadTokens(int begin, int end, float delta, Backend backend = Backend::kCpu) {
    AttendArgs args{};
    args.layout = &layout_;
    args.original_dtype = OriginalDtype::kF16;
    args.logit_scale = spec_.logit_scale;
    args.group_size = 1;
    args.queries = query_.data();
    args.failure_probability = &delta;
    args.tiles = &view_;
    args.tile_count = 1;
    args.token_begin = begin;
    args.token_end = end;
    if (result_ == nullptr) result_ = std::make_unique<ReadResult>(args);
    result_->Run(backend, args);
    Read read;
    read.served = result_->block_lse(0)[0];
    read.half_width = result_->half_width(0)[0] + BlockLseSlackNat(result_->block_lse(0)[0]);
    double sum = 0;
    for (int t = begin; t < end; ++t) sum += std::exp(ExactLogit(t));
    read.exact = std::log(sum);
    return read;
  }

  // Changes what the tile says it is, not its codes.
  void Pretend(KeyFormat format, uint64_t secret, uint64_t tag) {
    layout_.key_format = format;
    layout_.dither_secret = secret;
    TileHeader header;
    std::memcpy(&header, scan(), sizeof(header));
    header.key_format = static_cast<uint8_t>(format);
    header.identity_tag = tag;
    header.key_check = format == KeyFormat::kK8D ? DitherCheck(secret, tag) : 0;
    std::memcpy(scan(), &header, sizeof(header));
  }

  double ExactLogit(int t) const {
    double dot = 0;
    for (int i = 0; i < d(); ++i) dot += double{query_[i]} * F16ToFloat(keys_[t * d() + i]);
    return spec_.logit_scale * dot;
  }
  int d() const { return spec_.head_dim; }
  uint8_t* scan() { return tile_.get(); }
  uint8_t* detail() { return tile_.get() + layout_.scan_bytes; }
  TileLayout& layout() { return layout_; }
  const CacheSpec& spec() const { return spec_; }
  absl::Span<const float> query() const { return query_; }
  const AttendTile& view() const { return view_; }
  const std::vector<uint16_t>& keys() const { return keys_; }

 private:
  CacheSpec spec_;
  TileLayout layout_{};
  AlignedBytes tile_;
  std::vector<uint16_t> keys_;
  std::vector<uint16_t> values_;
  std::vector<float> query_;
  AttendTile view_{};
  std::unique_ptr<ReadResult> result_;
};

// What is broken.
enum class Mutant {
  kNone,
  kHalvedHalfWidth,
  kOtherSecret,    // than the tile was sealed with; its key_check is what keeps this from
                   // happening
  kOtherTile,      // whose dither is subtracted
  kNotSubtracted,  // the codes are read as those of K8
};

struct Tally {
  int64_t failures = 0;  // the served logit is outside its half-width
  double ratio_sum = 0;  // of error to half-width
};

double ServedBy(Mutant mutant, uint64_t tag, int begin, int end, float delta, DitheredTile* tile) {
  switch (mutant) {
    case Mutant::kNone:
    case Mutant::kHalvedHalfWidth:
      break;
    case Mutant::kOtherSecret:
      tile->Pretend(KeyFormat::kK8D, kSecret + 1, tag);
      break;
    case Mutant::kOtherTile:
      tile->Pretend(KeyFormat::kK8D, kSecret, tag + 1);
      break;
    case Mutant::kNotSubtracted:
      tile->Pretend(KeyFormat::kK8, 0, tag);
      delta = 0;
      break;
  }
  const double served = tile->ReadTokens(begin, end, delta).served;
  tile->Pretend(KeyFormat::kK8D, kSecret, tag);
  return served;
}

// `reads` reads of `token_count` tokens each, every tile with a tag of its own, so that no two
// reads share a dither. With one token the log-sum-exp is its logit; with several it moves by no
// more than the largest error of them.
Tally CountFailures(int64_t reads, int token_count, float delta, Mutant mutant = Mutant::kNone) {
  std::mt19937_64 random(20261130);
  DitheredTile tile;
  Tally tally;
  int64_t read = 0;
  for (uint64_t n = 1; read < reads; ++n) {
    const uint64_t tag = n * 0x9E3779B97F4A7C15;
    tile.Seal(tag, &random);
    for (int t = 2; t + token_count <= kTileTokens && read < reads; t += token_count, ++read) {
      if (read % 8 == 0) tile.SetQuery(&random);
      DitheredTile::Read one = tile.ReadTokens(t, t + token_count, delta);
      if (mutant == Mutant::kHalvedHalfWidth) {
        one.half_width /= 2;
      } else if (mutant != Mutant::kNone) {
        one.served = ServedBy(mutant, tag, t, t + token_count, delta, &tile);
      }
      const double error = std::fabs(one.served - one.exact);
      tally.failures += static_cast<int64_t>(!(error <= one.half_width));
      tally.ratio_sum += error / one.half_width;
    }
  }
  return tally;
}

struct MonteCarlo {
  float delta;
  int token_count;
};

class DitherMonteCarloTest : public ::testing::TestWithParam<MonteCarlo> {};

TEST_P(DitherMonteCarloTest, FailsNoMoreOftenThanItSaysOverAMillionReads) {
  constexpr int64_t kReads = 1'000'000;
  const auto [delta, token_count] = GetParam();
  const Tally tally = CountFailures(kReads, token_count, delta);
  const double at_most = RateAtMost(tally.failures, kReads);
  const double rate = static_cast<double>(tally.failures) / kReads;
  printf("delta %g, tokens %d: %ld failures, rate %.3g, 99.9999%% below %.3g, error / width %.3g\n",
         delta, token_count, static_cast<long>(tally.failures), rate, at_most,
         tally.ratio_sum / kReads);
  EXPECT_LE(at_most, delta);
  // Not vacuous: the half-width is reached, if seldom, and errors are a good part of it.
  EXPECT_GT(rate, delta / (token_count == 1 ? 100 : 1000));
  EXPECT_GT(tally.ratio_sum / kReads, 0.1);
}

INSTANTIATE_TEST_SUITE_P(Reads, DitherMonteCarloTest,
                         ::testing::Values(MonteCarlo{0.1f, 1}, MonteCarlo{0.01f, 1},
                                           MonteCarlo{0.1f, 2}),
                         [](const auto& info) {
                           return "of" + std::to_string(info.param.token_count) + "TokensAt" +
                                  std::to_string(static_cast<int>(1 / info.param.delta));
                         });

TEST(DitherMutantTest, BoundsAndDithersThatAreBrokenAreFound) {
  constexpr int64_t kReads = 100'000;
  constexpr float kDelta = 0.01f;
  for (const Mutant mutant : {Mutant::kHalvedHalfWidth, Mutant::kOtherSecret, Mutant::kOtherTile,
                              Mutant::kNotSubtracted}) {
    const Tally tally = CountFailures(kReads, 1, kDelta, mutant);
    EXPECT_GT(RateAtLeast(tally.failures, kReads), kDelta)
        << static_cast<int>(mutant) << ": " << tally.failures;
  }
}

TEST(DitherTest, HalfWidthsOfAReadAreTheFormulaOfItsFailureProbability) {
  std::mt19937_64 random(7);
  DitheredTile tile;
  tile.Seal(99, &random);
  tile.SetQuery(&random);
  std::vector<float> scale(tile.d());
  std::vector<float> sure_error(tile.d());
  for (int i = 0; i < tile.d(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, tile.scan() + tile.layout().scale_offset + 2 * i, sizeof(bits));
    scale[i] = F16ToFloat(bits);
    sure_error[i] = 0.5f * scale[i];
  }
  const double slack = BlockLseSlackNat(static_cast<float>(tile.ReadTokens(0, 64, 0).served));
  const double sure = ScaleHalfWidth(tile.query(), sure_error, tile.spec().logit_scale);
  for (const float delta : {0.25f, 1e-2f, 1e-6f, 0x1p-40f}) {
    const double formula = DitherHalfWidth(
        tile.query(), scale,
        {.logit_scale = tile.spec().logit_scale, .token_count = 64, .failure_probability = delta});
    ASSERT_LT(formula, sure);
    EXPECT_GE(tile.ReadTokens(0, 64, delta).half_width, formula) << delta;
    // The reference rounds little: with half or twice the probability it would be 1 % off.
    const double said = tile.ReadTokens(0, 64, delta, Backend::kReference).half_width - slack;
    EXPECT_GE(said, formula * (1 - 0x1p-20)) << delta;
    EXPECT_LE(said, formula * 1.002) << delta;
  }
  // Without a failure probability it is the bound that holds for sure.
  EXPECT_GE(tile.ReadTokens(0, 64, 0).half_width, sure);
  // And where that one is narrower, it is taken: one channel, where a dither is no sum.
  std::vector<float> one(tile.d());
  one[3] = 1;
  EXPECT_LT(ScaleHalfWidth(one, sure_error, 1),
            DitherHalfWidth(one, scale,
                            {.logit_scale = 1, .token_count = 64, .failure_probability = 1e-6}));
}

TEST(DitherTest, PhiloxGivesTheWordsOfItsAuthors) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(Philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(DitherTest, EveryPlaceHasADitherOfItsOwnAndAlwaysTheSame) {
  const DitherPlace place{.secret = 5, .identity_tag = 2, .token = 3};
  const auto at = [](const DitherPlace& where) {
    std::vector<float> u(10);
    DitherOf(where, absl::MakeSpan(u));
    for (const float one : u) EXPECT_TRUE(one > -0.5f && one < 0.5f) << one;
    return u;
  };
  const std::vector<float> u = at(place);
  EXPECT_EQ(at(place), u);
  DitherPlace other = place;
  other.token = 4;
  EXPECT_NE(at(other), u);
  other = place;
  other.identity_tag = uint64_t{2} << 32;
  EXPECT_NE(at(other), u);
  other = place;
  other.secret = uint64_t{5} << 32;
  EXPECT_NE(at(other), u);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(DitherAt(place, i), u[i]);
  EXPECT_NE(DitherCheck(5, 2), DitherCheck(6, 2));
  EXPECT_NE(DitherCheck(5, 2), DitherCheck(5, 3));
}

TEST(DitherTest, IsNarrowerThanTheDeterministicBound) {
  const std::vector<float> query(128, 1.0f);
  const std::vector<float> scale(128, 0.02f);
  const std::vector<float> half_step(128, 0.01f);
  EXPECT_LT(DitherHalfWidth(query, scale,
                            {.logit_scale = 1, .token_count = 4096, .failure_probability = 1e-9}),
            ScaleHalfWidth(query, half_step, 1));
}

TEST(DitherTest, IsInfiniteWhenAnythingIsUnknown) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const DitheredRead read{.logit_scale = 1, .token_count = 1, .failure_probability = 0.01};
  const auto width = [](std::vector<float> query, std::vector<float> scale, DitheredRead of) {
    return DitherHalfWidth(query, scale, of);
  };
  EXPECT_LT(width({1}, {1}, read), infinity);
  EXPECT_EQ(width({nan}, {1}, read), infinity);
  EXPECT_EQ(width({1}, {nan}, read), infinity);
  EXPECT_EQ(width({1}, {-1}, read), infinity);
  EXPECT_EQ(width({1, 1}, {1}, read), infinity);
  for (const double delta : {0.0, 1.0, -1.0, double{nan}}) {
    DitheredRead other = read;
    other.failure_probability = delta;
    EXPECT_EQ(width({1}, {1}, other), infinity) << delta;
  }
  DitheredRead none = read;
  none.token_count = 0;
  EXPECT_EQ(width({1}, {1}, none), infinity);
}

TEST(DitherTest, CodesNeverClipAndErrorsAreWithinHalfAStep) {
  std::mt19937_64 random(11);
  DitheredTile tile;
  std::vector<float> decoded(size_t{kTileTokens} * tile.d());
  for (uint64_t tag = 1; tag <= 200; ++tag) {
    tile.Seal(tag, &random);  // codes 0 and 255 in every channel; QuantizeTile checks each code
    ASSERT_TRUE(
        DequantizeTile(tile.layout(), tile.scan(), tile.detail(), decoded.data(), nullptr).ok());
    for (int t = 0; t < kTileTokens; ++t) {
      for (int i = 0; i < tile.d(); ++i) {
        const float step = 0x1p-7f * static_cast<float>(1 << (i % 3));
        const int at = t * tile.d() + i;
        ASSERT_LE(std::fabs(decoded[at] - F16ToFloat(tile.keys()[at])), step * (0.5f + 0x1p-9f));
      }
    }
  }
}

TEST(DitherTest, TilesOfAnotherSecretAreRefused) {
  std::mt19937_64 random(13);
  DitheredTile tile;
  tile.Seal(5, &random);
  EXPECT_TRUE(CheckTile(tile.layout(), tile.scan()).ok());
  for (const uint64_t other : {kSecret + 1, uint64_t{0}}) {
    tile.layout().dither_secret = other;
    const absl::Status status = CheckTile(tile.layout(), tile.scan());
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_NE(status.message().find("key_check"), absl::string_view::npos) << status;
  }
}

TEST(DitherTest, DevicesRefuseDitheredKeysByName) {
  SequenceShape shape;
  shape.key_format = KeyFormat::kK8D;
  const SequenceCase sequence(shape, 1, Backend::kCpu);
  ReadResult result(sequence.args());
  const absl::Status status = Attend(Backend::kCuda, sequence.args(), result.view(), nullptr);
  EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  EXPECT_NE(status.message().find("K8D"), absl::string_view::npos) << status;
}

TEST(DitherTest, OnlyDitheredKeysMayFail) {
  SequenceShape shape;
  const SequenceCase sequence(shape, 1, Backend::kCpu);
  const std::vector<float> delta(shape.group_size, 0.01f);
  AttendArgs args = sequence.args();
  args.failure_probability = delta.data();
  ReadResult result(args);
  const absl::Status status = Attend(Backend::kCpu, args, result.view(), nullptr);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
}

}  // namespace
}  // namespace certkv::conformance
