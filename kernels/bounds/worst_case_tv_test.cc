// TV* on the golden cases, bad and extreme input, and the laziness of the enumeration. Random cases
// are in worst_case_tv_property_test.
#include "kernels/bounds/worst_case_tv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/support/bound_checker.h"
#include "tests/support/worst_case_tv_golden.h"
#include "tests/support/worst_case_tv_reference.h"

namespace certkv {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
// Enumeration in long double is off by under 2^12 sets' sums of 20 terms: far below this.
constexpr double kExactRounding = 1e-9;

double Tv(const std::vector<double>& mass, const std::vector<double>& half_width,
          const WorstCaseTvOptions& options = {}) {
  return WorstCaseTv(TvAtoms<double, double>{mass, half_width, {}}, options).worst_case_tv;
}

double TvAlone(const std::vector<double>& mass, const std::vector<double>& half_width) {
  WorstCaseTvOptions options;
  options.heavy_tokens_max = 0;
  return Tv(mass, half_width, options);
}

std::vector<TvGoldenCase> GoldenCases() {
  return LoadTvGoldenCases(std::string(CERTKV_SOURCE_DIR) + "/tests/golden/worst_case_tv.json");
}

BoundCheck GoldenCheck(const TvGoldenCase& golden, double bound) {
  // 1e-3: the golden file's own grid gap of 2^-12 and ours of 1e-4.
  return {bound, golden.exact, kExactRounding, golden.upper + 1e-3};
}

TEST(WorstCaseTvTest, CoversTheExactValueOfEveryGoldenCaseAndIsTight) {
  const std::vector<TvGoldenCase> cases = GoldenCases();
  ASSERT_EQ(cases.size(), 103u);
  for (const TvGoldenCase& golden : cases) {
    const double bound = Tv(golden.mass, golden.half_width);
    EXPECT_EQ(CheckBound(GoldenCheck(golden, bound)), BoundViolation::kNone)
        << golden.kind << ", " << golden.mass.size() << " tokens: bound " << bound << ", exact "
        << golden.exact << ", upper " << golden.upper;
  }
}

TEST(WorstCaseTvTest, CoversTheExactValueOfEveryGoldenCaseWithFloatInput) {
  for (const TvGoldenCase& golden : GoldenCases()) {
    const std::vector<float> mass(golden.mass.begin(), golden.mass.end());
    const std::vector<float> half_width(golden.half_width.begin(), golden.half_width.end());
    const double exact = WorstCaseTvByEnumeration({mass.begin(), mass.end()},
                                                  {half_width.begin(), half_width.end()});
    const double bound = WorstCaseTv(TvAtoms<float, float>{mass, half_width, {}}).worst_case_tv;
    EXPECT_EQ(CheckBound({bound, exact, kExactRounding, golden.upper + 1e-3}),
              BoundViolation::kNone)
        << golden.kind << ": bound " << bound << ", exact " << exact;
  }
}

TEST(WorstCaseTvTest, RelaxationAloneMatchesTheGoldenFractionalValue) {
  for (const TvGoldenCase& golden : GoldenCases()) {
    const double bound = TvAlone(golden.mass, golden.half_width);
    EXPECT_EQ(CheckBound({bound, golden.exact, kExactRounding, golden.fractional + 1e-3}),
              BoundViolation::kNone)
        << golden.kind << ": bound " << bound << ", fractional " << golden.fractional;
  }
}

// The canary: half of a sound bound must not pass the check that guards the sound one.
TEST(WorstCaseTvTest, CheckerCatchesABoundThatIsHalved) {
  int caught = 0;
  int nonzero = 0;
  for (const TvGoldenCase& golden : GoldenCases()) {
    if (!(golden.exact > 2e-3)) continue;
    ++nonzero;
    const double halved = Tv(golden.mass, golden.half_width) / 2;
    if (CheckBound(GoldenCheck(golden, halved)) == BoundViolation::kBelowExact) ++caught;
  }
  EXPECT_GE(nonzero, 50);
  // Where splitting doubles the bound, half of it is above the exact value again: that is not
  // unsound, and rare.
  EXPECT_GE(caught, nonzero * 9 / 10);
}

TEST(WorstCaseTvTest, EqualHalfWidthsGiveTanhOfHalf) {
  for (const double c : {1e-3, 0.05, 0.2, 0.4, 1.0, 3.0, 10.0}) {
    for (const size_t count : {100u, 1000u}) {  // exact atoms and bins
      const std::vector<double> mass(count, 1.0);
      const std::vector<double> half_width(count, c);
      const double bound = Tv(mass, half_width);
      EXPECT_GE(bound, std::tanh(c / 2) - 1.0 / static_cast<double>(count)) << c;
      EXPECT_LE(bound, std::tanh(c / 2) + 1.5e-4) << "c " << c << ", count " << count;
    }
  }
}

TEST(WorstCaseTvTest, IsZeroWhenEveryHalfWidthIsZero) {
  EXPECT_LE(Tv({0.2, 0.3, 0.5}, {0, 0, 0}), 1e-12);
  EXPECT_LE(Tv(std::vector<double>(1000, 1.0), std::vector<double>(1000, 0.0)), 1e-9);
}

TEST(WorstCaseTvTest, NegativeZeroIsZero) {
  EXPECT_LE(Tv({0.5, 0.5}, {-0.0, 0.0}), 1e-12);
  EXPECT_LE(Tv({-0.0, 0.5, 0.5}, {1, 0, 0}), 1e-12);
}

// tanh(c / 2) is the relaxation's exact value when all half-widths are equal, so with no gap only
// the allowance for rounding is left above it.
TEST(WorstCaseTvTest, RelaxationIsNotBelowItsExactValueByEvenOneRounding) {
  WorstCaseTvOptions options;
  options.heavy_tokens_max = 0;
  options.gap = 0;
  for (int k = 1; k <= 2000; ++k) {
    const auto c = static_cast<double>(static_cast<float>(k * 0.0049));
    const std::vector<double> mass(1 + k % 100, 0.1 * k);
    const std::vector<double> half_width(mass.size(), c);
    const auto exact = std::tanh(static_cast<long double>(c) / 2);
    const double bound = Tv(mass, half_width, options);
    ASSERT_GE(static_cast<long double>(bound), exact) << c;
    ASSERT_LE(static_cast<long double>(bound), exact + 1e-12) << c;
  }
}

TEST(WorstCaseTvTest, OneTokenCannotMove) { EXPECT_LE(Tv({0.7}, {3.0}), 1e-12); }

TEST(WorstCaseTvTest, ThresholdSetsAloneWouldMissTheSmallToken) {
  EXPECT_GE(Tv({0.99, 0.01}, {10, 5}), 0.9899697);
}

TEST(WorstCaseTvTest, IsOneWhenNothingIsKnown) {
  EXPECT_EQ(Tv({}, {}), 1);
  EXPECT_EQ(Tv({0, 0}, {0.1, 0.1}), 1);
  EXPECT_EQ(Tv({0.5, 0.5}, {0.1}), 1);
  EXPECT_EQ(Tv({kInf, 1}, {0.1, 0.1}), 1);
  EXPECT_EQ(Tv({1e308, kInf}, {0.1, 0.1}), 1);
}

TEST(WorstCaseTvTest, IsOneWhenAnythingIsNanOrAMassIsNegative) {
  for (const size_t count : {2u, 64u, 200u, 1000u}) {
    for (const size_t place : {size_t{0}, count / 2, count - 1}) {
      std::vector<double> mass(count, 1.0);
      std::vector<double> half_width(count, 0.01);
      half_width[place] = kNan;
      EXPECT_EQ(Tv(mass, half_width), 1) << count << " " << place;
      half_width[place] = -kNan;
      EXPECT_EQ(Tv(mass, half_width), 1) << count << " " << place;
      mass[place] = 0;
      EXPECT_EQ(Tv(mass, half_width), 1) << "with mass 0";
      half_width[place] = 0.01;
      mass[place] = kNan;
      EXPECT_EQ(Tv(mass, half_width), 1) << count << " " << place;
      mass[place] = -1e-3;
      EXPECT_EQ(Tv(mass, half_width), 1) << count << " " << place;
      mass[place] = 1;
      EXPECT_LT(Tv(mass, half_width), 0.01) << "the same without the defect";
    }
  }
}

TEST(WorstCaseTvTest, IsOneWhenAMassIsBadThoughItsTopTokenIsNot) {
  const std::vector<double> half_width(1000, 0.01);
  const std::vector<double> top(1000, 0.5);
  for (const double bad : {kNan, -1e-3, -1.0}) {
    for (const size_t place : {size_t{0}, size_t{500}, size_t{999}}) {
      std::vector<double> mass(1000, 1.0);
      mass[place] = bad;
      EXPECT_EQ(WorstCaseTv(TvAtoms<double, double>{mass, half_width, top}).worst_case_tv, 1)
          << bad << " at " << place;
    }
  }
}

TEST(WorstCaseTvTest, AnUnboundedAtomAmongManyTakesEverything) {
  for (const double c : {256.0, 300.0, 1e38, 1e300, kInf, -1.0}) {
    for (const size_t place : {size_t{0}, size_t{500}, size_t{999}}) {
      std::vector<double> half_width(1000, 0.01);
      half_width[place] = c;
      EXPECT_EQ(Tv(std::vector<double>(1000, 1.0), half_width), 1) << c << " at " << place;
    }
  }
}

TEST(WorstCaseTvTest, NegativeHalfWidthCountsAsInfinite) {
  for (const double c : {-1e-300, -1e-9, -1.0, -kInf}) {
    EXPECT_EQ(Tv({0.25, 0.75}, {c, 0.1}), Tv({0.25, 0.75}, {kInf, 0.1})) << c;
  }
}

TEST(WorstCaseTvTest, InfiniteHalfWidthsGiveTheLimit) {
  // The atom in S takes everything: 1 - m of the smallest token.
  EXPECT_NEAR(Tv({0.5, 0.5}, {kInf, kInf}), 0.5, 1e-12);
  EXPECT_NEAR(Tv({0.25, 0.75}, {kInf, 0}), 0.75, 1e-12);
  EXPECT_EQ(Tv({1e-3, 1}, {kInf, 0}), 1);  // too light to be whole: the relaxation splits it
  EXPECT_LE(Tv({1}, {kInf}), 1e-12);
  EXPECT_EQ(TvAlone({0.5, 0.5}, {kInf, kInf}), 1);
}

TEST(WorstCaseTvTest, AbsentAtomsDoNotMatterWhateverTheirHalfWidth) {
  const double without = Tv({0.5, 0.5}, {0.1, 0.1});
  EXPECT_NEAR(Tv({0.5, 0, 0.5}, {0.1, kInf, 0.1}), without, 1e-12);
  EXPECT_NEAR(Tv({0.5, 0, 0.5}, {0.1, 1e3, 0.1}), without, 1e-12);
}

TEST(WorstCaseTvTest, HugeHalfWidthsAndTinyMassesAreNeverLessThanTheLimit) {
  EXPECT_EQ(Tv({1e-300, 1}, {1e3, 0}), 1);
  EXPECT_NEAR(Tv({0.5, 0.5}, {1e3, 1e3}), 0.5, 1e-12);
  for (const double c : {255.9, 256.0, 300.0, 700.0, 1e3, 1e30, 1e300}) {
    const double exact = WorstCaseTvByEnumeration({0.3, 0.3, 0.4}, {c, c, 0.1});
    const double bound = Tv({0.3, 0.3, 0.4}, {c, c, 0.1});
    EXPECT_EQ(CheckBound({bound, exact, kExactRounding, exact + 1e-3}), BoundViolation::kNone)
        << c << ": " << bound << " " << exact;
  }
}

TEST(WorstCaseTvTest, ScaleOfTheMassesDoesNotMatter) {
  const std::vector<double> mass = {0.2, 0.3, 0.1, 0.4};
  const std::vector<double> half_width = {0.1, 0.5, 0.3, 0.2};
  const double expected = Tv(mass, half_width);
  std::vector<double> many_masses;
  std::vector<double> many_widths;
  for (int i = 0; i < 400; ++i) {
    many_masses.push_back(1 + i % 7);
    many_widths.push_back(0.01 * (1 + i % 50));
  }
  const double expected_many = Tv(many_masses, many_widths);
  for (const int exponent : {-1000, -600, -100, 100, 600, 1000}) {
    std::vector<double> scaled = mass;
    for (double& m : scaled) m = std::ldexp(m, exponent);
    EXPECT_NEAR(Tv(scaled, half_width), expected, 1e-12) << exponent;
    scaled = many_masses;
    for (double& m : scaled) m = std::ldexp(m, exponent);
    EXPECT_NEAR(Tv(scaled, many_widths), expected_many, 1e-12) << exponent;
  }
}

TEST(WorstCaseTvTest, MassesWhoseSumOverflowsAreScaled) {
  EXPECT_NEAR(Tv({1e308, 1e308}, {0.1, 0.1}), Tv({1, 1}, {0.1, 0.1}), 1e-12);
}

TEST(WorstCaseTvTest, AnAtomOfManyTokensIsNotTakenForAHeavyToken) {
  // 1000 tokens of equal mass in two blocks: no token matters, tanh(1/2) can nearly be reached,
  // and treating a block as one token would say tanh-like 0.23 less.
  const std::vector<double> mass = {0.9, 0.1};
  const std::vector<double> half_width = {1.0, 1.0};
  const std::vector<double> top = {0.001, 0.001};
  const double blocks = WorstCaseTv(TvAtoms<double, double>{mass, half_width, top}).worst_case_tv;
  EXPECT_GE(blocks, std::tanh(0.5) - 0.001);
  EXPECT_LT(Tv(mass, half_width), std::tanh(0.5) - 0.1);
}

TEST(WorstCaseTvTest, TopTokenMassOutsideItsRangeIsClampedOrRefused) {
  const std::vector<double> mass = {0.9, 0.1};
  const std::vector<double> half_width = {1.0, 1.0};
  const auto with_top = [&](std::vector<double> top) {
    return WorstCaseTv(TvAtoms<double, double>{mass, half_width, top}).worst_case_tv;
  };
  EXPECT_EQ(with_top({0.95, 0.2}), Tv(mass, half_width));
  EXPECT_EQ(with_top({kNan, 0.1}), 1);
  EXPECT_EQ(with_top({-0.1, 0.1}), 1);
  EXPECT_EQ(with_top({0.9}), 1);
}

TEST(WorstCaseTvTest, ATokenThatIsSetApartHasAHalfWidthOfItsOwn) {
  // A sink that is read well, in an atom that is not.
  const std::vector<double> mass = {0.9, 0.1};
  const std::vector<double> half_width = {1.0, 0.3};
  const std::vector<double> top = {0.88, 0.01};
  const auto with_own = [&](double own) {
    const std::vector<double> owns = {own, 0.3};
    return WorstCaseTv(TvAtoms<double, double>{mass, half_width, top, owns}).worst_case_tv;
  };
  const double without = WorstCaseTv(TvAtoms<double, double>{mass, half_width, top}).worst_case_tv;
  EXPECT_LT(with_own(0.01), 0.5 * without);
  EXPECT_GE(with_own(0.01), WorstCaseTvByEnumeration({0.88, 0.02, 0.1}, {0.01, 1.0, 0.3}));
  EXPECT_EQ(with_own(1.0), without);
  for (const double bad : {1.5, -0.1, kNan, kInf}) EXPECT_EQ(with_own(bad), without) << bad;
  const std::vector<double> one = {0.1};
  EXPECT_EQ(WorstCaseTv(TvAtoms<double, double>{mass, half_width, top, one}).worst_case_tv, 1);
}

TEST(WorstCaseTvTest, CoversEverySetOfTokensWhenTopTokensHaveTheirOwnHalfWidths) {
  std::mt19937_64 random(41);
  std::uniform_real_distribution<double> uniform;
  int tighter = 0;
  for (int n = 0; n < 300; ++n) {
    std::vector<double> token_mass, token_width, mass, half_width, top, own;
    while (token_mass.size() < 12) {
      mass.push_back(0);
      half_width.push_back(0);
      top.push_back(0);
      own.push_back(0);
      for (uint64_t k = 0; k < 1 + random() % 3; ++k) {
        const double m = std::exp(6 * uniform(random) - 6);
        const double c = std::exp(4 * uniform(random) - 3.5);
        token_mass.push_back(m);
        token_width.push_back(c);
        mass.back() += m;
        half_width.back() = std::max(half_width.back(), c);
        if (m > top.back()) {
          top.back() = m;
          own.back() = c;
        }
      }
    }
    const double exact = WorstCaseTvByEnumeration(token_mass, token_width);
    const double with =
        WorstCaseTv(TvAtoms<double, double>{mass, half_width, top, own}).worst_case_tv;
    const double without =
        WorstCaseTv(TvAtoms<double, double>{mass, half_width, top}).worst_case_tv;
    ASSERT_GE(with, exact - 1e-12) << "case " << n;
    ASSERT_LE(with, without + 1e-4) << "case " << n;
    if (with < without - 0.01) ++tighter;
  }
  EXPECT_GT(tighter, 100);
}

TEST(WorstCaseTvTest, EnumeratesNothingWhenTheRelaxationMeetsTheTolerance) {
  WorstCaseTvOptions options;
  options.tolerance = 0.2;
  const std::vector<double> mass = {0.5, 0.3, 0.2};
  const std::vector<double> half_width = {0.1, 0.1, 0.1};
  const auto result = WorstCaseTv(TvAtoms<double, double>{mass, half_width, {}}, options);
  EXPECT_TRUE(result.met_tolerance);
  EXPECT_EQ(result.heavy_tokens_used, 0);
}

TEST(WorstCaseTvTest, EnumeratesOnlyAsManyTokensAsTheToleranceNeeds) {
  // A sink of 97 % whose logit moves by 1, and light tokens: the relaxation splits the sink.
  std::vector<double> mass = {0.97};
  std::vector<double> half_width = {1.0};
  for (int i = 0; i < 30; ++i) {
    mass.push_back(0.001);
    half_width.push_back(0.1);
  }
  WorstCaseTvOptions options;
  options.tolerance = 0.1;
  const auto result = WorstCaseTv(TvAtoms<double, double>{mass, half_width, {}}, options);
  EXPECT_GT(TvAlone(mass, half_width), 0.4);
  EXPECT_TRUE(result.met_tolerance);
  EXPECT_LE(result.worst_case_tv, 0.1);
  EXPECT_EQ(result.heavy_tokens_used, 1);
}

TEST(WorstCaseTvTest, ReturnsTheRelaxationWhenNoEnumerationCanMeetTheTolerance) {
  WorstCaseTvOptions options;
  options.tolerance = 0.1;
  const std::vector<double> mass = {0.5, 0.3, 0.2};
  const std::vector<double> half_width = {1, 1, 1};
  const auto result = WorstCaseTv(TvAtoms<double, double>{mass, half_width, {}}, options);
  EXPECT_FALSE(result.met_tolerance);
  EXPECT_GE(result.worst_case_tv, WorstCaseTvByEnumeration(mass, half_width));
  EXPECT_LE(result.worst_case_tv, TvAlone(mass, half_width));
}

TEST(WorstCaseTvTest, WorkspaceIsCleanAfterEveryKindOfInput) {
  WorstCaseTvWorkspace workspace;
  std::vector<double> mass;
  std::vector<double> half_width;
  for (int i = 0; i < 777; ++i) {
    mass.push_back(1 + i % 5);
    half_width.push_back(1e-6 * std::pow(1.03, i % 400));
  }
  const double expected = Tv(mass, half_width);
  const auto run = [&](const std::vector<double>& m, const std::vector<double>& c) {
    return WorstCaseTv(TvAtoms<double, double>{m, c, {}}, {}, &workspace).worst_case_tv;
  };
  const std::vector<double> bad_values = {kNan, -kNan, kInf, -1.0, 0.0, -0.0, 1e-300, 1e3};
  for (const double bad : bad_values) {
    for (const size_t place : {size_t{3}, size_t{500}}) {
      std::vector<double> broken = mass;
      broken[place] = bad;
      run(broken, half_width);
      EXPECT_EQ(run(mass, half_width), expected) << "after mass " << bad;
      broken = half_width;
      broken[place] = bad;
      run(mass, broken);
      EXPECT_EQ(run(mass, half_width), expected) << "after half-width " << bad;
    }
  }
}

TEST(WorstCaseTvTest, WorkspaceIsCleanAfterMassesThatCancel) {
  WorstCaseTvWorkspace workspace;
  std::vector<double> mass(200, 1.0);
  std::vector<double> half_width(200, 0.01);
  half_width[150] = 0.301;  // one bin for both, and for nothing else
  half_width[158] = 0.304;
  const double expected = Tv(mass, half_width);
  mass[150] = -1;
  WorstCaseTv(TvAtoms<double, double>{mass, half_width, {}}, {}, &workspace);
  mass[150] = 1;
  const TvAtoms<double, double> atoms{mass, half_width, {}};
  EXPECT_EQ(WorstCaseTv(atoms, {}, &workspace).worst_case_tv, expected);
}

// Chunks that the caller has looked at, and how wide they are.
struct KnownAtoms {
  std::vector<float> mass, half_width, top, chunk_min, chunk_max;

