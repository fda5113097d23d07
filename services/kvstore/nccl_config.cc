#include "services/kvstore/nccl_config.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/access_config.h"
#include "services/common/identity.h"

namespace certkv::kvstore {

absl::StatusOr<std::map<std::string, std::string>> NcclConfig::PeerAddresses() const {
  std::map<std::string, std::string> addresses;
  for (const std::string& pair : SplitNames(peers)) {
    const size_t equals = pair.find('=');
    if (equals == std::string::npos) {
      return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                       absl::StrCat("kvstore.nccl_peers has ", pair,
                                    ", must be bulk_address=tcp_address of a store, such as "
                                    "cache-1:7071=cache-1:7070"));
    }
    const std::string bulk = pair.substr(0, equals);
    const std::string grpc = pair.substr(equals + 1);
    CERTKV_RETURN_IF_ERROR(CheckAddress("kvstore.nccl_peers", bulk));
    CERTKV_RETURN_IF_ERROR(CheckAddress("kvstore.nccl_peers", grpc));
    addresses[bulk] = grpc;
  }
  return addresses;
}

absl::Status CheckNcclPeers(const NcclConfig& config, const BulkConfig& bulk) {
  CERTKV_ASSIGN_OR_RETURN(const auto addresses, config.PeerAddresses());
  const std::vector<std::string> peers = bulk.peer_list();
  const bool is_insecure = bulk.access.tcp_security == TcpSecurity::kInsecure;
  for (const auto& [pulled, asked] : addresses) {
    const bool is_peer = std::find(peers.begin(), peers.end(), pulled) != peers.end();
    if (!is_peer && !bulk.has_members) {
      return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                       absl::StrCat("kvstore.nccl_peers has ", pulled,
                                    ", which is none of kvstore.bulk_peers; add it there, for what "
                                    "doesn't come by NCCL comes by TCP"));
    }
    if (is_insecure && !IsLoopback(absl::string_view(asked).substr(0, asked.rfind(':')))) {
      return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                       absl::StrCat("kvstore.nccl_peers has ", asked,
                                    " with server.tcp_security insecure, which is for loopback "
                                    "addresses only; use mutual_tls or tls, or 127.0.0.1"));
    }
  }
  return absl::OkStatus();
}

void AddNcclFields(NcclConfig* config, ConfigSection* section) {
  section->AddEnum<NcclChoice>(
      "nccl", &config->choice,
      {{"off", NcclChoice::kOff}, {"auto", NcclChoice::kAuto}, {"require", NcclChoice::kRequire}},
      "whether blocks of other stores come by NCCL, from GPU to GPU, where both sides can, and by "
      "TCP where not: off, never; auto, where the library and a GPU are here; require, and "
      "the store does not start without them. Needs device: auto or cuda. NCCL encrypts nothing, "
      "whatever section server says");
  section->AddString("nccl_library", &config->library, 4096,
                     "NCCL's library, 2.14 or newer and the same version as the other stores', "
                     "as dlopen finds it");
  section->AddString("nccl_peers", &config->peers, 65536,
                     "stores of bulk_peers that are asked to send by NCCL: "
                     "bulk_address=tcp_address, with commas between; empty means none");
  section->AddSize("nccl_in_flight", &config->in_flight_bytes, {1 << 17, int64_t{1} << 34},
                   "memory of the GPU, and of pinned host memory, of one link to another store: "
                   "half of it is on its way while the other half is copied");
  section->AddInteger("nccl_link_limit", &config->link_limit, {1, 64}, "links",
                      "links to other stores at a time, one for each peer, cache and tenant, and "
                      "as many of others to this one");
  section->AddDuration("nccl_timeout", &config->timeout_ms, {100, 3'600'000},
                       "how long making a link, or a run of blocks over it, may take before TCP "
                       "takes over");
  section->AddDuration("nccl_retry_time", &config->retry_ms, {100, int64_t{24} * 3'600'000},
                       "how long blocks of a peer come by TCP after NCCL failed with it");
  section->AddDuration("nccl_idle_time", &config->idle_ms, {100, 3'600'000},
                       "how long a link stays when no pull uses it");
  section->AddCheck([config] { return config->PeerAddresses().status(); });
}

}  // namespace certkv::kvstore
