#include "services/common/access_control.h"

#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_context.h>
#include <grpcpp/server_context.h>

#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/private_file.h"
#include "services/common/wire_version.h"

namespace certkv {
namespace {

constexpr size_t kCertificatesKnownMax = 1024;
constexpr absl::string_view kBearer = "bearer ";

absl::Status Unauthenticated(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kUnauthenticated, reason, message);
}

const IdentityPtr& Owner() {
  static const auto* const kOwner =
      new IdentityPtr(std::make_shared<const Identity>(OwnerIdentity()));
  return *kOwner;
}

std::string ToString(const grpc::string_ref& text) { return std::string(text.data(), text.size()); }

}  // namespace

absl::StatusOr<std::unique_ptr<AccessControl>> AccessControl::Create(const AccessConfig& config,
                                                                     const Clock* clock) {
  CERTKV_RETURN_IF_ERROR(CheckAccessConfig(config));
  CERTKV_ASSIGN_OR_RETURN(UnixPeerList peers,
                          ParseUnixPeers(config.unix_users, config.unix_groups));
  std::unique_ptr<AccessControl> access(new AccessControl(config, std::move(peers), clock));
  CERTKV_RETURN_IF_ERROR(access->Reload());
  return access;
}

absl::Status AccessControl::Reload() {
  if (config_.access_file.empty()) return absl::OkStatus();
  CERTKV_ASSIGN_OR_RETURN(auto table, AccessTable::ReadFile(config_.access_file));
  absl::MutexLock lock(&mutex_);
  table_ = std::move(table);
  return absl::OkStatus();
}

std::shared_ptr<const AccessTable> AccessControl::Table() const {
  absl::ReaderMutexLock lock(&mutex_);
  return table_;
}

absl::Status AccessControl::CheckExpiry(const std::string& certificate) const {
  CertificateInfo info;
  {
    absl::MutexLock lock(&mutex_);
    const auto known = known_.find(certificate);
    if (known != known_.end()) {
      info = known->second;
    } else {
      CERTKV_ASSIGN_OR_RETURN(info, ParseCertificate(certificate));
      if (known_.size() >= kCertificatesKnownMax) known_.clear();
      known_.emplace(certificate, info);
    }
  }
  const absl::Status status = CheckValidity(info, clock_->NowMs(), "the client's certificate");
  return status.ok() ? status : Unauthenticated("TLS_CERTIFICATE_EXPIRED", status.message());
}

absl::StatusOr<IdentityPtr> AccessControl::Identify(const CallOrigin& origin) const {
  const std::shared_ptr<const AccessTable> table = Table();
  if (!origin.certificate.empty()) CERTKV_RETURN_IF_ERROR(CheckExpiry(origin.certificate));
  if (!origin.token.empty()) {
    IdentityPtr identity = table == nullptr || origin.token.size() > kTokenBytesMax
                               ? nullptr
                               : table->FindToken(origin.token);
    if (identity != nullptr) return identity;
    return Unauthenticated("TOKEN_UNKNOWN",
                           table == nullptr
                               ? "the server has no access file, so no token is known; call "
                                 "without one, or set server.access_file"
                               : "the token is none of the server's access file; it was "
                                 "withdrawn, or the server has not read the file again (SIGHUP)");
  }
  if (!origin.certificate_names.empty() && table != nullptr) {
    IdentityPtr identity = table->FindCertificate(origin.certificate_names);
    if (identity != nullptr) return identity;
    if (config_.tcp_security == TcpSecurity::kMutualTls) {
      return Unauthenticated("TLS_CERTIFICATE_UNKNOWN",
                             absl::StrCat("the certificate of ", origin.certificate_names[0],
                                          " is valid, but no identity of the server's access "
                                          "file has this name; add one, or show a token"));
    }
  }
  const bool is_open = origin.is_unix
                           ? !config_.unix_requires_token
                           : config_.tcp_security == TcpSecurity::kInsecure && table == nullptr;
  if (is_open) return Owner();
  return Unauthenticated("TOKEN_REQUIRED",
                         "the call shows neither a token nor a certificate that is known; send "
                         "one of the access file's tokens (token_file, --token-file, "
                         "CERTKV_TOKEN_FILE)");
}

CallOrigin OriginOf(const grpc::ServerContextBase& context) {
  CallOrigin origin;
  origin.is_unix = absl::StartsWith(context.peer(), "unix:");
  const auto& metadata = context.client_metadata();
  const auto header = metadata.find("authorization");
  if (header != metadata.end()) {
    const std::string value = ToString(header->second);
    // What is no bearer token is a token that nobody has, not the absence of one.
    origin.token = absl::StartsWithIgnoreCase(value, kBearer) ? value.substr(kBearer.size()) : "?";
  }
  if (origin.is_unix) return origin;
  const auto auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) return origin;
  for (const char* property : {GRPC_X509_CN_PROPERTY_NAME, GRPC_X509_SAN_PROPERTY_NAME}) {
    for (const auto& name : auth->FindPropertyValues(property)) {
      if (!name.empty()) origin.certificate_names.push_back(ToString(name));
    }
  }
  const auto pem = auth->FindPropertyValues(GRPC_X509_PEM_CERT_PROPERTY_NAME);
  if (!pem.empty()) origin.certificate = ToString(pem[0]);
  return origin;
}

absl::Status CheckWireVersions(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto sent = metadata.find(kWireVersionsKey);
  if (sent == metadata.end()) return absl::OkStatus();
  CERTKV_ASSIGN_OR_RETURN(const WireVersions theirs, WireVersionsFromText(ToString(sent->second)));
  return ChooseWireVersion(theirs, "the client", SupportedWireVersions(), "the server").status();
}

absl::StatusOr<IdentityPtr> Admit(const AccessControl* access,
                                  const grpc::ServerContextBase& context, Scope scope) {
  CERTKV_RETURN_IF_ERROR(CheckWireVersions(context));
  if (access == nullptr) return Owner();
  CERTKV_ASSIGN_OR_RETURN(IdentityPtr identity, access->Identify(OriginOf(context)));
  CERTKV_RETURN_IF_ERROR(identity->CheckScope(scope));
  return identity;
}

}  // namespace certkv
