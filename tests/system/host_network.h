// Several hosts on one machine: a network namespace each, with a link of its own to a switch; or,
// where nobody may make namespaces, addresses of the loopback interface.
#ifndef CERTKV_TESTS_SYSTEM_HOST_NETWORK_H_
#define CERTKV_TESTS_SYSTEM_HOST_NETWORK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "clients/cli/child_process.h"

namespace certkv {

enum class HostKind : uint8_t {
  kNamespaces,  // links can be cut and slowed down
  kLoopback,    // neither; a host is cut off by pausing what runs on it
};

// Hosts are 0, 1, ...; their addresses are of 198.18.0.0/24 (RFC 2544: tests of networks), or
// 127.0.1.1, 127.0.2.1, ... Namespaces are gone when this process is, however it ends.
// Threads: one.
class HostNetwork {
 public:
  // `names`: hosts that a name stands for, by gRPC's dns resolver. Files go to `directory`.
  // Errors: FailedPrecondition, namespaces, veth links or a bridge can't be made here; says which.
  static absl::StatusOr<std::unique_ptr<HostNetwork>> Create(HostKind kind, int host_count,
                                                             const std::string& name,
                                                             const std::vector<int>& named,
                                                             const std::string& directory);
  HostNetwork(const HostNetwork&) = delete;
  HostNetwork& operator=(const HostNetwork&) = delete;

  HostKind kind() const { return kind_; }
  std::string address(int host) const;
  // What comes before the words of a program that shall run on `host`.
  std::vector<std::string> words(int host) const;
  // gRPC target of `port` of the named hosts.
  std::string target(int port) const;

  // kNamespaces. Cuts off a host, or connects it again. Connections of before stay half open.
  absl::Status SetLink(int host, bool is_up);
  // kNamespaces. The same between two hosts alone.
  absl::Status SetPath(int a, int b, bool is_open);
  // kNamespaces. Makes a host's link slow_link(), or what it was.
  absl::Status SetSlow(int host, bool is_slow);
  // netem with delay and loss where the kernel has it, else tbf, which delays by its queue and
  // drops what overflows it.
  const std::string& slow_link() const { return slow_link_; }

 private:
  explicit HostNetwork(HostKind kind) : kind_(kind) {}
  absl::Status MakeNamespaces(int host_count);
  absl::StatusOr<std::unique_ptr<cli::ChildProcess>> StartAnchor(bool is_first);
  std::vector<std::string> WordsOf(const cli::ChildProcess& anchor) const;
  // A command inside a namespace.
  absl::Status Run(const cli::ChildProcess& anchor, const std::string& command) const;

  const HostKind kind_;
  std::string directory_;
  std::string name_;
  std::vector<int> named_;
  bool is_root_ = false;  // else the namespaces belong to a user namespace
  std::string slow_link_;
  // Processes that do nothing but hold a namespace.
  std::unique_ptr<cli::ChildProcess> switch_;
  std::vector<std::unique_ptr<cli::ChildProcess>> anchors_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_HOST_NETWORK_H_
