// A Redis server of a test's own, on a Unix socket in a fresh directory.
#ifndef CERTKV_TESTS_SUPPORT_REDIS_SERVER_H_
#define CERTKV_TESTS_SUPPORT_REDIS_SERVER_H_

#include <sys/socket.h>
#include <sys/un.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "kernels/core/shared_memory.h"
#include "tests/support/server_process.h"

namespace certkv {

class RedisServer {
 public:
  // With `keeps_data` a restart finds what was written (each write is on disk before its answer).
  explicit RedisServer(bool keeps_data = false, std::vector<std::string> more = {})
      : keeps_data_(keeps_data), more_(std::move(more)) {
    Start();
  }

  std::string socket() const { return process_.directory() + "/redis.sock"; }

  void Start() {
    std::vector<std::string> words = {"redis-server",
                                      "--port",
                                      "0",
                                      "--unixsocket",
                                      socket(),
                                      "--dir",
                                      process_.directory(),
                                      "--save",
                                      "",
                                      "--appendonly",
                                      keeps_data_ ? "yes" : "no",
                                      "--appendfsync",
                                      "always"};
    words.insert(words.end(), more_.begin(), more_.end());
    process_.Start(std::move(words), [this] { return Listens(); });
  }
  void Kill() { process_.Kill(); }
  // SIGSTOP and SIGCONT: it is there and does not answer.
  void Signal(int number) const { process_.Signal(number); }

 private:
  bool Listens() const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", socket().c_str());
    const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    return connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  }

  const bool keeps_data_;
  const std::vector<std::string> more_;
  ServerProcess process_{"redis"};
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_REDIS_SERVER_H_
