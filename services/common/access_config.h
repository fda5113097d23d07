// How a server is reached, and by whom: part of section "server" of a config file.
#ifndef CERTKV_SERVICES_COMMON_ACCESS_CONFIG_H_
#define CERTKV_SERVICES_COMMON_ACCESS_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "services/common/certificate.h"
#include "services/common/config_reader.h"

namespace certkv {

// What protects the TCP port.
enum class TcpSecurity : uint8_t {
  kMutualTls = 0,  // TLS; a client shows a certificate of tls_client_ca
  kTls = 1,        // TLS; a client shows a token
  kInsecure = 2,   // nothing: loopback addresses only
};

struct AccessConfig {
  std::string tcp_address;  // "host:port", port 0 = any free one; "" = none
  TcpSecurity tcp_security = TcpSecurity::kMutualTls;
  std::string tls_certificate;
  std::string tls_key;
  std::string tls_client_ca;
  std::string access_file;
  bool unix_requires_token = false;
  std::string unix_users;
  std::string unix_groups;

  CertificateFiles certificate_files() const {
    return {tls_certificate, tls_key,
            tcp_security == TcpSecurity::kMutualTls ? tls_client_ca : std::string()};
  }
};
// Errors: InvalidArgument [CONFIG_INVALID], `address`, of the setting `name`, is neither empty nor
// host:port.
absl::Status CheckAddress(absl::string_view name, const std::string& address);

// Is `host` an address that only this host reaches: 127.0.0.1, localhost, [::1] and the like?
bool IsLoopback(absl::string_view host);

// Adds the fields and the checks between them. `config` outlives the section.
void AddAccessFields(AccessConfig* config, ConfigSection* section);

// Errors: InvalidArgument [CONFIG_INVALID]: an address that is none, a port without what its
// protection needs, or one without protection that others than this host could reach.
absl::Status CheckAccessConfig(const AccessConfig& config);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_ACCESS_CONFIG_H_
