#include "services/gate/budget.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/core/check.h"
#include "services/gate/policy.h"

namespace certkv::gate {
namespace {

constexpr double kUnitsPerTv = 0x1p40;
constexpr int64_t kUnitsMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kUsableShare = 64;

static_assert(kBudgetMax * kUnitsPerTv < 0x1p61, "a budget fits, with room for what exceeds it");

int64_t AddUnits(int64_t a, int64_t b) { return a > kUnitsMax - b ? kUnitsMax : a + b; }

// Units of a read, rounded up; of 1 for a value that is not known to be in [0, 1].
int64_t ReadUnits(double worst_case_tv) {
  const double counted = worst_case_tv >= 0 && worst_case_tv <= 1 ? worst_case_tv : 1;
  return static_cast<int64_t>(std::ceil(counted * kUnitsPerTv));
}

double ToTv(int64_t units) { return static_cast<double>(units) / kUnitsPerTv; }

// The largest number of units <= `units` that a double holds exactly: a lease carries a double, and
// its holder must not read more from it than was counted here.
int64_t RepresentableUnits(int64_t units) {
  const int excess = static_cast<int>(std::bit_width(static_cast<uint64_t>(units))) - 53;
  return excess > 0 ? (units >> excess) << excess : units;
}

}  // namespace

Budget::Budget(double limit, double slice_share) {
  CERTKV_CHECK(limit > 0 && limit <= kBudgetMax, "a budget is in (0, kBudgetMax]");
  CERTKV_CHECK(slice_share > 0 && slice_share <= 1, "a slice is a share of the budget");
  limit_units_ = static_cast<int64_t>(std::floor(limit * kUnitsPerTv));
  slice_units_ = std::max<int64_t>(
      1,
      std::min(limit_units_, static_cast<int64_t>(std::floor(limit * slice_share * kUnitsPerTv))));
}

double Budget::limit() const { return ToTv(limit_units_); }

int64_t Budget::committed_units() const {
  return AddUnits(AddUnits(std::max(slices_units_, certified_units_), decided_units_),
                  exact_units_);
}
double Budget::committed() const { return ToTv(committed_units()); }

int64_t Budget::left_units() const {
  return std::max<int64_t>(0, limit_units_ - std::min(limit_units_, committed_units()));
}
double Budget::left() const { return ToTv(left_units()); }

bool Budget::HasSlice() const {
  return left_units() >= std::max<int64_t>(1, slice_units_ / kUsableShare);
}

double Budget::GiveSlice() {
  if (!HasSlice()) return 0;
  const int64_t units = RepresentableUnits(std::min(slice_units_, left_units()));
  // What was reported beyond the slices is spent: a new slice comes on top of it.
  slices_units_ = std::max(slices_units_, certified_units_) + units;
  CERTKV_CHECK(committed_units() <= limit_units_, "slices never exceed the budget");
  return ToTv(units);
}

bool Budget::Decide(double worst_case_tv) {
  if (!(worst_case_tv >= 0 && worst_case_tv <= 1)) return false;
  const int64_t units = ReadUnits(worst_case_tv);
  if (units > left_units()) return false;
  decided_units_ = AddUnits(decided_units_, units);
  return true;
}

void Budget::ReportCertified(double worst_case_tv) {
  certified_units_ = AddUnits(certified_units_, ReadUnits(worst_case_tv));
}

void Budget::ReportExact(double worst_case_tv) {
  exact_units_ = AddUnits(exact_units_, ReadUnits(worst_case_tv));
}

}  // namespace certkv::gate
