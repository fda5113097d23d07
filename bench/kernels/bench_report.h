// What a benchmark says about where it ran, its file, and clocks.
#ifndef CERTKV_BENCH_KERNELS_BENCH_REPORT_H_
#define CERTKV_BENCH_KERNELS_BENCH_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace certkv::bench {

// CPU, clock, caches, kernel, compiler, commit, instruction set of Backend::kCpu.
nlohmann::json DescribeRun();

// Writes `report` to `path`; to nothing when it is "". False, with a line on stderr, when the file
// can't be written.
bool WriteReport(const nlohmann::json& report, const std::string& path);

// Bytes of the last-level cache, 32 MiB when the system doesn't say.
int64_t LastLevelCacheBytes();

// Memory of this process on huge pages, as in "1024 kB".
std::string HugePagesInUse();

struct Clocks {
  int64_t wall_ns;
  int64_t thread_ns;  // CPU time of this thread
};
Clocks ReadClocks();

double Median(std::vector<double> values);

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_KERNELS_BENCH_REPORT_H_
