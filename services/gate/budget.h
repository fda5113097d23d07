// The budget of one request: how much the sum of worst_case_tv (kCumulative, kAnytime) or of
// failure_probability (kUnion) may grow, and how much of that gate has already given away.
//
// A lease's holder spends its slice without asking; gate learns of it later, or never. So gate
// counts a slice as spent the moment it gives it, and takes it back only when its holder says what
// was spent of it and that no more will be: not when the lease expires, not when nothing is
// reported, and never when a holder dies.
//
//   committed = max(sum of slices, sum reported as certified) + sum decided + sum exact
//
// Why that is sound: holders serve at most their slices (the invariant of the certifier and of the
// client), a returned slice shrinks to what was served under it, so all that is served, reported or
// not, is at most the sum of slices plus what gate itself accepted. Exact reads change nothing by
// quantization; their bound is float arithmetic. It is charged when it is reported, so that it
// narrows what can still be given, but an exact read is never refused.
//
// Amounts are integers (budget_units.h). What a tenant's requests commit is taken from the tenant's
// budget too; a slice is given only when both have it.
//
// Invariants (budget_test breaks each):
//   1. after every GiveSlice and successful Decide: committed <= limit;
//   2. what holders serve within their slices, plus what was decided, is <= committed;
//   3. committed falls by a return only, and by no more than was not spent;
//   4. nothing overflows: sums stay at the largest number.
//
// Threads: none; the owner locks.
#ifndef CERTKV_SERVICES_GATE_BUDGET_H_
#define CERTKV_SERVICES_GATE_BUDGET_H_

#include <cstdint>
#include <memory>

#include "services/gate/budget_units.h"
#include "services/gate/tenant_budget.h"

namespace certkv::gate {

// How large the slices are.
enum class SliceSchedule : uint8_t {
  kShare,  // each slice_share of the limit
  kUnion,  // the n-th limit / ((n + 1) (n + 2)), n = 0, 1, ...: there is always a next one
};

// What a lease carries.
struct Slice {
  int64_t units = 0;
  int64_t tenant_window = 0;
  int64_t lease_id = 0;  // that it was given for, by a shared ledger; 0: any
  double amount() const { return ToAmount(units); }  // exact
};

// What a request spends from: Budget, in this process, or the mirror of a shared ledger
// (ledger_budget.h).
class RequestBudget {
 public:
  virtual ~RequestBudget() = default;
  // As in Budget.
  virtual Slice GiveSlice() = 0;
  virtual bool HasSlice() const = 0;
  virtual bool ReturnSlice(const Slice& slice, int64_t spent_units) = 0;
  virtual bool Decide(double amount) = 0;
  virtual void ReportCertified(double amount) = 0;
  virtual void ReportExact(double amount) = 0;
  virtual double limit() const = 0;
  virtual double committed() const = 0;
  virtual double left() const = 0;
  virtual bool overrun() const = 0;
};

class Budget final : public RequestBudget {
 public:
  // `limit` in [0, kBudgetMax], `slice_share` in (0, 1]. `tenant` may be null.
  Budget(double limit, double slice_share, SliceSchedule schedule = SliceSchedule::kShare,
         std::shared_ptr<TenantBudget> tenant = nullptr);

  // Gives a slice away, or what is left when that is less; 0 when what is left is too little to be
  // of use (under 1/64 of a slice), here or at the tenant.
  Slice GiveSlice() override;
  // Would GiveSlice give something?
  bool HasSlice() const override;
  // The holder of `slice`, which was given here and not returned before, spent `spent_units` of it
  // and will spend no more. False, and nothing changes, when that is more than the slice.
  bool ReturnSlice(const Slice& slice, int64_t spent_units) override;

  // Commits a read that gate itself accepts. False, and nothing changes, when it does not fit. A
  // NaN never fits.
  bool Decide(double amount) override;
  // Takes in reads that have happened. What is not in [0, 1] counts as 1.
  void ReportCertified(double amount) override;
  void ReportExact(double amount) override;

  double limit() const override;      // rounded down
  double committed() const override;  // exact below 2^13, else rounded to nearest
  double left() const override;       // limit - committed, at least 0
  // More was reported as certified than all slices together allow: somebody broke the contract.
  bool overrun() const override { return certified_units_ > slices_units_; }

 private:
  int64_t committed_units() const;
  int64_t left_units() const;
  int64_t NextSliceUnits() const;  // of a whole slice, at least 1
  int64_t UsableUnits() const;     // the least that is worth giving
  void ChargeTenant(int64_t committed_before);

  const int64_t limit_units_;
  const int64_t slice_units_;  // kShare
  const SliceSchedule schedule_;
  const std::shared_ptr<TenantBudget> tenant_;
  int64_t slice_count_ = 0;      // given
  int64_t slices_units_ = 0;     // given away and not returned
  int64_t certified_units_ = 0;  // reported as certified or observed
  int64_t decided_units_ = 0;
  int64_t exact_units_ = 0;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_BUDGET_H_
