// `certkv demo`: the main job on a real trace, from an empty machine to a checked report.
#include <unistd.h>

#include <iostream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "clients/cli/commands.h"
#include "clients/cli/demo_report.h"
#include "clients/cli/demo_run.h"
#include "clients/cli/own_server.h"
#include "clients/cli/progress.h"
#include "clients/cli/trace.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

struct PlannedRun {
  const char* format;
  float tv_tolerance;
  float skip_tolerance;
};
// What reads may skip at most where the demo starts the server.
constexpr char kPolicy[] = "gate:\n  skip_tolerance: 0.1\n";
// The default at its tolerance; a tolerance at which the ladder climbs; two formats that hurt
// silently elsewhere; and the default when half of its tolerance may be spent on skipping tokens.
constexpr PlannedRun kRuns[] = {{"K8V4", 0.2f, 0},
                                {"K8V4", 0.02f, 0},
                                {"FP8_E4M3", 0.2f, 0},
                                {"K4V4", 0.2f, 0},
                                {"K8V4", 0.2f, 0.1f}};

constexpr char kTraceName[] = "smollm2-135m-4-layers.safetensors";

// The trace beside the build or in the working directory.
absl::StatusOr<std::string> FindTrace(const std::string& asked) {
  if (!asked.empty()) return asked;
  const std::string directory = ProgramDirectory();
  for (const std::string& path : {absl::StrCat("tests/data/", kTraceName),
                                  absl::StrCat(directory, "/../../../tests/data/", kTraceName)}) {
    if (access(path.c_str(), R_OK) == 0) return path;
  }
  return MakeError(absl::StatusCode::kNotFound, "FILE_NOT_FOUND",
                   absl::StrCat("no tests/data/", kTraceName,
                                " here or beside the build; name a trace with --trace"));
}

absl::StatusOr<std::vector<DemoRunResult>> RunAll(const Trace& trace,
                                                  const client::Options& services) {
  const DemoTruth truth = [&trace] {
    ProgressLine line("exact attention in double");
    return DemoTruth(trace, [&line](int64_t done, int64_t total) { line.Update(done, total); });
  }();
  std::vector<DemoRunResult> results;
  for (const PlannedRun& planned : kRuns) {
    DemoRunOptions options;
    options.services = services;
    options.format_name = planned.format;
    CERTKV_ASSIGN_OR_RETURN(options.format, ParseFormat(planned.format));
    options.tv_tolerance = planned.tv_tolerance;
    options.skip_tolerance = planned.skip_tolerance;
    ProgressLine line(absl::StrCat(planned.format, " at tolerance ", planned.tv_tolerance,
                                   planned.skip_tolerance > 0 ? ", skipping" : ""));
    CERTKV_ASSIGN_OR_RETURN(DemoRunResult result,
                            RunDemo(trace, truth, options, [&line](int64_t done, int64_t total) {
                              line.Update(done, total);
                            }));
    results.push_back(std::move(result));
  }
  return results;
}

}  // namespace

int RunDemoCommand(const GlobalOptions& global, const DemoOptions& options) {
  const absl::StatusOr<std::string> path = FindTrace(options.trace_path);
  if (!path.ok()) return Fail(path.status());
  const absl::StatusOr<std::unique_ptr<Trace>> trace = Trace::Open(*path);
  if (!trace.ok()) return Fail(trace.status());
  client::Options services = global.services;
  std::unique_ptr<OwnServer> server;
  if (!options.use_running) {
    absl::StatusOr<std::unique_ptr<OwnServer>> started = OwnServer::Start(kPolicy, &services);
    if (!started.ok()) return Fail(started.status());
    server = *std::move(started);
  }
  const absl::StatusOr<std::vector<DemoRunResult>> runs = RunAll(**trace, services);
  if (!runs.ok()) return Fail(runs.status());
  if (server != nullptr) {
    if (const absl::Status stopped = server->Stop(); !stopped.ok()) return Fail(stopped);
  }
  const std::string json = DemoReportJson(**trace, *runs);
  std::cout << (global.json ? json : RenderDemoReport(**trace, *runs)) << std::flush;
  if (!options.json_path.empty()) {
    if (const absl::Status written = WriteTextFile(options.json_path, json); !written.ok()) {
      return Fail(written);
    }
  }
  for (const DemoRunResult& run : *runs) {
    if (run.violations != 0 || run.uncertified_outputs != 0) return kExitViolation;
    if (run.failed_reads != 0) return kExitFailed;
  }
  return kExitOk;
}

}  // namespace certkv::cli
