// `certkv top`, `certkv events` and `certkv policy`: what an operator of gate looks at and changes.
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "clients/cli/commands.h"
#include "clients/cli/gate_policy.h"
#include "clients/cli/heat_map.h"
#include "clients/cli/table.h"
#include "clients/cpp/rpc.h"
#include "google/protobuf/util/json_util.h"
#include "kernels/core/policy.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

namespace v1 = certkv::gate::v1;
using nlohmann::json;

template <typename Request, typename Response>
absl::Status Call(const GlobalOptions& global, v1::Gate::Stub& stub,
                  grpc::Status (v1::Gate::Stub::*method)(grpc::ClientContext*, const Request&,
                                                         Response*),
                  const Request& request, Response* response, client::Retry retry) {
  return client::CallUnary(
      global.services.rpc_timeout_ms, retry,
      [&](grpc::ClientContext& context) { return (stub.*method)(&context, request, response); });
}

std::string TimeText(int64_t time_ms) {
  return absl::FormatTime("%Y-%m-%d %H:%M:%S", absl::FromUnixMillis(time_ms),
                          absl::LocalTimeZone());
}

absl::StatusOr<v1::Policy> ReadPolicy(const std::string& text) {
  v1::Policy policy;
  const auto status = google::protobuf::util::JsonStringToMessage(text, &policy);
  if (status.ok()) return policy;
  return MakeError(absl::StatusCode::kInvalidArgument, "POLICY_INVALID",
                   absl::StrCat("the policy is not JSON of certkv.gate.v1.Policy: ",
                                std::string(status.message()),
                                "; start from what certkv policy show --json prints"));
}

// The policy in force with the options' changes, or the one of a file.
absl::StatusOr<v1::Policy> AskedPolicy(const GlobalOptions& global, v1::Gate::Stub& stub,
                                       const PolicyOptions& options) {
  if (!options.path.empty()) {
    CERTKV_ASSIGN_OR_RETURN(const std::string text, ReadTextFile(options.path));
    return ReadPolicy(text);
  }
  CERTKV_ASSIGN_OR_RETURN(v1::Policy policy, PolicyInForce(global.services, stub));
  type::Tolerances& tolerances = *policy.mutable_tolerances();
  if (options.tv_tolerance >= 0) tolerances.set_tv_tolerance(options.tv_tolerance);
  if (options.value_tolerance >= 0) tolerances.set_value_tolerance(options.value_tolerance);
  if (options.output_tolerance >= 0) tolerances.set_output_tolerance(options.output_tolerance);
  if (options.skip_tolerance >= 0) tolerances.set_skip_tolerance(options.skip_tolerance);
  if (options.canary_share >= 0) policy.set_canary_share(options.canary_share);
  return policy;
}

std::string Share(int64_t part, int64_t whole) {
  return whole == 0 ? "-" : FormatPercent(static_cast<double>(part) / static_cast<double>(whole));
}

absl::Status ShowPolicy(const GlobalOptions& global, v1::Gate::Stub& stub) {
  CERTKV_ASSIGN_OR_RETURN(const v1::Policy policy, PolicyInForce(global.services, stub));
  std::cout << ToJsonText(policy);
  if (global.json) return absl::OkStatus();
  v1::ListPolicyChangesResponse changes;
  CERTKV_RETURN_IF_ERROR(Call(global, stub, &v1::Gate::Stub::ListPolicyChanges,
                              v1::ListPolicyChangesRequest(), &changes,
                              client::Retry::kIdempotent));
  Table table;
  table.AddColumn("version");
  for (const char* title : {"since", "by", "policy"}) table.AddColumn(title, Table::Align::kLeft);
  for (const auto& change : changes.changes()) {
    table.AddRow({absl::StrCat(change.version()), TimeText(change.time_ms()), change.source(),
                  change.after()});
  }
  std::cout << "\n" << table.Render() << std::flush;
  return absl::OkStatus();
}

absl::Status TryPolicy(const GlobalOptions& global, v1::Gate::Stub& stub,
                       const PolicyOptions& options) {
  v1::TryPolicyRequest request;
  CERTKV_ASSIGN_OR_RETURN(*request.mutable_policy(), AskedPolicy(global, stub, options));
  v1::TryPolicyResponse trial;
  CERTKV_RETURN_IF_ERROR(
      Call(global, stub, &v1::Gate::Stub::TryPolicy, request, &trial, client::Retry::kIdempotent));
  if (global.json) {
    std::cout << ToJsonText(trial) << std::flush;
    return absl::OkStatus();
  }
  const int64_t reads = trial.read_count();
  Table table;
  table.AddColumn("of the last reads", Table::Align::kLeft);
  for (const char* title : {"as it was", "under this policy"}) table.AddColumn(title);
  table.AddRow({"certified at once", Share(trial.recorded_first(), reads),
                Share(trial.tried_first(), reads)});
  table.AddRow(
      {"repaired", Share(trial.recorded_repaired(), reads), Share(trial.tried_repaired(), reads)});
  table.AddRow({"exact from the start",
                Share(reads - trial.recorded_first() - trial.recorded_repaired(), reads),
                Share(trial.tried_exact(), reads)});
  table.AddRow(
      {"bytes re-read", FormatBytes(trial.recorded_bytes()), FormatBytes(trial.tried_bytes())});
  std::cout << FormatCount(reads) << " reads replayed; the bytes of "
            << FormatCount(trial.estimated_count()) << " are a mean\n"
            << table.Render() << std::flush;
  return absl::OkStatus();
}

