// Settings of gate: section "gate" of a config file.
#ifndef CERTKV_SERVICES_GATE_CONFIG_H_
#define CERTKV_SERVICES_GATE_CONFIG_H_

#include <cstdint>
#include <deque>
#include <string>

#include "kernels/core/policy.h"
#include "services/common/config_reader.h"
#include "services/gate/policy.h"

namespace certkv {

// An override as it stands in a file; -1 and empty mean: as in the policy.
struct PolicyOverrideText {
  enum class Mode : uint8_t { kPolicy, kEnforce, kObserve, kExact };
  std::string tenant;
  std::string model;
  int32_t layer = -1;
  int32_t query_head = -1;
  double tv_tolerance = -1;
  double skip_tolerance = -1;
  double value_tolerance = -1;
  double output_tolerance = -1;
  double cumulative_budget = -1;
  Mode read_mode = Mode::kPolicy;
};

// What each field is stands in config.cc, where docs/config.md comes from.
struct GateConfig {
  gate::Policy policy;  // the first policy; UpdatePolicy replaces it
  // A file's overrides; the check of GateConfigSection makes policy.overrides of them.
  std::deque<PolicyOverrideText> override_texts;
  int32_t request_limit = 10'000;            // open and retained requests
  int32_t heads_per_request_max = 16'384;    // pairs of layer and query head with a record
  int32_t reporters_per_request_max = 64;    //
  int32_t tenant_limit = 1024;               //
  int64_t idle_timeout_ms = 10 * 60 * 1000;  // then a request is closed
  int32_t retained_limit = 10'000;           // closed requests kept
  int64_t retention_ms = 10 * 60 * 1000;     // how long a closed request stays readable
  std::string store_socket;                  // of the dashboard's capacity page
  std::string store_token_file;              // for it
  int32_t watcher_limit = 256;               // WatchRequestRisk streams
  std::string ledger_redis;                  // "" = the ledger is in this process
  std::string ledger_password_file;          //
  int64_t ledger_timeout_ms = 40;            // of a call, with the wait for a thread
  int32_t ledger_threads = 4;                // calls that wait for Redis at a time
};

// `config` must live as long as the section is used.
ConfigSection GateConfigSection(GateConfig* config);
// "gate_overrides", after GateConfigSection.
ConfigList GateOverridesList(GateConfig* config);

}  // namespace certkv

#endif  // CERTKV_SERVICES_GATE_CONFIG_H_
