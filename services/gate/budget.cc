#include "services/gate/budget.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/core/check.h"
#include "services/gate/policy.h"

namespace certkv::gate {
namespace {

constexpr int64_t kUsableShare = 64;
// (n + 1) (n + 2) stays within int64_t; a slice is below one unit long before.
constexpr int64_t kUnionSlicesMax = int64_t{1} << 30;

static_assert(kBudgetMax * kUnitsPerOne < 0x1p61, "a budget fits, with room for what exceeds it");

double CheckedLimit(double limit) {
  CERTKV_CHECK(limit >= 0 && limit <= kBudgetMax, "a budget is in [0, kBudgetMax]");
  return limit;
}

}  // namespace

Budget::Budget(double limit, double slice_share, SliceSchedule schedule,
               std::shared_ptr<TenantBudget> tenant)
    : limit_units_(LimitUnits(CheckedLimit(limit))),
      slice_units_(std::max<int64_t>(1, std::min(limit_units_, LimitUnits(limit * slice_share)))),
      schedule_(schedule),
      tenant_(std::move(tenant)) {
  CERTKV_CHECK(slice_share > 0 && slice_share <= 1, "a slice is a share of the budget");
}

double Budget::limit() const { return ToAmount(limit_units_); }

int64_t Budget::committed_units() const {
  return AddUnits(AddUnits(std::max(slices_units_, certified_units_), decided_units_),
                  exact_units_);
}
double Budget::committed() const { return ToAmount(committed_units()); }

int64_t Budget::left_units() const {
  return std::max<int64_t>(0, limit_units_ - std::min(limit_units_, committed_units()));
}
double Budget::left() const { return ToAmount(left_units()); }

int64_t Budget::NextSliceUnits() const {
  if (schedule_ == SliceSchedule::kShare) return slice_units_;
  const int64_t n = std::min(slice_count_, kUnionSlicesMax);
  return std::max<int64_t>(1, limit_units_ / ((n + 1) * (n + 2)));
}

int64_t Budget::UsableUnits() const {
  return std::max<int64_t>(1, NextSliceUnits() / kUsableShare);
}

bool Budget::HasSlice() const {
  const int64_t usable = UsableUnits();
  return left_units() >= usable && (tenant_ == nullptr || tenant_->left_units() >= usable);
}

Slice Budget::GiveSlice() {
  const int64_t usable = UsableUnits();
  if (left_units() < usable) return {};
  Slice slice{RepresentableUnits(std::min(NextSliceUnits(), left_units()))};
  if (tenant_ != nullptr) {
    const TenantBudget::Grant grant = tenant_->Take(slice.units, usable);
    if (grant.units == 0) return {};
    slice = {RepresentableUnits(grant.units), grant.window};
    tenant_->GiveBack({grant.units - slice.units, grant.window});
  }
  ++slice_count_;
  // What was reported beyond the slices is spent: a new slice comes on top of it.
  slices_units_ = std::max(slices_units_, certified_units_) + slice.units;
  CERTKV_CHECK(committed_units() <= limit_units_, "slices never exceed the budget");
  return slice;
}

bool Budget::ReturnSlice(const Slice& slice, int64_t spent_units) {
  if (!(spent_units >= 0 && spent_units <= slice.units)) return false;
  const int64_t unspent = slice.units - spent_units;
  CERTKV_CHECK(unspent <= slices_units_, "a returned slice was given");
  const int64_t before = committed_units();
  slices_units_ -= unspent;
  // After an overrun what was certified is more than the slices, and stays committed.
  if (tenant_ != nullptr) tenant_->GiveBack({before - committed_units(), slice.tenant_window});
  return true;
}

void Budget::ChargeTenant(int64_t committed_before) {
  // Mostly nothing, because the slice was charged when it was given: spare its lock.
  const int64_t more = committed_units() - committed_before;
  if (tenant_ != nullptr && more > 0) tenant_->Charge(more);
}

bool Budget::Decide(double amount) {
  if (!(amount >= 0 && amount <= 1)) return false;
  const int64_t units = SpentUnits(amount);
  if (units > left_units()) return false;
  if (tenant_ != nullptr && units > 0 && tenant_->Take(units, units).units == 0) return false;
  decided_units_ = AddUnits(decided_units_, units);
  return true;
}

void Budget::ReportCertified(double amount) {
  const int64_t before = committed_units();
  certified_units_ = AddUnits(certified_units_, SpentUnits(amount));
  ChargeTenant(before);
}

void Budget::ReportExact(double amount) {
  const int64_t before = committed_units();
  exact_units_ = AddUnits(exact_units_, SpentUnits(amount));
  ChargeTenant(before);
}

}  // namespace certkv::gate
