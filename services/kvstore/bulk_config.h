// Settings of the bulk plane: those of section "kvstore" that begin with bulk_, and the server's.
#ifndef CERTKV_SERVICES_KVSTORE_BULK_CONFIG_H_
#define CERTKV_SERVICES_KVSTORE_BULK_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/common/access_config.h"
#include "services/common/config_reader.h"

namespace certkv::kvstore {

struct BulkConfig {
  std::string address;  // "host:port" to serve other stores at; "": none
  std::string peers;    // "host:port, host:port" to pull from; "": none
  std::string peer_ca;
  std::string certificate;  // shown to peers
  std::string key;
  std::string token_file;
  int32_t connections = 4;  // of one pull
  int32_t connection_limit = 64;
  int64_t in_flight_bytes = int64_t{64} << 20;  // of one pull
  int64_t timeout_ms = 10'000;
  int32_t idle_connections = 4;   // to one peer, kept between pulls
  int64_t idle_time_ms = 30'000;  // for so long
  int32_t threads = 2;
  // Not settings of their own: section "server", whose rules and certificates are used. The section
  // is checked once it is known.
  AccessConfig access;
  bool has_access = false;

  // Nodes of the cluster are pulled from, too.
  bool has_members = false;

  std::vector<std::string> peer_list() const;
  bool pulls() const { return !peers.empty() || has_members; }
  bool is_on() const { return !address.empty() || pulls(); }
};

// Adds the fields and their check. `config` outlives the section.
void AddBulkFields(BulkConfig* config, ConfigSection* section);

// Errors: InvalidArgument [CONFIG_INVALID], as CheckAccessConfig says of tcp_address.
absl::Status CheckBulkConfig(const BulkConfig& config);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BULK_CONFIG_H_
