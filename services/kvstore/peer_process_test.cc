// The pidfd of a socket's peer becomes readable when that process ends, and not before.
#include "services/kvstore/peer_process.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

bool HasEnded(int pidfd, int timeout_ms) {
  pollfd waiting{pidfd, POLLIN, 0};
  return poll(&waiting, 1, timeout_ms) == 1;
}

// A listening socket, and a child process that has connected to it.
class PeerProcessTest : public testing::Test {
 protected:
  PeerProcessTest() {
    path_ = testing::TempDir() + "/peer" + std::to_string(getpid());
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
    unlink(path_.c_str());
    listener_ = UniqueFd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listener_.get(), 1), 0);
    child_ = fork();
    if (child_ == 0) {
      const int client = socket(AF_UNIX, SOCK_STREAM, 0);
      connect(client, reinterpret_cast<sockaddr*>(&address), sizeof(address));
      while (true) pause();
    }
    connection_ = UniqueFd(accept(listener_.get(), nullptr, nullptr));
  }
  ~PeerProcessTest() override {
    KillChild();
    unlink(path_.c_str());
  }
  void KillChild() {
    if (child_ < 0) return;
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
    child_ = -1;
  }

  std::string path_;
  UniqueFd listener_;
  UniqueFd connection_;
  pid_t child_ = -1;
};

TEST_F(PeerProcessTest, EndsWithTheProcessThatConnected) {
  ASSERT_TRUE(CheckPidfdSupport().ok());
  const auto pidfd = OpenPeerPidfd(connection_.get());
  ASSERT_TRUE(pidfd.ok()) << pidfd.status();
  EXPECT_FALSE(HasEnded(pidfd->get(), 20));
  kill(child_, SIGSTOP);
  EXPECT_FALSE(HasEnded(pidfd->get(), 20)) << "a stopped process lives";
  KillChild();
  EXPECT_TRUE(HasEnded(pidfd->get(), 5000));
}

TEST_F(PeerProcessTest, ADescriptorThatIsNoSocketHasNoPeer) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  EXPECT_EQ(ReasonOf(OpenPeerPidfd(reader.get()).status()), "PEER_UNKNOWN");
}

}  // namespace
}  // namespace certkv::kvstore
