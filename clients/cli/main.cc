// certkv: the command line. Arguments are described here; the work is in commands.h.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>
#include <iostream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "clients/cli/commands.h"
#include "clients/cli/completion.h"

namespace certkv::cli {
namespace {

constexpr char kFooter[] =
    "Exit codes: 0 done; 1 a service or file said no; 2 wrong arguments; 3 a service can't be\n"
    "reached; 4 (demo) a bound was violated or an output was neither certified nor exact.\n"
    "Targets are gRPC addresses: unix:/run/certkv/certkvd.sock, or host:port.";

constexpr char kSpec[] = "Formats of each layer from this file of certkv calibrate, instead";
constexpr char kFormats[] = "K8V4, K8V8, K8DV4, K8DV8, K6V4, K6V8, K4V4, K4V8, FP8_E4M3 or F16";

// Everything that options are parsed into.
struct Parsed {
  GlobalOptions global;
  PutOptions put;
  PullOptions pull;
  AttendOptions attend;
  ListOptions list;
  BlocksOptions blocks;
  RouteOptions route;
  HealthOptions health;
  RiskOptions risk;
  TopOptions top;
  EventsOptions events;
  PolicyOptions policy;
  CalibrateOptions calibrate;
  DemoOptions demo;
  std::string trace_info_path;
  int exit_code = kExitOk;
};

// Runs a command, unless the files that its calls would be made with can't work.
template <typename Command>
void Run(Parsed& parsed, const Command& command) {
  const absl::Status status = client::CheckAccess(parsed.global.services);
  parsed.exit_code = status.ok() ? command() : Fail(status);
}

void AddGlobalOptions(CLI::App& app, Parsed& parsed) {
  client::Options& services = parsed.global.services;
  app.add_option("--target", services.kvstore_target,
                 "The store's address; certkvd serves all three there");
  app.add_option("--certifier", services.certifier_target, "The certifier's, if it is elsewhere");
  app.add_option("--gate", services.gate_target, "Gate's, if it is elsewhere");
  app.add_option("--tenant", services.tenant, "Whose blocks and requests")
      ->envname("CERTKV_TENANT");
  app.add_option("--ca", services.ca_file, "PEM file of the server's authority: use TLS")
      ->envname("CERTKV_CA_FILE");
  app.add_option("--cert", services.certificate_file, "PEM file of this client's certificate")
      ->envname("CERTKV_CERT_FILE");
  app.add_option("--key", services.key_file, "PEM file of its private key")
      ->envname("CERTKV_KEY_FILE");
  app.add_option("--token-file", services.token_file, "File of a bearer token")
      ->envname("CERTKV_TOKEN_FILE");
  app.add_option("--timeout-ms", services.rpc_timeout_ms, "Deadline of a call")
      ->check(CLI::Range(1, 3600000))
      ->capture_default_str();
  app.add_flag("--json", parsed.global.json, "Print JSON for programs instead of tables");
}

void AddPutAndAttend(CLI::App& app, Parsed& parsed) {
  CLI::App* put = app.add_subcommand("put", "Put a trace's sequence into the store");
  put->add_option("--trace", parsed.put.trace_path, "A certkv-trace-1 safetensors file")
      ->required();
  put->add_option("--format", parsed.put.format, kFormats)->capture_default_str();
  put->add_option("--spec", parsed.put.spec_path, kSpec);
  put->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunPut(parsed.global, parsed.put); }); });

  CLI::App* pull =
      app.add_subcommand("pull", "Fetch a trace's prefix from another store over the bulk plane");
  pull->add_option("peer", parsed.pull.peer, "That store's bulk_address, one of kvstore.bulk_peers")
      ->required();
  pull->add_option("--trace", parsed.pull.trace_path, "A certkv-trace-1 safetensors file")
      ->required();
  pull->add_option("--format", parsed.pull.format, kFormats)->capture_default_str();
  pull->add_option("--spec", parsed.pull.spec_path, kSpec);
  pull->add_option("--order", parsed.pull.order, "whole, originals-later or originals-only")
      ->capture_default_str();
  pull->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunPull(parsed.global, parsed.pull); }); });

  CLI::App* attend = app.add_subcommand("attend", "Read a trace's queries with certificates");
  AttendOptions& options = parsed.attend;
  attend->add_option("--trace", options.trace_path, "A certkv-trace-1 safetensors file")
      ->required();
  attend->add_option("--format", options.format, kFormats)->capture_default_str();
  attend->add_option("--spec", options.spec_path, kSpec);
  attend->add_option("--request", options.request_id, "Name of the request in gate's ledger");
  attend->add_option("--layer", options.layer, "Index of one layer; all when left out");
  attend->add_option("--position", options.position,
                     "One of the trace's query positions; the last "
                     "when left out");
  attend->add_option("--tv-tolerance", options.tv_tolerance, "Tighter than the policy's, in [0, 1]")
      ->check(CLI::Range(0.0, 1.0));
  attend
      ->add_option("--skip-tolerance", options.skip_tolerance,
                   "Part of it that may be spent on skipping tokens, at most the policy's")
      ->check(CLI::Range(0.0, 0.99));
  attend->add_option("--mode", options.mode, "enforce, observe or exact")->capture_default_str();
  attend->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunAttend(parsed.global, parsed.attend); }); });
}

