// UnixListener: accepts connections at a Unix socket and hands over those of allowed peers.
#ifndef CERTKV_SERVICES_COMMON_UNIX_LISTENER_H_
#define CERTKV_SERVICES_COMMON_UNIX_LISTENER_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/io_context.hpp>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/common/unix_peer.h"

namespace certkv {

// gRPC asks nobody who they are at a Unix socket, so the connections that it serves come from here.
// A peer that is not allowed is logged, told why where somebody knows how, and closed.
// Threads: its handlers run on the io_context's threads and never block.
class UnixListener {
 public:
  // Owns the descriptor that it gets, which is non-blocking.
  using Accepted = std::function<void(int socket)>;
  // Tells a peer `why` it is closed: PermissionDenied [PEER_FORBIDDEN], or what PeerOf says. The
  // descriptor is non-blocking and stays the listener's.
  using Refused = std::function<void(int socket, const absl::Status& why)>;

  // `path` is free and its directory there; `io_context` outlives the listener.
  // Errors: Unavailable [LISTEN_FAILED], with the system's text.
  static absl::StatusOr<std::unique_ptr<UnixListener>> Create(const std::string& path,
                                                              UnixPeerList peers,
                                                              boost::asio::io_context* io_context,
                                                              Accepted accepted,
                                                              Refused refused = nullptr);
  // Stops accepting and removes the socket; nothing is called afterwards.
  ~UnixListener();

 private:
  class Acceptor;
  explicit UnixListener(std::shared_ptr<Acceptor> acceptor);
  const std::shared_ptr<Acceptor> acceptor_;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_UNIX_LISTENER_H_
