#include "services/gate/ledger_budget.h"

#include <algorithm>

#include "services/gate/budget_units.h"

namespace certkv::gate {

LedgerBudget::LedgerBudget(double limit, double slice_share, SliceSchedule schedule)
    : slice_units_(std::max<int64_t>(
          1, RepresentableUnits(std::min(LimitUnits(limit), LimitUnits(limit * slice_share))))),
      schedule_(schedule),
      limit_units_(LimitUnits(limit)),
      left_units_(limit_units_) {}

void LedgerBudget::PutSlice(int64_t lease_id, int64_t units) {
  may_have_slice_ = units > 0;
  if (units > 0) slices_.push_back({.units = units, .lease_id = lease_id});
}

void LedgerBudget::PutDecided(int64_t units) { decided_units_ = AddUnits(decided_units_, units); }

void LedgerBudget::SetState(const LedgerState& state) {
  // Of an answer that was overtaken by another one, too: these numbers are for people.
  if (state.left_units > left_units_) may_have_slice_ = true;
  left_units_ = state.is_void ? 0 : state.left_units;
  limit_units_ = state.limit_units;
  overrun_ = overrun_ || state.overrun;
}

Slice LedgerBudget::GiveSlice() {
  if (slices_.empty()) return {};
  const Slice slice = slices_.front();
  slices_.pop_front();
  return slice;
}

bool LedgerBudget::ReturnSlice(const Slice& slice, int64_t spent_units) {
  return spent_units >= 0 && spent_units <= slice.units;
}

bool LedgerBudget::Decide(double amount) {
  if (!(amount >= 0 && amount <= 1)) return false;
  const int64_t units = SpentUnits(amount);
  if (units > decided_units_) return false;
  decided_units_ -= units;
  return true;
}

double LedgerBudget::limit() const { return ToAmount(limit_units_); }
double LedgerBudget::left() const { return ToAmount(std::max<int64_t>(0, left_units_)); }
double LedgerBudget::committed() const {
  return ToAmount(std::max<int64_t>(0, limit_units_ - left_units_));
}

}  // namespace certkv::gate