void AddInspection(CLI::App& app, Parsed& parsed) {
  CLI::App* list = app.add_subcommand("ls", "List the store's blocks");
  list->add_option("--cache", parsed.list.cache_id, "One cache's id; all when left out");
  list->add_option("--limit", parsed.list.limit, "At most so many")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  list->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunList(parsed.global, parsed.list); }); });

  CLI::App* stats = app.add_subcommand("stats", "Occupancy and counters of the store");
  stats->callback([&parsed] { Run(parsed, [&parsed] { return RunStats(parsed.global); }); });

  CLI::App* health = app.add_subcommand("health", "Does the server at --target serve?");
  health->add_option("--service", parsed.health.service,
                     "One service of it, as in certkv.gate.v1.Gate; all when left out");
  health->add_flag("--alive", parsed.health.alive,
                   "It is enough that it answers, as while it opens a large store");
  health->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunHealth(parsed.global, parsed.health); }); });

  CLI::App* risk = app.add_subcommand("risk", "How risky is a request? Without one: a list");
  risk->add_option("request", parsed.risk.request_id, "The request's id");
  risk->add_flag("--watch", parsed.risk.watch, "Print again whenever it changes");
  risk->add_flag("--all", parsed.risk.include_closed, "Closed requests too");
  risk->add_option("--limit", parsed.risk.limit, "At most so many")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  risk->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunRisk(parsed.global, parsed.risk); }); });

  CLI::App* route = app.add_subcommand("route", "Which store has how much of a trace's prefix?");
  route->add_option("--trace", parsed.route.trace_path, "A certkv-trace-1 safetensors file")
      ->required();
  route->add_option("--format", parsed.route.format, kFormats)->capture_default_str();
  route->add_option("--node", parsed.route.nodes, "NAME=TARGET of a store; once for each")
      ->required();
  route->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunRoute(parsed.global, parsed.route); }); });

  CLI::App* trace = app.add_subcommand("trace", "Look at trace files");
  trace->require_subcommand(1);
  CLI::App* info = trace->add_subcommand("info", "What a trace holds");
  info->add_option("file", parsed.trace_info_path, "The trace")->required();
  info->callback([&parsed] {
    Run(parsed, [&parsed] { return RunTraceInfo(parsed.global, parsed.trace_info_path); });
  });
  CLI::App* record = trace->add_subcommand(
      "record", "Record one from a Transformers model: needs the Python package; --help says more");
  // Its arguments, --help too, are python -m certkv.trace's business.
  record->set_help_flag();
  record->prefix_command();
  record->callback([record, &parsed] { parsed.exit_code = RunTraceRecord(record->remaining()); });
}

void AddBlockChanges(CLI::App& app, Parsed& parsed) {
  const auto add = [&parsed, &app](const char* name, const char* text, BlocksAction action) {
    CLI::App* command = app.add_subcommand(name, text);
    command
        ->add_option("block", parsed.blocks.blocks,
                     "The first digits of a block's key, as certkv ls prints it")
        ->required();
    command->add_option("--cache", parsed.blocks.cache_id,
                        "Look in this cache only; in all when left out");
    command->callback([&parsed, action] {
      parsed.blocks.action = action;
      Run(parsed, [&parsed] { return RunBlocks(parsed.global, parsed.blocks); });
    });
    return command;
  };
  add("pin", "Keep blocks, and all that come before them in their chains, from eviction",
      BlocksAction::kPin)
      ->add_option("--ttl-seconds", parsed.blocks.ttl_seconds,
                   "How long; until it is taken off when left out")
      ->check(CLI::Range(int64_t{1}, int64_t{30} * 24 * 3600));
  add("unpin", "Let them, and all that come before them, go again", BlocksAction::kUnpin);
  add("drop", "Forget blocks, and all that come after them", BlocksAction::kDrop);
}

void AddPolicyChanges(CLI::App& command, PolicyOptions& options) {
  command.add_option("--file", options.path,
                     "The whole policy as JSON; without it the policy in force with these changes");
  command.add_option("--tv-tolerance", options.tv_tolerance, "In [0, 1]")
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--value-tolerance", options.value_tolerance, "At least 0")
      ->check(CLI::NonNegativeNumber);
  command
      .add_option("--output-tolerance", options.output_tolerance, "At least 0; 0 means no limit")
      ->check(CLI::NonNegativeNumber);
  command
      .add_option("--skip-tolerance", options.skip_tolerance,
                  "Part of the tv tolerance that may be spent on skipping tokens; 0 reads all")
      ->check(CLI::Range(0.0, 0.99));
  command
      .add_option("--canary-share", options.canary_share,
                  "Share of reads whose used outputs are compared with exact attention, in [0, 1]")
      ->check(CLI::Range(0.0, 1.0));
}

