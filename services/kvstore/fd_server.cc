#include "services/kvstore/fd_server.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/strand.hpp>
#include <cerrno>
#include <chrono>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/common/runtime_directory.h"
#include "services/kvstore/fd_connection.h"
#include "services/kvstore/peer_process.h"

namespace certkv::kvstore {
namespace {

using boost::asio::local::stream_protocol;

constexpr std::chrono::milliseconds kAcceptRetryDelay(100);

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status CheckPathLength(const std::string& path) {
  if (!path.empty() && path.size() < sizeof(sockaddr_un::sun_path)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "SOCKET_PATH_TOO_LONG",
                   absl::StrCat("fd_socket has ", path.size(), " bytes, must have 1 to ",
                                sizeof(sockaddr_un::sun_path) - 1,
                                "; choose a shorter runtime directory: ", path));
}

// Removes a socket that nobody listens on any more.
absl::Status RemoveStaleSocket(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0 && errno == ENOENT) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SOCKET_PATH_TAKEN",
                     absl::StrCat(path,
                                  " is a file that is no socket; remove it or choose another "
                                  "fd_socket"));
  }
  const absl::StatusOr<UniqueFd> probe = ConnectUnixSocket(path);
  if (probe.ok()) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SOCKET_IN_USE",
                     absl::StrCat("a server listens on ", path,
                                  " already; stop it or choose another fd_socket"));
  }
  unlink(path.c_str());
  return absl::OkStatus();
}

}  // namespace

class FdServer::Acceptor : public std::enable_shared_from_this<FdServer::Acceptor> {
 public:
  Acceptor(const Options& options, StoreEngine* engine, boost::asio::io_context* io_context)
      : path_(options.path),
        connection_limit_(static_cast<size_t>(options.connection_limit)),
        peers_(options.peers),
        io_context_(io_context),
        acceptor_(boost::asio::make_strand(*io_context)),
        retry_timer_(acceptor_.get_executor()),
        gate_(std::make_shared<EngineGate>()) {
    absl::MutexLock lock(&gate_->mutex);
    gate_->engine = engine;
  }

  absl::Status Listen() {
    boost::system::error_code error;
    acceptor_.open(stream_protocol(), error);
    if (!error) acceptor_.bind(stream_protocol::endpoint(path_), error);
    if (!error) is_bound_ = true;
    if (!error) CERTKV_RETURN_IF_ERROR(SetSocketMode(path_, peers_));
    if (!error) acceptor_.listen(stream_protocol::socket::max_listen_connections, error);
    if (error) {
      return MakeError(absl::StatusCode::kUnavailable, "LISTEN_FAILED",
                       absl::StrCat("listening on ", path_, ": ", error.message(),
                                    "; check the directory or choose another fd_socket"));
    }
    AcceptNext();
    return absl::OkStatus();
  }

  void Stop() {
    std::vector<std::weak_ptr<FdConnection>> connections;
    {
      absl::MutexLock lock(&mutex_);
      stopping_ = true;
      connections.swap(connections_);
    }
    {
      absl::MutexLock lock(&gate_->mutex);
      gate_->engine = nullptr;
    }
    for (const auto& weak : connections) {
      if (const auto connection = weak.lock()) connection->Close();
    }
    boost::asio::dispatch(acceptor_.get_executor(), [self = shared_from_this()] {
      boost::system::error_code ignored;
      self->acceptor_.close(ignored);
      self->retry_timer_.cancel();
    });
    if (is_bound_) unlink(path_.c_str());
  }

 private:
  void AcceptNext() {
    acceptor_.async_accept(boost::asio::make_strand(*io_context_),
                           [self = shared_from_this()](const boost::system::error_code& error,
                                                       FdConnection::Socket socket) {
                             self->OnAccept(error, std::move(socket));
                           });
  }

  void OnAccept(const boost::system::error_code& error, FdConnection::Socket socket) {
    if (error == boost::asio::error::operation_aborted) return;
    if (error) {
      // No descriptors left, most likely: the next attempt waits until some may have been freed.
      retry_timer_.expires_after(kAcceptRetryDelay);
      retry_timer_.async_wait(
          [self = shared_from_this()](const boost::system::error_code& stopped) {
            if (!stopped) self->AcceptNext();
          });
      return;
    }
    const absl::Status allowed = CheckPeer(socket.native_handle());
    if (!allowed.ok()) {
      FdConnection::Refuse(std::move(socket), allowed);
      return AcceptNext();
    }
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
      connections_.erase(std::remove_if(connections_.begin(), connections_.end(),
                                        [](const auto& weak) { return weak.expired(); }),
                         connections_.end());
      if (connections_.size() < connection_limit_) {  // else the socket closes here
        const auto connection = std::make_shared<FdConnection>(std::move(socket), gate_);
        connections_.push_back(connection);
        connection->Start();
      }
    }
    AcceptNext();
  }

  absl::Status CheckPeer(int socket) const {
    CERTKV_ASSIGN_OR_RETURN(const UnixPeer peer, PeerOf(socket));
    if (peers_.Allows(peer)) return absl::OkStatus();
    Log(LogLevel::kWarning, "unix_peer_refused",
        {{"path", path_},
         {"user", static_cast<int64_t>(peer.user)},
         {"process", static_cast<int64_t>(peer.process)}});
    return MakeError(absl::StatusCode::kPermissionDenied, "PEER_FORBIDDEN",
                     absl::StrCat("user ", peer.user,
                                  " may not connect to the store's sockets; add it to "
                                  "server.unix_users or a group of its to server.unix_groups"));
  }

  const std::string path_;
  const size_t connection_limit_;
  const UnixPeerList peers_;
  boost::asio::io_context* const io_context_;
  stream_protocol::acceptor acceptor_;
  boost::asio::steady_timer retry_timer_;
  const std::shared_ptr<EngineGate> gate_;
  bool is_bound_ = false;
  absl::Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<FdConnection>> connections_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::unique_ptr<FdServer>> FdServer::Create(const Options& options,
                                                           StoreEngine* engine,
                                                           boost::asio::io_context* io_context) {
  CERTKV_RETURN_IF_ERROR(CheckPathLength(options.path));
  CERTKV_RETURN_IF_ERROR(EnsureSocketDirectory(DirectoryOf(options.path)));
  CERTKV_RETURN_IF_ERROR(RemoveStaleSocket(options.path));
  const absl::Status pidfd = CheckPidfdSupport();
  if (!pidfd.ok()) Log(LogLevel::kWarning, "pidfd_missing", {{"why", pidfd.message()}});
  auto acceptor = std::make_shared<Acceptor>(options, engine, io_context);
  const absl::Status status = acceptor->Listen();
  if (!status.ok()) {
    acceptor->Stop();
    return status;
  }
  return std::unique_ptr<FdServer>(new FdServer(std::move(acceptor)));
}

FdServer::FdServer(std::shared_ptr<Acceptor> acceptor) : acceptor_(std::move(acceptor)) {}

FdServer::~FdServer() { acceptor_->Stop(); }

}  // namespace certkv::kvstore
