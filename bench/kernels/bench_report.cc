#include "bench/kernels/bench_report.h"

#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "certkv/version.h"
#include "kernels/ops/backend.h"

namespace certkv::bench {
namespace {

// Value of the first "key : value" line of a file under /proc.
std::string ReadField(const char* path, absl::string_view key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (!absl::StartsWith(line, key)) continue;
    const size_t colon = line.find(':');
    if (colon == std::string::npos) continue;
    return std::string(absl::StripAsciiWhitespace(line.substr(colon + 1)));
  }
  return "unknown";
}

int64_t ReadClock(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

// Cycles a nanosecond: a chain of dependent additions takes one cycle each. The best of several
// runs, because a shared core may be interrupted.
double MeasureClockGigahertz() {
  constexpr int kRuns = 20;
  constexpr int kSteps = 1 << 18;
  constexpr int kAdditions = 8;
  double best = 0;
  for (int run = 0; run < kRuns; ++run) {
    uint64_t x = 1;
    const int64_t begin = ReadClock(CLOCK_THREAD_CPUTIME_ID);
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 8
      for (int k = 0; k < kAdditions; ++k) {
        x += x;
        __asm__ volatile("" : "+r"(x));  // one addition after the other
      }
    }
    const int64_t spent = ReadClock(CLOCK_THREAD_CPUTIME_ID) - begin;
    best = std::max(best, double{kSteps} * kAdditions / static_cast<double>(spent));
  }
  return best;
}

}  // namespace

nlohmann::json DescribeRun() {
  utsname system{};
  uname(&system);
  const auto isa = SelectedCpuIsa();
  double load = 0;
  std::ifstream("/proc/loadavg") >> load;
  return {{"cpu", ReadField("/proc/cpuinfo", "model name")},
          {"cpu_family_model",
           ReadField("/proc/cpuinfo", "cpu family") + "/" + ReadField("/proc/cpuinfo", "model\t")},
          {"clock_gigahertz", MeasureClockGigahertz()},
          {"cpu_count", sysconf(_SC_NPROCESSORS_ONLN)},
          {"last_level_cache_bytes", LastLevelCacheBytes()},
          {"load_average", load},
          {"system", std::string(system.sysname) + " " + system.release},
          {"compiler", VersionCompiler()},
          {"build_type", VersionBuildType()},
          {"commit", VersionCommit()},
          {"instruction_set", isa.ok() ? CpuIsaName(*isa) : "unknown"}};
}

std::string HugePagesInUse() { return ReadField("/proc/self/smaps_rollup", "AnonHugePages"); }

bool WriteReport(const nlohmann::json& report, const std::string& path) {
  if (path.empty()) return true;
  std::ofstream file(path);
  file << report.dump(2) << "\n";
  file.close();
  if (file.good()) return true;
  std::fprintf(stderr, "%s: cannot be written; choose another place with --json\n", path.c_str());
  return false;
}

int64_t LastLevelCacheBytes() {
  // What this machine's cores share; cpuid, which sysconf asks, may tell the whole host's.
  int64_t kibibytes = 0;
  std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kibibytes;
  if (kibibytes > 0) return kibibytes * 1024;
  const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
  return l3 > 0 ? l3 : int64_t{32} << 20;
}

Clocks ReadClocks() { return {ReadClock(CLOCK_MONOTONIC), ReadClock(CLOCK_THREAD_CPUTIME_ID)}; }

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

}  // namespace certkv::bench
