#include "services/gate/budget.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "services/gate/policy.h"

namespace certkv::gate {
namespace {

TEST(BudgetTest, GivesSlicesUntilTheBudgetIsGone) {
  Budget budget(1.0, 0.25);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(budget.GiveSlice().amount(), 0.25);
  EXPECT_EQ(budget.committed(), 1.0);
  EXPECT_FALSE(budget.HasSlice());
  EXPECT_EQ(budget.GiveSlice().amount(), 0);
  EXPECT_FALSE(budget.overrun());
}

TEST(BudgetTest, GivesWhatIsLeftWhenThatIsLessThanASlice) {
  Budget budget(1.0, 0.75);
  EXPECT_EQ(budget.GiveSlice().amount(), 0.75);
  EXPECT_EQ(budget.GiveSlice().amount(), 0.25);
  EXPECT_EQ(budget.GiveSlice().amount(), 0);
}

TEST(BudgetTest, DoesNotGiveCrumbs) {
  Budget budget(1.0, 0.5);
  EXPECT_EQ(budget.GiveSlice().amount(), 0.5);
  ASSERT_TRUE(budget.Decide(0.496));
  EXPECT_FALSE(budget.HasSlice()) << "0.004 is under 1/64 of a slice";
  EXPECT_TRUE(budget.Decide(0.003)) << "gate itself may still use it";
}

TEST(BudgetTest, AnUnreportedSliceStaysSpent) {
  Budget budget(1.0, 0.5);
  budget.GiveSlice();
  EXPECT_EQ(budget.committed(), 0.5);
  budget.ReportCertified(0.125);  // part of the slice: nothing comes on top, nothing comes back
  EXPECT_EQ(budget.committed(), 0.5);
}

TEST(BudgetTest, DecideRefusesWhatDoesNotFitAndChangesNothing) {
  Budget budget(1.0, 0.5);
  budget.GiveSlice();
  EXPECT_TRUE(budget.Decide(0.25));
  EXPECT_FALSE(budget.Decide(0.2500001));
  EXPECT_EQ(budget.committed(), 0.75);
  EXPECT_TRUE(budget.Decide(0.25));
  EXPECT_FALSE(budget.Decide(1e-9));
  EXPECT_TRUE(budget.Decide(0));
}

TEST(BudgetTest, NanNeverFitsAndCountsAsOneWhenReported) {
  Budget budget(4.0, 0.5);
  EXPECT_FALSE(budget.Decide(std::numeric_limits<double>::quiet_NaN()));
  EXPECT_FALSE(budget.Decide(-0.1));
  EXPECT_FALSE(budget.Decide(1.5));
  EXPECT_EQ(budget.committed(), 0);
  budget.ReportCertified(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(budget.committed(), 1);
}

TEST(BudgetTest, SeesAnOverrunButNotWherePartsAddUpExactly) {
  Budget budget(1.0, 0.3f);
  const double slice = budget.GiveSlice().amount();
  // As the certifier spends: floats, rounded up to its units, as many as fit.
  double left = slice;
  const float read = 0.1f;
  while (double{read} + 0x1p-40 < left) {
    budget.ReportCertified(read);
    left -= std::ceil(double{read} * 0x1p40) * 0x1p-40;
  }
  budget.ReportCertified(left);
  EXPECT_FALSE(budget.overrun());
  budget.ReportCertified(0x1p-40);
  EXPECT_TRUE(budget.overrun());
  EXPECT_GT(budget.committed(), slice) << "what was served beyond the slice is charged";
}

TEST(BudgetTest, ASliceAfterAnOverrunComesOnTopOfWhatWasServed) {
  Budget budget(1.0, 0.25);
  budget.GiveSlice();
  budget.ReportCertified(0.5);
  EXPECT_EQ(budget.GiveSlice().amount(), 0.25);
  EXPECT_EQ(budget.committed(), 0.75);
}

TEST(BudgetTest, ExactReadsNarrowWhatIsLeftButAreNoOverrun) {
  Budget budget(1.0, 0.5);
  budget.GiveSlice();
  budget.ReportExact(0.25);
  EXPECT_FALSE(budget.overrun());
  EXPECT_EQ(budget.GiveSlice().amount(), 0.25);
  budget.ReportExact(0.25);  // beyond the budget: an exact read is never refused
  EXPECT_EQ(budget.committed(), 1.25);
  EXPECT_EQ(budget.left(), 0);
}

TEST(BudgetTest, NothingOverflows) {
  Budget budget(kBudgetMax, 1);
  EXPECT_EQ(budget.GiveSlice().amount(), kBudgetMax);
  for (int i = 0; i < 10'000'000; ++i) budget.ReportCertified(1);
  EXPECT_TRUE(budget.overrun());
  EXPECT_GE(budget.committed(), 0x1p63 / 0x1p40);
}

TEST(BudgetTest, TinyBudgetsGiveNothingRatherThanTooMuch) {
  Budget budget(1e-300, 1e-300);
  EXPECT_EQ(budget.GiveSlice().amount(), 0);
  EXPECT_FALSE(budget.Decide(1e-300));
}

TEST(BudgetTest, AReturnedSliceLeavesWhatWasSpentOfIt) {
  Budget budget(1.0, 0.5);
  const Slice slice = budget.GiveSlice();
  budget.ReportCertified(0.125);
  ASSERT_TRUE(budget.ReturnSlice(slice, SpentUnits(0.25))) << "an eighth is still to be reported";
  EXPECT_EQ(budget.committed(), 0.25);
  budget.ReportCertified(0.125);
  EXPECT_EQ(budget.committed(), 0.25);
  EXPECT_FALSE(budget.overrun());
  EXPECT_EQ(budget.GiveSlice().amount(), 0.5);
  EXPECT_EQ(budget.GiveSlice().amount(), 0.25);
}

TEST(BudgetTest, RefusesAReturnThatSpentMoreThanTheSlice) {
  Budget budget(1.0, 0.5);
  const Slice slice = budget.GiveSlice();
  EXPECT_FALSE(budget.ReturnSlice(slice, slice.units + 1));
  EXPECT_FALSE(budget.ReturnSlice(slice, -1));
  EXPECT_EQ(budget.committed(), 0.5);
}

TEST(BudgetTest, AReturnAfterAnOverrunGivesNothingBackThatWasServed) {
  Budget budget(1.0, 0.25);
  const Slice slice = budget.GiveSlice();
  budget.ReportCertified(0.5);
  ASSERT_TRUE(budget.ReturnSlice(slice, 0));
  EXPECT_EQ(budget.committed(), 0.5);
}

TEST(BudgetTest, UnionSlicesShrinkSoThatThereIsAlwaysANextOne) {
  Budget budget(0.001, 1, SliceSchedule::kUnion);
  double sum = 0;
  for (int64_t n = 0; n < 1000; ++n) {
    const double slice = budget.GiveSlice().amount();
    ASSERT_GT(slice, 0) << n;
    ASSERT_LE(slice, 0.001 / static_cast<double>((n + 1) * (n + 2)));
    sum += slice;
  }
  EXPECT_LE(sum, budget.limit());
  EXPECT_GT(sum, 0.00099);
}

// The property that the whole design is for. Holders spend at most their slices, some never report,
// some report late; leases end at any time; gate decides reads of its own. Whatever happens, what
// was served and not exact stays within the budget, and gate knows of it in advance.
TEST(BudgetTest, ServedReadsNeverExceedTheBudgetWhateverIsReported) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 generator(seed);
    std::uniform_real_distribution<double> uniform(0, 1);
    const double limit = std::pow(10, uniform(generator) * 4 - 2);
    Budget budget(limit, std::max(0.01, uniform(generator)));
    struct Holder {
      int64_t left_units;
      std::vector<float> unreported;
    };
    std::vector<Holder> holders;
    int64_t served_units = 0;  // exactly, in units of 2^-40: every float here is a multiple
    double committed_before = 0;
    for (int step = 0; step < 500; ++step) {
      const double choice = uniform(generator);
      // A float in [0, 1] that is a multiple of 2^-30.
      const float tv = static_cast<float>(std::floor(uniform(generator) * 0x1p10) * 0x1p-10 *
                                          uniform(generator));
      const auto units = static_cast<int64_t>(std::ceil(double{tv} * 0x1p40));
      if (choice < 0.1) {
        holders.push_back({budget.GiveSlice().units, {}});
      } else if (choice < 0.2) {
        if (budget.Decide(tv)) served_units += units;
      } else if (!holders.empty()) {
        Holder& holder = holders[generator() % holders.size()];
        if (choice < 0.8) {
          if (units <= holder.left_units) {
            holder.left_units -= units;
            served_units += units;
            holder.unreported.push_back(tv);
          }
        } else if (choice < 0.9) {
          for (const float read : holder.unreported) budget.ReportCertified(read);
          holder.unreported.clear();
        } else if (choice < 0.95) {
          holder.unreported.clear();  // died without a word
          holder.left_units = 0;
        }
      }
      ASSERT_LE(static_cast<double>(served_units) * 0x1p-40, budget.committed());
      ASSERT_LE(budget.committed(), budget.limit());
      ASSERT_GE(budget.committed(), committed_before);
      ASSERT_FALSE(budget.overrun());
      committed_before = budget.committed();
    }
  }
}

}  // namespace
}  // namespace certkv::gate
