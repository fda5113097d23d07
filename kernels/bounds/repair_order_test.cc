#include "kernels/bounds/repair_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/bounds/output_bound.h"
#include "kernels/bounds/rounding.h"
#include "tests/support/random_atoms.h"

namespace certkv {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr uint64_t kSeed = 77;

TEST(ChooseValueRepairsTest, TakesTheSmallestSetByDescendingTerm) {
  const std::vector<double> mass = {0.1, 0.5, 0.2, 0.2};
  const std::vector<double> eta = {1.0, 0.1, 0.3, 0.4};  // terms .1 .05 .06 .08
  std::vector<int32_t> order;
  const RepairChoice choice = ChooseValueRepairs({mass, eta, 0.12}, &order);
  EXPECT_THAT(order, ::testing::ElementsAre(0, 3, 2, 1));
  EXPECT_EQ(choice.block_count, 2);
  EXPECT_TRUE(choice.meets_target);
  EXPECT_NEAR(choice.predicted, 0.11, 1e-5);
}

TEST(ChooseValueRepairsTest, RepairsNothingWhenTheTermFits) {
  std::vector<int32_t> order;
  const RepairChoice choice = ChooseValueRepairs({{0.5, 0.5}, {0.1, 0.1}, 0.2}, &order);
  EXPECT_EQ(choice.block_count, 0);
  EXPECT_TRUE(choice.meets_target);
}

TEST(ChooseValueRepairsTest, PrefixIsMinimalOnRandomBlocks) {
  std::mt19937_64 random(kSeed);
  std::vector<int32_t> order;
  for (int trial = 0; trial < 500; ++trial) {
    const RandomAtoms blocks = MakeRandomAtoms(1 + trial % 50, &random);
    const double whole = ValueTerm(blocks.mass, blocks.half_width);
    const double target = whole * std::uniform_real_distribution<double>(0, 1)(random);
    const RepairChoice choice =
        ChooseValueRepairs({blocks.mass, blocks.half_width, target}, &order);
    ASSERT_TRUE(choice.meets_target) << "seed " << kSeed << " " << trial;
    std::vector<double> eta = blocks.half_width;
    for (int32_t k = 0; k < choice.block_count; ++k) eta[order[k]] = 0;
    // Summed in another order: 50 roundings.
    ASSERT_LE(ValueTerm(blocks.mass, eta), target * (1 + 1e-13));
    ASSERT_NEAR(ValueTerm(blocks.mass, eta), choice.predicted, 1e-12 * whole);
    if (choice.block_count > 0) {
      const int32_t last = order[choice.block_count - 1];
      eta[last] = blocks.half_width[last];
      ASSERT_GT(ValueTerm(blocks.mass, eta), target * (1 - 1e-13));
    }
  }
}

TEST(ChooseValueRepairsTest, UnknownErrorsAreRepairedFirst) {
  std::vector<int32_t> order;
  const RepairChoice choice = ChooseValueRepairs({{0.6, 0.3, 0.1}, {0.1, 0.1, kNan}, 0.2}, &order);
  EXPECT_EQ(order[0], 2);
  EXPECT_EQ(choice.block_count, 1);
  EXPECT_TRUE(choice.meets_target);
}

TEST(ChooseValueRepairsTest, RepairsEverythingThatCountsWhenAMassIsUnknown) {
  std::vector<int32_t> order;
  const RepairChoice choice = ChooseValueRepairs({{1, kNan, 1}, {0.1, 0.1, 0}, 0.01}, &order);
  EXPECT_EQ(choice.block_count, 2);
  EXPECT_EQ(order[0], 1);
  EXPECT_EQ(choice.predicted, 0);
}

TEST(ChooseValueRepairsTest, SaysWhenItCannotMeetTheTarget) {
  std::vector<int32_t> order;
  EXPECT_FALSE(ChooseValueRepairs({{1}, {0.1, 0.1}, 0.01}, &order).meets_target);
  EXPECT_FALSE(ChooseValueRepairs({{1}, {0.1}, kNan}, &order).meets_target);
}

class ChooseKeyRepairsTest : public ::testing::Test {
 protected:
  RepairChoice Choose(const std::vector<double>& mass, const std::vector<double>& half_width,
                      const std::vector<double>& repaired, double tv_max,
                      const std::vector<int64_t>& bytes = {}) {
    const TvAtoms<double, double> atoms{mass, half_width, {}};
    WorstCaseTvOptions options;
    options.tolerance = tv_max;
    const WorstCaseTvResult found = WorstCaseTv(atoms, options, &workspace_);
    return ChooseKeyRepairs({atoms, repaired, bytes, found, tv_max}, &workspace_, &scratch_,
                            &order_);
  }
  double TvAfter(const std::vector<double>& mass, std::vector<double> half_width,
                 const std::vector<double>& repaired, int32_t block_count) {
    for (int32_t k = 0; k < block_count; ++k) half_width[order_[k]] = repaired[order_[k]];
    return WorstCaseTv(TvAtoms<double, double>{mass, half_width, {}}, {}, &workspace_)
        .worst_case_tv;
  }