absl::Status SetPolicy(const GlobalOptions& global, v1::Gate::Stub& stub,
                       const PolicyOptions& options) {
  v1::UpdatePolicyRequest request;
  CERTKV_ASSIGN_OR_RETURN(*request.mutable_policy(), AskedPolicy(global, stub, options));
  v1::Policy policy;
  // Not retried: an answer that was lost may have been a change.
  CERTKV_RETURN_IF_ERROR(
      Call(global, stub, &v1::Gate::Stub::UpdatePolicy, request, &policy, client::Retry::kNever));
  std::cout << (global.json ? ToJsonText(policy)
                            : absl::StrCat("policy version ", policy.version(), " is in force\n"))
            << std::flush;
  return absl::OkStatus();
}

absl::Status ListEvents(const GlobalOptions& global, v1::Gate::Stub& stub,
                        const EventsOptions& options) {
  v1::ListRiskEventsRequest request;
  request.set_page_size(options.limit);
  v1::ListRiskEventsResponse response;
  CERTKV_RETURN_IF_ERROR(Call(global, stub, &v1::Gate::Stub::ListRiskEvents, request, &response,
                              client::Retry::kIdempotent));
  if (global.json) {
    std::cout << ToJsonText(response) << std::flush;
    return absl::OkStatus();
  }
  Table table;
  for (const char* title : {"time", "request", "kind", "what"}) {
    table.AddColumn(title, Table::Align::kLeft);
  }
  for (const auto& event : response.events()) {
    table.AddRow({TimeText(event.event().time_ms()), event.request(), event.event().kind(),
                  event.event().message()});
  }
  std::cout << table.Render() << std::flush;
  return absl::OkStatus();
}

absl::Status ShowTop(const GlobalOptions& global, v1::Gate::Stub& stub, const TopOptions& options) {
  v1::ListRequestRisksRequest request;
  request.set_page_size(options.limit);
  v1::ListRequestRisksResponse page;
  CERTKV_RETURN_IF_ERROR(Call(global, stub, &v1::Gate::Stub::ListRequestRisks, request, &page,
                              client::Retry::kIdempotent));
  if (global.json) {
    std::cout << ToJsonText(page) << std::flush;
    return absl::OkStatus();
  }
  Table table;
  table.AddColumn("request", Table::Align::kLeft);
  table.AddColumn("tenant", Table::Align::kLeft);
  table.AddColumn("risk", Table::Align::kLeft);
  for (const char* title : {"score", "reads", "at once", "exact", "failed", "re-read", "budget"}) {
    table.AddColumn(title);
  }
  table.AddColumn("mode", Table::Align::kLeft);
  for (const auto& risk : page.risks()) {
    table.AddRow({risk.request(), risk.tenant(), Bar(risk.risk_score(), 12),
                  FormatBound(risk.risk_score()), FormatCount(risk.read_count()),
                  Share(risk.reads_certified_first(), risk.read_count()),
                  Share(risk.reads_exact(), risk.read_count()),
                  FormatCount(risk.failed_read_count()), FormatBytes(risk.repair_bytes()),
                  risk.budget() > 0 ? FormatPercent(risk.budget_committed() / risk.budget()) : "-",
                  risk.forced_exact() ? "forced exact"
                                      : ReadModeName(static_cast<ReadMode>(risk.read_mode()))});
  }
  // One write per screen, from the corner, the rest of the old one cleared: it does not flicker.
  const bool live = options.count != 1 && isatty(STDOUT_FILENO) == 1;
  std::cout << (live ? "\x1b[H\x1b[J" : "") << TimeText(absl::ToUnixMillis(absl::Now())) << "  "
            << FormatCount(page.request_count()) << " open requests, the riskiest first\n"
            << table.Render() << std::flush;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  constexpr size_t kBytesMax = size_t{1} << 20;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND",
                     absl::StrCat("can't open ", path, "; check the path"));
  }
  std::string text(kBytesMax + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  if (!file.bad() && text.size() <= kBytesMax) return text;
  return MakeError(absl::StatusCode::kInvalidArgument, "FILE_UNREADABLE",
                   absl::StrCat(path, " can't be read, or has more than ", kBytesMax, " bytes"));
}

absl::Status WriteTextFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file.good()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "FILE_NOT_WRITTEN",
                   absl::StrCat(path, " can't be written; choose another path"));
}

int RunTop(const GlobalOptions& global, const TopOptions& options) {
  const auto stub = GateStub(global.services);
  for (int32_t shown = 1;; ++shown) {
    const absl::Status status = ShowTop(global, *stub, options);
    if (!status.ok()) return Fail(status);
    if (options.count > 0 && shown >= options.count) return kExitOk;
    absl::SleepFor(absl::Milliseconds(options.interval_ms));
  }
}

int RunEvents(const GlobalOptions& global, const EventsOptions& options) {
  const auto stub = GateStub(global.services);
  const absl::Status status = ListEvents(global, *stub, options);
  return status.ok() ? kExitOk : Fail(status);
}

int RunPolicy(const GlobalOptions& global, const PolicyOptions& options) {
  const auto stub = GateStub(global.services);
  const absl::Status status = options.action == PolicyAction::kShow ? ShowPolicy(global, *stub)
                              : options.action == PolicyAction::kTry
                                  ? TryPolicy(global, *stub, options)
                                  : SetPolicy(global, *stub, options);
  return status.ok() ? kExitOk : Fail(status);
}

}  // namespace certkv::cli
