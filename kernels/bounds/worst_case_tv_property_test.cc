// TV* on random atoms: against enumeration, against a slow relaxation, and its invariants.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/bounds/closed_forms.h"
#include "kernels/bounds/worst_case_tv.h"
#include "tests/support/bound_checker.h"
#include "tests/support/random_atoms.h"
#include "tests/support/worst_case_tv_reference.h"

namespace certkv {
namespace {

constexpr uint64_t kSeed = 20240917;
constexpr double kExactRounding = 1e-9;
constexpr double kGap = 1e-4;

class WorstCaseTvPropertyTest : public ::testing::Test {
 protected:
  void SetUp() override { RecordProperty("seed", std::to_string(kSeed)); }

  int32_t Count(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(random_);
  }
  double Uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_);
  }
  WorstCaseTvResult Run(const RandomAtoms& atoms, const WorstCaseTvOptions& options = {}) {
    return WorstCaseTv(TvAtoms<double, double>{atoms.mass, atoms.half_width, {}}, options,
                       &workspace_);
  }
  WorstCaseTvResult RunAlone(const RandomAtoms& atoms, double gap = kGap) {
    WorstCaseTvOptions options;
    options.heavy_tokens_max = 0;
    options.gap = gap;
    return Run(atoms, options);
  }

  std::mt19937_64 random_{kSeed};
  WorstCaseTvWorkspace workspace_;
};

// Share of the heaviest token that is not taken whole. Rounding the one split token up gives a set
// that is worth at most its mass less, so the relaxation is within it of TV*.
double SplitMassMax(std::vector<double> mass, int32_t heavy_max, double heavy_mass_min) {
  double total = 0;
  for (const double m : mass) total += m;
  std::sort(mass.rbegin(), mass.rend());
  int32_t heavy = 0;
  const auto count = static_cast<int32_t>(mass.size());
  while (heavy < std::min(heavy_max, count) && mass[heavy] / total >= heavy_mass_min) ++heavy;
  return heavy < count ? mass[heavy] / total : 0;
}

TEST_F(WorstCaseTvPropertyTest, CoversEnumerationAndExceedsItByTheLargestSplitTokenAtMost) {
  const WorstCaseTvOptions defaults;
  for (int trial = 0; trial < 3000; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(1, 11), &random_);
    const double exact = WorstCaseTvByEnumeration(atoms.mass, atoms.half_width);
    const double split =
        SplitMassMax(atoms.mass, defaults.heavy_tokens_max, defaults.heavy_mass_min);
    const double bound = Run(atoms).worst_case_tv;
    ASSERT_EQ(CheckBound({bound, exact, kExactRounding, exact + split + kGap + 1e-9}),
              BoundViolation::kNone)
        << "seed " << kSeed << ", trial " << trial << ": bound " << bound << ", exact " << exact
        << ", largest split token " << split;
    const double alone = RunAlone(atoms).worst_case_tv;
    const double largest = SplitMassMax(atoms.mass, 0, 0);
    ASSERT_EQ(CheckBound({alone, exact, kExactRounding, exact + largest + kGap + 1e-9}),
              BoundViolation::kNone)
        << "seed " << kSeed << ", trial " << trial << ": relaxation " << alone;
  }
}

TEST_F(WorstCaseTvPropertyTest, CheckerCatchesABoundThatIsHalved) {
  int caught = 0;
  int checked = 0;
  for (int trial = 0; trial < 300; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(2, 8), &random_);
    const double exact = WorstCaseTvByEnumeration(atoms.mass, atoms.half_width);
    if (!(exact > 0.01)) continue;
    ++checked;
    const double halved = Run(atoms).worst_case_tv / 2;
    if (CheckBound({halved, exact, kExactRounding, 1}) == BoundViolation::kBelowExact) ++caught;
  }
  EXPECT_GE(checked, 100);
  EXPECT_GE(caught, checked * 9 / 10) << "seed " << kSeed;
}

TEST_F(WorstCaseTvPropertyTest, CoversEnumerationAtAnyTolerance) {
  for (int trial = 0; trial < 1000; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(1, 10), &random_);
    const double exact = WorstCaseTvByEnumeration(atoms.mass, atoms.half_width);
    WorstCaseTvOptions options;
    options.tolerance = Uniform(0, 1);
    const WorstCaseTvResult result = Run(atoms, options);
    ASSERT_GE(result.worst_case_tv, exact - kExactRounding) << "seed " << kSeed << " " << trial;
    ASSERT_EQ(result.met_tolerance, result.worst_case_tv <= options.tolerance);
    // What the tightest computation meets, the lazy one meets as well.
    ASSERT_TRUE(result.met_tolerance || Run(atoms).worst_case_tv > options.tolerance - 2 * kGap)
        << "seed " << kSeed << " " << trial;
  }
}

