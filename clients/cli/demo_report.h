// What the demo prints and writes.
#ifndef CERTKV_CLIENTS_CLI_DEMO_REPORT_H_
#define CERTKV_CLIENTS_CLI_DEMO_REPORT_H_

#include <string>
#include <vector>

#include "clients/cli/demo_run.h"
#include "clients/cli/trace.h"

namespace certkv::cli {

// Tables, a drawing of bounds against truths, and a verdict.
std::string RenderDemoReport(const Trace& trace, const std::vector<DemoRunResult>& runs);

// {"trace": ..., "runs": [{"format", "tv_tolerance", "reads", "capacity", "coverage", "repairs",
// "worst_bound", "worst_true_tv", "violations", "uncertified_outputs", ...}]}
std::string DemoReportJson(const Trace& trace, const std::vector<DemoRunResult>& runs);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_DEMO_REPORT_H_
