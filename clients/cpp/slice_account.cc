#include "clients/cpp/slice_account.h"

#include <algorithm>
#include <cmath>

namespace certkv::client {
namespace {

constexpr double kUnitsPerOne = 0x1p40;
// A larger slice is cut, so that sums of one read more cannot overflow. gate's are smaller.
constexpr double kSliceMax = 0x1p21;

// A NaN, or what is not in [0, 1], counts as 1.
int64_t Units(double amount) {
  const double counted = amount >= 0 && amount <= 1 ? amount : 1;
  return static_cast<int64_t>(std::ceil(counted * kUnitsPerOne));
}

}  // namespace

SliceAccount::SliceAccount(const PolicyLease& lease)
    : lease_id_(lease.lease_id),
      slice_units_(static_cast<int64_t>(std::floor(
          std::min(lease.budget_slice >= 0 ? lease.budget_slice : 0, kSliceMax) * kUnitsPerOne))) {}

bool SliceAccount::Spend(const PolicyLease& lease, absl::Span<const ReadCertificate> certificates) {
  if (lease.risk_mode == RiskMode::kThreshold || lease.read_mode == ReadMode::kObserve) return true;
  absl::MutexLock lock(&mutex_);
  if (closed_) return false;
  int64_t left = slice_units_ - spent_units_;
  for (const ReadCertificate& certificate : certificates) {
    if (certificate.outcome == Outcome::kExact && SpendsTv(lease.risk_mode)) continue;
    left -= Units(SpendsTv(lease.risk_mode) ? certificate.worst_case_tv
                                            : certificate.failure_probability);
    if (left < 0) return false;
  }
  spent_units_ = slice_units_ - left;
  return true;
}

void SliceAccount::SpendFailed(const PolicyLease& lease, int64_t head_count) {
  if (lease.risk_mode != RiskMode::kUnion || lease.read_mode != ReadMode::kEnforce) return;
  absl::MutexLock lock(&mutex_);
  if (closed_) return;
  const int64_t units = head_count * Units(FailureShare(lease.budget_slice));
  spent_units_ += std::min(units, slice_units_ - spent_units_);
}

double SliceAccount::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  return static_cast<double>(spent_units_) / kUnitsPerOne;
}

}  // namespace certkv::client
