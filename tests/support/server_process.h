// A server of a test's own that is somebody else's program.
#ifndef CERTKV_TESTS_SUPPORT_SERVER_PROCESS_H_
#define CERTKV_TESTS_SUPPORT_SERVER_PROCESS_H_

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
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

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_SERVER_PROCESS_H_
