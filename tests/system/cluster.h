// The servers of a system test: one certkvd, or three processes, in a fresh runtime directory.
#ifndef CERTKV_TESTS_SYSTEM_CLUSTER_H_
#define CERTKV_TESTS_SYSTEM_CLUSTER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "clients/cli/child_process.h"
#include "clients/cpp/options.h"

namespace certkv {

enum class ClusterShape : uint8_t { kAllInOne, kThreeProcesses };
const char* ClusterShapeName(ClusterShape shape);

enum class ClusterService : uint8_t { kStore, kCertifier, kGate };

// How a cluster's servers are reached, when not by anybody at their Unix sockets.
struct ClusterAccess {
  std::string server_yaml = {};     // more of the config file of every server
  std::string reader_token = {};    // path of the certifier's token for the store
  std::string store_yaml = {};      // more of the config file of the process that runs the store
  std::string certifier_yaml = {};  // and of the certifier's
  // Store and certifier are programs whose GPU is host memory (device_failures.cc).
  bool on_device = false;
  // "1-2": all are servers of a release that speaks these versions; "": of this one.
  std::string wire_versions = {};
};

class Cluster {
 public:
  // `gate_yaml` is the config file of the process that runs gate; "" = defaults.
  static absl::StatusOr<std::unique_ptr<Cluster>> Start(ClusterShape shape,
                                                        const std::string& gate_yaml,
                                                        const ClusterAccess& access = {});
  ~Cluster();

  // Targets filled in; short timeouts, so that a test of an outage is quick.
  client::Options options() const;
  const std::string& directory() const { return directory_; }
  ClusterShape shape() const { return shape_; }

  pid_t pid(ClusterService service) { return Of(service).process->pid(); }
  // SIGKILL to the process that runs `service` (kAllInOne: the one process).
  void Kill(ClusterService service);
  // Sends the process that runs `service` a signal that it survives.
  void Signal(ClusterService service, int signal_number);
  // Its config file, which need not exist.
  std::string ConfigPath(ClusterService service);
  // Starts it again on the same socket and waits until it serves.
  absl::Status Restart(ClusterService service);
  // Ends it as an upgrade does (SIGTERM), and starts the program of the release that speaks
  // `wire_versions` ("": this one) on the same socket.
  absl::Status Replace(ClusterService service, const std::string& wire_versions);
  // From now on the GPU of the process that runs `service` fails so (injected_failures.h). Only
  // with ClusterAccess::on_device.
  void SetDeviceFailures(ClusterService service, const std::string& failures);
  // The same for NCCL of the store (tests/nccl/stub_nccl.cc).
  void SetNcclFailures(const std::string& failures);
  // SIGTERM to all; errors when one doesn't drain to exit status 0.
  absl::Status Stop();
  // What the servers wrote to their logs.
  std::string Logs() const;

 private:
  struct Server {
    std::string program;
    std::string socket;  // path
    std::unique_ptr<cli::ChildProcess> process;
    std::string wire_versions;  // of another release; "" = this one
    bool on_device = false;
  };
  Cluster(ClusterShape shape, std::string directory)
      : shape_(shape), directory_(std::move(directory)) {}
  absl::Status StartServer(Server& server);
  Server& Of(ClusterService service);

  const ClusterShape shape_;
  const std::string directory_;
  std::vector<Server> servers_;  // kAllInOne: one; else store, certifier, gate
};

// Waits until a server's health service says SERVING.
absl::Status WaitUntilServing(const std::string& target, cli::ChildProcess& process);

// Directory of the built programs (certkvd, certkv, ...), beside the tests' own.
std::string BinaryDirectory();

// certkvd, certkv-kvstore and certkv-certifier whose GPU is host memory, and the variable that
// names the file of its failures.
std::string DeviceDirectory();
inline constexpr char kDeviceFailures[] = "CERTKV_TEST_DEVICE_FAILURES";

// certkv-kvstore, certkv-certifier and certkv-gate of another release: the versions that they speak
// stand in their environment, under kOtherReleaseVersions (other_release.cc).
std::string OtherReleaseDirectory();
inline constexpr char kOtherReleaseVersions[] = "CERTKV_TEST_WIRE_VERSIONS";
// Theirs too: by how much their clock is wrong (other_clock.cc).
inline constexpr char kOtherClockSkewMs[] = "CERTKV_TEST_CLOCK_SKEW_MS";

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_CLUSTER_H_
