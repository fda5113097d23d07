#include "services/common/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <fstream>

#include "certkv/version.h"
#include "services/common/log.h"

namespace certkv {
namespace {

constexpr MetricInfo kInfos[] = {
    {"certkv_server_build_info", MetricKind::kGauge, "version, commit, compiler",
     "Always 1; the labels say what runs"},
    {"certkv_server_up_seconds", MetricKind::kGauge, "", "Time since the process was first asked"},
    {"certkv_server_resident_memory_bytes", MetricKind::kGauge, "",
     "Memory of the process that is in RAM, shared slabs included"},
    {"certkv_server_cpu_seconds_total", MetricKind::kCounter, "",
     "Processor time of all threads, user and system"},
    {"certkv_server_log_lines_total", MetricKind::kCounter, "level", "Lines written to the log"},
};

double Seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
}

}  // namespace

absl::Span<const MetricInfo> ProcessMetricInfos() { return kInfos; }

void CollectProcessMetrics(MetricSink* sink) {
  static const auto begin = std::chrono::steady_clock::now();
  sink->Add(
      "certkv_server_build_info", 1,
      {{"version", VersionNumber()}, {"commit", VersionCommit()}, {"compiler", VersionCompiler()}});
  sink->Add("certkv_server_up_seconds",
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  int64_t pages_total = 0;
  int64_t pages_resident = 0;
  std::ifstream("/proc/self/statm") >> pages_total >> pages_resident;
  sink->Add("certkv_server_resident_memory_bytes",
            static_cast<double>(pages_resident) * static_cast<double>(sysconf(_SC_PAGESIZE)));
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  sink->Add("certkv_server_cpu_seconds_total", Seconds(usage.ru_utime) + Seconds(usage.ru_stime));
  for (const LogLevel level :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
    sink->Add("certkv_server_log_lines_total", static_cast<double>(LogLineCount(level)),
              {{"level", LogLevelName(level)}});
  }
}

}  // namespace certkv
