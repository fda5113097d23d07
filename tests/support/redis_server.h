// A Redis server of a test's own, on a Unix socket in a fresh directory.
#ifndef CERTKV_TESTS_SUPPORT_REDIS_SERVER_H_
#define CERTKV_TESTS_SUPPORT_REDIS_SERVER_H_

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace certkv {

class RedisServer {
 public:
  // With `keeps_data` a restart finds what was written (each write is on disk before its answer).
  explicit RedisServer(bool keeps_data = false, std::vector<std::string> more = {})
      : keeps_data_(keeps_data), more_(std::move(more)) {
    char directory[] = "/tmp/certkv-redis-XXXXXX";
    EXPECT_NE(mkdtemp(directory), nullptr);
    directory_ = directory;
    Start();
  }
  ~RedisServer() {
    Kill();
    std::filesystem::remove_all(directory_);
  }
  RedisServer(const RedisServer&) = delete;
  RedisServer& operator=(const RedisServer&) = delete;

  std::string socket() const { return directory_ + "/redis.sock"; }

  void Start() {
    std::vector<std::string> words = {"redis-server",
                                      "--port",
                                      "0",
                                      "--unixsocket",
                                      socket(),
                                      "--dir",
                                      directory_,
                                      "--save",
                                      "",
                                      "--appendonly",
                                      keeps_data_ ? "yes" : "no",
                                      "--appendfsync",
                                      "always",
                                      "--logfile",
                                      directory_ + "/redis.log"};
    words.insert(words.end(), more_.begin(), more_.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // also when the test is killed
      execvp("redis-server", arguments.data());
      _exit(127);
    }
    for (int i = 0; i < 1000 && !Listens(); ++i) absl::SleepFor(absl::Milliseconds(10));
    ASSERT_TRUE(Listens()) << "no redis-server, or it does not start; ./dev test installs it";
  }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  // SIGSTOP and SIGCONT: it is there and does not answer.
  void Signal(int number) const { kill(pid_, number); }

 private:
  bool Listens() const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", socket().c_str());
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    const bool listens = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    close(fd);
    return listens;
  }

  const bool keeps_data_;
  const std::vector<std::string> more_;
  std::string directory_;
  pid_t pid_ = 0;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_REDIS_SERVER_H_
