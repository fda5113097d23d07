#include "services/common/server_runner.h"

#include <fcntl.h>
#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "kernels/core/check.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/call_counter.h"
#include "services/common/clock.h"
#include "services/common/health_service.h"
#include "services/common/rpc_observer.h"
#include "services/common/runtime_directory.h"
#include "services/common/unix_listener.h"

namespace certkv {
namespace {

constexpr int kKeepaliveTimeMs = 30000;     // a silent connection is probed
constexpr int kKeepaliveTimeoutMs = 10000;  // and closed when nothing answers
constexpr int kClientPingIntervalMinMs = 10000;
constexpr int kMetadataBytesMax = 16 << 10;
constexpr unsigned kCertificateRefreshSeconds = 1;  // between looks at the files
constexpr absl::Duration kShutdownPoll = absl::Milliseconds(20);
// From the end of the last call to the closing of its connection, so that the client has read the
// answer: a client that writes to a closed connection first takes that for the end of the call.
constexpr absl::Duration kLastBytesTime = absl::Milliseconds(100);

absl::Status Refused(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason, message);
}

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Does some process accept connections at the socket?
bool IsLive(const std::string& path) {
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  const int result =
      connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  return result == 0 || errno == EAGAIN;  // EAGAIN: it lives and its queue is full
}

// Process-wide settings of gRPC, made before the first server is built.
void PrepareGrpc() {
  static const bool kDone = [] {
    // Never undone. Otherwise the last server's destructor ends the library, which waits for its
    // polling threads: up to 10 seconds (seen), although every call has ended.
    grpc_init();
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  static_cast<void>(kDone);
}

void SetLimits(const ServerConfig& config, grpc::ServerBuilder* builder) {
  builder->SetMaxReceiveMessageSize(kMessageBytesMax);
  builder->SetMaxSendMessageSize(kMessageBytesMax);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, config.streams_per_connection_max);
  builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMetadataBytesMax);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveTimeMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kClientPingIntervalMinMs);
  // With it two servers would share a TCP port and calls go to either.
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
}

}  // namespace

ConfigSection ServerConfigSection(ServerConfig* config, absl::string_view socket_name) {
  ConfigSection section("server", "Where the process listens, and its threads.");
  section.AddString("unix_socket", &config->unix_socket, 107,
                    absl::StrCat("path of the gRPC socket; empty means ", socket_name,
                                 " in $CERTKV_RUNTIME_DIR, else $XDG_RUNTIME_DIR/certkv, else "
                                 "/tmp/certkv-<uid>"));
  AddAccessFields(&config->access, &section);
  section.AddInteger("io_threads", &config->io_threads, {.min = 0, .max = 1024}, "threads",
                     "threads for computing, timers and background work; 0 means one per "
                     "processor, at least 2");
  section.AddDuration("drain_timeout", &config->drain_timeout_ms, {.min = 0, .max = 600000},
                      "how long running calls may take to finish after SIGTERM");
  section.AddInteger("streams_per_connection_max", &config->streams_per_connection_max,
                     {.min = 1, .max = 65536}, "calls",
                     "calls that one connection may have open at once");
  section.AddEnum<LogLevel>("log_level", &config->log_level,
                            {{"debug", LogLevel::kDebug},
                             {"info", LogLevel::kInfo},
                             {"warning", LogLevel::kWarning},
                             {"error", LogLevel::kError}},
                            "least level that is logged to stderr");
  section.AddEnum<LogFormat>("log_format", &config->log_format,
                             {{"text", LogFormat::kText}, {"json", LogFormat::kJson}},
                             "how lines of the log look: key=value, or a JSON object each");
  section.AddString("http_address", &config->http_address, 256,
                    "host:port of the metrics (/metrics) and, at gate, the dashboard (/); empty "
                    "means none; without http_token_file a loopback address such as "
                    "127.0.0.1:9464");
  section.AddString("http_token_file", &config->http_token_file, 4096,
                    "file with the token that callers of http_address must send (Authorization: "
                    "Bearer); at least 16 bytes; others may not read it; empty means none");
  section.AddCheck([config] { return CheckAddress("http_address", config->http_address); });
  return section;
}

