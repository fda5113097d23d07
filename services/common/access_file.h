// The access file of a server: which tokens and certificates there are, and what each may do.
//
//   identities:
//     - name: engine-a
//       token_sha256: 8f3c...   # of the token, in hexadecimal; the token itself is never here
//       scopes: read, write
//       tenants: a
//     - name: operator
//       certificate: operator.example.org
//       scopes: read, admin, risk
//       tenants: "*"
#ifndef CERTKV_SERVICES_COMMON_ACCESS_FILE_H_
#define CERTKV_SERVICES_COMMON_ACCESS_FILE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "services/common/config_reader.h"
#include "services/common/identity.h"

namespace certkv {

inline constexpr int32_t kIdentitiesMax = 4096;

using IdentityPtr = std::shared_ptr<const Identity>;

// Threads: immutable.
class AccessTable {
 public:
  // Errors: as ConfigReader::ReadText; InvalidArgument [ACCESS_FILE_INVALID], with the identity.
  static absl::StatusOr<std::shared_ptr<const AccessTable>> Parse(absl::string_view file_name,
                                                                  const std::string& text);
  // Errors: as Parse, ConfigReader::ReadFile and CheckPrivateFile.
  static absl::StatusOr<std::shared_ptr<const AccessTable>> ReadFile(const std::string& path);

  // Null when nobody has it. Compares the SHA-256 of the token with every entry's, each to its
  // end: the time says nothing about which one, if any, it is.
  IdentityPtr FindToken(absl::string_view token) const;
  // By one of the names that a certificate authority has written into a certificate.
  IdentityPtr FindCertificate(absl::Span<const std::string> names) const;

  int32_t size() const { return static_cast<int32_t>(entries_.size()); }

 private:
  struct Entry {
    IdentityPtr identity;
    std::string token_sha256;  // 32 bytes, or "": it has no token
    std::string certificate;   // a name, or "": it has none
  };
  std::vector<Entry> entries_;
};

// The file's settings as Markdown, for docs/config.md.
std::string AccessFileMarkdown();

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_ACCESS_FILE_H_