void AddOperation(CLI::App& app, Parsed& parsed) {
  CLI::App* top = app.add_subcommand("top", "The riskiest open requests, live");
  top->add_option("--limit", parsed.top.limit, "At most so many")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  top->add_option("--count", parsed.top.count, "Screens; 0 means until it is interrupted")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  top->add_option("--interval-ms", parsed.top.interval_ms, "Between screens")
      ->check(CLI::Range(100, 3600000))
      ->capture_default_str();
  top->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunTop(parsed.global, parsed.top); }); });

  CLI::App* events = app.add_subcommand("events", "What happened to requests, the latest first");
  events->add_option("--limit", parsed.events.limit, "At most so many")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  events->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunEvents(parsed.global, parsed.events); }); });

  CLI::App* policy = app.add_subcommand("policy", "What gate asks of reads");
  policy->require_subcommand(1);
  const auto add = [&parsed, policy](const char* name, const char* text, PolicyAction action) {
    CLI::App* command = policy->add_subcommand(name, text);
    command->callback([&parsed, action] {
      parsed.policy.action = action;
      Run(parsed, [&parsed] { return RunPolicy(parsed.global, parsed.policy); });
    });
    return command;
  };
  add("show", "The policy in force, and who changed it", PolicyAction::kShow);
  AddPolicyChanges(*add("try", "Replay the last reads under another policy", PolicyAction::kTry),
                   parsed.policy);
  AddPolicyChanges(*add("set", "Put another policy in force", PolicyAction::kSet), parsed.policy);
}

void AddCalibrate(CLI::App& app, Parsed& parsed) {
  CalibrateOptions& options = parsed.calibrate;
  CLI::App* command = app.add_subcommand(
      "calibrate", "Propose a format and a tolerance for each layer of a model, from its traces");
  command->add_option("trace", options.traces, "certkv-trace-1 files of one model")->required();
  command->add_option("--held-out", options.held_out,
                      "Traces whose queries tell what to expect, and don't choose; without them "
                      "the queries of the others are split");
  command
      ->add_option("--formats", options.formats,
                   "Candidates, with commas between; w1 or w4: bands of a witness, c: with weights")
      ->capture_default_str();
  command->add_option("--tv-tolerance", options.tv_tolerance, "The loosest, in [0, 1]")
      ->check(CLI::Range(0.0, 1.0));
  command->add_option("--value-tolerance", options.value_tolerance, "At least 0")
      ->check(CLI::NonNegativeNumber);
  command
      ->add_option("--coverage", options.coverage,
                   "Share of reads that need no repair, in [0.01, 1]")
      ->check(CLI::Range(0.01, 1.0))
      ->capture_default_str();
  command
      ->add_option("--coverage-of", options.coverage_of,
                   "Of each layer's reads, or of the reads of all layers of the model together, "
                   "which takes fewer bytes")
      ->check(CLI::IsMember({"layer", "model"}))
      ->capture_default_str();
  command->add_option("--spec", options.spec_path, "Write the cache's spec there, as JSON");
  command->add_option("--policy", options.policy_path,
                      "Write a policy there, for certkv policy set --file");
  command->add_option("--svg", options.svg_path, "Draw it there");
  command->callback([&parsed] {
    Run(parsed, [&parsed] { return RunCalibrate(parsed.global, parsed.calibrate); });
  });
}

void AddDemo(CLI::App& app, Parsed& parsed) {
  CLI::App* demo = app.add_subcommand(
      "demo",
      "Start certkvd, put a real sequence as two workers, read it with certificates at two "
      "tolerances and in three formats, and check every bound against the truth");
  demo->add_option("--trace", parsed.demo.trace_path,
                   "Another certkv-trace-1 file than the one in tests/data");
  demo->add_option("--json", parsed.demo.json_path, "Write the results to this file as JSON");
  demo->add_flag("--use-running", parsed.demo.use_running,
                 "Use the servers at --target instead of starting certkvd");
  demo->callback(
      [&parsed] { Run(parsed, [&parsed] { return RunDemoCommand(parsed.global, parsed.demo); }); });
}

int Main(int argc, char** argv) {
  CLI::App app("CertKV: a shared quantized KV cache whose every read carries a proven bound",
               "certkv");
  Parsed parsed;
  AddGlobalOptions(app, parsed);
  AddPutAndAttend(app, parsed);
  AddInspection(app, parsed);
  AddBlockChanges(app, parsed);
  AddOperation(app, parsed);
  AddCalibrate(app, parsed);
  AddDemo(app, parsed);
  CLI::App* completion = app.add_subcommand("completion", "Print a bash completion script");
  completion->callback([&app] { std::cout << BashCompletion(app); });
  app.require_subcommand(1);
  app.footer(kFooter);
  // CLI11 throws; nothing else here does.
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? kExitOk : kExitUsage;
  }
  return parsed.exit_code;
}

}  // namespace
}  // namespace certkv::cli

int main(int argc, char** argv) { return certkv::cli::Main(argc, argv); }
