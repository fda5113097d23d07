// The budget of one request in RiskMode::kCumulative: how much the sum of worst_case_tv may grow,
// and how much of that gate has already given away.
//
// A lease's holder spends its slice without asking; gate learns of it later, or never, and a report
// does not say which lease a read was made under. So gate counts a slice as spent the moment it
// gives it, and never takes it back: not when the lease expires, not when nothing is reported.
//
//   committed = max(sum of slices, sum reported as certified) + sum decided + sum exact
//
// Why that is sound: holders serve at most their slices (the certifier's own invariant), so all
// that is served, reported or not, is at most the sum of slices plus what gate itself accepted.
// Exact reads change nothing by quantization; their bound is float arithmetic. It is charged when
// it is reported, so that it narrows what can still be given, but an exact read is never refused.
//
// Amounts are integers in units of 2^-40, as in the certifier: a read's rounded up, a slice's and
// the limit's rounded down. So sums are exact, their order does not matter, and a holder that
// stays within its slice never looks as if it had not.
//
// Invariants (budget_test breaks each):
//   1. after every GiveSlice and successful Decide: committed <= limit;
//   2. what holders serve within their slices, plus what was decided, is <= committed;
//   3. committed never falls;
//   4. nothing overflows: sums stay at the largest number.
//
// Threads: none; the owner locks.
#ifndef CERTKV_SERVICES_GATE_BUDGET_H_
#define CERTKV_SERVICES_GATE_BUDGET_H_

#include <cstdint>

namespace certkv::gate {

class Budget {
 public:
  // `limit` in (0, kBudgetMax], `slice_share` in (0, 1].
  Budget(double limit, double slice_share);

  // Gives a slice away: slice_share of the limit, or what is left when that is less; 0 when what is
  // left is too little to be of use (under 1/64 of a slice).
  double GiveSlice();
  // Would GiveSlice give something?
  bool HasSlice() const;

  // Commits a read that gate itself accepts. False, and nothing changes, when it does not fit. A
  // NaN never fits.
  bool Decide(double worst_case_tv);
  // Takes in reads that have happened. What is not in [0, 1] counts as 1.
  void ReportCertified(double worst_case_tv);
  void ReportExact(double worst_case_tv);

  double limit() const;      // rounded down
  double committed() const;  // exact below 2^13, else rounded to nearest
  double left() const;       // limit - committed, at least 0
  // More was reported as certified than all slices together allow: somebody broke the contract.
  bool overrun() const { return certified_units_ > slices_units_; }

 private:
  int64_t committed_units() const;
  int64_t left_units() const;

  int64_t limit_units_;
  int64_t slice_units_;          // of a whole slice, at least 1
  int64_t slices_units_ = 0;     // given away
  int64_t certified_units_ = 0;  // reported as certified or observed
  int64_t decided_units_ = 0;
  int64_t exact_units_ = 0;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_BUDGET_H_
