// Settings of blocks that come by NCCL: those of section "kvstore" that begin with nccl.
#ifndef CERTKV_SERVICES_KVSTORE_NCCL_CONFIG_H_
#define CERTKV_SERVICES_KVSTORE_NCCL_CONFIG_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/common/config_reader.h"
#include "services/kvstore/bulk_config.h"

namespace certkv::kvstore {

enum class NcclChoice : uint8_t {
  kOff,      // blocks come by TCP alone
  kAuto,     // by NCCL where this store and the other one can
  kRequire,  // and this store does not start where it can't
};

struct NcclConfig {
  NcclChoice choice = NcclChoice::kOff;
  std::string library = "libnccl.so.2";
  std::string peers;  // "bulk host:port=gRPC host:port", with commas between
  int64_t in_flight_bytes = int64_t{32} << 20;  // of one link, on each side
  int32_t link_limit = 8;                       // of each kind: to others, and of others
  int64_t timeout_ms = 10'000;
  int64_t retry_ms = 60'000;
  int64_t idle_ms = 60'000;

  bool is_on() const { return choice != NcclChoice::kOff; }
  // gRPC address of each peer by its bulk address. Errors: InvalidArgument [CONFIG_INVALID].
  absl::StatusOr<std::map<std::string, std::string>> PeerAddresses() const;
};

// Are the peers among those that blocks are pulled from, and on this machine where nothing is
// encrypted? Errors: InvalidArgument [CONFIG_INVALID].
absl::Status CheckNcclPeers(const NcclConfig& config, const BulkConfig& bulk);

// Adds the fields and their check. `config` outlives the section.
void AddNcclFields(NcclConfig* config, ConfigSection* section);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_NCCL_CONFIG_H_
