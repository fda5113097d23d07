#include "services/common/server_program.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "certkv/version.h"
#include "kernels/core/status.h"
#include "services/common/metric_table.h"
#include "services/common/process_metrics.h"
#include "services/common/rpc_observer.h"
#include "services/common/runtime_directory.h"

namespace certkv {
namespace {

constexpr int kExitGood = 0;
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;

absl::Status Usage(absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "FLAG_INVALID",
                   absl::StrCat(message, "; --help lists the flags"));
}

void Print(const std::string& text) { std::fputs(text.c_str(), stdout); }

absl::Status StartHttp(const ServerConfig& config, std::vector<HttpRoute> routes,
                       ServerRunner* runner, std::unique_ptr<HttpServer>* http) {
  if (config.http_address.empty()) return absl::OkStatus();
  CERTKV_ASSIGN_OR_RETURN(*http, HttpServer::Start({config.http_address, config.http_token_file},
                                                   std::move(routes), runner->io_context()));
  Log(LogLevel::kInfo, "http_listening",
      {{"address", config.http_address}, {"port", (*http)->port()}});
  return absl::OkStatus();
}

}  // namespace

struct ServerProgram::Flags {
  std::optional<std::string> config;
  std::optional<std::string> socket;
  std::optional<std::string> tcp;
  bool check_config = false;
  bool print_config = false;
  bool print_config_docs = false;
  bool print_metrics_docs = false;
  bool version = false;
  bool help = false;
};

ServerProgram::ServerProgram(ProgramInfo info) : info_(std::move(info)) {
  reader_.AddSection(ServerConfigSection(&server_config_, info_.socket_name));
}

absl::StatusOr<ServerProgram::Flags> ServerProgram::ParseFlags(int argc, char** argv) {
  Flags flags;
  const std::pair<absl::string_view, bool*> switches[] = {
      {"--check-config", &flags.check_config},
      {"--print-config", &flags.print_config},
      {"--print-config-docs", &flags.print_config_docs},
      {"--print-metrics-docs", &flags.print_metrics_docs},
      {"--version", &flags.version},
      {"--help", &flags.help},
      {"-h", &flags.help}};
  const std::pair<absl::string_view, std::optional<std::string>*> options[] = {
      {"--config", &flags.config}, {"--socket", &flags.socket}, {"--tcp", &flags.tcp}};
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    const size_t equals = argument.find('=');
    const absl::string_view name = argument.substr(0, equals);
    const auto is_named = [name](const auto& entry) { return entry.first == name; };
    const auto option = std::find_if(std::begin(options), std::end(options), is_named);
    const auto flag = std::find_if(std::begin(switches), std::end(switches), is_named);
    if (option != std::end(options)) {
      if (option->second->has_value()) return Usage(absl::StrCat(name, " is given twice"));
      if (equals != absl::string_view::npos) {
        *option->second = std::string(argument.substr(equals + 1));
      } else if (i + 1 < argc) {
        *option->second = argv[++i];
      } else {
        return Usage(absl::StrCat(name, " needs a value"));
      }
      if ((*option->second)->empty()) return Usage(absl::StrCat(name, " has an empty value"));
    } else if (flag != std::end(switches)) {
      if (equals != absl::string_view::npos) return Usage(absl::StrCat(name, " takes no value"));
      *flag->second = true;
    } else {
      return Usage(absl::StrCat(absl::StartsWith(argument, "-") ? "unknown flag " : "unexpected ",
                                argument));
    }
  }
  return flags;
}

