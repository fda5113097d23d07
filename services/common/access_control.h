// AccessControl: who makes a call, and may that caller make it?
#ifndef CERTKV_SERVICES_COMMON_ACCESS_CONTROL_H_
#define CERTKV_SERVICES_COMMON_ACCESS_CONTROL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "services/common/access_config.h"
#include "services/common/access_file.h"
#include "services/common/clock.h"
#include "services/common/identity.h"
#include "services/common/unix_peer.h"

namespace grpc {
class ServerContextBase;
}  // namespace grpc

namespace certkv {

// How a call came, without the wire.
struct CallOrigin {
  bool is_unix = false;
  std::string token = {};        // "" = none was shown
  std::string certificate = {};  // PEM, of a chain that TLS has verified; "" = none
  std::vector<std::string> certificate_names = {};
};

// A token decides where one is shown, else the certificate, else the way that the call came.
// Threads: all methods are safe.
class AccessControl {
 public:
  // `clock` outlives the object. Errors: those of AccessTable::ReadFile and CheckAccessConfig.
  static absl::StatusOr<std::unique_ptr<AccessControl>> Create(const AccessConfig& config,
                                                               const Clock* clock);

  // Reads the access file again. On an error, which is as Create's, what was in force stays.
  absl::Status Reload();

  // Who calls. Errors: Unauthenticated [TOKEN_REQUIRED | TOKEN_UNKNOWN | TLS_CERTIFICATE_UNKNOWN |
  // TLS_CERTIFICATE_EXPIRED].
  absl::StatusOr<IdentityPtr> Identify(const CallOrigin& origin) const;

  const UnixPeerList& unix_peers() const { return unix_peers_; }

 private:
  AccessControl(AccessConfig config, UnixPeerList unix_peers, const Clock* clock)
      : config_(std::move(config)), unix_peers_(std::move(unix_peers)), clock_(clock) {}

  std::shared_ptr<const AccessTable> Table() const ABSL_LOCKS_EXCLUDED(mutex_);
  // A connection outlives the validity of the certificate that it was made with.
  absl::Status CheckExpiry(const std::string& certificate) const ABSL_LOCKS_EXCLUDED(mutex_);

  const AccessConfig config_;
  const UnixPeerList unix_peers_;
  const Clock* const clock_;
  mutable absl::Mutex mutex_;
  std::shared_ptr<const AccessTable> table_ ABSL_GUARDED_BY(mutex_);  // null: no access file
  // By PEM text, so that a certificate is parsed once.
  mutable absl::flat_hash_map<std::string, CertificateInfo> known_ ABSL_GUARDED_BY(mutex_);
};

CallOrigin OriginOf(const grpc::ServerContextBase& context);

// Does the caller speak a version of this server's? One that sends none is a program made from the
// protos by hand; it is not asked. Errors: as WireVersionsFromText and ChooseWireVersion.
absl::Status CheckWireVersions(const grpc::ServerContextBase& context);

// The caller, if it has the scope. `access` null: everybody is the owner; for servers in tests.
// Errors: as CheckWireVersions and AccessControl::Identify; PermissionDenied [SCOPE_MISSING].
absl::StatusOr<IdentityPtr> Admit(const AccessControl* access,
                                  const grpc::ServerContextBase& context, Scope scope);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_ACCESS_CONTROL_H_
