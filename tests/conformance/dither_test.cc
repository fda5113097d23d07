// The dither tier: how often the half-width fails, over a million reads, against the probability
// that it says; and that a quantizer without its dither is found out.
#include "kernels/bounds/dither.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/bounds/half_width.h"
#include "kernels/reference/dither_key.h"

namespace certkv {
namespace {

constexpr int kChannels = 16;
constexpr double kLogitScale = 0.25;
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

enum class Quantizer { kSubtractive, kNotSubtracted, kNoDither };

// `reads` reads of `token_count` tokens each; how many had a logit outside the half-width.
int64_t CountFailures(Quantizer quantizer, int64_t reads, int token_count, double delta) {
  std::mt19937_64 random(20261130);
  std::normal_distribution<float> normal;
  std::vector<float> scale(kChannels);
  std::vector<float> zero(kChannels);
  for (int i = 0; i < kChannels; ++i) {
    scale[i] = 0.01f * static_cast<float>(1 + i % 5);
    zero[i] = 0.3f * normal(random);
  }
  int64_t failures = 0;
  std::vector<float> query(kChannels);
  std::vector<float> key(kChannels);
  std::vector<int8_t> codes(kChannels);
  std::vector<double> decoded(kChannels);
  for (int64_t read = 0; read < reads; ++read) {
    if (read % 64 == 0) {
      for (float& one : query) one = normal(random);
    }
    const double bound =
        DitherHalfWidth(
            query, scale,
            {.logit_scale = kLogitScale, .token_count = token_count, .failure_probability = delta})
            .half_width_nats();
    bool failed = false;
    for (int t = 0; t < token_count; ++t) {
      // Half way between two codes: the worst place for a dither that is not taken off again.
      for (int i = 0; i < kChannels; ++i) {
        key[i] =
            zero[i] + (static_cast<float>((read + 7 * t + 3 * i) % 90 - 45) + 0.499f) * scale[i];
      }
      const DitherPlace place{.request_key = static_cast<uint64_t>(read) * 0x9E3779B97F4A7C15,
                              .layer = static_cast<int32_t>(read % 30),
                              .kv_head = 3,
                              .token = t};
      if (quantizer == Quantizer::kNoDither) {
        for (int i = 0; i < kChannels; ++i) {
          decoded[i] = zero[i] + std::rint((key[i] - zero[i]) / double{scale[i]}) * scale[i];
        }
      } else {
        EXPECT_TRUE(reference::QuantizeDitheredKey(key, zero, scale, place, absl::MakeSpan(codes)));
        reference::DecodeDitheredKey(codes, zero, scale, place, absl::MakeSpan(decoded));
        for (int i = 0; i < kChannels && quantizer == Quantizer::kNotSubtracted; ++i) {
          decoded[i] = zero[i] + static_cast<double>(codes[i]) * scale[i];
        }
      }
      double error = 0;
      for (int i = 0; i < kChannels; ++i) error += query[i] * (decoded[i] - key[i]);
      failed = failed || !(std::fabs(kLogitScale * error) <= bound);
    }
    failures += static_cast<int64_t>(failed);
  }
  return failures;
}

TEST(DitherMonteCarloTest, FailsNoMoreOftenThanItSaysOverAMillionReads) {
  constexpr int64_t kReads = 1'000'000;
  printf("%8s %6s %10s %12s %14s\n", "delta", "tokens", "failures", "rate", "99.9999% below");
  for (const double delta : {0.1, 0.01}) {
    for (const int token_count : {1, 2}) {
      const int64_t failures = CountFailures(Quantizer::kSubtractive, kReads, token_count, delta);
      const double at_most = RateAtMost(failures, kReads);
      printf("%8g %6d %10ld %12.3g %14.3g\n", delta, token_count, failures,
             static_cast<double>(failures) / kReads, at_most);
      EXPECT_LE(at_most, delta);
      // Not vacuous: a bound of half this width would fail.
      EXPECT_GT(static_cast<double>(failures) / kReads, delta / 100);
    }
  }
}

TEST(DitherMonteCarloTest, FindsADitherThatIsNotSubtractedAndOneThatIsMissing) {
  constexpr int64_t kReads = 100'000;
  constexpr double kDelta = 0.01;
  for (const Quantizer broken : {Quantizer::kNotSubtracted, Quantizer::kNoDither}) {
    const int64_t failures = CountFailures(broken, kReads, 1, kDelta);
    EXPECT_GT(RateAtLeast(failures, kReads), kDelta) << failures;
  }
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
  const DitherPlace place{.request_key = 5, .layer = 1, .kv_head = 2, .token = 3};
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
  other.kv_head = 3;
  EXPECT_NE(at(other), u);
  other = place;
  other.layer = 2;
  EXPECT_NE(at(other), u);
  other = place;
  other.request_key = uint64_t{5} << 32;
  EXPECT_NE(at(other), u);
}

TEST(DitherTest, IsNarrowerThanTheDeterministicBoundAndNoNumberOfIt) {
  const std::vector<float> query(128, 1.0f);
  const std::vector<float> scale(128, 0.02f);
  const std::vector<float> half_step(128, 0.01f);
  const ProbableHalfWidth probable = DitherHalfWidth(
      query, scale, {.logit_scale = 1, .token_count = 4096, .failure_probability = 1e-9});
  EXPECT_EQ(probable.failure_probability(), 1e-9);
  EXPECT_LT(probable.half_width_nats(), ScaleHalfWidth(query, half_step, 1));
  static_assert(!std::is_convertible_v<ProbableHalfWidth, double>);
  static_assert(!std::is_convertible_v<double, ProbableHalfWidth>);
}

TEST(DitherTest, IsInfiniteWhenAnythingIsUnknown) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const DitheredRead read{.logit_scale = 1, .token_count = 1, .failure_probability = 0.01};
  const auto width = [](std::vector<float> query, std::vector<float> scale, DitheredRead of) {
    return DitherHalfWidth(query, scale, of).half_width_nats();
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

TEST(DitherTest, RefusesAKeyWhoseCodeWouldBeClipped) {
  std::vector<int8_t> codes(1);
  const auto has_code = [&codes](float key, float zero, float scale) {
    return reference::QuantizeDitheredKey({&key, 1}, {&zero, 1}, {&scale, 1}, DitherPlace{},
                                          absl::MakeSpan(codes));
  };
  EXPECT_TRUE(has_code(126, 0, 1));
  EXPECT_FALSE(has_code(128, 0, 1));
  EXPECT_FALSE(has_code(std::numeric_limits<float>::quiet_NaN(), 0, 1));
  EXPECT_FALSE(has_code(0, 0, 0));
  EXPECT_FALSE(has_code(1e30f, 1e30f, 1));
}

}  // namespace
}  // namespace certkv