TEST_F(WorstCaseTvPropertyTest, BlocksWithATopTokenCoverTheirTokens) {
  for (int trial = 0; trial < 1500; ++trial) {
    const RandomAtoms tokens = MakeRandomAtoms(Count(2, 11), &random_);
    const int32_t block_tokens = Count(2, 4);
    RandomAtoms shared = tokens;  // one half-width per block
    std::vector<double> mass;
    std::vector<double> top;
    std::vector<double> half_width;
    for (size_t i = 0; i < tokens.mass.size(); ++i) {
      if (i % block_tokens == 0) {
        mass.push_back(0);
        top.push_back(0);
        half_width.push_back(tokens.half_width[i]);
      }
      mass.back() += tokens.mass[i];
      top.back() = std::max(top.back(), tokens.mass[i]);
      shared.half_width[i] = half_width.back();
    }
    const double exact = WorstCaseTvByEnumeration(shared.mass, shared.half_width);
    const double bound =
        WorstCaseTv(TvAtoms<double, double>{mass, half_width, top}, {}, &workspace_).worst_case_tv;
    ASSERT_GE(bound, exact - kExactRounding) << "seed " << kSeed << " " << trial;
    ASSERT_LE(bound, RunAlone(shared).worst_case_tv + kGap + 1e-9);
  }
}

TEST_F(WorstCaseTvPropertyTest, FewTokensAmongManyAbsentOnesCoverEnumeration) {
  // The same cases through the bins: filled up with atoms of 1e-30 of the mass.
  for (int trial = 0; trial < 1000; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(1, 10), &random_);
    RandomAtoms many = atoms;
    double total = 0;
    for (const double m : atoms.mass) total += m;
    const int32_t fillers = Count(150, 400);
    for (int32_t i = 0; i < fillers; ++i) {
      many.mass.push_back(total * 1e-30);
      many.half_width.push_back(Uniform(0, 0.1));
    }
    std::vector<size_t> order(many.mass.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    RandomAtoms shuffled;
    for (const size_t i : order) {
      shuffled.mass.push_back(many.mass[i]);
      shuffled.half_width.push_back(many.half_width[i]);
    }
    // The fillers shift N / (N + D) by under 1e-9: N and D are at least e^-30 of the lightest atom.
    const double exact = WorstCaseTvByEnumeration(atoms.mass, atoms.half_width);
    const double split = SplitMassMax(atoms.mass, 6, 1.0 / 64);
    const double bound = Run(shuffled).worst_case_tv;
    ASSERT_EQ(CheckBound({bound, exact, 1e-9, exact + split + 2 * kGap}), BoundViolation::kNone)
        << "seed " << kSeed << ", trial " << trial << ": bound " << bound << ", exact " << exact
        << ", split " << split;
  }
}

TEST_F(WorstCaseTvPropertyTest, ManyAtomsMatchTheSortedRelaxation) {
  for (int trial = 0; trial < 60; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(129, 2000), &random_);
    const double attained = RelaxedTvByScan(atoms.mass, atoms.half_width);
    const double bound = RunAlone(atoms).worst_case_tv;
    // The scan's last step is 1e-8 in r, so it is at most about that below the maximum; the bins
    // may cost as much as the gap once more.
    ASSERT_EQ(CheckBound({bound, attained, 1e-9, attained + 3 * kGap}), BoundViolation::kNone)
        << "seed " << kSeed << ", trial " << trial << ", " << atoms.mass.size() << " atoms: bound "
        << bound << ", attained " << attained;
  }
}

TEST_F(WorstCaseTvPropertyTest, FewAtomsMatchTheSortedRelaxation) {
  for (int trial = 0; trial < 500; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(1, 128), &random_);
    const double attained = RelaxedTvByScan(atoms.mass, atoms.half_width);
    const double bound = RunAlone(atoms).worst_case_tv;
    ASSERT_EQ(CheckBound({bound, attained, 1e-9, attained + 2 * kGap}), BoundViolation::kNone)
        << "seed " << kSeed << ", trial " << trial << ", " << atoms.mass.size() << " atoms: bound "
        << bound << ", attained " << attained;
  }
}

