// certkv-bench-reclaim: how soon the store has released what a killed worker held. The store runs
// as its own process under the load of other workers; the clock starts before kill(2) and stops
// when GetStats says that the victim's cache has no session, leased or half-written block.
#include <cstdio>
#include <string>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/kernels/bench_report.h"
#include "tests/system/reclaim.h"

ABSL_FLAG(int32_t, kills, 200, "workers to kill");
ABSL_FLAG(int32_t, load_workers, 2, "workers that write all the time on other caches");
ABSL_FLAG(std::string, json, "", "file to write the results to");

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  const auto cluster = certkv::Cluster::Start(certkv::ClusterShape::kThreeProcesses, "");
  if (!cluster.ok()) {
    std::fprintf(stderr, "%s\n", cluster.status().ToString().c_str());
    return 1;
  }
  const certkv::ReclaimOptions options{absl::GetFlag(FLAGS_kills),
                                       absl::GetFlag(FLAGS_load_workers), 1};
  const auto result = certkv::MeasureReclaim(**cluster, options);
  if (!result.ok()) {
    std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
    return 1;
  }
  const nlohmann::json report = {{"run", certkv::bench::DescribeRun()},
                                 {"kills", result->milliseconds.size()},
                                 {"load_workers", options.load_workers},
                                 {"kills_with_leases", result->kills_with_leases},
                                 {"kills_while_writing", result->kills_while_writing},
                                 {"p50_ms", result->Percentile(50)},
                                 {"p90_ms", result->Percentile(90)},
                                 {"p99_ms", result->Percentile(99)},
                                 {"worst_ms", result->Percentile(100)}};
  std::printf("%s\n", report.dump(2).c_str());
  return certkv::bench::WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}
