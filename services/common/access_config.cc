#include "services/common/access_config.h"

#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/core/status.h"
#include "services/common/unix_peer.h"

namespace certkv {
namespace {

constexpr size_t kPathBytesMax = 4096;

absl::Status Invalid(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID", message);
}

absl::Status CheckTcp(const AccessConfig& config) {
  const std::string& address = config.tcp_address;
  CERTKV_RETURN_IF_ERROR(CheckAddress("tcp_address", address));
  const size_t colon = address.rfind(':');
  if (config.tcp_security == TcpSecurity::kInsecure) {
    if (IsLoopback(absl::string_view(address).substr(0, colon))) return absl::OkStatus();
    return Invalid(absl::StrCat("tcp_address is ", address,
                                " with tcp_security insecure, which is for loopback addresses "
                                "only; use mutual_tls or tls, or 127.0.0.1"));
  }
  const bool is_mutual = config.tcp_security == TcpSecurity::kMutualTls;
  std::vector<std::string> missing;
  if (config.tls_certificate.empty()) missing.emplace_back("tls_certificate");
  if (config.tls_key.empty()) missing.emplace_back("tls_key");
  if (is_mutual && config.tls_client_ca.empty()) missing.emplace_back("tls_client_ca");
  if (config.access_file.empty()) missing.emplace_back("access_file");
  if (missing.empty()) return absl::OkStatus();
  return Invalid(absl::StrCat(
      "tcp_address is ", address, " with tcp_security ", is_mutual ? "mutual_tls" : "tls",
      ", which needs ", absl::StrJoin(missing, ", "), "; deploy/tls/make-certificates makes them"));
}

}  // namespace

bool IsLoopback(absl::string_view host) {
  return host == "localhost" || host == "[::1]" || host == "::1" ||
         (absl::StartsWith(host, "127.") &&
          host.find_first_not_of("0123456789.") == absl::string_view::npos);
}

absl::Status CheckAddress(absl::string_view name, const std::string& address) {
  if (address.empty()) return absl::OkStatus();
  const size_t colon = address.rfind(':');
  int32_t port = -1;
  if (colon == std::string::npos || colon == 0 ||
      !absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535 ||
      absl::StartsWith(address, "unix:")) {
    return Invalid(absl::StrCat(name, " is ", address,
                                ", must be host:port with a port in [0, 65535], such as "
                                "127.0.0.1:7070"));
  }
  return absl::OkStatus();
}

absl::Status CheckAccessConfig(const AccessConfig& config) {
  if (!config.tcp_address.empty()) CERTKV_RETURN_IF_ERROR(CheckTcp(config));
  if (config.unix_requires_token && config.access_file.empty()) {
    return Invalid("unix_requires_token is true, which needs access_file; nobody else could call");
  }
  return ParseUnixPeers(config.unix_users, config.unix_groups).status();
}

void AddAccessFields(AccessConfig* config, ConfigSection* section) {
  section->AddString("tcp_address", &config->tcp_address, 256,
                     "host:port to listen on as well; empty means no TCP");
  section->AddEnum<TcpSecurity>(
      "tcp_security", &config->tcp_security,
      {{"mutual_tls", TcpSecurity::kMutualTls},
       {"tls", TcpSecurity::kTls},
       {"insecure", TcpSecurity::kInsecure}},
      "what protects tcp_address: TLS to clients with a certificate of tls_client_ca, TLS to "
      "clients with a token, or nothing, which is for loopback addresses only");
  section->AddString("tls_certificate", &config->tls_certificate, kPathBytesMax,
                     "PEM file of the server's certificate and the chain below its CA; this and "
                     "the two below are read again when they change");
  section->AddString("tls_key", &config->tls_key, kPathBytesMax,
                     "PEM file of its private key, without a passphrase; others may not read it");
  section->AddString("tls_client_ca", &config->tls_client_ca, kPathBytesMax,
                     "PEM file of the authorities whose client certificates are believed");
  section->AddString("access_file", &config->access_file, kPathBytesMax,
                     "file of the identities that may call, with their tokens, scopes and tenants; "
                     "others may not read it; SIGHUP reads it again");
  section->AddBool("unix_requires_token", &config->unix_requires_token,
                   "ask callers at the Unix socket for a token of access_file too, so that "
                   "processes of one user may be different tenants");
  section->AddString("unix_users", &config->unix_users, 4096,
                     "users, by name or number with commas between, that may connect to the Unix "
                     "sockets; empty, and no unix_groups, means the server's own");
  section->AddString("unix_groups", &config->unix_groups, 4096,
                     "groups whose processes may connect to the Unix sockets");
  section->AddCheck([config] { return CheckAccessConfig(*config); });
}

}  // namespace certkv
