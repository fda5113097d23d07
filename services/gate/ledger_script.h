// The script of RedisLedger, embedded when it is built.
#ifndef CERTKV_SERVICES_GATE_LEDGER_SCRIPT_H_
#define CERTKV_SERVICES_GATE_LEDGER_SCRIPT_H_

#include "absl/strings/string_view.h"

namespace certkv::gate {

// `path` is "ledger.lua"; "" for any other.
absl::string_view LedgerScript(absl::string_view path);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_LEDGER_SCRIPT_H_
