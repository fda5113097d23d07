// The arithmetic of a request's risk (docs/bounds.md, section 6): what its reads' worst_case_tv add
// up to, and whether one more read fits.
//
// kThreshold: each read within tv_tolerance.
// kCumulative: also the sum over the request within a budget. Deterministic: the sum of
// worst_case_tv bounds the sum of the true total variations, with no probability involved.
// kUnion: read n may fail with at most its share of `failure_probability` (risk_budget.h).
// kAnytime: the sum within AnytimeSumLimit(budget, failure_probability), where budget limits
// losses. Outside kUnion a read that may fail never fits: the two kinds are not mixed in one
// number.
//
// Invariants (risk_ledger_test breaks each):
//   1. sums are rounded up: never below the exact sum of what was recorded;
//   2. nothing is lost: a NaN, negative or larger value than 1 counts as 1;
//   3. a histogram's buckets add up to its count;
//   4. after a refused Spend the ledger is as it was before.
//
// Units: total variation, [0, 1]. Memory: 120 bytes for each layer and head, taken when
// constructed. Errors: an index out of range is a programmer error (CERTKV_CHECK); services check
// their input. Threads: none; the owner locks.
#ifndef CERTKV_KERNELS_BOUNDS_RISK_LEDGER_H_
#define CERTKV_KERNELS_BOUNDS_RISK_LEDGER_H_

#include <array>
#include <cstdint>
#include <vector>

#include "kernels/core/policy.h"

namespace certkv {

inline constexpr int32_t kTvBucketCount = 12;
// Bucket k holds tv in (bound[k - 1], bound[k]]; the first also 0. Powers of two from 2^-11 to 1.
inline constexpr std::array<float, kTvBucketCount> kTvBucketBounds = {
    0x1p-11f, 0x1p-10f, 0x1p-9f, 0x1p-8f, 0x1p-7f, 0x1p-6f,
    0x1p-5f,  0x1p-4f,  0x1p-3f, 0x1p-2f, 0x1p-1f, 1.0f};

// Bucket of a tv; of 1 for a value that is not in [0, 1].
int32_t TvBucketOf(double worst_case_tv);

struct RiskSums {
  int64_t read_count = 0;
  double tv_max = 0;
  double tv_sum = 0;  // rounded up
  std::array<int64_t, kTvBucketCount> histogram{};

  void Add(double worst_case_tv);
};

struct RiskLedgerOptions {
  int32_t layer_count = 0;       // >= 1
  int32_t query_head_count = 0;  // >= 1
  RiskMode mode = RiskMode::kThreshold;
  double tv_tolerance = 0;         // [0, 1]
  double budget = 0;               // kCumulative: limit of the sum; kAnytime: of the losses; >= 0
  double failure_probability = 0;  // kUnion, kAnytime: (0, 1)
};

class RiskLedger {
 public:
  explicit RiskLedger(const RiskLedgerOptions& options);

  // Is a read of this tv, whose bound fails with this probability, within the tolerance and within
  // what is left of the budget? NaN never is.
  bool CanSpend(double worst_case_tv, double failure_probability = 0) const;
  // Records the read when CanSpend; otherwise changes nothing and returns false.
  bool Spend(int32_t layer, int32_t query_head, double worst_case_tv,
             double failure_probability = 0);
  // Records a read that has happened, whether it fits or not.
  void Record(int32_t layer, int32_t query_head, double worst_case_tv,
              double failure_probability = 0);

  // kCumulative, kAnytime: limit of the sum - sum, rounded down, at least 0. Otherwise +infinity.
  double BudgetLeft() const;
  // kUnion: sum of the recorded failure probabilities, rounded up.
  double failure_probability_sum() const { return failure_probability_sum_; }
  // A read was recorded that did not fit.
  bool exceeded() const { return exceeded_; }

  const RiskLedgerOptions& options() const { return options_; }
  const RiskSums& total() const { return total_; }
  const RiskSums& head(int32_t layer, int32_t query_head) const;

 private:
  size_t IndexOf(int32_t layer, int32_t query_head) const;

  RiskLedgerOptions options_;
  double sum_limit_;  // of worst_case_tv; +infinity where only reads are limited
  double failure_probability_sum_ = 0;
  RiskSums total_;
  std::vector<RiskSums> heads_;  // [layer][query_head]
  bool exceeded_ = false;
};

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_RISK_LEDGER_H_
