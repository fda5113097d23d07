// FinishCertificate against enumeration of every set and every corner of the box, with masses that
// are rounded as far as attend.h allows.
#include "kernels/ops/finish_certificate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/bounds/worst_case_tv.h"
#include "kernels/core/status.h"
#include "kernels/ops/attend.h"
#include "tests/conformance/path.h"

namespace certkv::conformance {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

FinishArgs ArgsOf(const std::vector<float>& lse, const std::vector<float>& max,
                  const std::vector<float>& half_width) {
  FinishArgs args{};
  args.atom_count = static_cast<int32_t>(lse.size());
  args.block_lse = lse.data();
  args.block_max_logit = max.data();
  args.logit_half_width = half_width.data();
  args.sink_index = -1;
  return args;
}

// Tokens of a small read, grouped into atoms, and what a kernel would report of them.
struct SmallRead {
  std::vector<std::vector<double>> logits;  // [atom][token]
  std::vector<float> half_width;            // [atom]
  std::vector<float> block_lse;
  std::vector<float> block_max_logit;
  int32_t sink_index = -1;

  // Rounds lse and maximum by up to `share` of the slack, in any direction.
  void Report(double share, std::mt19937_64* random) {
    std::uniform_real_distribution<double> direction(-share, share);
    for (const std::vector<double>& atom : logits) {
      double max = -kInfinity;
      for (const double logit : atom) max = std::max(max, logit);
      double sum = 0;
      for (const double logit : atom) sum += std::exp(logit - max);
      const double lse = max + std::log(sum);
      const double slack = BlockLseSlackNat(static_cast<float>(lse));
      block_lse.push_back(static_cast<float>(lse + slack * direction(*random)));
      block_max_logit.push_back(static_cast<float>(max + slack * direction(*random)));
    }
  }
  FinishArgs args() const {
    FinishArgs finish{};
    finish.atom_count = static_cast<int32_t>(block_lse.size());
    finish.block_lse = block_lse.data();
    finish.block_max_logit = block_max_logit.data();
    finish.logit_half_width = half_width.data();
    finish.sink_index = sink_index;
    finish.value_term = 0.25f;
    finish.rounding_term = 0.125f;
    finish.value_radius = 2.0f;
    return finish;
  }
};

// TV* over single tokens: every set S, at its own corner of the box.
double EnumerateWorstTv(const SmallRead& read) {
  std::vector<double> mass;
  std::vector<double> half_width;
  const double reference = read.logits[0][0];
  for (size_t a = 0; a < read.logits.size(); ++a) {
    for (const double logit : read.logits[a]) {
      mass.push_back(std::exp(logit - reference));
      half_width.push_back(read.half_width[a]);
    }
  }
  double total = 0;
  for (const double m : mass) total += m;
  double worst = 0;
  for (uint32_t set = 0; set < 1u << mass.size(); ++set) {
    double inside = 0;
    double outside = 0;
    double served = 0;
    for (size_t t = 0; t < mass.size(); ++t) {
      const bool is_inside = (set >> t & 1) != 0;
      (is_inside ? inside : outside) +=
          mass[t] * std::exp(is_inside ? half_width[t] : -half_width[t]);
      if (is_inside) served += mass[t] / total;
    }
    if (inside + outside > 0) worst = std::max(worst, inside / (inside + outside) - served);
  }
  return worst;
}

SmallRead RandomRead(std::mt19937_64* random, double spread_nat, double half_width_max) {
  std::uniform_real_distribution<double> unit(0, 1);
  SmallRead read;
  const int atom_count = 1 + static_cast<int>(unit(*random) * 4);
  for (int a = 0; a < atom_count; ++a) {
    std::vector<double> atom;
    const int token_count = 1 + static_cast<int>(unit(*random) * 3);
    for (int t = 0; t < token_count; ++t) atom.push_back(spread_nat * unit(*random));
    read.logits.push_back(atom);
    read.half_width.push_back(static_cast<float>(half_width_max * unit(*random)));
  }
  return read;
}

class FinishCertificateTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    const std::string missing = SelectPath(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  // Of cases that take a microsecond, and a thousand on CPU threads.
  int CaseCount(int count) const {
    return GetParam().backend == Backend::kCuda ? count / 4 : count;
  }
  Certificate Finish(const FinishArgs& args) {
    Certificate certificate;
    const absl::Status status =
        FinishCertificate(GetParam().backend, args, &workspace_, &certificate);
    EXPECT_TRUE(status.ok()) << status;
    return certificate;
  }

  FinishWorkspace workspace_;
};

TEST_P(FinishCertificateTest, CoversEveryCornerUnderRoundedMasses) {
  std::mt19937_64 random(17);
  for (int n = 0; n < CaseCount(4000); ++n) {
    SmallRead read = RandomRead(&random, n % 3 == 0 ? 14 : 3, n % 2 == 0 ? 0.3 : 2);
    read.Report(1.0, &random);
    FinishArgs args = read.args();
    args.tv_tolerance = n % 4 == 0 ? 0.2f : 0.0f;
    ASSERT_GE(Finish(args).worst_case_tv, EnumerateWorstTv(read)) << "case " << n;
  }
}

// At 50,000 nats the reported masses may be off by 1.2 %, which shows in every step.
TEST_P(FinishCertificateTest, CoversEveryCornerWhenLogitsAreLarge) {
  std::mt19937_64 random(21);
  for (int n = 0; n < CaseCount(4000); ++n) {
    SmallRead read = RandomRead(&random, 3, n % 2 == 0 ? 0.02 : 0.2);
    for (std::vector<double>& atom : read.logits) {
      for (double& logit : atom) logit += 50000;
    }
    read.Report(1.0, &random);
    ASSERT_GE(Finish(read.args()).worst_case_tv, EnumerateWorstTv(read)) << "case " << n;
  }
}

// An atom of one heavy token and a rest that is smaller than the rounding of its mass.
TEST_P(FinishCertificateTest, CoversWhenTheRestOfAnAtomIsBelowItsRounding) {
  std::mt19937_64 random(18);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int n = 0; n < CaseCount(2000); ++n) {
    SmallRead read;
    const double rest = -6 - 8 * unit(random);
    read.logits = {{0, rest, rest}, {-3 * unit(random)}, {-2, -2.5}};
    for (int a = 0; a < 3; ++a) read.half_width.push_back(static_cast<float>(1.5 * unit(random)));
    read.Report(1.0, &random);
    ASSERT_GE(Finish(read.args()).worst_case_tv, EnumerateWorstTv(read)) << "case " << n;
  }
}

