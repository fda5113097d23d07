#include "clients/cli/demo_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "clients/cli/table.h"

namespace certkv::cli {
namespace {

int64_t RepairCount(const DemoRunResult& run, Rung rung) {
  const auto found = run.repairs.find(rung);
  return found == run.repairs.end() ? 0 : found->second;
}

std::string CertificateTable(const std::vector<DemoRunResult>& runs) {
  Table table;
  table.AddColumn("format", Table::Align::kLeft);
  for (const char* title :
       {"tolerance", "may\nskip", "capacity", "reads", "tokens\nread", "certified at\nfirst read",
        "worst true TV\nunrepaired", "worst true TV\nserved", "worst\nbound", "bounds\nviolated",
        "uncertified\noutputs"}) {
    table.AddColumn(title);
  }
  for (const DemoRunResult& run : runs) {
    const auto tokens =
        static_cast<double>(std::max<int64_t>(run.read_tokens + run.skipped_tokens, 1));
    table.AddRow({run.format, FormatBound(run.tv_tolerance), FormatBound(run.skip_tolerance),
                  absl::StrFormat("%.2fx", run.capacity), FormatCount(run.reads),
                  FormatPercent(static_cast<double>(run.read_tokens) / tokens),
                  FormatPercent(run.coverage), FormatBound(run.worst_unrepaired_tv),
                  FormatBound(run.worst_true_tv), FormatBound(run.worst_bound),
                  FormatCount(run.violations), FormatCount(run.uncertified_outputs)});
  }
  return table.Render();
}

std::string RepairTable(const std::vector<DemoRunResult>& runs) {
  Table table;
  table.AddColumn("format", Table::Align::kLeft);
  for (const char* title :
       {"tolerance", "values", "keys", "head", "layer", "bytes\nre-read", "worst error\n/ bound",
        "mean output\nerror", "time per\nread", "gate:\nreads", "risk\nscore", "sum of\nTV"}) {
    table.AddColumn(title);
  }
  for (const DemoRunResult& run : runs) {
    table.AddRow(
        {run.format, FormatBound(run.tv_tolerance), FormatCount(RepairCount(run, Rung::kValues)),
         FormatCount(RepairCount(run, Rung::kKeys)), FormatCount(RepairCount(run, Rung::kHead)),
         FormatCount(RepairCount(run, Rung::kLayer)), FormatBytes(run.repair_bytes),
         FormatBound(run.worst_error_share), FormatPercent(run.mean_relative_error),
         FormatNanoseconds(run.read_nanoseconds), FormatCount(run.risk.read_count),
         FormatBound(run.risk.risk_score), FormatBound(run.risk.sum_worst_case_tv)});
  }
  return table.Render();
}

// Two rows of block heights over a log axis of total variation: truths, and bounds.
std::string Drawing(const DemoRunResult& run) {
  const char* const heights[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  const auto row = [&](const int64_t* counts) {
    const int64_t largest = *std::max_element(counts, counts + DemoHistogram::kBuckets);
    std::string text;
    for (int i = 0; i < DemoHistogram::kBuckets; ++i) {
      const double share =
          static_cast<double>(counts[i]) / static_cast<double>(std::max<int64_t>(largest, 1));
      const int height = counts[i] == 0 ? 0 : std::max(1, static_cast<int>(std::lround(share * 8)));
      text += heights[height];
    }
    return text;
  };
  const int mark =
      std::clamp(static_cast<int>((std::log10(std::max(double{run.tv_tolerance}, 1e-4)) + 4) * 6),
                 0, DemoHistogram::kBuckets - 1);
  return absl::StrCat(absl::StrFormat("  %-9s true TV  │", run.format), row(run.histogram.truth),
                      "│\n", "            bound    │", row(run.histogram.bound),
                      "│  mean bound / truth ", absl::StrFormat("%.1f", run.mean_bound_over_truth),
                      "\n", "                     │", std::string(mark, ' '), "^",
                      std::string(DemoHistogram::kBuckets - 1 - mark, ' '), "│  tolerance ",
                      FormatBound(run.tv_tolerance), "\n");
}

}  // namespace

std::string RenderDemoReport(const Trace& trace, const std::vector<DemoRunResult>& runs) {
  std::string text = absl::StrCat(
      "\nCertKV demo: ", trace.model(), ", ", FormatCount(trace.token_count()), " tokens, ",
      trace.layer_count(), " layers, ", trace.query_count(), " query positions. Two workers share ",
      runs.empty() ? 0 : runs[0].blocks_shared, " of ", runs.empty() ? 0 : runs[0].blocks,
      " blocks.\n\n",
      "What quantization changed in each read (TV: total variation between exact and served "
      "softmax), and what was proven of it\n\n",
      CertificateTable(runs), "\nRepair from the FP16 originals, outputs, and gate's ledger\n\n",
      RepairTable(runs),
      "\nFirst reads by total variation, 0.0001 (left) to 1 (right), log scale\n\n");
  for (const DemoRunResult& run : runs) {
    absl::StrAppend(&text, Drawing(run));
  }
  int64_t reads = 0;
  int64_t violations = 0;
  int64_t uncertified = 0;
  int64_t failed = 0;
  for (const DemoRunResult& run : runs) {
    reads += run.reads;
    violations += run.violations;
    uncertified += run.uncertified_outputs;
    failed += run.failed_reads;
  }
  absl::StrAppend(&text, "\n", FormatCount(reads), " outputs: ", FormatCount(violations),
                  " bounds violated, ", FormatCount(uncertified),
                  " outputs neither certified nor exact, ", FormatCount(failed),
                  " reads ended in an error.\n");
  return text;
}

std::string DemoReportJson(const Trace& trace, const std::vector<DemoRunResult>& runs) {
  nlohmann::json report;
  report["trace"] = {{"model", trace.model()},
                     {"tokens", trace.token_count()},
                     {"layers", trace.layer_numbers()},
                     {"query_positions", trace.query_count()}};
  report["runs"] = nlohmann::json::array();
  for (const DemoRunResult& run : runs) {
    report["runs"].push_back({
        {"format", run.format},
        {"tv_tolerance", run.tv_tolerance},
        {"skip_tolerance", run.skip_tolerance},
        {"read_tokens", run.read_tokens},
        {"skipped_tokens", run.skipped_tokens},
        {"read_bytes", run.read_bytes},
        {"reads", run.reads},
        {"failed_reads", run.failed_reads},
        {"capacity", run.capacity},
        {"original_bytes", run.original_bytes},
        {"device_bytes", run.device_bytes},
        {"blocks", run.blocks},
        {"blocks_shared", run.blocks_shared},
        {"coverage", run.coverage},
        {"repairs",
         {{"values", RepairCount(run, Rung::kValues)},
          {"keys", RepairCount(run, Rung::kKeys)},
          {"head", RepairCount(run, Rung::kHead)},
          {"layer", RepairCount(run, Rung::kLayer)}}},
        {"exact_outputs", run.exact_outputs},
        {"repair_bytes", run.repair_bytes},
        {"worst_bound", run.worst_bound},
        {"worst_first_bound", run.worst_first_bound},
        {"worst_true_tv", run.worst_true_tv},
        {"worst_unrepaired_tv", run.worst_unrepaired_tv},
        {"mean_bound_over_truth", run.mean_bound_over_truth},
        {"worst_error_over_bound", run.worst_error_share},
        {"mean_relative_output_error", run.mean_relative_error},
        {"violations", run.violations},
        {"uncertified_outputs", run.uncertified_outputs},
        {"read_ns", run.read_nanoseconds},
        {"risk",
         {{"request", run.risk.request},
          {"risk_score", run.risk.risk_score},
          {"read_count", run.risk.read_count},
          {"max_worst_case_tv", run.risk.max_worst_case_tv},
          {"sum_worst_case_tv", run.risk.sum_worst_case_tv}}},
    });
  }
  return report.dump(2) + "\n";
}

}  // namespace certkv::cli
