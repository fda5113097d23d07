// certkv-bench-gpu: see gpu_bench.h. On a machine without a GPU it says so and writes nothing.
#include <cstdio>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/gpu/gpu_bench.h"
#include "bench/kernels/bench_report.h"
#include "kernels/cuda/cuda.h"

ABSL_FLAG(std::string, json, "", "file to write the results to");
ABSL_FLAG(bool, quick, false, "small sizes: does everything run?");

namespace {

void PrintReads(const nlohmann::json& report) {
  std::printf("copy %.0f GB/s on %s\n", report["copy"]["gb_per_s"].get<double>(),
              report["device"]["name"].get<std::string>().c_str());
  std::printf("%8s %6s %8s %9s %7s %8s %12s %12s\n", "tokens", "heads", "format", "GB/s", "of copy",
              "x FP16", "certificate", "skipping");
  for (const nlohmann::json& row : report["reads"]) {
    for (const auto& [name, format] : row["formats"].items()) {
      const bool skips = format.contains("progressive");
      std::printf("%8d %6d %8s %9.0f %7.2f %8.2f %9.1f us %9.1f us\n", row["tokens"].get<int>(),
                  row["group_size"].get<int>(), name.c_str(), format["gb_per_s"].get<double>(),
                  format["share_of_copy"].get<double>(),
                  format["speed_over_fp16_paged"].get<double>(),
                  1e6 * format["certificate_seconds"].get<double>(),
                  skips ? 1e6 * format["progressive"]["seconds"].get<double>() : 0.0);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  if (const absl::Status status = certkv::cuda::CheckDevice(); !status.ok()) {
    std::printf("nothing measured: %s\n", std::string(status.message()).c_str());
    return 0;
  }
  namespace bench = certkv::bench;
  const absl::StatusOr<nlohmann::json> measured =
      bench::RunGpuBench(absl::GetFlag(FLAGS_quick) ? bench::SmallSizes() : bench::FullSizes());
  if (!measured.ok()) {
    std::fprintf(stderr, "%s\n", measured.status().ToString().c_str());
    return 1;
  }
  nlohmann::json report = *measured;
  report["run"] = bench::DescribeRun();
  PrintReads(report);
  return bench::WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}