TEST_P(FinishCertificateTest, IsTightWhenAtomsAreTokens) {
  std::mt19937_64 random(19);
  for (int n = 0; n < CaseCount(500); ++n) {
    SmallRead read = RandomRead(&random, 2, 0.4);
    for (std::vector<double>& atom : read.logits) atom.resize(1);
    read.Report(0.0, &random);
    // 2^-14 for masses and for each half-width, the price of heavy tokens, 1e-4 for the gap.
    ASSERT_LE(Finish(read.args()).worst_case_tv, EnumerateWorstTv(read) + 2e-3) << "case " << n;
  }
}

TEST_P(FinishCertificateTest, MeetsAToleranceThatTheTightestMeets) {
  std::mt19937_64 random(20);
  for (int n = 0; n < CaseCount(500); ++n) {
    SmallRead read = RandomRead(&random, 5, 0.6);
    read.Report(0.5, &random);
    FinishArgs args = read.args();
    const float tightest = Finish(args).worst_case_tv;
    args.tv_tolerance = std::min(1.0f, tightest * 1.01f + 0.001f);
    ASSERT_LE(Finish(args).worst_case_tv, args.tv_tolerance) << "case " << n;
  }
}

TEST_P(FinishCertificateTest, HeavySinkCostsNothing) {
  SmallRead read;
  read.logits = {{0.0}, {1.0}, {9.0}};
  read.half_width = {0.5f, 0.5f, 0.0f};
  std::mt19937_64 random(1);
  read.Report(0.0, &random);
  read.sink_index = 2;
  const Certificate certificate = Finish(read.args());
  EXPECT_GE(certificate.worst_case_tv, EnumerateWorstTv(read));
  EXPECT_LE(certificate.worst_case_tv, 0.001f);
}

