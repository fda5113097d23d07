#include "services/kvstore/bulk_config.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/identity.h"

namespace certkv::kvstore {
namespace {

constexpr size_t kPathBytesMax = 4096;

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID", message);
}

}  // namespace

std::vector<std::string> BulkConfig::peer_list() const { return SplitNames(peers); }

absl::Status CheckBulkConfig(const BulkConfig& config) {
  if (!config.is_on()) return absl::OkStatus();
  AccessConfig access = config.access;
  access.tcp_address = config.address;
  CERTKV_RETURN_IF_ERROR(
      WithContext(CheckAccessConfig(access), "kvstore.bulk_address, for which section server's"));
  const bool is_insecure = access.tcp_security == TcpSecurity::kInsecure;
  for (const std::string& peer : config.peer_list()) {
    CERTKV_RETURN_IF_ERROR(CheckAddress("kvstore.bulk_peers", peer));
    const absl::string_view host = absl::string_view(peer).substr(0, peer.rfind(':'));
    if (is_insecure && !IsLoopback(host)) {
      return Invalid(absl::StrCat("kvstore.bulk_peers has ", peer,
                                  " with server.tcp_security insecure, which is for loopback "
                                  "addresses only; use mutual_tls or tls, or 127.0.0.1"));
    }
  }
  if (!config.pulls() || is_insecure) return absl::OkStatus();
  if (config.peer_ca.empty()) {
    return Invalid(
        "kvstore.bulk_peers or cluster.etcd is set without bulk_peer_ca, by which their "
        "certificates are "
        "believed; deploy/tls/make-certificates makes one");
  }
  const bool has_pair = !config.certificate.empty() && !config.key.empty();
  if (access.tcp_security == TcpSecurity::kMutualTls && !has_pair) {
    return Invalid(
        "kvstore.bulk_peers or cluster.etcd is set with server.tcp_security mutual_tls, which "
        "needs "
        "bulk_certificate and bulk_key; deploy/tls/make-certificates makes them (client)");
  }
  if (access.tcp_security == TcpSecurity::kTls && config.token_file.empty()) {
    return Invalid(
        "kvstore.bulk_peers or cluster.etcd is set with server.tcp_security tls, which needs "
        "bulk_token_file; "
        "deploy/tls/make-certificates makes a token");
  }
  return absl::OkStatus();
}

void AddBulkFields(BulkConfig* config, ConfigSection* section) {
  section->AddString("bulk_address", &config->address, 256,
                     "host:port at which other stores fetch blocks, protected as section server "
                     "says of its TCP port; empty means that none can");
  section->AddString("bulk_peers", &config->peers, 65536,
                     "bulk_address of the stores that PullBlocks may name, with commas between; "
                     "empty means none");
  section->AddString("bulk_peer_ca", &config->peer_ca, kPathBytesMax,
                     "PEM file of the authorities by which these stores are believed");
  section->AddString("bulk_certificate", &config->certificate, kPathBytesMax,
                     "PEM file of the client certificate that is shown to them; this and the other "
                     "files are read again for each pull");
  section->AddString("bulk_key", &config->key, kPathBytesMax,
                     "PEM file of its private key; others may not read it");
  section->AddString("bulk_token_file", &config->token_file, kPathBytesMax,
                     "file of a token that is shown to them, too; empty means none");
  section->AddInteger("bulk_connections", &config->connections, {1, 64}, "connections",
                      "connections over which one pull fetches");
  section->AddInteger("bulk_connection_limit", &config->connection_limit, {1, 65536}, "connections",
                      "connections that other stores may have to this one");
  section->AddSize("bulk_in_flight", &config->in_flight_bytes, {1 << 16, int64_t{1} << 40},
                   "bytes that one pull has asked for and not received; at least one block a "
                   "connection; twice what the link carries in a round trip fills it");
  section->AddDuration("bulk_timeout", &config->timeout_ms, {100, 3'600'000},
                       "how long one block may take, or the answer to a request for it, before "
                       "the connection is made anew");
  section->AddInteger("bulk_idle_connections", &config->idle_connections, {0, 64}, "connections",
                      "connections to one peer, for one cache and tenant, that stay open for the "
                      "next pull; 0: each pull makes its own");
  // Shorter than the minute after which the other side ends them.
  section->AddDuration("bulk_idle_time", &config->idle_time_ms, {100, 50'000},
                       "how long such a connection stays open when no pull uses it");
  section->AddInteger("bulk_threads", &config->threads, {1, 256}, "threads",
                      "threads that send, receive and check blocks");
  section->AddCheck(
      [config] { return config->has_access ? CheckBulkConfig(*config) : absl::OkStatus(); });
}

}  // namespace certkv::kvstore