std::string ServerProgram::HelpText() const {
  return absl::StrCat(
      "usage: ", info_.name, " [--config FILE] [--socket PATH] [--tcp HOST:PORT]\n\n",
      info_.summary,
      "\nRuns without a config file. SIGTERM and SIGINT finish the running calls and exit.\n\n"
      "  --config FILE     read settings from this YAML file (docs/config.md lists them)\n"
      "  --socket PATH     listen on this Unix socket; default ",
      RuntimeDirectory(), "/", info_.socket_name,
      "\n"
      "  --tcp HOST:PORT   listen on TCP as well, protected as server.tcp_security says; port 0\n"
      "                    takes a free one\n"
      "  --check-config    read the config, say whether it is good, and exit\n"
      "  --print-config    print the settings in force as YAML with comments, and exit\n"
      "  --print-config-docs  print all settings with their defaults as Markdown, and exit\n"
      "  --print-metrics-docs  print all metrics as Markdown, and exit\n"
      "  --version         print version, commit and compiler, and exit\n"
      "  --help            print this text, and exit\n\n"
      "Environment: CERTKV_RUNTIME_DIR  directory of the default sockets\n"
      "Exit status: 0 stopped as asked; 1 could not start; 2 a flag or the config is wrong\n");
}

std::string ServerProgram::DocsText() const {
  return absl::StrCat(
      "# Configuration\n\n"
      "Written by `",
      info_.name,
      " --print-config-docs`; a test compares. Do not edit.\n\n"
      "No config file is needed. A file is YAML: a map of the sections below, each a map of\n"
      "settings; what it leaves out keeps its default. `certkvd` reads all sections,\n"
      "`certkv-kvstore`, `certkv-certifier` and `certkv-gate` read `server` and their own. An\n"
      "unknown or repeated key, a wrong type and a value out of range are errors with file and\n"
      "line. `--check-config` checks a file, `--print-config` prints what is in force. Samples "
      "are\n"
      "in `deploy/config`.\n\n"
      "Sizes are written `4096`, `64KiB`, `512MiB`, `4GiB` or `2TiB`; durations `500ms`, `30s`,\n"
      "`5min` or `2h`, always with their unit.\n\n",
      reader_.ToMarkdown(), "\n", AccessFileMarkdown());
}

std::string ServerProgram::MetricsDocsText() const {
  std::string text = absl::StrCat(
      "# Metrics\n\n"
      "Written by `",
      info_.name,
      " --print-metrics-docs`; a test compares. Do not edit.\n\n"
      "With `server.http_address` set, a server answers `GET /metrics` in Prometheus' text "
      "format.\n"
      "`certkvd` has all of them, the others those of `server` and their own. Names are\n"
      "`certkv_<service>_<noun>_<unit>`; `total` is the unit of what is counted. Scrape "
      "configuration,\nalert rules and a Grafana dashboard are in `deploy/prometheus` and "
      "`deploy/grafana`.\n\n## `server`\n\n");
  std::vector<MetricInfo> common(ProcessMetricInfos().begin(), ProcessMetricInfos().end());
  for (const MetricInfo& info : RpcObserver::MetricInfos()) common.push_back(info);
  absl::StrAppend(&text, MetricsToMarkdown(common));
  for (const absl::Span<const MetricInfo> infos : metric_infos_) {
    const absl::string_view service = infos.front().name.substr(7);
    absl::StrAppend(&text, "\n## `", service.substr(0, service.find('_')), "`\n\n",
                    MetricsToMarkdown(infos));
  }
  return text;
}

absl::Status ServerProgram::Configure(const Flags& flags) {
  if (flags.config.has_value()) CERTKV_RETURN_IF_ERROR(reader_.ReadFile(*flags.config));
  if (flags.socket.has_value()) server_config_.unix_socket = *flags.socket;
  if (flags.tcp.has_value()) server_config_.access.tcp_address = *flags.tcp;
  if (server_config_.unix_socket.empty()) {
    server_config_.unix_socket = absl::StrCat(RuntimeDirectory(), "/", info_.socket_name);
  }
  for (const auto& callback : on_configured_) callback(server_config_);
  return reader_.Check(flags.config.value_or("flags"));
}

