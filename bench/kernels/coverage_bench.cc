// certkv-bench-coverage: what share of a real model's reads each pair of formats certifies.
//
// Every query of a trace, of every layer and head, reads its range once, nothing repaired. A read
// is covered at a tolerance when its worst_case_tv is within it. The true total variation of each
// read is computed over the originals in double (tests/conformance); a bound below it is a
// violation, and the program fails.
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "bench/kernels/bench_report.h"
#include "clients/cli/calibrate.h"
#include "clients/cli/trace.h"
#include "clients/cli/witness_weights.h"
#include "kernels/core/half.h"
#include "kernels/core/slab_layout.h"
#include "kernels/core/status.h"
#include "tests/conformance/bound_tally.h"
#include "tests/conformance/sequence_case.h"

ABSL_FLAG(std::string, trace, "tests/data/smollm2-135m-4-layers.safetensors", "the real model's");
ABSL_FLAG(std::string, formats,
          "K8V4,K8V4w1,K8V4w1c,K6V4,K6V4w1,K6V4w1c,K6V4w4,K6V4w4c,K4V4,K4V4w4,K4V4w4c,"
          "FP8_E4M3w4,FP8_E4M3w4c",
          "formats, with the bands of a witness after w, and c where it has weights");
ABSL_FLAG(std::string, weights_from, "",
          "trace to choose weights from; empty: every other run of 8 queries of the trace itself, "
          "and the rest is measured");
ABSL_FLAG(int32_t, every, 1, "use every so many-th query position");
ABSL_FLAG(bool, exact_arithmetic, false,
          "read with the reference: no rounding of queries and weights, all sums in double");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

using namespace certkv::conformance;  // NOLINT: as in soundness_bench.cc

constexpr std::array<double, 3> kTolerances = {0.2, 0.1, 0.05};

// Of one pair of formats, over all reads.
struct Coverage {
  BoundTally tally;
  std::array<int64_t, 3> covered{};
  double bound_sum = 0;
  double true_sum = 0;
};

Backend ReadBackend() {
  return absl::GetFlag(FLAGS_exact_arithmetic) ? Backend::kReference : Backend::kCpu;
}

// Does a query of the trace choose weights, instead of being measured?
bool ChoosesWeights(int32_t query_index) {
  return absl::GetFlag(FLAGS_weights_from).empty() &&
         !cli::IsHeldOut(cli::QueryRole::kSplit, query_index);
}

void AddReads(SequenceCase* sequence, const cli::Trace& trace, int32_t layer, int32_t kv_head,
              Coverage* coverage) {
  const SequenceRows original = OriginalRows(*sequence);
  const SequenceRows served = ServedRows(*sequence, sequence->args(), 0);
  const int64_t size = int64_t{sequence->spec().group_size} * sequence->spec().head_dim;
  FinishWorkspace workspace;
  for (int32_t i = 0; i < trace.query_count(); i += absl::GetFlag(FLAGS_every)) {
    if (ChoosesWeights(i)) continue;
    const std::vector<float> queries = trace.Queries(layer, i);
    sequence->SetQueries(
        {queries.begin() + kv_head * size, queries.begin() + (kv_head + 1) * size});
    sequence->SetRange(0, int64_t{trace.query_positions()[i]} + 1);
    const AttendArgs& args = sequence->args();
    ReadResult result(args);
    result.Run(ReadBackend(), args);
    for (int g = 0; g < args.group_size; ++g) {
      const Certificate certificate = FinishHead(ReadBackend(), args, g, result, 0, &workspace);
      const HeadAttention exact = AttendExactly(original, args, g);
      const HeadAttention quantized = AttendExactly(served, args, g);
      AddHead(args, g, result, certificate, exact, quantized, &coverage->tally);
      coverage->bound_sum += certificate.worst_case_tv;
      coverage->true_sum += TotalVariation(exact, quantized);
      for (size_t k = 0; k < kTolerances.size(); ++k) {
        coverage->covered[k] += certificate.worst_case_tv <= kTolerances[k] ? 1 : 0;
      }
    }
  }
}

struct Row {
  std::string name;
  cli::WeightedFormat format;
};

absl::StatusOr<Row> ParseRow(const std::string& name) {
  CERTKV_ASSIGN_OR_RETURN(const cli::WeightedFormat format, cli::ParseWeightedFormat(name));
  return Row{name, format};
}

absl::StatusOr<cli::LayerWeights> WeightsOf(const cli::Trace& trace,
                                            const cli::FormatChoice& choice) {
  const std::string path = absl::GetFlag(FLAGS_weights_from);
  if (path.empty()) return cli::ChooseWeights({{&trace, ChoosesWeights}}, choice);
  CERTKV_ASSIGN_OR_RETURN(const auto other, cli::Trace::Open(path));
  if (other->layer_numbers() != trace.layer_numbers()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "TRACE_INVALID",
                     absl::StrCat(path, " has other layers than the trace; record the same"));
  }
  return cli::ChooseWeights({{other.get(), [](int32_t) { return true; }}}, choice);
}

