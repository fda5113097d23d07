// ServerRunner: a gRPC server of one or several services, with what every CertKV server has:
// health, reflection, a Unix socket (and TCP when asked) for those who may call, message limits,
// threads for timers and computing, and a drain on SIGTERM or SIGINT.
#ifndef CERTKV_SERVICES_COMMON_SERVER_RUNNER_H_
#define CERTKV_SERVICES_COMMON_SERVER_RUNNER_H_

#include <signal.h>
// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/signal_set.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/shared_memory.h"
#include "services/common/access_config.h"
#include "services/common/config_reader.h"
#include "services/common/log.h"

namespace grpc {
class Server;
class ServerBuilder;
class ServerCredentials;
class Service;
namespace experimental {
class ExternalConnectionAcceptor;
}  // namespace experimental
}  // namespace grpc

namespace certkv {

class CallCounter;
class HealthService;
class RpcObserver;
class UnixListener;

struct ServerConfig {
  std::string unix_socket;  // path; "" = none
  AccessConfig access;
  int32_t io_threads = 0;  // of the io_context; 0 = one per processor, at least 2
  int64_t drain_timeout_ms = 10000;
  int32_t streams_per_connection_max = 1024;
  LogLevel log_level = LogLevel::kInfo;
  LogFormat log_format = LogFormat::kText;
  std::string http_address;     // "host:port" of metrics and dashboard; "" = none
  std::string http_token_file;  // "" = none: a loopback address only
};
// Section "server". `socket_name` is the file name of the default socket, for the docs.
ConfigSection ServerConfigSection(ServerConfig* config, absl::string_view socket_name);

// One service as the runner sees it; the objects behind it outlive the runner's Run.
struct ServedService {
  std::string name;  // full name, "certkv.gate.v1.Gate", under which health knows it
  std::vector<grpc::Service*> services;
  std::function<void()> drain;  // called once: no new work, end streams; doesn't block
  // Calls what it is given once, when the service serves: now, or later from any thread. Null: it
  // serves from the start. Until then health says NOT_SERVING.
  std::function<void(std::function<void()>)> when_ready = nullptr;
};

// Invariants:
//  1. The socket file is replaced only while this process holds the lock of "<socket>.lock", so
//     that two servers never own one path.
//  2. Once draining has begun, health says NOT_SERVING and no new call is accepted.
//  3. The io_context's threads run until the last call has ended: calls finish on them.
class ServerRunner {
 public:
  // Starts the threads of the io_context. Until the runner's end the calling thread, and the
  // threads that it starts, leave SIGTERM and SIGINT to those; destroy the runner on the same
  // thread.
  ServerRunner(absl::string_view program, ServerConfig config);
  // As Stop.
  ~ServerRunner();
  ServerRunner(const ServerRunner&) = delete;
  ServerRunner& operator=(const ServerRunner&) = delete;

  // For timers, background work and whatever computes longer than about 100 microseconds.
  boost::asio::io_context* io_context() { return &io_context_; }

  // Makes the Unix socket's directory (0700), makes sure that no live server has the path, and
  // removes the socket of a dead one. A program calls it before its services take other paths.
  // Errors: as Start.
  absl::Status ClaimSocket();

  // Claims the socket when that was not done before, takes SIGTERM and SIGINT over, listens and
  // serves.
  // Errors: FailedPrecondition [SOCKET_IN_USE], a live server has the path; [SOCKET_PATH_TAKEN],
  // a file that is no socket; [SOCKET_DIRECTORY_UNSAFE]. InvalidArgument [SOCKET_PATH_TOO_LONG];
  // [NO_ADDRESS], neither socket nor TCP; as CheckAccessConfig. Unavailable [LISTEN_FAILED |
  // SOCKET_DIRECTORY_FAILED]; as CheckCertificateFiles.
  absl::Status Start(std::vector<ServedService> services);

  // What SIGHUP does, on a thread of the io_context; before Start. Without it SIGHUP ends a
  // process.
  void OnReload(std::function<void()> reload) { reload_ = std::move(reload); }

  // Counts the calls of all services.
  RpcObserver* observer() { return observer_.get(); }

  // gRPC targets that reach the server: "unix:/run/certkv/gate.sock", "127.0.0.1:4711".
  const std::vector<std::string>& targets() const { return targets_; }

  // Blocks until SIGTERM, SIGINT or RequestStop; then drains for at most the configured time,
  // cancels what still runs, and returns. A second signal ends the process at once with status 1.
  void Run();

  // Threads: safe. Doesn't block.
  void RequestStop();

  // Cancels what runs and joins the threads, at once. Nothing happens after Run has returned.
  void Stop() { Shutdown(0); }

 private:
  absl::Status ListenOnUnixSocket();
  // Null where `access` is without TLS.
  absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TcpCredentials() const;
  void WaitForSignal();
  void Shutdown(int64_t drain_timeout_ms);

  const std::string program_;
  const ServerConfig config_;
  const std::unique_ptr<CallCounter> calls_;
  const std::unique_ptr<RpcObserver> observer_;
  const std::unique_ptr<HealthService> health_;
  boost::asio::io_context io_context_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_guard_;
  boost::asio::signal_set signals_;
  std::vector<std::thread> threads_;
  sigset_t mask_before_;
  UniqueFd socket_lock_;
  std::vector<ServedService> services_;
  std::function<void()> reload_;
  std::unique_ptr<grpc::Server> server_;
  // Outlives the listener that calls it, and is destroyed before the server.
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> unix_acceptor_;
  std::unique_ptr<UnixListener> unix_listener_;
  std::vector<std::string> targets_;
  absl::Mutex mutex_;
  bool stop_requested_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_SERVER_RUNNER_H_
