#include "clients/cli/child_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"

extern char** environ;

namespace certkv::cli {
namespace {

std::string WaitStatusText(int status) {
  if (WIFEXITED(status)) return absl::StrCat("exit status ", WEXITSTATUS(status));
  return absl::StrCat("signal ", WTERMSIG(status));
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::Start(
    const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
    const std::string& log_path) {
  // Everything is allocated before fork: the child may only make system calls.
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  std::vector<char*> envp;
  for (const std::string& entry : environment) envp.push_back(const_cast<char*>(entry.c_str()));
  for (char** entry = environ; *entry != nullptr; ++entry) envp.push_back(*entry);
  envp.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) {
    return MakeError(absl::StatusCode::kInternal, "SPAWN_FAILED",
                     absl::StrCat("starting ", arguments[0], ": ", std::strerror(errno)));
  }
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);  // the parent died before prctl
    const int log = open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (log >= 0) {
      dup2(log, STDOUT_FILENO);
      dup2(log, STDERR_FILENO);
    }
    execve(argv[0], argv.data(), envp.data());
    _exit(127);
  }
  return std::unique_ptr<ChildProcess>(new ChildProcess(pid, log_path));
}

absl::Status ChildProcess::CheckRunning() {
  int status = 0;
  if (pid_ > 0 && waitpid(pid_, &status, WNOHANG) == 0) return absl::OkStatus();
  pid_ = -1;
  return MakeError(
      absl::StatusCode::kUnavailable, "CHILD_ENDED",
      absl::StrCat("the server ended with ", WaitStatusText(status), "; its log is ", log_path_));
}

absl::Status ChildProcess::Stop() {
  if (pid_ <= 0) return absl::OkStatus();
  kill(pid_, SIGTERM);
  int status = 0;
  bool killed = false;
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (absl::Now() > deadline && !killed) {
      kill(pid_, SIGKILL);
      killed = true;
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
  pid_ = -1;
  if (!killed && WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return MakeError(
      absl::StatusCode::kInternal, "CHILD_FAILED",
      absl::StrCat("the server ended with ", WaitStatusText(status),
                   killed ? " because it didn't drain in 10 s" : "", "; its log is ", log_path_));
}

ChildProcess::~ChildProcess() { Stop().IgnoreError(); }

std::string ProgramDirectory() {
  char path[4096];
  const ssize_t size = readlink("/proc/self/exe", path, sizeof(path) - 1);
  if (size <= 0) return ".";
  std::string program(path, static_cast<size_t>(size));
  return program.substr(0, program.rfind('/'));
}

}  // namespace certkv::cli
