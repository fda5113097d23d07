// FdConnection: one client of the descriptor socket.
#ifndef CERTKV_SERVICES_KVSTORE_FD_CONNECTION_H_
#define CERTKV_SERVICES_KVSTORE_FD_CONNECTION_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <boost/asio/local/stream_protocol.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/system/error_code.hpp>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/fd_protocol.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// The engine while it is there. Handlers hold the lock shared while they use it; whoever takes the
// engine away waits for them.
struct EngineGate {
  absl::Mutex mutex;
  StoreEngine* engine ABSL_GUARDED_BY(mutex) = nullptr;
};

// Invariants:
//  1. The session of the connection ends when the connection does, or the process that made it
//     (which may have left the socket to a child). The latter needs a pidfd; without one it is
//     logged. The connection closes when the session ends.
//  2. One request is answered before the next is read.
// Threads: everything runs on the strand of its socket, but for Close().
class FdConnection : public std::enable_shared_from_this<FdConnection> {
 public:
  using Socket = boost::asio::local::stream_protocol::socket;

  FdConnection(Socket socket, std::shared_ptr<EngineGate> gate);
  ~FdConnection();

  // Says why to a peer that is not served, through a descriptor that is non-blocking.
  static void Refuse(int socket, const absl::Status& why);

  void Start();
  void Close();  // soon, from any thread

 private:
  void ReadRequest();
  void OnRequest(const boost::system::error_code& error);
  // Answers; an error says that the connection is to be closed.
  absl::Status Answer(StoreEngine* engine);
  absl::Status Connect(StoreEngine* engine);
  absl::Status SendStaging(StoreEngine* engine);
  absl::Status SendDescriptors(const std::vector<int>& fds, int32_t staging_slot_count);
  absl::Status SendError(const absl::Status& status);
  // Ends the session when the process at the other end does.
  absl::Status WatchPeer();
  void End(absl::string_view why);

  Socket socket_;
  boost::asio::steady_timer first_request_timer_;
  boost::asio::posix::stream_descriptor peer_;  // a pidfd; closed when there is none
  const std::shared_ptr<EngineGate> gate_;
  FdRequest request_{};
  SessionId session_{};  // 0 until the token was accepted
  std::string token_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_FD_CONNECTION_H_