int ServerProgram::Serve(const Flags& flags) {
  ServerRunner runner(info_.name, server_config_);
  std::vector<std::function<void()>> reloads;
  MetricTable metrics;
  metrics.AddSource({ProcessMetricInfos(), CollectProcessMetrics});
  metrics.AddSource({RpcObserver::MetricInfos(),
                     [&runner](MetricSink* sink) { runner.observer()->CollectMetrics(sink); }});
  std::vector<HttpRoute> routes = {
      {.path = "/metrics", .is_open = false, .handler = [&metrics](const HttpRequest&) {
         return HttpResponse{.content_type = "text/plain; version=0.0.4; charset=utf-8",
                             .body = metrics.ToText()};
       }}};
  // Declared after the runner: the services end first, when its threads have been joined but its
  // io_context, which holds their timers, still exists.
  std::vector<std::shared_ptr<void>> owners;
  std::vector<ServedService> served;
  absl::StatusOr<std::unique_ptr<AccessControl>> access =
      AccessControl::Create(server_config_.access, RealClock());
  absl::Status status = access.status();
  if (status.ok()) status = runner.ClaimSocket();
  for (const auto& factory : factories_) {
    if (!status.ok()) break;
    absl::StatusOr<Instance> instance = factory(runner.io_context(), access->get());
    status = instance.status();
    if (!status.ok()) break;
    if (instance->reload) reloads.push_back(std::move(instance->reload));
    if (instance->metrics.collect) metrics.AddSource(std::move(instance->metrics));
    std::move(instance->routes.begin(), instance->routes.end(), std::back_inserter(routes));
    owners.push_back(std::move(instance->owner));
    served.push_back(std::move(instance->served));
  }
  runner.OnReload([this, &flags, &reloads, &access] {
    if (const absl::Status read = (*access)->Reload(); !read.ok()) {
      Log(LogLevel::kError, "access_file_refused",
          {{"reason", ReasonOf(read)}, {"message", read.message()}});
    } else if (!server_config_.access.access_file.empty()) {
      Log(LogLevel::kInfo, "access_file_reloaded", {{"file", server_config_.access.access_file}});
    }
    if (!flags.config.has_value()) {
      Log(LogLevel::kWarning, "config_not_reloaded", {{"reason", "no config file was given"}});
      return;
    }
    for (const auto& reset : resets_) reset();
    const absl::Status read = Configure(flags);
    if (!read.ok()) {
      // What is in force stays: servers have copies of what was read before.
      Log(LogLevel::kError, "config_refused",
          {{"file", *flags.config}, {"message", read.message()}});
      return;
    }
    Log(LogLevel::kInfo, "config_reloaded", {{"file", *flags.config}});
    for (const auto& reload : reloads) reload();
  });
  std::unique_ptr<HttpServer> http;
  if (status.ok()) status = StartHttp(server_config_, std::move(routes), &runner, &http);
  if (status.ok()) status = runner.Start(std::move(served));
  if (status.ok()) {
    runner.Run();
  } else {
    Log(LogLevel::kError, "start_failed",
        {{"program", info_.name}, {"reason", ReasonOf(status)}, {"message", status.message()}});
    runner.Stop();
  }
  http.reset();
  while (!owners.empty()) owners.pop_back();
  return status.ok() ? kExitGood : kExitFailed;
}

int ServerProgram::Run(int argc, char** argv) {
  const absl::StatusOr<Flags> flags = ParseFlags(argc, argv);
  if (!flags.ok()) {
    std::fprintf(stderr, "%s: %s\n", info_.name.c_str(),
                 std::string(flags.status().message()).c_str());
    return kExitUsage;
  }
  if (flags->help) {
    Print(HelpText());
    return kExitGood;
  }
  if (flags->version) {
    Print(absl::StrCat(info_.name, " ", VersionNumber(), " (commit ", VersionCommit(), ", ",
                       VersionBuildType(), ", ", VersionCompiler(), ")\n"));
    return kExitGood;
  }
  if (flags->print_config_docs) {
    Print(DocsText());
    return kExitGood;
  }
  if (flags->print_metrics_docs) {
    Print(MetricsDocsText());
    return kExitGood;
  }
  if (const absl::Status status = Configure(*flags); !status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return kExitUsage;
  }
  if (flags->print_config) {
    Print(reader_.ToYaml());
    return kExitGood;
  }
  if (flags->check_config) {
    Print(absl::StrCat(flags->config.value_or("no config file, the defaults"), ": good\n"));
    return kExitGood;
  }
  return Serve(*flags);
}

}  // namespace certkv