TEST_F(WorstCaseTvPropertyTest, DoesNotFallWhenHalfWidthsGrow) {
  for (int trial = 0; trial < 1000; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(trial % 10 == 0 ? 300 : Count(1, 12), &random_);
    RandomAtoms wider = atoms;
    for (double& c : wider.half_width) {
      if (Uniform(0, 1) < 0.5) c += Uniform(0, 0.1);
    }
    // TV* is monotone; each bound is above its own by the gap and, with bins, half of it more.
    ASSERT_GE(Run(wider).worst_case_tv, Run(atoms).worst_case_tv - 1.5 * kGap)
        << "seed " << kSeed << " " << trial;
    if (atoms.mass.size() <= 12) {
      ASSERT_GE(Run(wider).worst_case_tv,
                WorstCaseTvByEnumeration(atoms.mass, atoms.half_width) - kExactRounding);
    }
  }
}

// Splitting a token in two tokens of the same half-width can only add sets, so TV* may rise. The
// relaxation may split atoms anyway, so it does not change at all.
TEST_F(WorstCaseTvPropertyTest, SplittingATokenLeavesTheRelaxationAndNeverLosesTheExactValue) {
  constexpr double kSmallGap = 1e-10;
  for (int trial = 0; trial < 1000; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(1, 9), &random_);
    RandomAtoms split = atoms;
    const auto chosen = static_cast<size_t>(Count(0, static_cast<int32_t>(atoms.mass.size()) - 1));
    split.mass[chosen] /= 2;
    split.mass.push_back(split.mass[chosen]);
    split.half_width.push_back(split.half_width[chosen]);
    ASSERT_NEAR(RunAlone(atoms, kSmallGap).worst_case_tv, RunAlone(split, kSmallGap).worst_case_tv,
                1e-9)
        << "seed " << kSeed << " " << trial;
    const double exact = WorstCaseTvByEnumeration(atoms.mass, atoms.half_width);
    const double exact_split = WorstCaseTvByEnumeration(split.mass, split.half_width);
    ASSERT_GE(exact_split, exact - kExactRounding);
    ASSERT_GE(Run(atoms).worst_case_tv, exact - kExactRounding);
    ASSERT_GE(Run(split).worst_case_tv, exact_split - kExactRounding);
  }
}

TEST_F(WorstCaseTvPropertyTest, OrderOfTheAtomsDoesNotMatter) {
  for (int trial = 0; trial < 200; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(1, 600), &random_);
    RandomAtoms reversed = atoms;
    std::reverse(reversed.mass.begin(), reversed.mass.end());
    std::reverse(reversed.half_width.begin(), reversed.half_width.end());
    // Equal masses may exchange their roles as heavy tokens; otherwise only roundings differ.
    ASSERT_NEAR(RunAlone(atoms).worst_case_tv, RunAlone(reversed).worst_case_tv, kGap)
        << "seed " << kSeed << " " << trial;
  }
}

TEST_F(WorstCaseTvPropertyTest, IsNeverAboveAClosedForm) {
  for (int trial = 0; trial < 1000; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(trial % 10 == 0 ? 500 : Count(1, 20), &random_);
    // Each closed form bounds the relaxation too: it never asks whether a token is whole.
    const double bound = RunAlone(atoms).worst_case_tv - 2 * kGap;
    ASSERT_LE(bound, EFormTv(atoms.mass, atoms.half_width)) << "seed " << kSeed << " " << trial;
    ASSERT_LE(bound, TwoSidedTv(atoms.mass, atoms.half_width)) << "seed " << kSeed;
    ASSERT_LE(bound, TanhTv(atoms.half_width)) << "seed " << kSeed << " " << trial;
  }
}

TEST_F(WorstCaseTvPropertyTest, FloatAndDoubleInputAgree) {
  for (int trial = 0; trial < 300; ++trial) {
    const RandomAtoms atoms = MakeRandomAtoms(Count(1, 1000), &random_);
    const std::vector<float> mass(atoms.mass.begin(), atoms.mass.end());
    const std::vector<float> half_width(atoms.half_width.begin(), atoms.half_width.end());
    const std::vector<double> same_mass(mass.begin(), mass.end());
    const std::vector<double> same_width(half_width.begin(), half_width.end());
    const double floats =
        WorstCaseTv(TvAtoms<float, float>{mass, half_width, {}}, {}, &workspace_).worst_case_tv;
    ASSERT_EQ(floats,
              WorstCaseTv(TvAtoms<double, float>{same_mass, half_width, {}}, {}, &workspace_)
                  .worst_case_tv);
    ASSERT_EQ(floats,
              WorstCaseTv(TvAtoms<double, double>{same_mass, same_width, {}}, {}, &workspace_)
                  .worst_case_tv);
  }
}

}  // namespace
}  // namespace certkv
