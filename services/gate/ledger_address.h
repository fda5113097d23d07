// How a config names the Redis server of a shared ledger.
#ifndef CERTKV_SERVICES_GATE_LEDGER_ADDRESS_H_
#define CERTKV_SERVICES_GATE_LEDGER_ADDRESS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace certkv::gate {

// One of the two.
struct RedisAddress {
  std::string unix_path = {};
  std::string ip = {};
  int32_t port = 0;
};

// "unix:PATH" or "IP:PORT"; an address and no name, because a look-up could take longer than a
// decision may.
// Errors: InvalidArgument [CONFIG_INVALID].
absl::StatusOr<RedisAddress> ParseRedisAddress(const std::string& text);
absl::Status CheckRedisAddress(const std::string& text);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_LEDGER_ADDRESS_H_
