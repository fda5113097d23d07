#include "services/kvstore/fd_server.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/io_context.hpp>
#include <boost/asio/strand.hpp>
#include <cerrno>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/log.h"
#include "services/common/runtime_directory.h"
#include "services/common/unix_listener.h"
#include "services/kvstore/fd_connection.h"
#include "services/kvstore/peer_process.h"

namespace certkv::kvstore {
namespace {

using boost::asio::local::stream_protocol;

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

// The connections that are open.
class FdServer::Connections {
 public:
  Connections(int32_t limit, StoreEngine* engine, boost::asio::io_context* io_context)
      : limit_(static_cast<size_t>(limit)),
        io_context_(io_context),
        gate_(std::make_shared<EngineGate>()) {
    absl::MutexLock lock(&gate_->mutex);
    gate_->engine = engine;
  }

  // Owns the descriptor.
  void Add(int descriptor) {
    FdConnection::Socket socket(boost::asio::make_strand(*io_context_));
    boost::system::error_code error;
    socket.assign(stream_protocol(), descriptor, error);
    if (error) {
      close(descriptor);
      return;
    }
    absl::MutexLock lock(&mutex_);
    connections_.erase(std::remove_if(connections_.begin(), connections_.end(),
                                      [](const auto& weak) { return weak.expired(); }),
                       connections_.end());
    if (connections_.size() >= limit_) return;  // the socket closes
    const auto connection = std::make_shared<FdConnection>(std::move(socket), gate_);
    connections_.push_back(connection);
    connection->Start();
  }

  // After the last Add.
  void CloseAll() {
    std::vector<std::weak_ptr<FdConnection>> connections;
    {
      absl::MutexLock lock(&mutex_);
      connections.swap(connections_);
    }
    {
      absl::MutexLock lock(&gate_->mutex);
      gate_->engine = nullptr;
    }
    for (const auto& weak : connections) {
      if (const auto connection = weak.lock()) connection->Close();
    }
  }

 private:
  const size_t limit_;
  boost::asio::io_context* const io_context_;
  const std::shared_ptr<EngineGate> gate_;
  absl::Mutex mutex_;
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
  auto connections = std::make_unique<Connections>(options.connection_limit, engine, io_context);
  CERTKV_ASSIGN_OR_RETURN(
      auto listener,
      UnixListener::Create(
          options.path, options.peers, io_context,
          [raw = connections.get()](int socket) { raw->Add(socket); }, FdConnection::Refuse));
  return std::unique_ptr<FdServer>(new FdServer(std::move(connections), std::move(listener)));
}

FdServer::FdServer(std::unique_ptr<Connections> connections, std::unique_ptr<UnixListener> listener)
    : connections_(std::move(connections)), listener_(std::move(listener)) {}

FdServer::~FdServer() {
  listener_.reset();  // it adds connections
  connections_->CloseAll();
}

}  // namespace certkv::kvstore
