// An etcd server of a test's own, on free ports of the loopback address.
#ifndef CERTKV_TESTS_SUPPORT_ETCD_SERVER_H_
#define CERTKV_TESTS_SUPPORT_ETCD_SERVER_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/support/loopback.h"
#include "tests/support/server_process.h"

namespace certkv {

// What was written is found again after Kill() and Start().
class EtcdServer {
 public:
  EtcdServer() { Start(); }

  pid_t pid() const { return process_.pid(); }
  uint16_t port() const { return port_; }
  // A fresh one, which goes with it.
  const std::string& directory() const { return process_.directory(); }
  std::string endpoint() const { return absl::StrCat("127.0.0.1:", port_); }

  void Start() {
    const std::string client = absl::StrCat("http://127.0.0.1:", port_);
    const std::string peer = absl::StrCat("http://127.0.0.1:", peer_port_);
    process_.Start({"etcd", "--data-dir", process_.directory() + "/data", "--listen-client-urls",
                    client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
                    "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer},
                   [this] { return ConnectToLoopback(port_).valid(); });
  }
  void Kill() { process_.Kill(); }
  // SIGSTOP and SIGCONT: it is there and does not answer.
  void Signal(int number) const { process_.Signal(number); }

 private:
  const uint16_t port_ = static_cast<uint16_t>(UnusedPort());
  const uint16_t peer_port_ = static_cast<uint16_t>(UnusedPort());
  ServerProcess process_{"etcd"};
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_ETCD_SERVER_H_
