#include "clients/cpp/report_book.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace certkv::client {

PolicyLease ExactLease(const std::string& request) {
  PolicyLease lease;
  lease.request = request;
  lease.read_mode = ReadMode::kExact;
  return lease;
}

ReportBook::ReportBook(PolicyLease lease)
    : lease_(std::move(lease)), account_(std::make_shared<SliceAccount>(lease_)) {}

LeaseInUse ReportBook::UseLease(int64_t now_ms) const {
  const bool usable = !released_ && !incomplete_ && !closing_ && account_ != nullptr &&
                      now_ms < lease_.expire_time_ms;
  if (!usable) return {ExactLease(lease_.request), nullptr};
  return {lease_, lease_.lease_id != 0 ? account_ : nullptr};
}

void ReportBook::AbandonSlice(int64_t lease_id) {
  if (account_ == nullptr || account_->lease_id() != lease_id || !account_->has_slice()) return;
  account_->Close();
  retired_.push_back(std::move(account_));
  account_ = nullptr;
}

void ReportBook::AddReport(absl::Span<const ReadCertificate> certificates,
                           int64_t failed_read_count) {
  OutgoingReport batch;
  batch.batch_number = next_batch_++;
  batch.lease_id = lease_.lease_id;
  batch.certificates.assign(certificates.begin(), certificates.end());
  batch.failed_read_count = failed_read_count;
  batch.returned = TakeReturnable(/*is_last=*/false);
  waiting_.push_back(std::move(batch));
}

void ReportBook::AddCanaries(absl::Span<const CanaryFinding> findings) {
  OutgoingReport batch;
  batch.batch_number = next_batch_++;
  batch.lease_id = lease_.lease_id;
  batch.canaries.assign(findings.begin(), findings.end());
  waiting_.push_back(std::move(batch));
}

void ReportBook::Close() {
  if (!std::exchange(closing_, true)) QueueRenewal(/*is_last=*/true);
}

void ReportBook::QueueRenewal(bool is_last) {
  OutgoingReport batch;
  batch.batch_number = next_batch_++;
  batch.lease_id = lease_.lease_id;
  batch.is_last = is_last;
  if (is_last && account_ != nullptr && account_->has_slice()) retired_.push_back(account_);
  batch.returned = TakeReturnable(is_last);
  waiting_.push_back(std::move(batch));
}

std::vector<SpentSlice> ReportBook::TakeReturnable(bool is_last) {
  // Nobody gets a reference to a retired account any more, so that the last user is this vector. A
  // read that still runs under a closed account finds that it cannot spend, and is exact.
  const auto ends = std::partition(
      retired_.begin(), retired_.end(), [this, is_last](const std::shared_ptr<SliceAccount>& one) {
        return !is_last && one.use_count() > 1 && one->lease_id() != lease_.lease_id;
      });
  std::vector<SpentSlice> returned;
  for (auto account = ends; account != retired_.end(); ++account) {
    returned.push_back({(*account)->lease_id(), (*account)->Close()});
  }
  retired_.erase(ends, retired_.end());
  return returned;
}

void ReportBook::TakeAnswer(ReportAnswer answer) {
  if (answer.release) released_ = true;
  if (answer.lease.has_value() && answer.lease->sequence >= lease_.sequence) {
    TakeLease(*std::move(answer.lease));
    if (answer.force_exact) lease_.read_mode = ReadMode::kExact;
  }
  if (!waiting_.empty() && waiting_.front().batch_number == answer.batch_number) {
    waiting_.pop_front();
  }
}

void ReportBook::TakeLease(PolicyLease lease) {
  const bool is_new = lease.lease_id != lease_.lease_id;
  lease_ = std::move(lease);
  if (!is_new) return;
  if (account_ != nullptr && account_->has_slice()) retired_.push_back(std::move(account_));
  // Gate keeps no more of them returnable either; what an older one did not spend stays spent.
  if (retired_.size() > kSlicesReturnableMax) retired_.erase(retired_.begin());
  account_ = std::make_shared<SliceAccount>(lease_);
}

}  // namespace certkv::client