  WorstCaseTvWorkspace workspace_;
  std::vector<double> scratch_;
  std::vector<int32_t> order_;
};

TEST_F(ChooseKeyRepairsTest, RepairsTheBlockThatCarriesTheWorstCase) {
  std::vector<double> mass(20, 0.05);
  std::vector<double> half_width(20, 0.02);
  half_width[7] = 5;
  const std::vector<double> repaired(20, 1e-5);
  const RepairChoice choice = Choose(mass, half_width, repaired, 0.1);
  EXPECT_EQ(order_[0], 7);
  EXPECT_EQ(choice.block_count, 1);
  EXPECT_TRUE(choice.meets_target);
}

TEST_F(ChooseKeyRepairsTest, PrefersWhatIsCheapPerByte) {
  const std::vector<double> mass(40, 0.025);
  std::vector<double> half_width(40, 0.01);
  half_width[3] = half_width[4] = 2;
  std::vector<int64_t> bytes(40, 1000);
  bytes[3] = 100000;
  Choose(mass, half_width, std::vector<double>(40, 1e-5), 0.05, bytes);
  EXPECT_EQ(order_[0], 4);
}

TEST_F(ChooseKeyRepairsTest, InfiniteHalfWidthsGoFirst) {
  const std::vector<double> mass(200, 1);
  std::vector<double> half_width(200, 0.1);
  half_width[150] = kUnknownBound;
  half_width[20] = kNan;
  half_width[60] = -1;
  const RepairChoice choice = Choose(mass, half_width, std::vector<double>(200, 1e-5), 0.1);
  EXPECT_THAT(std::vector<int32_t>(order_.begin(), order_.begin() + 3),
              ::testing::ElementsAre(20, 60, 150));
  EXPECT_EQ(choice.block_count, 3);
  EXPECT_TRUE(choice.meets_target);
}

TEST_F(ChooseKeyRepairsTest, SaysWhenEvenAllBlocksAreNotEnough) {
  const std::vector<double> mass(100, 1);
  const RepairChoice choice =
      Choose(mass, std::vector<double>(100, 1.0), std::vector<double>(100, 0.9), 0.1);
  EXPECT_FALSE(choice.meets_target);
  EXPECT_EQ(choice.block_count, 100);
  EXPECT_GT(choice.predicted, 0.1);
}

TEST_F(ChooseKeyRepairsTest, SizesThatDifferGiveNoChoice) {
  EXPECT_FALSE(Choose({1, 1}, {0.1, 0.1}, {0.1}, 0.5).meets_target);
  EXPECT_TRUE(order_.empty());
}

TEST_F(ChooseKeyRepairsTest, PrefixMeetsTheTargetAndBeatsOrderingByMassAlone) {
  std::mt19937_64 random(kSeed);
  int64_t chosen_blocks = 0;
  int64_t by_mass_blocks = 0;
  int missed = 0;
  for (int trial = 0; trial < 150; ++trial) {
    const auto count = static_cast<int32_t>(20 + trial);
    RandomAtoms blocks = MakeRandomAtoms(count, &random);
    const std::vector<double> repaired(count, 1e-5);
    const TvAtoms<double, double> atoms{blocks.mass, blocks.half_width, {}};
    const double before = WorstCaseTv(atoms, {}, &workspace_).worst_case_tv;
    if (!(before > 0.01)) continue;
    const double target = before / 2;
    const RepairChoice choice = Choose(blocks.mass, blocks.half_width, repaired, target);
    if (!choice.meets_target) {
      ++missed;
      continue;
    }
    // The prediction is TV* of exactly these half-widths.
    ASSERT_LE(TvAfter(blocks.mass, blocks.half_width, repaired, choice.block_count), target + 1e-4)
        << "seed " << kSeed << " " << trial;
    chosen_blocks += choice.block_count;
    std::vector<int32_t> by_mass(count);
    for (int32_t k = 0; k < count; ++k) by_mass[k] = k;
    std::sort(by_mass.begin(), by_mass.end(),
              [&](int32_t a, int32_t b) { return blocks.mass[a] > blocks.mass[b]; });
    order_ = by_mass;
    int32_t needed = 0;
    while (needed < count && TvAfter(blocks.mass, blocks.half_width, repaired, needed) > target) {
      ++needed;
    }
    by_mass_blocks += needed;
  }
  EXPECT_EQ(missed, 0) << "seed " << kSeed;
  EXPECT_LT(chosen_blocks, by_mass_blocks) << "seed " << kSeed;
}

}  // namespace
}  // namespace certkv
