// What a shared ledger keeps of a request beside its account: enough for a replica that did not
// open it. Text; what does not hold its own format is no record.
#ifndef CERTKV_SERVICES_GATE_LEDGER_RECORD_H_
#define CERTKV_SERVICES_GATE_LEDGER_RECORD_H_

#include <string>

#include "absl/status/statusor.h"
#include "services/gate/policy.h"

namespace certkv::gate {

struct LedgerRecord {
  std::string label;
  RequestTerms terms;
  // Of the policy when the request was opened: what an open request keeps (Request, invariant 4).
  RiskMode risk_mode = RiskMode::kThreshold;
  double cumulative_budget = 0;
  double budget_slice_share = 1;
  double failure_probability = 0;
};

// `policy` is resolved for the request.
LedgerRecord MakeLedgerRecord(const std::string& label, const RequestTerms& terms,
                              const Policy& policy);
// `policy` with what the record keeps, and without overrides: for the constructor of Request.
Policy PolicyOfRecord(const LedgerRecord& record, const Policy& policy);

std::string EncodeLedgerRecord(const LedgerRecord& record);
// Errors: Unavailable [LEDGER_UNAVAILABLE], another version wrote it, or none of ours.
absl::StatusOr<LedgerRecord> DecodeLedgerRecord(const std::string& text);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_LEDGER_RECORD_H_
