// A CertKV cluster over several hosts: three with a store and a certifier each, two with a gate,
// one with etcd and Redis; workers where a test wants them.
#ifndef CERTKV_TESTS_SYSTEM_HOST_CLUSTER_H_
#define CERTKV_TESTS_SYSTEM_HOST_CLUSTER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "clients/cli/child_process.h"
#include "clients/cpp/options.h"
#include "tests/support/server_process.h"
#include "tests/system/certificates.h"
#include "tests/system/host_network.h"
#include "tests/system/reclaim.h"

namespace certkv {

inline constexpr int kNodeHosts = 3;      // hosts 0, 1, 2
inline constexpr int kFirstGateHost = 3;  // and 4
inline constexpr int kGateHosts = 2;
inline constexpr int kControlHost = 5;
inline constexpr int kHostCount = 6;

// One server of the cluster.
struct HostServer {
  std::string program;  // "certkv-gate"
  int host = 0;
  std::string socket;
  std::string wire_versions;  // of another release; "" = this one
  int64_t clock_skew_ms = 0;  // of another release: its clock is so much ahead
  std::unique_ptr<cli::ChildProcess> process;
};

// Over namespaces all that leaves a host is under mutual TLS, but for etcd and Redis. Threads: one.
class HostCluster {
 public:
  // `node_yaml` goes to the stores' section kvstore, `gate_yaml` to the gates' section gate.
  // Errors: FailedPrecondition, as HostNetwork::Create; and what the programs say.
  static absl::StatusOr<std::unique_ptr<HostCluster>> Start(HostKind kind,
                                                            const std::string& node_yaml,
                                                            const std::string& gate_yaml);
  ~HostCluster();
  HostCluster(const HostCluster&) = delete;
  HostCluster& operator=(const HostCluster&) = delete;

  HostNetwork& network() { return *network_; }
  // In the order of a rolling restart: gates, then each node's certifier and store.
  std::vector<HostServer>& servers() { return servers_; }
  HostServer& server(const std::string& program, int host);

  // Of a worker on a node's host.
  client::Options options(int host) const;
  // `worker` as WorkerProcess::Start says.
  absl::StatusOr<std::unique_ptr<WorkerProcess>> StartWorker(int host, const std::string& model,
                                                             const std::string& mode,
                                                             int64_t lease_duration_ms);

  // SIGKILL.
  void Kill(HostServer& server);
  // Starts it and waits until it serves.
  absl::Status Run(HostServer& server);
  // SIGTERM, a drain, and the program of a release that speaks `wire_versions`, with such a clock.
  absl::Status Replace(HostServer& server, const std::string& wire_versions,
                       int64_t clock_skew_ms = 0);
  // SIGSTOP or SIGCONT to what runs on a host; workers are the caller's.
  void Signal(int host, int number);
  // One value of a node's metrics, the sum over its labels; -1: it did not answer.
  double Metric(int host, const std::string& name) const;
  // Until every node says that it sees `count` nodes.
  absl::Status WaitForNodes(int count) const;
  std::string Logs() const;

 private:
  HostCluster() = default;
  std::string Path(const std::string& name) const { return directory_ + "/" + name; }
  std::string LogOf(const HostServer& server) const;
  std::string ConfigOf(const HostServer& server) const;
  std::string ServerYaml() const;
  void StartControl();

  std::string directory_;
  Certificates certificates_;
  std::unique_ptr<HostNetwork> network_;
  std::string node_yaml_;
  std::string gate_yaml_;
  std::unique_ptr<ServerProcess> etcd_;
  std::unique_ptr<ServerProcess> redis_;
  std::vector<HostServer> servers_;
  int worker_count_ = 0;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_HOST_CLUSTER_H_