absl::StatusOr<nlohmann::json> Measure(const cli::Trace& trace, const Row& row) {
  const cli::FormatChoice& choice = row.format.format;
  const std::string& format = row.name;
  const CacheSpec spec = trace.MakeSpec(choice);
  const int64_t stride = int64_t{spec.kv_head_count} * spec.head_dim;
  const std::vector<client::LayerKv> layers = trace.Layers();
  cli::LayerWeights weights(trace.layer_count());
  if (row.format.is_weighted) {
    CERTKV_ASSIGN_OR_RETURN(weights, WeightsOf(trace, choice));
  }
  Coverage coverage;
  for (int32_t layer = 0; layer < trace.layer_count(); ++layer) {
    CacheSpec one = spec;  // of one KV head
    one.layers = {spec.layers[layer]};
    one.kv_head_count = 1;
    for (int32_t h = 0; h < spec.kv_head_count; ++h) {
      if (row.format.is_weighted) {
        const auto begin = weights[layer].begin() + int64_t{h} * spec.head_dim;
        one.layers[0].witness_weights.assign(begin, begin + spec.head_dim);
      }
      const auto* keys = static_cast<const uint16_t*>(layers[layer].keys) + h * spec.head_dim;
      const auto* values = static_cast<const uint16_t*>(layers[layer].values) + h * spec.value_dim;
      SequenceCase sequence(SequenceShape(), one, keys, stride, values,
                            int64_t{spec.kv_head_count} * spec.value_dim, trace.token_count(),
                            Backend::kCpu);
      AddReads(&sequence, trace, layer, h, &coverage);
    }
    absl::FPrintF(stderr, "\r%-10s layer %d of %d", format, layer + 1, trace.layer_count());
  }
  std::fputc('\r', stderr);
  const auto reads = static_cast<double>(coverage.tally.reads);
  const double bytes = cli::BytesPerToken(spec, SlabKind::kDevice);
  const double original_bytes = cli::BytesPerToken(spec, SlabKind::kBacking);
  return nlohmann::json{{"name", format},
                        {"reads", coverage.tally.reads},
                        {"bytes_per_token", bytes},
                        {"capacity", original_bytes / bytes},
                        {"mean_worst_case_tv", coverage.bound_sum / reads},
                        {"mean_true_tv", coverage.true_sum / reads},
                        {"median_half_width_over_error", coverage.tally.MedianTightness()},
                        {"coverage_at_0.2", static_cast<double>(coverage.covered[0]) / reads},
                        {"coverage_at_0.1", static_cast<double>(coverage.covered[1]) / reads},
                        {"coverage_at_0.05", static_cast<double>(coverage.covered[2]) / reads},
                        {"violations", coverage.tally.violations()}};
}

int Main() {
  const auto fail = [](const std::string& why) {
    absl::FPrintF(stderr, "certkv-bench-coverage: %s\n", why);
    return 1;
  };
  const auto trace = cli::Trace::Open(absl::GetFlag(FLAGS_trace));
  if (!trace.ok()) return fail(trace.status().ToString());
  if (absl::GetFlag(FLAGS_every) < 1) {
    return fail(absl::StrCat("--every is ", absl::GetFlag(FLAGS_every), ", must be at least 1"));
  }
  const std::vector<std::string> formats = absl::StrSplit(absl::GetFlag(FLAGS_formats), ',');
  std::vector<Row> choices;
  for (const std::string& format : formats) {
    const auto row = ParseRow(format);
    if (!row.ok()) return fail(row.status().ToString());
    choices.push_back(*row);
  }
  nlohmann::json report = DescribeRun();
  report["model"] = (*trace)->model();
  report["layers"] = (*trace)->layer_count();
  report["exact_arithmetic"] = absl::GetFlag(FLAGS_exact_arithmetic);
  report["tokens"] = (*trace)->token_count();
  report["weights_from"] = absl::GetFlag(FLAGS_weights_from).empty()
                               ? "every other run of 8 queries of the trace"
                               : absl::GetFlag(FLAGS_weights_from);
  int64_t violations = 0;
  absl::PrintF("%-10s %9s %9s %8s %9s %9s  %5s %5s %5s\n", "format", "B/token", "capacity", "reads",
               "bound", "true TV", ".2", ".1", ".05");
  for (const Row& choice : choices) {
    const auto measured = Measure(**trace, choice);
    if (!measured.ok()) return fail(measured.status().ToString());
    const nlohmann::json& row = *measured;
    violations += row["violations"].get<int64_t>();
    absl::PrintF("%-10s %9.1f %8.2fx %8d %9.4f %9.4f  %5.3f %5.3f %5.3f\n", choice.name,
                 row["bytes_per_token"].get<double>(), row["capacity"].get<double>(),
                 row["reads"].get<int64_t>(), row["mean_worst_case_tv"].get<double>(),
                 row["mean_true_tv"].get<double>(), row["coverage_at_0.2"].get<double>(),
                 row["coverage_at_0.1"].get<double>(), row["coverage_at_0.05"].get<double>());
    report["rows"].push_back(row);
  }
  if (!WriteReport(report, absl::GetFlag(FLAGS_json))) return 1;
  if (violations > 0) absl::FPrintF(stderr, "%d VIOLATIONS\n", violations);
  return violations == 0 ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Main();
}
