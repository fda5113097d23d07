// X.509 certificates in PEM files: what can be said of them before a handshake fails without a
// reason.
#ifndef CERTKV_SERVICES_COMMON_CERTIFICATE_H_
#define CERTKV_SERVICES_COMMON_CERTIFICATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

struct CertificateInfo {
  std::string subject;        // "CN = engine"
  int64_t not_before_ms = 0;  // Unix epoch
  int64_t not_after_ms = 0;
  // Whom it is of: common names, then alternative names (DNS, URI, e-mail).
  std::vector<std::string> names;
};
// The first certificate of a PEM text. Errors: InvalidArgument [TLS_CERTIFICATE_INVALID].
absl::StatusOr<CertificateInfo> ParseCertificate(absl::string_view pem);

// Errors: FailedPrecondition [TLS_CERTIFICATE_EXPIRED], it is over or has not begun; `what` names
// it.
absl::Status CheckValidity(const CertificateInfo& info, int64_t now_ms, absl::string_view what);

// Paths of PEM files; "" = none.
struct CertificateFiles {
  std::string certificate;  // with the chain below the CA
  std::string key;
  std::string ca;  // whose certificates the peer is believed by
};
// Can a server or client begin with these? The key is the certificate's, private, and all
// certificates are valid now.
// Errors: InvalidArgument [TLS_CERTIFICATE_INVALID]; FailedPrecondition [TLS_CERTIFICATE_EXPIRED |
// SECRET_FILE_UNSAFE]; NotFound [SECRET_FILE_UNREADABLE].
absl::Status CheckCertificateFiles(const CertificateFiles& files, int64_t now_ms);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_CERTIFICATE_H_
