#include "services/gate/risk_account.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/bounds/rounding.h"

namespace certkv::gate {
namespace {

// Counters stay at their largest value; a reporter may send any number.
void AddSaturating(int64_t* counter, int64_t amount) {
  if (__builtin_add_overflow(*counter, amount, counter)) {
    *counter = std::numeric_limits<int64_t>::max();
  }
}

bool IsRiskier(const HeadRisk& a, const HeadRisk& b) {
  return std::make_tuple(-a.sums.tv_max, -a.sums.tv_sum, a.layer, a.query_head) <
         std::make_tuple(-b.sums.tv_max, -b.sums.tv_sum, b.layer, b.query_head);
}

}  // namespace

void RiskAccount::Record(const ReadCertificate& certificate, bool outside_tolerance,
                         int64_t now_ms) {
  totals_.sums.Add(certificate.worst_case_tv);
  totals_.max_first_worst_case_tv =
      std::max(totals_.max_first_worst_case_tv, certificate.first_worst_case_tv);
  totals_.max_output_error_bound =
      std::max(totals_.max_output_error_bound, certificate.output_error_bound);
  ++totals_.reads_by_rung[static_cast<int>(certificate.rung)];
  if (certificate.outcome == Outcome::kCertified && certificate.rung == Rung::kNone) {
    ++totals_.reads_certified_first;
  }
  if (certificate.outcome == Outcome::kExact) ++totals_.reads_exact;
  if (certificate.outcome == Outcome::kObserved) ++totals_.reads_observed;
  if (outside_tolerance) ++totals_.reads_outside_tolerance;
  AddSaturating(&totals_.repair_bytes, certificate.repair_bytes);
  totals_.failure_probability_sum =
      AddRoundedUp(totals_.failure_probability_sum, double{certificate.failure_probability});

  const auto place = std::make_pair(certificate.layer, certificate.query_head);
  if (static_cast<int64_t>(heads_.size()) < heads_max_ || heads_.contains(place)) {
    heads_[place].Add(certificate.worst_case_tv);
  } else if (!head_limit_met_) {
    head_limit_met_ = true;
    AddEvent(now_ms, "HEAD_LIMIT",
             absl::StrCat("more than ", heads_max_,
                          " pairs of layer and query head; further ones are in the totals only "
                          "(config: heads_per_request_max)"));
  }
}

void RiskAccount::RecordFailed(int64_t read_count) {
  AddSaturating(&totals_.failed_read_count, read_count);
}

void RiskAccount::AddEvent(int64_t time_ms, absl::string_view kind, absl::string_view message) {
  events_.push_back({time_ms, std::string(kind), std::string(message)});
  if (events_.size() > kRiskEventsMax) events_.pop_front();
}

std::vector<HeadRisk> RiskAccount::RiskiestHeads(int32_t count) const {
  std::vector<HeadRisk> heads;
  heads.reserve(heads_.size());
  for (const auto& [place, sums] : heads_) heads.push_back({place.first, place.second, sums});
  const size_t kept = std::min(heads.size(), static_cast<size_t>(count));
  std::partial_sort(heads.begin(), heads.begin() + static_cast<std::ptrdiff_t>(kept), heads.end(),
                    IsRiskier);
  heads.resize(kept);
  return heads;
}

}  // namespace certkv::gate
