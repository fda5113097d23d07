#include "services/gate/tenant_budget.h"

#include <algorithm>

#include "kernels/core/check.h"
#include "services/gate/budget_units.h"
#include "services/gate/policy.h"

namespace certkv::gate {
namespace {

int64_t CheckedLimit(double limit) {
  CERTKV_CHECK(limit >= 0 && limit <= kBudgetMax, "a tenant's budget is in [0, kBudgetMax]");
  return limit == 0 ? kUnitsMax : LimitUnits(limit);
}

}  // namespace

TenantBudget::TenantBudget(double limit) : limit_units_(CheckedLimit(limit)) {}

int64_t TenantBudget::LeftUnits() const {
  return limit_units_ - std::min(limit_units_, committed_units_);
}

TenantBudget::Grant TenantBudget::Take(int64_t units, int64_t units_min) {
  absl::MutexLock lock(&mutex_);
  const int64_t granted = std::min(units, LeftUnits());
  if (granted <= 0 || granted < units_min) return {0, window_};
  committed_units_ = AddUnits(committed_units_, granted);
  return {granted, window_};
}

void TenantBudget::GiveBack(const Grant& grant) {
  absl::MutexLock lock(&mutex_);
  if (grant.window != window_) return;
  CERTKV_CHECK(grant.units >= 0 && grant.units <= committed_units_,
               "no more is given back than was taken");
  committed_units_ -= grant.units;
}

void TenantBudget::Charge(int64_t units) {
  absl::MutexLock lock(&mutex_);
  committed_units_ = AddUnits(committed_units_, units);
}

void TenantBudget::BeginWindow() {
  absl::MutexLock lock(&mutex_);
  committed_units_ = 0;
  ++window_;
}

void TenantBudget::SetLimit(double limit) {
  const int64_t limit_units = CheckedLimit(limit);
  absl::MutexLock lock(&mutex_);
  limit_units_ = limit_units;
}

double TenantBudget::limit() const {
  absl::MutexLock lock(&mutex_);
  return limit_units_ == kUnitsMax ? 0 : ToAmount(limit_units_);
}

double TenantBudget::committed() const {
  absl::MutexLock lock(&mutex_);
  return ToAmount(committed_units_);
}

int64_t TenantBudget::left_units() const {
  absl::MutexLock lock(&mutex_);
  return LeftUnits();
}

}  // namespace certkv::gate
