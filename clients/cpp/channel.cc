// Channels: TLS and tokens as the options say.
#include <grpcpp/support/client_interceptor.h>
#include <sys/stat.h>

#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cpp/rpc.h"
#include "kernels/core/status.h"
#include "services/common/certificate.h"
#include "services/common/client_credentials.h"
#include "services/common/private_file.h"
#include "services/common/wire_version.h"

namespace certkv::client {
namespace {

// A host that is gone says nothing, and TCP alone would wait for it for a quarter of an hour.
constexpr int kConnectTimeoutMs = 1000;    // of one address; then the next is tried
constexpr int kKeepaliveTimeMs = 12000;    // servers allow a ping in 10 s
constexpr int kKeepaliveTimeoutMs = 5000;  // also how long sent bytes may stay unacknowledged

CertificateFiles FilesOf(const Options& options) {
  return {options.certificate_file, options.key_file, options.ca_file};
}

bool IsUnix(const std::string& target) { return absl::StartsWith(target, "unix:"); }

bool IsLoopback(const std::string& target) {
  const absl::string_view host = absl::string_view(target).substr(0, target.rfind(':'));
  return host == "localhost" || host == "[::1]" || absl::StartsWith(host, "127.");
}

// A token file, read again when it changes. Threads: safe.
class TokenFile {
 public:
  explicit TokenFile(std::string path) : path_(std::move(path)) {}

  // The last good token; "" when there never was one.
  std::string Get() ABSL_LOCKS_EXCLUDED(mutex_) {
    struct stat info {};
    absl::MutexLock lock(&mutex_);
    if (stat(path_.c_str(), &info) != 0) return token_;
    const State state{info.st_mtim.tv_sec, info.st_mtim.tv_nsec, static_cast<int64_t>(info.st_ino)};
    if (state == read_) return token_;
    absl::StatusOr<std::string> token = ReadTokenFile(path_);
    if (token.ok()) {
      token_ = *std::move(token);
      read_ = state;
    }
    return token_;
  }

 private:
  using State = std::vector<int64_t>;

  const std::string path_;
  absl::Mutex mutex_;
  State read_ ABSL_GUARDED_BY(mutex_);
  std::string token_ ABSL_GUARDED_BY(mutex_);
};

// Puts the versions that we speak, and the token, into each call. gRPC's own way for tokens, call
// credentials, is for TLS alone, and a Unix socket has none.
class MetadataInterceptor final : public grpc::experimental::Interceptor {
 public:
  MetadataInterceptor(const std::string* versions, TokenFile* token)
      : versions_(versions), token_(token) {}
  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    using Point = grpc::experimental::InterceptionHookPoints;
    if (methods->QueryInterceptionHookPoint(Point::PRE_SEND_INITIAL_METADATA)) {
      methods->GetSendInitialMetadata()->insert({kWireVersionsKey, *versions_});
      const std::string token = token_ == nullptr ? "" : token_->Get();
      if (!token.empty()) {
        methods->GetSendInitialMetadata()->insert({"authorization", "Bearer " + token});
      }
    }
    methods->Proceed();
  }

 private:
  const std::string* const versions_;
  TokenFile* const token_;  // null: none
};

class MetadataInterceptorFactory final
    : public grpc::experimental::ClientInterceptorFactoryInterface {
 public:
  // `token_path` "": no token.
  explicit MetadataInterceptorFactory(const std::string& token_path)
      : versions_(WireVersionsToText(SupportedWireVersions())),
        token_(token_path.empty() ? nullptr : std::make_unique<TokenFile>(token_path)) {}
  grpc::experimental::Interceptor* CreateClientInterceptor(
      grpc::experimental::ClientRpcInfo* /*info*/) override {
    return new MetadataInterceptor(&versions_, token_.get());
  }

 private:
  const std::string versions_;
  const std::unique_ptr<TokenFile> token_;
};

}  // namespace

absl::Status CheckAccess(const Options& options) {
  CERTKV_RETURN_IF_ERROR(CheckCertificateFiles(FilesOf(options), absl::ToUnixMillis(absl::Now())));
  if (options.ca_file.empty() && !options.certificate_file.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TLS_CERTIFICATE_INVALID",
                     "a client certificate needs ca_file as well, by which the server is believed");
  }
  if (options.token_file.empty()) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(ReadTokenFile(options.token_file).status());
  const Options resolved = ResolveTargets(options);
  for (const std::string& target :
       {resolved.kvstore_target, resolved.certifier_target, resolved.gate_target}) {
    if (IsUnix(target) || IsLoopback(target) || !options.ca_file.empty()) continue;
    return MakeError(absl::StatusCode::kInvalidArgument, "TOKEN_UNPROTECTED",
                     absl::StrCat("a token would go to ", target,
                                  " where everybody on the way can read it; set ca_file, so that "
                                  "it goes through TLS"));
  }
  return absl::OkStatus();
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target, const Options& options,
                                           const ChannelTraits& traits) {
  grpc::ChannelArguments arguments;
  if (traits.balance) arguments.SetLoadBalancingPolicyName("round_robin");
  if (!traits.server_name.empty()) arguments.SetSslTargetNameOverride(traits.server_name);
  arguments.SetMaxReceiveMessageSize(kMessageBytesMax);
  arguments.SetMaxSendMessageSize(kMessageBytesMax);
  // A service that was restarted should be found again within a second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (!IsUnix(target)) {
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  }
  const auto credentials =
      ClientCredentials(IsUnix(target) ? CertificateFiles{} : FilesOf(options));
  // Checked again here: a caller that asked nobody must not send a token in the clear either.
  if (!options.token_file.empty() && !IsUnix(target) && !IsLoopback(target) &&
      options.ca_file.empty()) {
    return grpc::CreateCustomChannel(target, nullptr, arguments);  // every call fails
  }
  std::vector<std::unique_ptr<grpc::experimental::ClientInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(std::make_unique<MetadataInterceptorFactory>(options.token_file));
  return grpc::experimental::CreateCustomChannelWithInterceptors(target, credentials, arguments,
                                                                 std::move(interceptors));
}

absl::Status ExplainConnection(const absl::Status& status) {
  if (!absl::IsUnavailable(status) || !ReasonOf(status).empty()) return status;
  const absl::string_view text = status.message();
  if (absl::StrContains(text, "handshake failed")) {
    return MakeError(absl::StatusCode::kUnauthenticated, "TLS_HANDSHAKE_FAILED",
                     absl::StrCat(text,
                                  "; the server's certificate is not one of ca_file, is not "
                                  "valid now, or has another name than the target"));
  }
  const bool is_closed = absl::StrContains(text, "Socket closed") ||
                         absl::StrContains(text, "Broken pipe") ||
                         absl::StrContains(text, "Connection reset");
  if (!absl::StrContains(text, "failed to connect") || !is_closed) return status;
  return MakeError(absl::StatusCode::kUnavailable, "CONNECTION_CLOSED",
                   absl::StrCat(text,
                                "; the server closed the connection before its first use: "
                                "it may refuse this client's certificate, the lack of one, "
                                "or this user, and its log says so"));
}

}  // namespace certkv::client
