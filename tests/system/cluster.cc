#include "tests/system/cluster.h"

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "clients/cpp/rpc.h"
#include "kernels/core/status.h"
#include "tests/support/file_content.h"

namespace certkv {
namespace {

// Renamed into its place, so that nobody reads half of it.
void WriteAtOnce(const std::string& path, const std::string& text) {
  std::ofstream(path + ".new") << text;
  std::filesystem::rename(path + ".new", path);
}

}  // namespace

const char* ClusterShapeName(ClusterShape shape) {
  return shape == ClusterShape::kAllInOne ? "AllInOne" : "ThreeProcesses";
}

std::string BinaryDirectory() { return absl::StrCat(cli::ProgramDirectory(), "/../bin"); }

std::string OtherReleaseDirectory() {
  return absl::StrCat(cli::ProgramDirectory(), "/../other_release");
}

std::string DeviceDirectory() { return absl::StrCat(cli::ProgramDirectory(), "/../on_device"); }

absl::Status WaitUntilServing(const std::string& target, cli::ChildProcess& process) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);  // sanitizer builds start slowly
  while (absl::Now() < deadline) {
    CERTKV_RETURN_IF_ERROR(process.CheckRunning());
    const auto channel = client::MakeChannel(target);
    if (channel->WaitForConnected(std::chrono::system_clock::now() +
                                  std::chrono::milliseconds(500))) {
      return absl::OkStatus();
    }
  }
  return absl::DeadlineExceededError(absl::StrCat("no server at ", target, " within 60 s"));
}

absl::Status Cluster::StartServer(Server& server) {
  const bool is_other = !server.wire_versions.empty();
  const std::string programs = is_other           ? OtherReleaseDirectory()
                               : server.on_device ? DeviceDirectory()
                                                  : BinaryDirectory();
  std::vector<std::string> arguments = {absl::StrCat(programs, "/", server.program), "--socket",
                                        server.socket};
  std::vector<std::string> environment = {absl::StrCat("CERTKV_RUNTIME_DIR=", directory_)};
  if (is_other) {
    environment.push_back(absl::StrCat(kOtherReleaseVersions, "=", server.wire_versions));
  }
  if (server.on_device) {
    environment.push_back(
        absl::StrCat(kDeviceFailures, "=", directory_, "/", server.program, ".failures"));
    environment.push_back("CERTKV_DEVICES=2");
    environment.push_back(absl::StrCat("CERTKV_STUB_NCCL=", directory_, "/nccl.failures"));
  }
  const std::string config = absl::StrCat(directory_, "/", server.program, ".yaml");
  if (std::filesystem::exists(config)) {
    arguments.push_back("--config");
    arguments.push_back(config);
  }
  CERTKV_ASSIGN_OR_RETURN(
      server.process,
      cli::ChildProcess::Start(arguments, environment,
                               absl::StrCat(directory_, "/", server.program, ".log")));
  return WaitUntilServing(absl::StrCat("unix:", server.socket), *server.process);
}

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Start(ClusterShape shape,
                                                        const std::string& gate_yaml,
                                                        const ClusterAccess& access) {
  char directory[] = "/tmp/certkv-test-XXXXXX";
  if (mkdtemp(directory) == nullptr) return absl::InternalError("mkdtemp failed");
  std::unique_ptr<Cluster> cluster(new Cluster(shape, directory));
  const std::string base(directory);
  if (shape == ClusterShape::kAllInOne) {
    cluster->servers_.push_back({"certkvd", base + "/certkvd.sock", nullptr, "", false});
  } else {
    cluster->servers_.push_back({"certkv-kvstore", base + "/kvstore.sock", nullptr, "", false});
    cluster->servers_.push_back({"certkv-certifier", base + "/certifier.sock", nullptr, "", false});
    cluster->servers_.push_back({"certkv-gate", base + "/gate.sock", nullptr, "", false});
  }
  for (Server& server : cluster->servers_) {
    server.wire_versions = access.wire_versions;
    server.on_device = access.on_device && server.program != "certkv-gate";
    std::string yaml = access.server_yaml;
    const bool is_all = server.program == "certkvd";
    if (is_all || server.program == "certkv-gate") yaml += gate_yaml;
    if (is_all || server.program == "certkv-kvstore") yaml += access.store_yaml;
    if (is_all || server.program == "certkv-certifier") yaml += access.certifier_yaml;
    if (!access.reader_token.empty() && (is_all || server.program == "certkv-certifier")) {
      yaml += absl::StrCat("certifier:\n  store_token_file: ", access.reader_token, "\n");
    }
    if (!yaml.empty()) std::ofstream(absl::StrCat(base, "/", server.program, ".yaml")) << yaml;
    CERTKV_RETURN_IF_ERROR(cluster->StartServer(server));
  }
  return cluster;
}

Cluster::~Cluster() {
  servers_.clear();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

Cluster::Server& Cluster::Of(ClusterService service) {
  return shape_ == ClusterShape::kAllInOne ? servers_[0] : servers_[static_cast<size_t>(service)];
}

void Cluster::Signal(ClusterService service, int signal_number) {
  kill(Of(service).process->pid(), signal_number);
}

std::string Cluster::ConfigPath(ClusterService service) {
  return absl::StrCat(directory_, "/", Of(service).program, ".yaml");
}

void Cluster::SetDeviceFailures(ClusterService service, const std::string& failures) {
  WriteAtOnce(absl::StrCat(directory_, "/", Of(service).program, ".failures"), failures);
}

void Cluster::SetNcclFailures(const std::string& failures) {
  WriteAtOnce(absl::StrCat(directory_, "/nccl.failures"), failures);
}

client::Options Cluster::options() const {
  client::Options options;
  options.kvstore_target = absl::StrCat("unix:", servers_[0].socket);
  if (shape_ == ClusterShape::kThreeProcesses) {
    options.certifier_target = absl::StrCat("unix:", servers_[1].socket);
    options.gate_target = absl::StrCat("unix:", servers_[2].socket);
  }
  options = client::ResolveTargets(options);
  options.rpc_timeout_ms = 5000;
  return options;
}

void Cluster::Kill(ClusterService service) {
  kill(Of(service).process->pid(), SIGKILL);
  // Reaped, so that the pid and the sockets are really free.
  while (Of(service).process->CheckRunning().ok()) absl::SleepFor(absl::Milliseconds(1));
}

absl::Status Cluster::Restart(ClusterService service) { return StartServer(Of(service)); }

absl::Status Cluster::Replace(ClusterService service, const std::string& wire_versions) {
  Server& server = Of(service);
  CERTKV_RETURN_IF_ERROR(server.process->Stop());
  server.wire_versions = wire_versions;
  return StartServer(server);
}

absl::Status Cluster::Stop() {
  for (auto server = servers_.rbegin(); server != servers_.rend(); ++server) {
    CERTKV_RETURN_IF_ERROR(server->process->Stop());
  }
  return absl::OkStatus();
}

std::string Cluster::Logs() const {
  std::string text;
  for (const Server& server : servers_) {
    absl::StrAppend(&text, "--- ", server.program, "\n",
                    ContentOf(absl::StrCat(directory_, "/", server.program, ".log")));
  }
  return text;
}

}  // namespace certkv
