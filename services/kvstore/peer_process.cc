#include "services/kvstore/peer_process.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

#ifdef SO_PEERPIDFD
constexpr int kPeerPidfdOption = SO_PEERPIDFD;
#else
constexpr int kPeerPidfdOption = 77;  // Linux 6.5; Debian 12's headers are older
#endif

int OpenPidfd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

absl::Status PidfdMissing() {
  return MakeError(absl::StatusCode::kUnimplemented, "PIDFD_MISSING",
                   "the kernel has no pidfd_open (Linux 5.3): a session ends when its socket is "
                   "closed by all who hold it, not when its process dies; use a newer kernel");
}

absl::Status PidfdError(pid_t pid, int error) {
  if (error == ENOSYS) return PidfdMissing();
  if (error == ESRCH) {
    return MakeError(absl::StatusCode::kUnavailable, "PEER_ENDED",
                     absl::StrCat("process ", pid, " has ended; attach again"));
  }
  return MakeError(absl::StatusCode::kFailedPrecondition, "PEER_UNKNOWN",
                   absl::StrCat("process ", pid, " of the descriptor socket can't be watched: ",
                                std::strerror(error), "; its session ends with its socket"));
}

}  // namespace

absl::Status CheckPidfdSupport() {
  const UniqueFd self(OpenPidfd(getpid()));
  return self.valid() || errno != ENOSYS ? absl::OkStatus() : PidfdMissing();
}

absl::StatusOr<UniqueFd> OpenPeerPidfd(int socket) {
  int pidfd = -1;
  socklen_t size = sizeof(pidfd);
  if (getsockopt(socket, SOL_SOCKET, kPeerPidfdOption, &pidfd, &size) == 0) return UniqueFd(pidfd);
  struct ucred peer {};
  size = sizeof(peer);
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return PidfdError(0, errno);
  if (peer.pid == 0) return PidfdError(0, ENOENT);  // of a PID namespace that is not below ours
  UniqueFd opened(OpenPidfd(peer.pid));
  if (opened.valid()) return opened;
  return PidfdError(peer.pid, errno);
}

}  // namespace certkv::kvstore