ServerRunner::ServerRunner(absl::string_view program, ServerConfig config)
    : program_(program),
      config_(std::move(config)),
      calls_(std::make_unique<CallCounter>()),
      observer_(std::make_unique<RpcObserver>()),
      health_(std::make_unique<HealthService>()),
      work_guard_(boost::asio::make_work_guard(io_context_)),
      signals_(io_context_) {
  SetLogService(program);
  SetLogFormat(config_.log_format);
  SetLeastLogLevel(config_.log_level);
  // A peer that went away is an error of a write, not the end of the process.
  std::signal(SIGPIPE, SIG_IGN);
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  const int count = config_.io_threads > 0 ? config_.io_threads : std::max(2, processors);
  for (int i = 0; i < count; ++i) {
    threads_.emplace_back([this] { io_context_.run(); });
  }
  // Signals go to a thread that waits in the io_context. ThreadSanitizer would hold one back for
  // ever that comes to a thread inside Abseil's or gRPC's waits, which it doesn't see.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  sigaddset(&stop_signals, SIGTERM);
  sigaddset(&stop_signals, SIGHUP);
  sigaddset(&stop_signals, SIGINT);
  pthread_sigmask(SIG_BLOCK, &stop_signals, &mask_before_);
}

ServerRunner::~ServerRunner() {
  Shutdown(0);
  pthread_sigmask(SIG_SETMASK, &mask_before_, nullptr);
}

absl::Status ServerRunner::ClaimSocket() {
  const std::string& path = config_.unix_socket;
  if (path.empty() || socket_lock_.valid()) return absl::OkStatus();
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "SOCKET_PATH_TOO_LONG",
                     absl::StrCat("socket path ", path, " has ", path.size(),
                                  " bytes, the system allows ", sizeof(sockaddr_un::sun_path) - 1,
                                  "; choose a shorter one with --socket or CERTKV_RUNTIME_DIR"));
  }
  CERTKV_RETURN_IF_ERROR(EnsureSocketDirectory(DirectoryOf(path)));
  const std::string lock_path = path + ".lock";
  UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock.valid()) {
    return MakeError(absl::StatusCode::kUnavailable, "SOCKET_DIRECTORY_FAILED",
                     absl::StrCat("can't make ", lock_path, ": ", std::strerror(errno),
                                  "; choose another place with --socket"));
  }
  const std::string in_use = absl::StrCat("another server listens on ", path,
                                          "; stop it, or choose another path with --socket");
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return Refused("SOCKET_IN_USE", in_use);
  struct stat info {};
  const bool exists = lstat(path.c_str(), &info) == 0;
  if (exists && !S_ISSOCK(info.st_mode)) {
    return Refused("SOCKET_PATH_TAKEN",
                   absl::StrCat(path,
                                " exists and is no socket; it is left alone: move it away, "
                                "or choose another path with --socket"));
  }
  if (exists && IsLive(path)) return Refused("SOCKET_IN_USE", in_use);
  if (exists) {
    Log(LogLevel::kInfo, "stale_socket_replaced", {{"path", path}});
    unlink(path.c_str());
  }
  socket_lock_ = std::move(lock);
  return absl::OkStatus();
}

absl::Status ServerRunner::Start(std::vector<ServedService> services) {
  CERTKV_CHECK(server_ == nullptr, "a runner is started once");
  services_ = std::move(services);
  PrepareGrpc();
  grpc::ServerBuilder builder;
  SetLimits(config_, &builder);
  int tcp_port = 0;
  if (config_.unix_socket.empty() && config_.access.tcp_address.empty()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "NO_ADDRESS",
                     "neither a Unix socket nor a TCP address is configured; set one");
  }
  if (!config_.unix_socket.empty()) {
    CERTKV_RETURN_IF_ERROR(ClaimSocket());
    unix_acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        grpc::InsecureServerCredentials());
  }
  if (!config_.access.tcp_address.empty()) {
    CERTKV_RETURN_IF_ERROR(CheckAccessConfig(config_.access));
    CERTKV_ASSIGN_OR_RETURN(const auto credentials, TcpCredentials());
    builder.AddListeningPort(config_.access.tcp_address, credentials, &tcp_port);
  }
  builder.RegisterService(health_.get());
  // Before anybody can see that the server is up and asks it to stop.
  boost::system::error_code error;
  signals_.add(SIGTERM, error);
  signals_.add(SIGINT, error);
  if (reload_) signals_.add(SIGHUP, error);
  WaitForSignal();
  for (const ServedService& served : services_) {
    health_->AddService(served.name);
    const auto ready = [this, name = served.name] { health_->SetServing(name); };
    if (served.when_ready) {
      served.when_ready(ready);
    } else {
      ready();
    }
    for (grpc::Service* service : served.services) builder.RegisterService(service);
  }
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(calls_->MakeFactory());
  interceptors.push_back(observer_->MakeFactory());
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                     absl::StrCat("can't listen on ", config_.access.tcp_address,
                                  "; is the port taken, or the host not this one?"));
  }
  if (!config_.unix_socket.empty()) {
    CERTKV_RETURN_IF_ERROR(ListenOnUnixSocket());
    targets_.push_back("unix:" + config_.unix_socket);
  }
  if (!config_.access.tcp_address.empty()) {
    const std::string& address = config_.access.tcp_address;
    targets_.push_back(absl::StrCat(address.substr(0, address.rfind(':')), ":", tcp_port));
  }
  Log(LogLevel::kInfo, "listening",
      {{"program", program_}, {"targets", absl::StrJoin(targets_, ",")}, {"pid", getpid()}});
  return absl::OkStatus();
}

