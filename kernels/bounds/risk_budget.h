// What the budgets of RiskMode::kUnion and kAnytime allow (docs/bounds.md, section 6).
//
// kUnion: read n = 0, 1, ... may fail with probability UnionShare(delta, n); the shares add up to
// delta, so that all certificates of a request hold together but for delta (union bound).
//
// kAnytime: let X_n in [0, 1] be a loss of read n with E[X_n | past] <= worst_case_tv of read n.
// While the sum of worst_case_tv is at most AnytimeSumLimit(limit, delta),
//   P(at some moment, X_1 + ... + X_n >= limit) <= delta.
// Source: Ville's inequality (Ville 1939) for the supermartingale
//   M_n = exp(lambda (X_1 + ... + X_n) - (e^lambda - 1) (tv_1 + ... + tv_n)),
// the sub-Poisson case of Howard, Ramdas, McAuliffe, Sekhon, "Time-uniform Chernoff bounds via
// nonnegative supermartingales", Probability Surveys 17 (2020), with one lambda fixed in advance.
//
// Units: probabilities and total variation, [0, 1]; limits in total variation. Results are rounded
// to the safe side: limits and shares down, bounds up. Errors: NaN or an argument out of range
// allows nothing (0), and bounds nothing (+infinity). Threads: pure functions.
#ifndef CERTKV_KERNELS_BOUNDS_RISK_BUDGET_H_
#define CERTKV_KERNELS_BOUNDS_RISK_BUDGET_H_

#include <cstdint>

namespace certkv {

// delta / ((index + 1) (index + 2)), rounded down. `failure_probability` is delta, in (0, 1).
double UnionShare(double failure_probability, int64_t index);

// The largest sum B of worst_case_tv with limit ln(limit / B) - limit + B >= ln(1 / delta), rounded
// down; below `limit`. `loss_limit` > 0 and finite, `failure_probability` in (0, 1).
double AnytimeSumLimit(double loss_limit, double failure_probability);

// But for probability delta, losses add up to less than this at every moment at which the sum of
// worst_case_tv is `tv_sum`: ((e^lambda - 1) tv_sum + ln(1 / delta)) / lambda, with the lambda
// that is best at AnytimeSumLimit, where it equals `loss_limit`. Rounded up.
double AnytimeLossBound(double tv_sum, double loss_limit, double failure_probability);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_RISK_BUDGET_H_
