#include "kernels/bounds/risk_ledger.h"

#include <algorithm>
#include <cmath>

#include "kernels/bounds/risk_budget.h"
#include "kernels/bounds/rounding.h"
#include "kernels/core/check.h"

namespace certkv {
namespace {

double Counted(double tv) { return tv >= 0 && tv <= 1 ? tv : 1; }

double SumLimit(const RiskLedgerOptions& options) {
  switch (options.mode) {
    case RiskMode::kCumulative:
      return options.budget;
    case RiskMode::kAnytime:
      return AnytimeSumLimit(options.budget, options.failure_probability);
    case RiskMode::kThreshold:
    case RiskMode::kUnion:
      return kUnknownBound;
  }
  return 0;
}

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

RiskLedger::RiskLedger(const RiskLedgerOptions& options)
    : options_(options), sum_limit_(SumLimit(options)) {
  CERTKV_CHECK(options.layer_count >= 1 && options.query_head_count >= 1,
               "a risk ledger needs at least one layer and one query head");
  heads_.resize(static_cast<size_t>(options.layer_count) * options.query_head_count);
}

bool RiskLedger::CanSpend(double worst_case_tv, double failure_probability) const {
  if (!(worst_case_tv >= 0 && worst_case_tv <= options_.tv_tolerance)) return false;
  const double share = options_.mode == RiskMode::kUnion
                           ? UnionShare(options_.failure_probability, total_.read_count)
                           : 0;
  if (!(failure_probability >= 0 && failure_probability <= share)) return false;
  return AddRoundedUp(total_.tv_sum, worst_case_tv) <= sum_limit_;
}

bool RiskLedger::Spend(int32_t layer, int32_t query_head, double worst_case_tv,
                       double failure_probability) {
  if (!CanSpend(worst_case_tv, failure_probability)) return false;
  Record(layer, query_head, worst_case_tv, failure_probability);
  return true;
}

void RiskLedger::Record(int32_t layer, int32_t query_head, double worst_case_tv,
                        double failure_probability) {
  exceeded_ = exceeded_ || !CanSpend(worst_case_tv, failure_probability);
  failure_probability_sum_ = AddRoundedUp(failure_probability_sum_, Counted(failure_probability));
  heads_[IndexOf(layer, query_head)].Add(worst_case_tv);
  total_.Add(worst_case_tv);
}

double RiskLedger::BudgetLeft() const {
  if (!SpendsTv(options_.mode)) return kUnknownBound;
  const double left = sum_limit_ - total_.tv_sum;
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
