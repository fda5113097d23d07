// A TCP port between a client and a server of a test, which cuts, damages or holds up what the
// server sends.
#ifndef CERTKV_TESTS_SUPPORT_TCP_PROXY_H_
#define CERTKV_TESTS_SUPPORT_TCP_PROXY_H_

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <list>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/shared_memory.h"
#include "tests/support/loopback.h"

namespace certkv {

inline bool SendAll(int fd, const char* bytes, size_t size) {
  while (size > 0) {
    const ssize_t sent = send(fd, bytes, size, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

// Threads: all methods are safe.
class TcpProxy {
 public:
  explicit TcpProxy(int32_t upstream_port)
      : upstream_port_(upstream_port), listener_(ListenOnLoopback(&port_)) {
    acceptor_ = std::thread([this] { Accept(); });
  }
  ~TcpProxy() {
    is_stopped_ = true;
    acceptor_.join();
    for (std::thread& thread : threads_) thread.join();
  }
  TcpProxy(const TcpProxy&) = delete;
  TcpProxy& operator=(const TcpProxy&) = delete;

  int32_t port() const { return port_; }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  // Each of the next `times` connections is cut after so many bytes of the server.
  void CutAfter(int64_t bytes, int32_t times) {
    cut_after_ = bytes;
    cuts_left_ = times;
  }
  // Flips a bit of byte `at` of all that the server sends over all connections, once.
  void FlipBitAt(int64_t at) { flip_at_ = at; }
  // Nothing goes on after so many bytes of the server, until it is called anew.
  void StallAfter(int64_t bytes) { stall_after_ = bytes; }
  // Nothing goes on, either way, over the connections that are open now: their other end is gone
  // and nobody said so.
  void FreezeOpen() { frozen_ = connections_.load(); }
  // New connections are closed, and those that are open.
  void Refuse(bool refuse) { is_refusing_ = refuse; }
  // At most so many bytes of the server a second, over all connections; 0: no limit.
  void SetRate(int64_t bytes_per_second) { rate_ = bytes_per_second; }

  int64_t forwarded_bytes() const { return forwarded_; }
  int32_t connection_count() const { return connections_; }

 private:
  static constexpr int kPollMs = 5;

  void Accept() {
    while (!is_stopped_) {
      pollfd waiting{listener_.get(), POLLIN, 0};
      if (poll(&waiting, 1, kPollMs) <= 0) continue;
      const int client = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (client < 0) continue;
      if (is_refusing_) {
        close(client);
        continue;
      }
      const int32_t number = connections_++;
      threads_.emplace_back([this, client, number] { Forward(UniqueFd(client), number); });
    }
  }

  void Forward(UniqueFd client, int32_t number) {
    const UniqueFd server = ConnectToLoopback(upstream_port_);
    if (!server.valid()) return;
    const bool is_cut = cuts_left_.fetch_sub(1) > 0;
    int64_t left = is_cut ? cut_after_.load() : std::numeric_limits<int64_t>::max();
    std::vector<char> buffer(64 << 10);
    while (!is_stopped_ && !is_refusing_ && left > 0) {
      if (number < frozen_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs));
        continue;
      }
      pollfd ends[] = {{client.get(), POLLIN, 0}, {server.get(), POLLIN, 0}};
      const bool is_stalled = forwarded_ >= stall_after_;
      if (is_stalled) ends[1].events = 0;
      if (poll(ends, 2, kPollMs) <= 0) continue;
      if (ends[0].revents != 0) {
        const ssize_t got = recv(client.get(), buffer.data(), buffer.size(), 0);
        if (got <= 0 || !SendAll(server.get(), buffer.data(), static_cast<size_t>(got))) return;
      }
      if (ends[1].revents == 0 || is_stalled) continue;
      int64_t most =
          std::min({left, static_cast<int64_t>(buffer.size()), stall_after_ - forwarded_});
      if (rate_ > 0) most = std::min<int64_t>(most, 1 + rate_ / 100);
      if (most <= 0) continue;  // another connection has brought the bytes to the stall meanwhile
      const ssize_t got = recv(server.get(), buffer.data(), static_cast<size_t>(most), 0);
      if (got <= 0) return;
      const int64_t from = forwarded_.fetch_add(got);
      const int64_t flip = flip_at_ - from;
      if (flip >= 0 && flip < got) buffer[static_cast<size_t>(flip)] ^= 1;
      Pace(got);
      if (!SendAll(client.get(), buffer.data(), static_cast<size_t>(got))) return;
      left -= got;
    }
  }

  // Waits until the bytes have their turn.
  void Pace(int64_t bytes) {
    using Clock = std::chrono::steady_clock;
    if (rate_ == 0) return;
    const int64_t now = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
    int64_t turn = next_turn_ns_.load();
    int64_t end;
    do {
      end = std::max(now, turn) + bytes * 1'000'000'000 / rate_;
    } while (!next_turn_ns_.compare_exchange_weak(turn, end));
    std::this_thread::sleep_for(std::chrono::nanoseconds(end - now));
  }

  const int32_t upstream_port_;
  int32_t port_ = 0;
  const UniqueFd listener_;
  std::atomic<bool> is_stopped_{false};
  std::atomic<bool> is_refusing_{false};
  std::atomic<int64_t> cut_after_{0};
  std::atomic<int32_t> cuts_left_{0};
  std::atomic<int64_t> flip_at_{-1};
  std::atomic<int64_t> stall_after_{std::numeric_limits<int64_t>::max()};
  std::atomic<int64_t> rate_{0};
  std::atomic<int64_t> next_turn_ns_{0};
  std::atomic<int64_t> forwarded_{0};
  std::atomic<int32_t> connections_{0};
  std::atomic<int32_t> frozen_{0};  // connections before this one
  std::list<std::thread> threads_;  // of the acceptor's thread
  std::thread acceptor_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_TCP_PROXY_H_
