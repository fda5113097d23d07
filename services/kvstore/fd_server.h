// FdServer: the Unix socket that hands slabs to sessions and tells when they end.
#ifndef CERTKV_SERVICES_KVSTORE_FD_SERVER_H_
#define CERTKV_SERVICES_KVSTORE_FD_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "services/common/unix_peer.h"
#include "services/kvstore/store_engine.h"

namespace boost::asio {
class io_context;
}  // namespace boost::asio

namespace certkv {
class UnixListener;
}  // namespace certkv

namespace certkv::kvstore {

// Speaks kernels/core/fd_protocol.h. A connection is one session: when it closes, whoever closes
// it, or when the process that connected ends, the session ends. A peer that sends nothing for 10 s
// after connecting, or does not read its replies, is cut off.
//
// Threads: its handlers run on the io_context's threads and never block.
class FdServer {
 public:
  // Makes the socket's directory (0700) and replaces the socket of a store that is gone.
  // `engine` and `io_context` outlive the server.
  // Errors: FailedPrecondition [SOCKET_IN_USE], a live server answers there; [SOCKET_PATH_TAKEN], a
  // file that is no socket; [SOCKET_DIRECTORY_UNSAFE]. InvalidArgument [SOCKET_PATH_TOO_LONG].
  // Unavailable [LISTEN_FAILED | SOCKET_DIRECTORY_FAILED].
  struct Options {
    std::string path;
    int32_t connection_limit = 0;        // one more is closed as soon as it is accepted
    UnixPeerList peers = OwnUserOnly();  // others get an error and are closed
  };
  static absl::StatusOr<std::unique_ptr<FdServer>> Create(const Options& options,
                                                          StoreEngine* engine,
                                                          boost::asio::io_context* io_context);
  // Stops accepting, closes every connection and removes the socket. After it no handler touches
  // the engine.
  ~FdServer();

 private:
  class Connections;

  FdServer(std::unique_ptr<Connections> connections, std::unique_ptr<UnixListener> listener);

  const std::unique_ptr<Connections> connections_;
  std::unique_ptr<UnixListener> listener_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_FD_SERVER_H_
