#include "kernels/bounds/risk_ledger.h"

#include <algorithm>
#include <cmath>

#include "kernels/bounds/rounding.h"
#include "kernels/core/check.h"

namespace certkv {
namespace {

double Counted(double tv) { return tv >= 0 && tv <= 1 ? tv : 1; }

}  // namespace

int32_t TvBucketOf(double worst_case_tv) {
  const double tv = Counted(worst_case_tv);
  const auto* bound = std::lower_bound(kTvBucketBounds.begin(), kTvBucketBounds.end(), tv);
  return static_cast<int32_t>(bound - kTvBucketBounds.begin());
}

void RiskSums::Add(double worst_case_tv) {
  const double tv = Counted(worst_case_tv);
  ++read_count;
  tv_max = std::max(tv_max, tv);
  tv_sum = AddRoundedUp(tv_sum, tv);
  ++histogram[TvBucketOf(tv)];
}

RiskLedger::RiskLedger(const RiskLedgerOptions& options) : options_(options) {
  CERTKV_CHECK(options.layer_count >= 1 && options.query_head_count >= 1,
               "a risk ledger needs at least one layer and one query head");
  heads_.resize(static_cast<size_t>(options.layer_count) * options.query_head_count);
}

bool RiskLedger::CanSpend(double worst_case_tv) const {
  if (!(worst_case_tv >= 0 && worst_case_tv <= options_.tv_tolerance)) return false;
  if (options_.mode != RiskMode::kCumulative) return true;
  return AddRoundedUp(total_.tv_sum, worst_case_tv) <= options_.budget;
}

bool RiskLedger::Spend(int32_t layer, int32_t query_head, double worst_case_tv) {
  if (!CanSpend(worst_case_tv)) return false;
  Record(layer, query_head, worst_case_tv);
  return true;
}

void RiskLedger::Record(int32_t layer, int32_t query_head, double worst_case_tv) {
  exceeded_ = exceeded_ || !CanSpend(worst_case_tv);
  heads_[IndexOf(layer, query_head)].Add(worst_case_tv);
  total_.Add(worst_case_tv);
}

double RiskLedger::BudgetLeft() const {
  if (options_.mode != RiskMode::kCumulative) return kUnknownBound;
  const double left = options_.budget - total_.tv_sum;
  // Rounded to nearest, so one step down; exact at 0.
  return left > 0 ? std::nextafter(left, 0.0) : 0;
}

const RiskSums& RiskLedger::head(int32_t layer, int32_t query_head) const {
  return heads_[IndexOf(layer, query_head)];
}

size_t RiskLedger::IndexOf(int32_t layer, int32_t query_head) const {
  CERTKV_CHECK(layer >= 0 && layer < options_.layer_count, "layer is outside the ledger");
  CERTKV_CHECK(query_head >= 0 && query_head < options_.query_head_count,
               "query head is outside the ledger");
  return static_cast<size_t>(layer) * options_.query_head_count + query_head;
}

}  // namespace certkv