TEST_P(FinishCertificateTest, OutputBoundAddsItsThreeTerms) {
  SmallRead read;
  read.logits = {{0.0}, {0.5}};
  read.half_width = {0.1f, 0.1f};
  std::mt19937_64 random(1);
  read.Report(0.0, &random);
  const Certificate certificate = Finish(read.args());
  const double expected = 0.25 + 2 * double{certificate.worst_case_tv} * 2.0 + 0.125;
  EXPECT_GE(certificate.output_error_bound, expected);
  EXPECT_LE(certificate.output_error_bound, expected * 1.0001);
  EXPECT_EQ(certificate.value_term, 0.25f);
  EXPECT_EQ(certificate.value_radius, 2.0f);
}

TEST_P(FinishCertificateTest, IgnoresEmptyAtoms) {
  SmallRead read;
  read.logits = {{0.0}, {0.5}};
  read.half_width = {0.1f, 0.1f};
  std::mt19937_64 random(1);
  read.Report(0.0, &random);
  const float expected = Finish(read.args()).worst_case_tv;
  read.block_lse.insert(read.block_lse.begin() + 1, -kInfinity);
  read.block_max_logit.insert(read.block_max_logit.begin() + 1, -kInfinity);
  read.half_width.insert(read.half_width.begin() + 1, 0.0f);
  EXPECT_EQ(Finish(read.args()).worst_case_tv, expected);
}

struct Unknown {
  const char* name;
  void (*change)(SmallRead* read, FinishArgs* args);
  float worst_case_tv_min;
  float output_bound_min;
};

TEST_P(FinishCertificateTest, WhatCannotBeComputedIsTheWorstCase) {
  constexpr Unknown kUnknowns[] = {
      {"lse NaN", [](SmallRead* r, FinishArgs*) { r->block_lse[0] = kNan; }, 1, kInfinity},
      {"lse infinite", [](SmallRead* r, FinishArgs*) { r->block_lse[1] = kInfinity; }, 1,
       kInfinity},
      {"no token",
       [](SmallRead* r, FinishArgs*) { r->block_lse[0] = r->block_lse[1] = -kInfinity; }, 1,
       kInfinity},
      {"half-width NaN", [](SmallRead* r, FinishArgs*) { r->half_width[0] = kNan; }, 1, 4},
      {"half-width negative", [](SmallRead* r, FinishArgs*) { r->half_width[0] = -1; }, 1, 4},
      {"half-width infinite", [](SmallRead* r, FinishArgs*) { r->half_width[0] = kInfinity; }, 1,
       4},
      {"maximum NaN", [](SmallRead* r, FinishArgs*) { r->block_max_logit[0] = kNan; }, 0, 0},
      {"radius infinite", [](SmallRead*, FinishArgs* a) { a->value_radius = kInfinity; }, 0,
       kInfinity},
      {"radius NaN", [](SmallRead*, FinishArgs* a) { a->value_radius = kNan; }, 0, kInfinity},
      {"value term NaN", [](SmallRead*, FinishArgs* a) { a->value_term = kNan; }, 0, kInfinity},
      {"rounding NaN", [](SmallRead*, FinishArgs* a) { a->rounding_term = kNan; }, 0, kInfinity},
  };
  for (const Unknown& unknown : kUnknowns) {
    SCOPED_TRACE(unknown.name);
    SmallRead read;
    read.logits = {{0.0}, {0.5}};
    read.half_width = {0.1f, 0.1f};
    std::mt19937_64 random(1);
    read.Report(0.0, &random);
    FinishArgs args = read.args();
    unknown.change(&read, &args);
    const Certificate certificate = Finish(args);
    EXPECT_GE(certificate.worst_case_tv, unknown.worst_case_tv_min);
    EXPECT_LE(certificate.worst_case_tv, 1.0f);
    EXPECT_GE(certificate.output_error_bound, unknown.output_bound_min);
  }
}

