// The subcommands of `certkv`. Each prints to standard output (a table, or JSON with --json), says
// progress and errors on standard error, and returns the process's exit code.
#ifndef CERTKV_CLIENTS_CLI_COMMANDS_H_
#define CERTKV_CLIENTS_CLI_COMMANDS_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "clients/cpp/options.h"

namespace certkv::cli {

// Exit codes, documented in `certkv --help`.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;       // a service or file said no
inline constexpr int kExitUsage = 2;        // wrong arguments
inline constexpr int kExitUnavailable = 3;  // a service can't be reached
inline constexpr int kExitViolation = 4;    // a truth above its bound, or an uncertified output

struct GlobalOptions {
  client::Options services;
  bool json = false;
};

struct PutOptions {
  std::string trace_path;
  std::string format = "K8V4";
  std::string spec_path;  // "" = every layer in that format; else what RunCalibrate wrote
};
int RunPut(const GlobalOptions& global, const PutOptions& options);

struct PullOptions {
  std::string trace_path;
  std::string format = "K8V4";
  std::string spec_path;        // as PutOptions
  std::string peer;             // bulk_address of another store
  std::string order = "whole";  // or originals-later, originals-only
};
// Has the store fetch a trace's prefix from another one.
int RunPull(const GlobalOptions& global, const PullOptions& options);

struct AttendOptions {
  std::string trace_path;
  std::string format = "K8V4";
  std::string spec_path;      // as in PutOptions
  std::string request_id;     // "" = a random one
  int32_t layer = -1;         // index in the trace; -1 = all
  int64_t position = -1;      // one of the trace's query positions; -1 = the last
  float tv_tolerance = -1;    // < 0 = the policy's
  float skip_tolerance = -1;  // < 0 = the policy's
  std::string mode = "enforce";
};
int RunAttend(const GlobalOptions& global, const AttendOptions& options);

struct ListOptions {
  int64_t cache_id = 0;
  int32_t limit = 100;
};
int RunList(const GlobalOptions& global, const ListOptions& options);

enum class BlocksAction : uint8_t { kPin, kUnpin, kDrop };
struct BlocksOptions {
  BlocksAction action = BlocksAction::kPin;
  std::vector<std::string> blocks;  // their keys' first hexadecimal digits
  int64_t cache_id = 0;             // look in this cache only; 0 = in all
  int64_t ttl_seconds = 0;          // of a pin; 0 = until it is taken off
};
int RunBlocks(const GlobalOptions& global, const BlocksOptions& options);

struct RouteOptions {
  std::string trace_path;
  std::string format = "K8V4";
  std::vector<std::string> nodes;  // "NAME=TARGET"
};
int RunRoute(const GlobalOptions& global, const RouteOptions& options);

int RunStats(const GlobalOptions& global);

struct HealthOptions {
  std::string service;  // full name, "certkv.gate.v1.Gate"; "" = the whole server
  bool alive = false;   // an answer is enough
};
// Asks the server at --target by grpc.health.v1. kExitOk: it serves; kExitFailed: not yet, or no
// longer; kExitUnavailable: it can't be reached.
int RunHealth(const GlobalOptions& global, const HealthOptions& options);

struct RiskOptions {
  std::string request_id;  // "" = list all, the riskiest first
  bool watch = false;
  bool include_closed = false;
  int32_t limit = 50;
};
int RunRisk(const GlobalOptions& global, const RiskOptions& options);

struct TopOptions {
  int32_t limit = 30;
  int32_t count = 0;  // screens; 0 = until it is interrupted
  int64_t interval_ms = 1000;
};
int RunTop(const GlobalOptions& global, const TopOptions& options);

struct EventsOptions {
  int32_t limit = 100;
};
int RunEvents(const GlobalOptions& global, const EventsOptions& options);

enum class PolicyAction : uint8_t { kShow, kTry, kSet };
struct PolicyOptions {
  PolicyAction action = PolicyAction::kShow;
  std::string path;  // JSON of certkv.gate.v1.Policy; "" = the policy in force with these changes:
  float tv_tolerance = -1;
  float value_tolerance = -1;
  float output_tolerance = -1;
  float skip_tolerance = -1;
  double canary_share = -1;
};
int RunPolicy(const GlobalOptions& global, const PolicyOptions& options);

int RunTraceInfo(const GlobalOptions& global, const std::string& path);
// Becomes `python3 -m certkv.trace record arguments...`, python3 being $CERTKV_PYTHON where it is
// set. Returns only when that can't be started.
int RunTraceRecord(const std::vector<std::string>& arguments);

struct CalibrateOptions {
  std::vector<std::string> traces;    // their queries choose
  std::vector<std::string> held_out;  // their queries tell what to expect; none = traces are split
  std::string formats =
      "K8V8,K8V4,K8V8w1c,K8V4w1c,K8V8w4c,K8V4w4c,K6V8,K6V4,K6V8w1c,K6V4w1c,K6V8w4c,K6V4w4c,K4V8,"
      "K4V4,"
      "K4V8w1c,K4V4w1c,K4V8w4c,K4V4w4c";
  float tv_tolerance = -1;            // < 0 = the default policy's
  float value_tolerance = -1;         // the same
  double coverage = 0.95;             // of reads
  std::string coverage_of = "layer";  // of each layer's, or "model": of all layers' together
  std::string spec_path;              // write certkv.type.CacheSpec as JSON there; "" = nowhere
  std::string policy_path;            // certkv.gate.v1.Policy
  std::string svg_path;               // the picture
};
// With a certkvd of its own.
int RunCalibrate(const GlobalOptions& global, const CalibrateOptions& options);

struct DemoOptions {
  std::string trace_path;    // "" = the trace in tests/data
  std::string json_path;     // write the results there too
  bool use_running = false;  // the servers of GlobalOptions instead of an own certkvd
};
int RunDemoCommand(const GlobalOptions& global, const DemoOptions& options);

// The text of a file of at most 1 MiB. Errors: NotFound [FILE_NOT_FOUND]; InvalidArgument
// [FILE_UNREADABLE].
absl::StatusOr<std::string> ReadTextFile(const std::string& path);

// Errors: FailedPrecondition [FILE_NOT_WRITTEN].
absl::Status WriteTextFile(const std::string& path, const std::string& text);

// Prints `data` with --json, else `text`.
void Print(const GlobalOptions& global, const nlohmann::json& data, const std::string& text);

// Prints `error: ...` and gives the exit code.
int Fail(const absl::Status& status);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_COMMANDS_H_