  explicit KnownAtoms(int count, std::mt19937_64* random) {
    std::normal_distribution<float> normal;
    for (int j = 0; j < count; ++j) {
      mass.push_back(std::exp(2 * normal(*random)));
      half_width.push_back(0.1f * std::exp(normal(*random)));
      top.push_back(0);
    }
  }
  void Look() {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    chunk_min.assign(mass.size() / kTvChunkAtoms, kInfinity);
    chunk_max.assign(mass.size() / kTvChunkAtoms, 0.0f);
    for (size_t j = 0; j < chunk_min.size() * kTvChunkAtoms; ++j) {
      float& low = chunk_min[j / kTvChunkAtoms];
      float& high = chunk_max[j / kTvChunkAtoms];
      low = std::min(low, half_width[j]);
      high = top[j] > 0 ? kInfinity : std::max(high, half_width[j]);
    }
  }
  TvAtoms<float, float> atoms(bool known) const {
    TvAtoms<float, float> result{mass, half_width, top};
    if (!known) return result;
    result.chunk_half_width_min = chunk_min;
    result.chunk_half_width_max = chunk_max;
    return result;
  }
};

TEST(WorstCaseTvTest, ChunksThatTheCallerHasLookedAtGiveTheSame) {
  std::mt19937_64 random(47);
  WorstCaseTvWorkspace workspace;
  for (const int count : {129, 192, 700, 8192}) {
    KnownAtoms known(count, &random);
    known.mass[5] = known.top[5] = 40.0f * static_cast<float>(count) / 700;
    known.half_width[count / 2] = 300;  // unbounded, of no mass
    known.mass[count / 2] = 0;
    known.half_width[count / 3] = 0x1p-18f;  // below the bins with two edges
    known.Look();
    const WorstCaseTvOptions options{.gap = 1e-6};
    const WorstCaseTvResult looked_for = WorstCaseTv(known.atoms(false), options, &workspace);
    const WorstCaseTvResult given = WorstCaseTv(known.atoms(true), options, &workspace);
    EXPECT_GT(looked_for.worst_case_tv, 0.02);
    EXPECT_LT(looked_for.worst_case_tv, 0.5);
    EXPECT_EQ(given.heavy_tokens_used, looked_for.heavy_tokens_used);
    // Both gaps, and 2^-22 (1 + c) of a few terms for float moments.
    EXPECT_NEAR(given.worst_case_tv, looked_for.worst_case_tv, 1e-5) << count << " atoms";
    // As tokens of the relaxation alone, in doubles.
    const std::vector<double> mass(known.mass.begin(), known.mass.end());
    const std::vector<double> half_width(known.half_width.begin(), known.half_width.end());
    const std::vector<double> top(known.top.begin(), known.top.end());
    const TvAtoms<double, double> doubles{mass, half_width, top};
    EXPECT_GE(given.worst_case_tv, WorstCaseTv(doubles, options).worst_case_tv - 2e-6);
  }
}

TEST(WorstCaseTvTest, IsOneWhenRangesAreNotOneForEachChunk) {
  std::mt19937_64 random(53);
  KnownAtoms known(640, &random);
  known.Look();
  TvAtoms<float, float> atoms = known.atoms(true);
  EXPECT_LT(WorstCaseTv(atoms).worst_case_tv, 0.5);
  atoms.chunk_half_width_max.remove_suffix(1);
  EXPECT_EQ(WorstCaseTv(atoms).worst_case_tv, 1);
  atoms.chunk_half_width_min.remove_suffix(1);
  EXPECT_EQ(WorstCaseTv(atoms).worst_case_tv, 1);
}

}  // namespace
}  // namespace certkv
