#include "tests/system/socket_proxy.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <utility>
#include <vector>

#include "kernels/core/check.h"

namespace certkv {
namespace {

constexpr int kPollMs = 20;

// Writes all of it; false when the other end is gone.
bool WriteAll(int socket, const char* bytes, size_t size) {
  while (size > 0) {
    const ssize_t sent = send(socket, bytes, size, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

}  // namespace

SocketProxy::SocketProxy(std::string path, std::string upstream)
    : path_(std::move(path)),
      upstream_(std::move(upstream)),
      listener_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
  CERTKV_CHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                   listen(listener_.get(), 64) == 0,
               "a proxy's path is free");
  acceptor_ = std::thread([this] { Accept(); });
}

SocketProxy::~SocketProxy() {
  stopping_ = true;
  acceptor_.join();
  Cut();
  absl::MutexLock lock(&mutex_);
  for (Connection& connection : connections_) connection.forwarder.join();
  connections_.clear();
  unlink(path_.c_str());
}

void SocketProxy::Cut() {
  absl::MutexLock lock(&mutex_);
  for (Connection& connection : connections_) {
    if (connection.is_over) continue;
    ++cut_count_;
    shutdown(connection.client.get(), SHUT_RDWR);
    shutdown(connection.server.get(), SHUT_RDWR);
  }
}

void SocketProxy::HalfClose() {
  absl::MutexLock lock(&mutex_);
  for (Connection& connection : connections_) {
    if (connection.is_over) continue;
    ++cut_count_;
    shutdown(connection.client.get(), SHUT_WR);
  }
}

void SocketProxy::Accept() {
  while (!stopping_) {
    pollfd waiting{listener_.get(), POLLIN, 0};
    if (poll(&waiting, 1, kPollMs) <= 0) continue;
    UniqueFd client(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!client.valid()) continue;
    absl::StatusOr<UniqueFd> server = ConnectUnixSocket(upstream_);
    if (!server.ok()) continue;  // the client's connection closes, as the server's would
    absl::MutexLock lock(&mutex_);
    Reap();
    Connection& connection = connections_.emplace_back();
    connection.client = std::move(client);
    connection.server = *std::move(server);
    connection.forwarder = std::thread([this, one = &connection] { Forward(one); });
  }
}

void SocketProxy::Reap() {
  for (auto it = connections_.begin(); it != connections_.end();) {
    if (!it->is_over) {
      ++it;
      continue;
    }
    it->forwarder.join();
    it = connections_.erase(it);
  }
}

void SocketProxy::Forward(Connection* connection) {
  std::vector<char> buffer(64 << 10);
  bool is_open = true;
  while (is_open && !stopping_) {
    pollfd ends[] = {{connection->client.get(), POLLIN, 0}, {connection->server.get(), POLLIN, 0}};
    if (stalled_) {
      poll(nullptr, 0, kPollMs);
      continue;
    }
    if (poll(ends, 2, kPollMs) <= 0) continue;
    for (int i = 0; i < 2 && is_open; ++i) {
      if (ends[i].revents == 0) continue;
      const ssize_t got = recv(ends[i].fd, buffer.data(), buffer.size(), 0);
      // After a half close the client's end takes no more, but may still send.
      if (got <= 0) is_open = false;
      if (got > 0 && !WriteAll(ends[1 - i].fd, buffer.data(), static_cast<size_t>(got))) {
        is_open = i == 1;
      }
    }
  }
  shutdown(connection->client.get(), SHUT_RDWR);
  shutdown(connection->server.get(), SHUT_RDWR);
  connection->is_over = true;
}

}  // namespace certkv
