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

  timeline_.Add(certificate, now_ms);
  KeepIfWorst(certificate);
  if (HeadSums* head = HeadOf(certificate.layer, certificate.query_head)) {
    head->tv_max = std::max(head->tv_max, certificate.worst_case_tv);
    head->tv_sum = AddRoundedUp(head->tv_sum, certificate.worst_case_tv);
    uint32_t& count = head->histogram[TvBucketOf(certificate.worst_case_tv)];
    if (count < std::numeric_limits<uint32_t>::max()) ++count;
  } else if (!head_limit_met_) {
    head_limit_met_ = true;
    AddEvent(now_ms, "HEAD_LIMIT",
             absl::StrCat("more than ", heads_max_,
                          " pairs of layer and query head; further ones are in the totals only "
                          "(config: heads_per_request_max)"));
  }
}

RiskAccount::HeadSums* RiskAccount::HeadOf(int32_t layer, int32_t query_head) {
  const auto row = static_cast<size_t>(layer);
  const auto index = static_cast<size_t>(query_head);
  const size_t have = row < layers_.size() ? layers_[row].size() : 0;
  if (index < have) return &layers_[row][index];
  const auto more = static_cast<int64_t>(index + 1 - have);
  if (head_count_ + more > heads_max_) return nullptr;
  if (row >= layers_.size()) layers_.resize(row + 1);
  layers_[row].reserve(index + 1);  // exactly: there are many requests
  layers_[row].resize(index + 1);
  head_count_ += static_cast<int32_t>(more);
  return &layers_[row][index];
}

void RiskAccount::KeepIfWorst(const ReadCertificate& certificate) {
  const bool is_full = worst_.size() >= kWorstReadsMax;
  if (is_full && certificate.first_worst_case_tv <= worst_[least_worst_].first_worst_case_tv)
    return;
  const WorstRead read{.layer = certificate.layer,
                       .query_head = certificate.query_head,
                       .query_position = certificate.query_position,
                       .first_worst_case_tv = certificate.first_worst_case_tv,
                       .worst_case_tv = certificate.worst_case_tv,
                       .output_error_bound = certificate.output_error_bound,
                       .rung = certificate.rung,
                       .outcome = certificate.outcome};
  if (is_full) {
    worst_[least_worst_] = read;
  } else {
    worst_.push_back(read);
  }
  const auto least = std::min_element(worst_.begin(), worst_.end(),
                                      [](const WorstRead& one, const WorstRead& other) {
                                        return one.first_worst_case_tv < other.first_worst_case_tv;
                                      });
  least_worst_ = static_cast<size_t>(least - worst_.begin());
}

std::vector<WorstRead> RiskAccount::WorstReads() const {
  std::vector<WorstRead> reads = worst_;
  std::sort(reads.begin(), reads.end(), [](const WorstRead& a, const WorstRead& b) {
    return std::make_tuple(-a.first_worst_case_tv, a.query_position, a.layer, a.query_head) <
           std::make_tuple(-b.first_worst_case_tv, b.query_position, b.layer, b.query_head);
  });
  return reads;
}

HeadRisk RiskAccount::ToHeadRisk(int32_t layer, int32_t query_head, const HeadSums& sums) {
  HeadRisk head{.layer = layer, .query_head = query_head, .sums = {}};
  head.sums.tv_max = sums.tv_max;
  head.sums.tv_sum = sums.tv_sum;
  for (int32_t bucket = 0; bucket < kTvBucketCount; ++bucket) {
    head.sums.histogram[bucket] = sums.histogram[bucket];
    head.sums.read_count += sums.histogram[bucket];
  }
  return head;
}

void RiskAccount::RecordFailed(int64_t read_count) {
  AddSaturating(&totals_.failed_read_count, read_count);
}

void RiskAccount::RecordCanaries(int64_t checks, int64_t mismatches) {
  AddSaturating(&totals_.canary_checks, checks);
  AddSaturating(&totals_.canary_mismatches, mismatches);
}

void RiskAccount::AddEvent(int64_t time_ms, absl::string_view kind, absl::string_view message) {
  events_.push_back({time_ms, std::string(kind), std::string(message)});
  if (events_.size() > kRiskEventsMax) events_.pop_front();
  // A clock that jumped back leaves later times behind.
  latest_event_ms_ = -1;
  for (const RiskEvent& event : events_) {
    latest_event_ms_ = std::max(latest_event_ms_, event.time_ms);
  }
}

std::vector<HeadRisk> RiskAccount::AllHeads() const {
  std::vector<HeadRisk> heads;
  heads.reserve(static_cast<size_t>(head_count_));
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    for (size_t head = 0; head < layers_[layer].size(); ++head) {
      heads.push_back(ToHeadRisk(static_cast<int32_t>(layer), static_cast<int32_t>(head),
                                 layers_[layer][head]));
      if (heads.back().sums.read_count == 0) heads.pop_back();
    }
  }
  return heads;
}

std::vector<HeadRisk> RiskAccount::RiskiestHeads(int32_t count) const {
  std::vector<HeadRisk> heads = AllHeads();
  const size_t kept = std::min(heads.size(), static_cast<size_t>(count));
  std::partial_sort(heads.begin(), heads.begin() + static_cast<std::ptrdiff_t>(kept), heads.end(),
                    IsRiskier);
  heads.resize(kept);
  return heads;
}

}  // namespace certkv::gate
