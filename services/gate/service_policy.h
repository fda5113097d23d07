// PolicyShare: one policy at all replicas of gate that share a ledger.
#ifndef CERTKV_SERVICES_GATE_SERVICE_POLICY_H_
#define CERTKV_SERVICES_GATE_SERVICE_POLICY_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "services/gate/ledger.h"
#include "services/gate/policy.h"
#include "services/gate/request_registry.h"

namespace certkv::gate {

// Before the first change each replica has the policy of its own file, version 1, which is not
// shared. A change is made in the ledger first, from the latest version there; the other replicas
// take it with their next Sync. When the ledger is lost, the next Sync of any replica brings back
// what it has; of two, the later version stays, at the replicas too.
//
// Threads: all methods are safe. With a ledger they block as its calls do (LedgerDeadline), and
// hold no lock meanwhile.
class PolicyShare {
 public:
  // Both outlive this object; `ledger` may be null: then there is one gate.
  PolicyShare(RequestRegistry* registry, Ledger* ledger) : registry_(registry), ledger_(ledger) {}

  // Puts into the ledger what is newer here, and in force what is newer there; true when that is
  // another policy than before. Errors: as the ledger's; Unavailable [LEDGER_UNAVAILABLE], another
  // version of gate wrote the policy there and this one can't read it.
  absl::StatusOr<bool> Sync();
  // RequestRegistry::UpdatePolicy at all replicas. Errors: as that; as Sync. After an error of the
  // ledger the change may be in force nonetheless.
  absl::StatusOr<Policy> Update(const Policy& policy, absl::string_view source);

 private:
  absl::StatusOr<bool> Adopt(const LedgerPolicy& shared);

  RequestRegistry* const registry_;
  Ledger* const ledger_;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_SERVICE_POLICY_H_