TEST_P(FinishCertificateTest, NanMaximumNeverMakesTheBoundSmaller) {
  SmallRead read;
  read.logits = {{0.0}, {0.5}};
  read.half_width = {0.3f, 0.3f};
  std::mt19937_64 random(1);
  read.Report(0.0, &random);
  read.block_max_logit = {kNan, kInfinity};
  EXPECT_GE(Finish(read.args()).worst_case_tv, EnumerateWorstTv(read));
}

// The same anywhere in a read that is long enough for bins: in full chunks, first, last and
// between, and in what is left after them.
TEST_P(FinishCertificateTest, WhatCannotBeComputedIsTheWorstCaseAnywhere) {
  struct Broken {
    std::vector<float> lse, max, half_width;
  };
  constexpr int kCount = 300;
  const std::vector<float> lse(kCount, 3.0f), max(kCount, 1.0f), half_width(kCount, 0.1f);
  const auto finish = [&](const Broken& broken) {
    FinishArgs args = ArgsOf(broken.lse, broken.max, broken.half_width);
    args.value_radius = 1;
    return Finish(args).worst_case_tv;
  };
  const float plain = finish({lse, max, half_width});
  const float exact = std::tanh(0.05f) - 1e-6f;  // half-widths are all the same
  EXPECT_GE(plain, exact);
  EXPECT_LT(plain, exact + 1e-3f);
  for (const int place : {0, 1, 63, 64, 130, 191, 255, 256, 299}) {
    SCOPED_TRACE(place);
    for (const float bad : {kNan, -kNan, kInfinity}) {
      Broken broken{lse, max, half_width};
      broken.max[place] = bad;
      EXPECT_GE(finish(broken), exact) << "maximum " << bad;
      broken.lse[place] = bad;
      EXPECT_EQ(finish(broken), 1.0f) << "lse " << bad;
    }
    for (const float bad : {kNan, -kNan, kInfinity, -1.0f, -0x1p-120f}) {
      Broken broken{lse, max, half_width};
      broken.half_width[place] = bad;
      EXPECT_EQ(finish(broken), 1.0f) << "half-width " << bad;
      broken.half_width[(place + 8) % kCount] = -0.0f;  // doesn't hide it
      EXPECT_EQ(finish(broken), 1.0f) << "half-width " << bad << " and -0";
    }
    Broken zero{lse, max, half_width};
    zero.half_width[place] = -0.0f;
    EXPECT_LE(finish(zero), plain);
    EXPECT_GT(finish(zero), exact * 0.99f);
  }
}

// Masses of e^-86 of the largest and less aren't told apart in float, those of 2^-42 not on a GPU,
// where 4,096 of them that may grow by e^20 cost a tenth of this bound.
TEST_P(FinishCertificateTest, CoversWhatIsFarBelowTheLargest) {
  constexpr int kCount = 4096;
  const double share = GetParam().backend == Backend::kCuda ? 0.1 : 0;
  for (const float distance : {80.0f, 85.9f, 86.1f, 88.0f, 100.0f, 200.0f}) {
    for (const float width : {0.5f, 19.9f}) {
      std::vector<float> lse(kCount, 10 - distance), max(kCount, 9 - distance);
      std::vector<float> half_width(kCount, width);
      std::vector<double> mass, wide(kCount, width);
      for (int a = 0; a < kCount; a += 200) {
        lse[a] = 10;
        max[a] = 9;
        half_width[a] = 0.2f;
        wide[a] = 0.2f;
      }
      for (const float l : lse) mass.push_back(std::exp(double{l}));
      FinishArgs args = ArgsOf(lse, max, half_width);
      constexpr double kGap = 1e-6;
      const std::vector<double> tops(kCount, 0.0);
      const TvAtoms<double, double> atoms{mass, wide, tops};
      const double exact = WorstCaseTv(atoms, {.gap = kGap}).worst_case_tv;
      const double bound = Finish(args).worst_case_tv;
      EXPECT_GE(bound, exact - 2 * kGap) << distance << " nats, half-width " << width;
      EXPECT_LE(bound, exact * (1 + share) + 1e-3) << distance << " nats, half-width " << width;
    }
  }
}

