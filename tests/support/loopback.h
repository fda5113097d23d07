// TCP over the loopback address, for tests and benchmarks.
#ifndef CERTKV_TESTS_SUPPORT_LOOPBACK_H_
#define CERTKV_TESTS_SUPPORT_LOOPBACK_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>

#include "kernels/core/check.h"
#include "kernels/core/shared_memory.h"

namespace certkv {

inline constexpr char kLoopback[] = "127.0.0.1";

inline sockaddr_in SocketAddress(const char* host, int32_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, host, &address.sin_addr);
  return address;
}

// A socket that listens on a free port of an address of this host.
inline UniqueFd ListenOn(const char* host, int32_t* port) {
  UniqueFd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address = SocketAddress(host, 0);
  socklen_t size = sizeof(address);
  CERTKV_CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                   listen(listener.get(), 64) == 0 &&
                   getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0,
               "a port is free");
  *port = ntohs(address.sin_port);
  return listener;
}

inline UniqueFd ListenOnLoopback(int32_t* port) { return ListenOn(kLoopback, port); }

// Invalid where nobody listens.
inline UniqueFd ConnectTo(const char* host, int32_t port) {
  UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = SocketAddress(host, port);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    fd.reset();
  }
  return fd;
}
inline UniqueFd ConnectToLoopback(int32_t port) { return ConnectTo(kLoopback, port); }

// A port that nobody listens on at this moment.
inline int32_t UnusedPort() {
  int32_t port = 0;
  ListenOnLoopback(&port).reset();
  return port;
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_LOOPBACK_H_
