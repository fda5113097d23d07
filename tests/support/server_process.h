// A server of a test's own that is somebody else's program.
#ifndef CERTKV_TESTS_SUPPORT_SERVER_PROCESS_H_
#define CERTKV_TESTS_SUPPORT_SERVER_PROCESS_H_

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace certkv {

// Starts `words` in a fresh directory of /tmp, and kills it at the end, also when the test is
// killed.
class ServerProcess {
 public:
  explicit ServerProcess(const std::string& name) {
    directory_ = "/tmp/certkv-" + name + "-XXXXXX";
    EXPECT_NE(mkdtemp(directory_.data()), nullptr);
  }
  ~ServerProcess() {
    Kill();
    std::filesystem::remove_all(directory_);
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  pid_t pid() const { return pid_; }
  const std::string& directory() const { return directory_; }

  // What it prints goes to <directory>/output. Waits until `is_ready()`.
  template <typename IsReady>
  void Start(std::vector<std::string> words, const IsReady& is_ready) {
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const std::string output = directory_ + "/output";
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int fd = open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
      dup2(fd, STDOUT_FILENO);
      dup2(fd, STDERR_FILENO);
      execvp(arguments[0], arguments.data());
      _exit(127);
    }
    for (int i = 0; i < 1000 && !is_ready(); ++i) absl::SleepFor(absl::Milliseconds(10));
    ASSERT_TRUE(is_ready()) << "no " << words[0]
                            << ", or it does not start; ./dev test installs it";
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
  std::string directory_;
  pid_t pid_ = 0;
};

inline bool CanConnect(const sockaddr* address, socklen_t size) {
  const int fd = ::socket(address->sa_family, SOCK_STREAM, 0);
  const bool connected = connect(fd, address, size) == 0;
  close(fd);
  return connected;
}

inline sockaddr_in LoopbackAddress(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

// A TCP port of the loopback address that nobody listens on at this moment.
inline uint16_t UnusedPort() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = LoopbackAddress(0);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  close(fd);
  return ntohs(address.sin_port);
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_SERVER_PROCESS_H_