// Of tokens that were skipped only a bound on their mass is known.
TEST_P(FinishCertificateTest, MixesInWhatWasSkipped) {
  std::mt19937_64 random(31);
  std::uniform_real_distribution<double> unit(0, 1);
  for (int n = 0; n < CaseCount(800); ++n) {
    SmallRead read = RandomRead(&random, 3, n % 2 == 0 ? 0.1 : 0.6);
    read.Report(1.0, &random);
    FinishArgs args = read.args();
    args.skipped_lse_nat = static_cast<float>(3 - 12 * unit(random));
    args.tv_tolerance = n % 4 == 0 ? 0.3f : 0.0f;
    double kept = 0;
    for (size_t a = 0; a < read.logits.size(); ++a) {
      for (const double logit : read.logits[a]) kept += std::exp(logit - read.half_width[a]);
    }
    const double skipped = std::exp(double{args.skipped_lse_nat});
    const double share = skipped / (skipped + kept);
    const Certificate certificate = Finish(args);
    ASSERT_GE(certificate.skipped_share, share) << "case " << n;
    ASSERT_LE(certificate.skipped_share, share * 1.001) << "case " << n;
    ASSERT_GE(certificate.worst_case_tv, share + (1 - share) * EnumerateWorstTv(read))
        << "case " << n;
  }
  SmallRead read = RandomRead(&random, 3, 0.1);
  read.Report(0.0, &random);
  FinishArgs args = read.args();
  args.skipped_lse_nat = kInfinity;
  EXPECT_EQ(Finish(args).worst_case_tv, 1.0f);
  EXPECT_EQ(Finish(args).skipped_share, 1.0f);
}

TEST_P(FinishCertificateTest, RefusesBadArguments) {
  SmallRead read;
  read.logits = {{0.0}};
  read.half_width = {0.1f};
  std::mt19937_64 random(1);
  read.Report(0.0, &random);
  const auto reason = [&](const FinishArgs& args) {
    Certificate certificate;
    return ReasonOf(FinishCertificate(GetParam().backend, args, &workspace_, &certificate));
  };
  FinishArgs args = read.args();
  EXPECT_EQ(reason(args), "");
  args.atom_count = 0;
  EXPECT_EQ(reason(args), "FINISH_ARGS_INVALID");
  args = read.args();
  args.block_lse = nullptr;
  EXPECT_EQ(reason(args), "FINISH_ARGS_INVALID");
  args = read.args();
  args.sink_index = 1;
  EXPECT_EQ(reason(args), "FINISH_ARGS_INVALID");
  args = read.args();
  args.tv_tolerance = kNan;
  EXPECT_EQ(reason(args), "FINISH_ARGS_INVALID");
  Certificate certificate;
  EXPECT_EQ(ReasonOf(FinishCertificate(GetParam().backend, read.args(), nullptr, &certificate)),
            "FINISH_ARGS_INVALID");
}

