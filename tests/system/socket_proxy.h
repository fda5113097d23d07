// A Unix socket between clients and a server, which a test cuts.
#ifndef CERTKV_TESTS_SYSTEM_SOCKET_PROXY_H_
#define CERTKV_TESTS_SYSTEM_SOCKET_PROXY_H_

#include <atomic>
#include <cstdint>
#include <list>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/shared_memory.h"

namespace certkv {

// Forwards bytes both ways between each connection to `path` and one of its own to `upstream`.
// Threads: all methods are safe.
class SocketProxy {
 public:
  SocketProxy(std::string path, std::string upstream);
  ~SocketProxy();
  SocketProxy(const SocketProxy&) = delete;
  SocketProxy& operator=(const SocketProxy&) = delete;

  const std::string& path() const { return path_; }

  // Both ends of every connection see the end of the stream, wherever in a message it is.
  void Cut();
  // Clients see the end of the stream; what they still send goes on to the server.
  void HalfClose();
  // Nothing is forwarded until it is called with false.
  void Stall(bool stalled) { stalled_ = stalled; }

  // Connections cut or half closed.
  int64_t cut_count() const { return cut_count_; }

 private:
  struct Connection {
    UniqueFd client;
    UniqueFd server;
    std::thread forwarder;
    std::atomic<bool> is_over{false};
  };

  void Accept();
  void Forward(Connection* connection);
  // Joins the forwarders of connections that are over.
  void Reap() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string path_;
  const std::string upstream_;
  UniqueFd listener_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> stalled_{false};
  std::atomic<int64_t> cut_count_{0};
  absl::Mutex mutex_;
  std::list<Connection> connections_ ABSL_GUARDED_BY(mutex_);
  std::thread acceptor_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_SOCKET_PROXY_H_
