// A server started for the demo and stopped with it.
#ifndef CERTKV_CLIENTS_CLI_CHILD_PROCESS_H_
#define CERTKV_CLIENTS_CLI_CHILD_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace certkv::cli {

// Dies with this process (PR_SET_PDEATHSIG), also when that is killed.
class ChildProcess {
 public:
  // Starts `arguments` (the first is the program's path) with `environment` added to ours and its
  // standard error appended to `log_path`. Errors: Internal [SPAWN_FAILED].
  static absl::StatusOr<std::unique_ptr<ChildProcess>> Start(
      const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
      const std::string& log_path);
  ~ChildProcess();  // SIGTERM, then SIGKILL after 10 seconds
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Sends SIGTERM and waits. Errors: Internal [CHILD_FAILED], it ended with another status than 0
  // or had to be killed.
  absl::Status Stop();
  // Errors: Unavailable [CHILD_ENDED], it has ended; with its status and log path.
  absl::Status CheckRunning();
  pid_t pid() const { return pid_; }

 private:
  ChildProcess(pid_t pid, std::string log_path) : pid_(pid), log_path_(std::move(log_path)) {}

  pid_t pid_;  // -1 once reaped
  std::string log_path_;
};

// Directory of the running program.
std::string ProgramDirectory();

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_CHILD_PROCESS_H_