absl::Status ServerRunner::ListenOnUnixSocket() {
  CERTKV_ASSIGN_OR_RETURN(UnixPeerList peers,
                          ParseUnixPeers(config_.access.unix_users, config_.access.unix_groups));
  CERTKV_ASSIGN_OR_RETURN(
      unix_listener_,
      UnixListener::Create(config_.unix_socket, std::move(peers), &io_context_, [this](int socket) {
        grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
        connection.fd = socket;
        unix_acceptor_->HandleNewConnection(&connection);
      }));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> ServerRunner::TcpCredentials() const {
  const AccessConfig& access = config_.access;
  if (access.tcp_security == TcpSecurity::kInsecure) return grpc::InsecureServerCredentials();
  const CertificateFiles files = access.certificate_files();
  CERTKV_RETURN_IF_ERROR(CheckCertificateFiles(files, RealClock()->NowMs()));
  auto provider = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      files.key, files.certificate, files.ca, kCertificateRefreshSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE);
  if (!files.ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

void ServerRunner::WaitForSignal() {
  signals_.async_wait([this](const boost::system::error_code& error, int signal_number) {
    if (error) return;
    if (signal_number == SIGHUP) {
      reload_();
      return WaitForSignal();
    }
    {
      absl::MutexLock lock(&mutex_);
      if (stop_requested_) {
        Log(LogLevel::kWarning, "stopped_at_once", {{"signal", signal_number}});
        if (!config_.unix_socket.empty()) unlink(config_.unix_socket.c_str());
        std::_Exit(1);
      }
    }
    Log(LogLevel::kInfo, "signal", {{"signal", signal_number}});
    RequestStop();
    WaitForSignal();
  });
}

void ServerRunner::Run() {
  CERTKV_CHECK(server_ != nullptr, "Run comes after a successful Start");
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&stop_requested_));
  }
  Shutdown(config_.drain_timeout_ms);
}

void ServerRunner::RequestStop() {
  absl::MutexLock lock(&mutex_);
  stop_requested_ = true;
}

void ServerRunner::Shutdown(int64_t drain_timeout_ms) {
  if (server_ != nullptr) {
    const auto begin = std::chrono::steady_clock::now();
    const auto timeout = std::chrono::milliseconds(drain_timeout_ms);
    Log(LogLevel::kInfo, "draining", {{"program", program_}, {"timeout_ms", drain_timeout_ms}});
    health_->Drain();
    unix_listener_.reset();  // removes the socket
    // In reverse, because a later service may use an earlier one.
    for (auto served = services_.rbegin(); served != services_.rend(); ++served) {
      if (served->drain) served->drain();
    }
    // Stops accepting at once, waits for running calls, cancels them when the time is over.
    absl::Notification done;
    std::thread shutdown([this, timeout, &done] {
      server_->Shutdown(std::chrono::system_clock::now() + timeout);
      done.Notify();
    });
    // It waits for idle connections as well (call_counter.h): those are closed once no call runs.
    while (!done.HasBeenNotified()) {
      if (!calls_->WaitUntilIdle(kShutdownPoll)) continue;
      done.WaitForNotificationWithTimeout(kLastBytesTime);
      // Asked again for a call that came before the server had stopped accepting.
      if (calls_->WaitUntilIdle(absl::ZeroDuration())) {
        grpc_server_cancel_all_calls(server_->c_server());
      }
    }
    shutdown.join();
    server_->Wait();
    unix_acceptor_.reset();
    server_.reset();
    const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(
        std::chrono::steady_clock::now() - begin);
    Log(took < timeout ? LogLevel::kInfo : LogLevel::kWarning,
        took < timeout ? "drained" : "drain_timed_out",
        {{"program", program_}, {"took_ms", took.count()}});
  }
  work_guard_.reset();
  io_context_.stop();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  boost::system::error_code error;
  signals_.clear(error);
}

}  // namespace certkv
