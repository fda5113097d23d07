#include "services/certifier/budget.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv::certifier {
namespace {

constexpr double kUnitsPerOne = 0x1p40;
// A larger slice is clamped: 2^22 heads at worst_case_tv 1, more than one lease can serve.
constexpr int64_t kSliceUnitsMax = int64_t{1} << 62;

int64_t SliceUnits(double slice) {
  CERTKV_CHECK(slice >= 0 && std::isfinite(slice), "a lease was validated before its account");
  const double units = std::floor(slice * kUnitsPerOne);  // exact: a power of two
  return units < 0x1p62 ? static_cast<int64_t>(units) : kSliceUnitsMax;
}

}  // namespace

BudgetAccount::BudgetAccount(double slice) : slice_(slice), slice_units_(SliceUnits(slice)) {}

int64_t BudgetAccount::Reserve(float amount) {
  if (!(amount >= 0 && amount <= 1)) return -1;
  const auto units = static_cast<int64_t>(std::ceil(double{amount} * kUnitsPerOne));
  int64_t spent = spent_units_.load(std::memory_order_relaxed);
  do {
    if (units > slice_units_ - spent) return -1;
  } while (!spent_units_.compare_exchange_weak(spent, spent + units, std::memory_order_relaxed));
  return units;
}

void BudgetAccount::Refund(int64_t units) {
  const int64_t before = spent_units_.fetch_sub(units, std::memory_order_relaxed);
  CERTKV_CHECK(units >= 0 && before >= units, "no more is given back than was taken");
}

float BudgetAccount::TakeShare() {
  const float share = FailureShare(slice_);
  return share > 0 && Reserve(share) >= 0 ? share : 0.0f;
}

double BudgetAccount::spent() const {
  return static_cast<double>(spent_units_.load(std::memory_order_relaxed)) / kUnitsPerOne;
}

absl::StatusOr<std::shared_ptr<BudgetAccount>> BudgetBook::AccountOf(const PolicyLease& lease,
                                                                     int64_t now_ms) {
  if (lease.risk_mode == RiskMode::kThreshold) return std::shared_ptr<BudgetAccount>();
  absl::MutexLock lock(&mutex_);
  const auto found = accounts_.find(lease.lease_id);
  if (found != accounts_.end()) {
    if (found->second.account->slice() != lease.budget_slice) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "POLICY_LEASE_INVALID",
          absl::StrCat("policy lease ", lease.lease_id, " has budget_slice ", lease.budget_slice,
                       ", but was given before with ", found->second.account->slice(),
                       "; pass the lease on as gate gave it"));
    }
    found->second.expire_time_ms = std::max(found->second.expire_time_ms, lease.expire_time_ms);
    return found->second.account;
  }
  if (static_cast<int64_t>(accounts_.size()) >= account_limit_) {
    absl::erase_if(accounts_,
                   [now_ms](const auto& entry) { return entry.second.expire_time_ms <= now_ms; });
  }
  if (static_cast<int64_t>(accounts_.size()) >= account_limit_) {
    return MakeError(absl::StatusCode::kResourceExhausted, "BUDGET_ACCOUNT_LIMIT",
                     absl::StrCat("the certifier keeps accounts of ", accounts_.size(),
                                  " unexpired policy leases, at most ", account_limit_,
                                  "; wait until some expire, or raise certifier.budget_limit"));
  }
  auto account = std::make_shared<BudgetAccount>(lease.budget_slice);
  accounts_[lease.lease_id] = {account, lease.expire_time_ms};
  return account;
}

int32_t BudgetBook::size() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int32_t>(accounts_.size());
}

}  // namespace certkv::certifier
