#include "services/certifier/metrics.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/core/cache_spec.h"

namespace certkv::certifier {
namespace {

constexpr MetricInfo kInfos[] = {
    {"certkv_certifier_reads_total", MetricKind::kCounter, "result",
     "Reads (one layer and position, all its heads), ok or failed"},
    {"certkv_certifier_read_seconds", MetricKind::kHistogram, "",
     "Time of a read from its first KV head to its last, repairs included"},
    {"certkv_certifier_busy_seconds_total", MetricKind::kCounter, "",
     "Time of threads in reads; its rate is how many threads are busy, which a replica is added "
     "for"},
    {"certkv_certifier_queue_seconds", MetricKind::kHistogram, "",
     "Time of a message of reads from its arrival until a thread begins with it"},
    {"certkv_certifier_heads_total", MetricKind::kCounter, "format, rung",
     "Query heads read, by the formats of their layer and the highest rung they needed (none: "
     "certified at the first read); coverage is the share of none"},
    {"certkv_certifier_outcomes_total", MetricKind::kCounter, "outcome",
     "Query heads read, by what their output is"},
    {"certkv_certifier_repair_bytes_total", MetricKind::kCounter, "",
     "Bytes of originals read again for repairs"},
    {"certkv_certifier_read_bytes_total", MetricKind::kCounter, "",
     "Bytes of records, originals and tails that reads took from memory"},
    {"certkv_certifier_tokens_total", MetricKind::kCounter, "what",
     "Tokens of reads, each once per query head: read, or skipped under a certificate"},
    {"certkv_certifier_skips_total", MetricKind::kCounter, "result",
     "Query heads that skipped tokens; times one had skipped too much and read more (missed); "
     "heads "
     "that were allowed to and whose format can't (unable)"},
    {"certkv_certifier_dithered_heads_total", MetricKind::kCounter, "tier",
     "Query heads read from dithered keys: with a share of a UNION budget (dither), or by the "
     "bound "
     "that holds for sure because there was none (deterministic)"},
    {"certkv_certifier_passes_total", MetricKind::kCounter, "", "Calls of the attention kernel"},
    {"certkv_certifier_device_passes_total", MetricKind::kCounter, "result",
     "Calls of the attention kernel that a GPU was to run: done there, or done by the host for the "
     "reason that is named; only with certifier.device"},
    {"certkv_certifier_slow_finishes_total", MetricKind::kCounter, "",
     "Certificates that the fast finishing step left to the slow one: reads of more than 131,072 "
     "atoms, and numbers that aren't finite"},
    {"certkv_certifier_tiles_verified_total", MetricKind::kCounter, "what",
     "Tiles whose checksums were recomputed, of quantized records or of originals"},
    {"certkv_certifier_errors_total", MetricKind::kCounter, "reason",
     "Reads that ended in an error, by its reason"},
    {"certkv_certifier_views_open_total", MetricKind::kGauge, "", "Sequences that are open"},
    {"certkv_certifier_leases_total", MetricKind::kGauge, "",
     "Unexpired policy leases whose spending is remembered"},
};

double Load(const std::atomic<int64_t>& count) {
  return static_cast<double>(count.load(std::memory_order_relaxed));
}

}  // namespace

absl::Span<const MetricInfo> CertifierMetricInfos() { return kInfos; }

void CollectCertifierMetrics(const CertifierCounters& counters, int32_t view_count,
                             int32_t budget_count, MetricSink* sink) {
  sink->Add("certkv_certifier_reads_total", Load(counters.reads), {{"result", "ok"}});
  sink->Add("certkv_certifier_reads_total", Load(counters.failed_reads), {{"result", "failed"}});
  sink->AddHistogram("certkv_certifier_read_seconds", counters.read_seconds.Snapshot());
  sink->Add("certkv_certifier_busy_seconds_total", Load(counters.busy_ns) * 1e-9);
  sink->AddHistogram("certkv_certifier_queue_seconds", counters.queue_seconds.Snapshot());
  for (int key = 0; key < CertifierCounters::kFormatCount; ++key) {
    for (int value = 0; value < CertifierCounters::kFormatCount; ++value) {
      const auto& by_rung = counters.heads_by_format[key][value];
      int64_t all = 0;
      for (const auto& count : by_rung) all += count.load(std::memory_order_relaxed);
      if (all == 0) continue;
      const std::string format = absl::StrCat(KeyFormatName(static_cast<KeyFormat>(key)),
                                              ValueFormatName(static_cast<ValueFormat>(value)));
      for (int rung = 1; rung <= static_cast<int>(Rung::kLayer); ++rung) {
        sink->Add("certkv_certifier_heads_total", Load(by_rung[rung]),
                  {{"format", format}, {"rung", RungName(static_cast<Rung>(rung))}});
      }
    }
  }
  for (int outcome = 1; outcome <= static_cast<int>(Outcome::kObserved); ++outcome) {
    sink->Add("certkv_certifier_outcomes_total", Load(counters.heads_by_outcome[outcome]),
              {{"outcome", OutcomeName(static_cast<Outcome>(outcome))}});
  }
  sink->Add("certkv_certifier_repair_bytes_total", Load(counters.repair_bytes));
  sink->Add("certkv_certifier_read_bytes_total", Load(counters.read_bytes));
  sink->Add("certkv_certifier_tokens_total", Load(counters.read_tokens), {{"what", "read"}});
  sink->Add("certkv_certifier_tokens_total", Load(counters.skipped_tokens), {{"what", "skipped"}});
  const char* const skips = "certkv_certifier_skips_total";
  sink->Add(skips, Load(counters.skipping_heads), {{"result", "skipped"}});
  sink->Add(skips, Load(counters.skip_misses), {{"result", "missed"}});
  sink->Add(skips, Load(counters.unskippable_heads), {{"result", "unable"}});
  const char* const dithered = "certkv_certifier_dithered_heads_total";
  sink->Add(dithered, Load(counters.dithered_heads), {{"tier", "dither"}});
  sink->Add(dithered, Load(counters.shareless_heads), {{"tier", "deterministic"}});
  sink->Add("certkv_certifier_passes_total", Load(counters.attend_passes));
  const auto fallbacks = counters.DeviceFallbacksByReason();
  if (counters.device_passes > 0 || !fallbacks.empty()) {
    const char* const device = "certkv_certifier_device_passes_total";
    sink->Add(device, Load(counters.device_passes), {{"result", "done"}});
    for (const auto& [reason, count] : fallbacks) {
      sink->Add(device, static_cast<double>(count), {{"result", reason}});
    }
  }
  sink->Add("certkv_certifier_slow_finishes_total", Load(counters.slow_finishes));
  sink->Add("certkv_certifier_tiles_verified_total", Load(counters.tiles_verified),
            {{"what", "quantized"}});
  sink->Add("certkv_certifier_tiles_verified_total", Load(counters.originals_verified),
            {{"what", "original"}});
  for (const auto& [reason, count] : counters.ErrorsByReason()) {
    sink->Add("certkv_certifier_errors_total", static_cast<double>(count), {{"reason", reason}});
  }
  sink->Add("certkv_certifier_views_open_total", view_count);
  sink->Add("certkv_certifier_leases_total", budget_count);
}

}  // namespace certkv::certifier
