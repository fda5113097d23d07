#include "tests/system/host_cluster.h"

#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "tests/support/file_content.h"
#include "tests/system/cluster.h"

namespace certkv {
namespace {

constexpr int kTargetPort = 7000;
constexpr int kBulkPort = 7001;
constexpr int kGatePort = 7002;
constexpr int kMetricsPort = 9464;
constexpr int kEtcdPort = 2379;
constexpr int kEtcdPeerPort = 2380;
constexpr int kRedisPort = 6379;
constexpr char kGateName[] = "gates.certkv.test";

// Loopback hosts share 127.0.0.1.
int MetricsPort(int host) { return kMetricsPort + host; }

}  // namespace

absl::StatusOr<std::unique_ptr<HostCluster>> HostCluster::Start(HostKind kind,
                                                                const std::string& node_yaml,
                                                                const std::string& gate_yaml) {
  std::unique_ptr<HostCluster> cluster(new HostCluster);
  char directory[] = "/tmp/certkv-hosts-XXXXXX";
  if (mkdtemp(directory) == nullptr) return absl::InternalError("mkdtemp failed");
  cluster->directory_ = directory;
  cluster->node_yaml_ = node_yaml;
  cluster->gate_yaml_ = gate_yaml;
  CERTKV_ASSIGN_OR_RETURN(cluster->network_,
                          HostNetwork::Create(kind, kHostCount, kGateName,
                                              {kFirstGateHost, kFirstGateHost + 1}, directory));
  std::string names = kGateName;
  for (int host = 0; host < kHostCount; ++host) {
    absl::StrAppend(&names, " ", cluster->network_->address(host));
  }
  if (!cluster->certificates_.Make("ca") || !cluster->certificates_.Make("server " + names) ||
      !cluster->certificates_.Make("client engine read,write,risk '*'")) {
    return absl::InternalError("deploy/tls/make-certificates failed");
  }
  cluster->StartControl();
  for (int host = kFirstGateHost; host < kFirstGateHost + kGateHosts; ++host) {
    cluster->servers_.push_back({"certkv-gate", host, "", "", 0, nullptr});
  }
  for (int host = 0; host < kNodeHosts; ++host) {
    cluster->servers_.push_back({"certkv-certifier", host, "", "", 0, nullptr});
    cluster->servers_.push_back({"certkv-kvstore", host, "", "", 0, nullptr});
  }
  for (HostServer& server : cluster->servers_) {
    const std::string place = cluster->Path(absl::StrCat("host", server.host));
    std::filesystem::create_directory(place);
    std::filesystem::permissions(place, std::filesystem::perms::owner_all);
    server.socket =
        absl::StrCat(place, "/", server.program.substr(std::string("certkv-").size()), ".sock");
    std::ofstream(absl::StrCat(server.socket, ".yaml")) << cluster->ConfigOf(server);
    CERTKV_RETURN_IF_ERROR(cluster->Run(server));
  }
  CERTKV_RETURN_IF_ERROR(cluster->WaitForNodes(kNodeHosts));
  return cluster;
}

HostCluster::~HostCluster() {
  servers_.clear();
  etcd_.reset();
  redis_.reset();
  network_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(directory_, ignored);
}

void HostCluster::StartControl() {
  const std::string address = network_->address(kControlHost);
  const auto start = [&](std::unique_ptr<ServerProcess>* server, const std::string& name,
                         const std::vector<std::string>& own, const std::string& ready) {
    *server = std::make_unique<ServerProcess>(name);
    std::vector<std::string> words = network_->words(kControlHost);
    words.insert(words.end(), own.begin(), own.end());
    const std::string output = (*server)->directory() + "/output";
    (*server)->Start(words, [&] { return absl::StrContains(ContentOf(output), ready); });
  };
  const std::string client = absl::StrCat("http://", address, ":", kEtcdPort);
  const std::string peer = absl::StrCat("http://", address, ":", kEtcdPeerPort);
  start(&etcd_, "etcd",
        {"etcd", "--data-dir", Path("etcd"), "--listen-client-urls", client,
         "--advertise-client-urls", client, "--listen-peer-urls", peer,
         "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer},
        "ready to serve client requests");
  start(&redis_, "redis",
        {"redis-server", "--port", absl::StrCat(kRedisPort), "--bind", address, "--protected-mode",
         "no", "--dir", directory_, "--save", ""},
        "Ready to accept connections");
}

std::string HostCluster::ServerYaml() const {
  if (network_->kind() == HostKind::kLoopback) return "server:\n  tcp_security: insecure\n";
  return absl::StrCat("server:\n  tls_certificate: ", certificates_.Path("server.crt"),
                      "\n  tls_key: ", certificates_.Path("server.key"),
                      "\n  tls_client_ca: ", certificates_.Path("ca.crt"),
                      "\n  access_file: ", certificates_.Path("access.yaml"), "\n");
}

std::string HostCluster::ConfigOf(const HostServer& server) const {
  const std::string address = network_->address(server.host);
  const std::string control = network_->address(kControlHost);
  std::string yaml = ServerYaml();
  if (server.program == "certkv-gate") {
    return absl::StrCat(yaml, "  tcp_address: ", address, ":", kGatePort,
                        "\ngate:\n  ledger_redis: ", control, ":", kRedisPort, "\n", gate_yaml_);
  }
  if (server.program == "certkv-certifier") return "";
  const std::string bulk = absl::StrCat(address, ":", kBulkPort);
  absl::StrAppend(&yaml, "  http_address: 127.0.0.1:", MetricsPort(server.host),
                  "\nkvstore:\n  bulk_address: ", bulk, "\n  bulk_timeout: 2s\n", node_yaml_);
  if (network_->kind() == HostKind::kNamespaces) {
    absl::StrAppend(&yaml, "  bulk_peer_ca: ", certificates_.Path("ca.crt"),
                    "\n  bulk_certificate: ", certificates_.Path("engine.crt"),
                    "\n  bulk_key: ", certificates_.Path("engine.key"), "\n");
  }
  return absl::StrCat(yaml, "cluster:\n  etcd: ", control, ":", kEtcdPort, "\n  node: node-",
                      server.host, "\n  target: ", address, ":", kTargetPort,
                      "\n  bulk_target: ", bulk, "\n  ttl: 2s\n");
}

HostServer& HostCluster::server(const std::string& program, int host) {
  for (HostServer& server : servers_) {
    if (server.program == program && server.host == host) return server;
  }
  std::abort();  // a test asked for what no host runs
}

client::Options HostCluster::options(int host) const {
  client::Options options;
  const std::string base = absl::StrCat("unix:", directory_, "/host", host);
  options.kvstore_target = base + "/kvstore.sock";
  options.certifier_target = base + "/certifier.sock";
  options.gate_target = network_->target(kGatePort);
  return options;
}

absl::StatusOr<std::unique_ptr<WorkerProcess>> HostCluster::StartWorker(int host,
                                                                        const std::string& model,
                                                                        const std::string& mode,
                                                                        int64_t lease_duration_ms) {
  WorkerPlace place{Path(absl::StrCat("worker-", ++worker_count_, ".log")),
                    network_->words(host),
                    {absl::StrCat(kWorkerRpcTimeoutMs, "=", 3000)}};
  if (network_->kind() == HostKind::kNamespaces) {
    place.environment.push_back(absl::StrCat(kWorkerTlsDirectory, "=", certificates_.Path("")));
  }
  return WorkerProcess::Start(place, model, mode, lease_duration_ms, options(host));
}

void HostCluster::Kill(HostServer& server) {
  kill(server.process->pid(), SIGKILL);
  while (server.process->CheckRunning().ok()) absl::SleepFor(absl::Milliseconds(1));
}

absl::Status HostCluster::Run(HostServer& server) {
  std::vector<std::string> words = network_->words(server.host);
  const bool is_other = !server.wire_versions.empty();
  words.push_back(
      absl::StrCat(is_other ? OtherReleaseDirectory() : BinaryDirectory(), "/", server.program));
  words.insert(words.end(), {"--socket", server.socket, "--config", server.socket + ".yaml"});
  std::vector<std::string> environment = {
      absl::StrCat("CERTKV_RUNTIME_DIR=", directory_, "/host", server.host)};
  if (is_other) {
    environment.push_back(absl::StrCat(kOtherReleaseVersions, "=", server.wire_versions));
    environment.push_back(absl::StrCat(kOtherClockSkewMs, "=", server.clock_skew_ms));
  }
  CERTKV_ASSIGN_OR_RETURN(server.process,
                          cli::ChildProcess::Start(words, environment, LogOf(server)));
  return WaitUntilServing("unix:" + server.socket, *server.process);
}

absl::Status HostCluster::Replace(HostServer& server, const std::string& wire_versions,
                                  int64_t clock_skew_ms) {
  CERTKV_RETURN_IF_ERROR(server.process->Stop());
  server.wire_versions = wire_versions;
  server.clock_skew_ms = clock_skew_ms;
  return Run(server);
}

void HostCluster::Signal(int host, int number) {
  if (host == kControlHost) {
    etcd_->Signal(number);
    redis_->Signal(number);
  }
  for (HostServer& server : servers_) {
    if (server.host == host) kill(server.process->pid(), number);
  }
}

double HostCluster::Metric(int host, const std::string& name) const {
  const std::string path = Path("metrics.txt");
  const std::string script = Path("get-metrics");
  const int port = MetricsPort(host);
  std::ofstream(script) << "exec 3<>/dev/tcp/127.0.0.1/" << port
                        << "\nprintf 'GET /metrics HTTP/1.0\\r\\nHost: 127.0.0.1:" << port
                        << "\\r\\n\\r\\n' >&3\ncat <&3\n";
  const std::string command =
      absl::StrCat(absl::StrJoin(network_->words(host), " "), " bash ", script, " >", path);
  if (std::system(command.c_str()) != 0) return -1;
  const std::string answer = ContentOf(path);
  if (!absl::StrContains(answer, " 200 OK\r\n")) return -1;
  double sum = 0;
  for (const absl::string_view line : absl::StrSplit(answer, '\n')) {
    const bool is_it = absl::StartsWith(line, name + "{") || absl::StartsWith(line, name + " ");
    double value = 0;
    if (is_it && absl::SimpleAtod(line.substr(line.rfind(' ') + 1), &value)) sum += value;
  }
  return sum;
}

absl::Status HostCluster::WaitForNodes(int count) const {
  const std::string said = absl::StrCat("nodes=", count, " ");
  for (const HostServer& server : servers_) {
    if (server.program != "certkv-kvstore") continue;
    const std::string log = LogOf(server);
    for (int i = 0; i < 1000 && !absl::StrContains(ContentOf(log), said); ++i) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    if (!absl::StrContains(ContentOf(log), said)) {
      return absl::DeadlineExceededError(
          absl::StrCat("node ", server.host, " does not see ", count, " nodes"));
    }
  }
  return absl::OkStatus();
}

std::string HostCluster::LogOf(const HostServer& server) const { return server.socket + ".log"; }

std::string HostCluster::Logs() const {
  std::string text;
  for (const HostServer& server : servers_) {
    absl::StrAppend(&text, "--- ", server.program, " of host ", server.host, "\n",
                    ContentOf(LogOf(server)));
  }
  return text;
}

}  // namespace certkv
