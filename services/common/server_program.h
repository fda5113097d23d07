// ServerProgram: the main function of a CertKV server: flags, config, services, run.
//
//   int main(int argc, char** argv) {
//     certkv::GateConfig config;
//     certkv::ServerProgram program(
//         {.name = "certkv-gate", .summary = "...", .socket_name = "gate.sock"});
//     program.AddSection(certkv::GateConfigSection(&config));
//     program.AddService<certkv::GateServer>("certkv.gate.v1.Gate", &config);
//     return program.Run(argc, argv);
//   }
//
// With server.http_address it serves the metrics of all services, and the pages of those that have
// some.
#ifndef CERTKV_SERVICES_COMMON_SERVER_PROGRAM_H_
#define CERTKV_SERVICES_COMMON_SERVER_PROGRAM_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "services/common/access_control.h"
#include "services/common/clock.h"
#include "services/common/config_reader.h"
#include "services/common/http_server.h"
#include "services/common/metrics.h"
#include "services/common/server_runner.h"

namespace certkv {

struct ProgramInfo {
  std::string name;         // "certkv-gate"
  std::string summary;      // one sentence for --help
  std::string socket_name;  // file name of the default socket, "gate.sock"
};

// Exit statuses: 0, stopped after a drain, or the printed answer is good; 1, it could not start;
// 2, a flag or the config is wrong.
class ServerProgram {
 public:
  explicit ServerProgram(ProgramInfo info);

  // Sections come after "server" in the order of the calls.
  void AddSection(ConfigSection section) { reader_.AddSection(std::move(section)); }
  void AddList(ConfigList list) { reader_.AddList(std::move(list)); }
  // Called when flags and file are read, before services are made: to derive what depends on where
  // the server listens (`server.unix_socket` is filled in then).
  void OnConfigured(std::function<void(const ServerConfig& server)> callback) {
    on_configured_.push_back(std::move(callback));
  }
  // `Server` has Create(const Config&, const Clock*, io_context*, const AccessControl*),
  // grpc_services() and Drain().
  // Services are made in the order of the calls and destroyed in reverse. `config` outlives Run,
  // and has its defaults now. A server keeps a copy of it: on SIGHUP it is set to its defaults,
  // read again, and given to the Reload(const Config&) of a server that has one. A
  // server with WhenReady(std::function<void()>) serves when it calls that. A server with metrics
  // has static MetricInfos() and CollectMetrics(MetricSink*); one with pages, HttpRoutes().
  template <typename Server, typename Config>
  void AddService(absl::string_view full_name, Config* config) {
    resets_.push_back([config, defaults = *config] { *config = defaults; });
    if constexpr (requires { Server::MetricInfos(); }) {
      metric_infos_.push_back(Server::MetricInfos());
    }
    factories_.push_back(
        [name = std::string(full_name), config](
            boost::asio::io_context* io, const AccessControl* access) -> absl::StatusOr<Instance> {
          auto server = Server::Create(*config, RealClock(), io, access);
          if (!server.ok()) return server.status();
          std::shared_ptr<Server> owned = std::move(*server);
          Instance instance;
          instance.served = {.name = name,
                             .services = owned->grpc_services(),
                             .drain = [raw = owned.get()] { raw->Drain(); }};
          if constexpr (requires(Server & one) { one.WhenReady(nullptr); }) {
            instance.served.when_ready = [raw = owned.get()](std::function<void()> ready) {
              raw->WhenReady(std::move(ready));
            };
          }
          if constexpr (requires(Server & one, const Config& read) { one.Reload(read); }) {
            instance.reload = [raw = owned.get(), config] { raw->Reload(*config); };
          }
          if constexpr (requires { Server::MetricInfos(); }) {
            instance.metrics.infos = Server::MetricInfos();
            instance.metrics.collect = [raw = owned.get()](MetricSink* sink) {
              raw->CollectMetrics(sink);
            };
          }
          if constexpr (requires(Server & one) { one.HttpRoutes(); }) {
            instance.routes = owned->HttpRoutes();
          }
          instance.owner = std::move(owned);
          return instance;
        });
  }

  // Blocks until the server has stopped. Returns the exit status of the process.
  int Run(int argc, char** argv);

 private:
  struct Instance {
    std::shared_ptr<void> owner;
    ServedService served;
    std::function<void()> reload;  // may be empty
    MetricSource metrics;          // `collect` may be empty
    std::vector<HttpRoute> routes;
  };
  struct Flags;

  static absl::StatusOr<Flags> ParseFlags(int argc, char** argv);
  std::string HelpText() const;
  std::string DocsText() const;
  std::string MetricsDocsText() const;
  absl::Status Configure(const Flags& flags);
  int Serve(const Flags& flags);

  const ProgramInfo info_;
  ServerConfig server_config_;
  ConfigReader reader_;
  std::vector<std::function<void(const ServerConfig&)>> on_configured_;
  std::vector<std::function<void()>> resets_;
  std::vector<absl::Span<const MetricInfo>> metric_infos_;
  using Factory =
      std::function<absl::StatusOr<Instance>(boost::asio::io_context*, const AccessControl*)>;
  std::vector<Factory> factories_;
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_SERVER_PROGRAM_H_
