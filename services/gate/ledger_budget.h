// The budget of a request whose account is in a shared ledger (ledger.h): what the ledger said
// last, and what it has given for this replica to use.
//
// Nothing is given from here that was not put here before: the registry asks the ledger without a
// lock, puts what it got, and then lets the request go on. What is put and not used stays spent.
//
// Threads: none; the owner locks.
#ifndef CERTKV_SERVICES_GATE_LEDGER_BUDGET_H_
#define CERTKV_SERVICES_GATE_LEDGER_BUDGET_H_

#include <cstdint>
#include <deque>

#include "services/gate/budget.h"
#include "services/gate/ledger.h"

namespace certkv::gate {

class LedgerBudget final : public RequestBudget {
 public:
  // As Budget's; `limit` is what the ledger has.
  LedgerBudget(double limit, double slice_share, SliceSchedule schedule);

  // What Ledger::Grant is to be asked for.
  LedgerGrantAsk NextAsk(int64_t lease_id) const { return {lease_id, slice_units_, schedule_}; }
  // Is it worth to ask? False while a slice waits here, and when the ledger last had nothing.
  bool WantsSlice() const { return slices_.empty() && may_have_slice_; }
  // What was granted for a lease; 0: nothing.
  void PutSlice(int64_t lease_id, int64_t units);
  void PutDecided(int64_t units);
  void SetState(const LedgerState& state);

  Slice GiveSlice() override;
  bool HasSlice() const override { return !slices_.empty(); }
  // The ledger has taken it back with the batch that returns it; this says whether it can be.
  bool ReturnSlice(const Slice& slice, int64_t spent_units) override;
  bool Decide(double amount) override;
  void ReportCertified(double) override {}
  void ReportExact(double) override {}
  double limit() const override;
  double committed() const override;
  double left() const override;
  bool overrun() const override { return overrun_; }

 private:
  const int64_t slice_units_;
  const SliceSchedule schedule_;
  int64_t limit_units_;
  int64_t left_units_;
  bool overrun_ = false;
  bool may_have_slice_ = true;
  std::deque<Slice> slices_;
  int64_t decided_units_ = 0;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_LEDGER_BUDGET_H_
