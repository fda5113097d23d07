// `certkv calibrate`.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_split.h"
#include "clients/cli/calibrate_report.h"
#include "clients/cli/commands.h"
#include "clients/cli/gate_policy.h"
#include "clients/cli/own_server.h"
#include "clients/cli/progress.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"

namespace certkv::cli {
namespace {

// Traces, and the roles of their queries.
struct OpenedTraces {
  std::vector<std::unique_ptr<Trace>> traces;
  std::vector<CalibrationTrace> roles;
};

absl::StatusOr<OpenedTraces> OpenTraces(const CalibrateOptions& options) {
  OpenedTraces opened;
  const auto open = [&opened](const std::string& path, QueryRole role) -> absl::Status {
    CERTKV_ASSIGN_OR_RETURN(std::unique_ptr<Trace> trace, Trace::Open(path));
    opened.roles.push_back({trace.get(), role});
    opened.traces.push_back(std::move(trace));
    return absl::OkStatus();
  };
  const QueryRole role = options.held_out.empty() ? QueryRole::kSplit : QueryRole::kChoose;
  for (const std::string& path : options.traces) CERTKV_RETURN_IF_ERROR(open(path, role));
  for (const std::string& path : options.held_out) {
    CERTKV_RETURN_IF_ERROR(open(path, QueryRole::kHeldOut));
  }
  return opened;
}

absl::StatusOr<std::vector<Candidate>> ParseCandidates(const std::string& formats) {
  std::vector<Candidate> candidates;
  for (const absl::string_view name : absl::StrSplit(formats, ',')) {
    Candidate candidate;
    candidate.name = std::string(name);
    CERTKV_ASSIGN_OR_RETURN(const WeightedFormat parsed, ParseWeightedFormat(name));
    candidate.format = parsed.format;
    candidate.is_weighted = parsed.is_weighted;
    candidates.push_back(std::move(candidate));
  }
  return candidates;
}

absl::Status WriteIfAsked(const std::string& path, const std::string& text) {
  return path.empty() ? absl::OkStatus() : WriteTextFile(path, text);
}

absl::Status Calibrate(const GlobalOptions& global, const CalibrateOptions& options) {
  CERTKV_ASSIGN_OR_RETURN(const OpenedTraces traces, OpenTraces(options));
  CERTKV_ASSIGN_OR_RETURN(std::vector<Candidate> candidates, ParseCandidates(options.formats));
  client::Options services = global.services;
  CERTKV_ASSIGN_OR_RETURN(const std::unique_ptr<OwnServer> server, OwnServer::Start("", &services));
  CERTKV_ASSIGN_OR_RETURN(const gate::v1::Policy policy,
                          PolicyInForce(services, *GateStub(services)));
  CalibrationTerms terms;
  CERTKV_ASSIGN_OR_RETURN(terms.tolerances, TolerancesFromProto(policy.tolerances()));
  if (options.tv_tolerance >= 0) terms.tolerances.tv_tolerance = options.tv_tolerance;
  if (options.value_tolerance >= 0) terms.tolerances.value_tolerance = options.value_tolerance;
  terms.coverage = options.coverage;
  terms.of_model = options.coverage_of == "model";
  for (Candidate& candidate : candidates) {
    ProgressLine line(candidate.name);
    CERTKV_RETURN_IF_ERROR(
        Measure(traces.roles, services, terms.tolerances, &candidate,
                [&line](int64_t done, int64_t total) { line.Update(done, total); }));
  }
  CERTKV_RETURN_IF_ERROR(server->Stop());
  const Calibration calibration = Choose(*traces.traces[0], std::move(candidates), terms);
  CERTKV_RETURN_IF_ERROR(
      WriteIfAsked(options.spec_path, ToJsonText(CacheSpecToProto(calibration.spec))));
  CERTKV_RETURN_IF_ERROR(
      WriteIfAsked(options.policy_path, ToJsonText(CalibratedPolicy(calibration, policy))));
  CERTKV_RETURN_IF_ERROR(WriteIfAsked(options.svg_path, DrawCalibration(calibration)));
  Print(global, CalibrationJson(calibration), RenderCalibration(calibration));
  return absl::OkStatus();
}

}  // namespace

int RunCalibrate(const GlobalOptions& global, const CalibrateOptions& options) {
  const absl::Status status = Calibrate(global, options);
  return status.ok() ? kExitOk : Fail(status);
}

}  // namespace certkv::cli