// Thousands of atoms, as of a long read: bins, float masses and early stops cost at most 1e-3, on a
// GPU, which puts atoms at the upper edges of bins, a fiftieth of the bound as well; and never go
// below the worst case that is attained.
TEST_P(FinishCertificateTest, StaysNearTheReferenceForLongReads) {
  std::mt19937_64 random(23);
  std::normal_distribution<float> normal;
  const float share = GetParam().backend == Backend::kCuda ? 0.02f : 0.0f;
  for (int n = 0; n < 60; ++n) {
    const int count = n % 3 == 0 ? 8192 : n % 3 == 1 ? 700 : 129;
    const float spread = n % 4 == 0 ? 0.0f : n % 4 == 1 ? 0.1f : 0.6f;
    const float scale = n % 2 == 0 ? 0.1f : 0.5f;
    std::vector<float> lse, max, half_width;
    std::vector<double> mass, width;
    for (int a = 0; a < count; ++a) {
      lse.push_back(20 + 2 * normal(random));
      if (n % 5 == 0 && a == 77) lse.back() = 30;  // a needle
      if (n % 7 == 0 && a % 3 == 0) lse.back() -= 200;
      max.push_back(a == 77 ? lse.back() : lse.back() - 2);
      half_width.push_back(scale * std::exp(spread * normal(random)));
      mass.push_back(std::exp(double{lse.back()}));
      width.push_back(half_width.back());
    }
    FinishArgs args = ArgsOf(lse, max, half_width);
    Certificate reference;
    ASSERT_TRUE(FinishCertificate(Backend::kReference, args, &workspace_, &reference).ok());
    Certificate fast = Finish(args);
    ASSERT_LE(fast.worst_case_tv, reference.worst_case_tv * (1 + share) + 1e-3f) << "case " << n;
    // With the needle's atom as one token and the others as many, no rounding.
    std::vector<double> tops(count, 0.0);
    tops[77] = mass[77];
    constexpr double kGap = 1e-6;
    const WorstCaseTvResult exact =
        WorstCaseTv(TvAtoms<double, double>{mass, width, tops}, {.gap = kGap});
    ASSERT_GE(fast.worst_case_tv, exact.worst_case_tv - 2 * kGap) << "case " << n;
    // The needle's half-width is its own.
    std::vector<float> own = half_width;
    own[77] /= 8;
    std::vector<double> owns(own.begin(), own.end());
    args.top_half_width = own.data();
    ASSERT_TRUE(FinishCertificate(Backend::kReference, args, &workspace_, &reference).ok());
    fast = Finish(args);
    ASSERT_LE(fast.worst_case_tv, reference.worst_case_tv * (1 + share) + 1e-3f) << "case " << n;
    const WorstCaseTvResult tighter =
        WorstCaseTv(TvAtoms<double, double>{mass, width, tops, owns}, {.gap = kGap});
    ASSERT_GE(fast.worst_case_tv, tighter.worst_case_tv - 2 * kGap) << "case " << n;
    if (n % 5 == 0 && n % 2 == 1) {
      EXPECT_LT(fast.worst_case_tv, exact.worst_case_tv - 0.01) << "case " << n;
    }
  }
}

// Float sums of so many masses would say too little.
TEST(FinishCertificateLengthTest, LeavesVeryLongReadsToTheReference) {
  constexpr int32_t kCount = (1 << 17) + 1;
  std::mt19937_64 random(29);
  std::normal_distribution<float> normal;
  std::vector<float> lse(kCount), max(kCount), half_width(kCount);
  for (int32_t a = 0; a < kCount; ++a) {
    lse[a] = 3 * normal(random);
    max[a] = lse[a] - 2;
    half_width[a] = 0.1f * std::exp(normal(random));
  }
  FinishArgs args = ArgsOf(lse, max, half_width);
  FinishWorkspace workspace;
  Certificate reference;
  Certificate fast;
  ASSERT_TRUE(FinishCertificate(Backend::kReference, args, &workspace, &reference).ok());
  ASSERT_TRUE(FinishCertificate(Backend::kCpu, args, &workspace, &fast).ok());
  EXPECT_EQ(fast.worst_case_tv, reference.worst_case_tv);
  EXPECT_GT(fast.worst_case_tv, 0.01f);
  EXPECT_LT(fast.worst_case_tv, 0.5f);
  EXPECT_TRUE(fast.left_to_reference);
  args.atom_count = kCount - 1;
  ASSERT_TRUE(FinishCertificate(Backend::kCpu, args, &workspace, &fast).ok());
  EXPECT_FALSE(fast.left_to_reference);
  lse[7] = std::numeric_limits<float>::quiet_NaN();
  ASSERT_TRUE(FinishCertificate(Backend::kCpu, args, &workspace, &fast).ok());
  EXPECT_TRUE(fast.left_to_reference);
}

INSTANTIATE_TEST_SUITE_P(Paths, FinishCertificateTest, ::testing::ValuesIn(AllPaths()),
                         [](const auto& info) { return PathName(info.param); });

}  // namespace
}  // namespace certkv::conformance
