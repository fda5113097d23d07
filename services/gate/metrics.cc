#include "services/gate/metrics.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/cache_spec.h"
#include "services/gate/counters.h"

namespace certkv::gate {
namespace {

constexpr MetricInfo kInfos[] = {
    {"certkv_gate_requests_total", MetricKind::kGauge, "state",
     "Requests that gate keeps, open and closed"},
    {"certkv_gate_request_events_total", MetricKind::kCounter, "event",
     "Requests opened, closed by their client, closed for being idle, and refused"},
    {"certkv_gate_reads_total", MetricKind::kCounter, "format, rung",
     "Reads of a head that gave an output, by the formats of their layer and the highest rung they "
     "needed (none: certified at the first read); coverage is the share of none"},
    {"certkv_gate_outcomes_total", MetricKind::kCounter, "outcome",
     "The same reads by what their output is"},
    {"certkv_gate_served_tv_ratio", MetricKind::kHistogram, "",
     "worst_case_tv of the same reads, as served"},
    {"certkv_gate_failed_reads_total", MetricKind::kCounter, "", "Reads that ended in an error"},
    {"certkv_gate_reads_outside_tolerance_total", MetricKind::kCounter, "",
     "Outputs served although no policy lease allowed them: a reader is broken"},
    {"certkv_gate_repair_bytes_total", MetricKind::kCounter, "",
     "Bytes of originals read again for repairs"},
    {"certkv_gate_canary_checks_total", MetricKind::kCounter, "result",
     "Outputs that an engine used, compared with exact attention: match or mismatch"},
    {"certkv_gate_batches_total", MetricKind::kCounter, "result",
     "Batches of certificates, counted or repeated (had been counted before)"},
    {"certkv_gate_batch_seconds", MetricKind::kHistogram, "", "Time to count a batch"},
    {"certkv_gate_directives_total", MetricKind::kCounter, "action",
     "Answers to batches by what they command"},
    {"certkv_gate_decisions_total", MetricKind::kCounter, "result",
     "Answers of Decide, accepted or refused"},
    {"certkv_gate_ledger_failures_total", MetricKind::kCounter, "",
     "Steps in the shared ledger that were not answered in time: what needed them was refused"},
    {"certkv_gate_policy_version_info", MetricKind::kGauge, "",
     "Version of the policy in force; it rises with every change"},
    {"certkv_gate_tenant_committed_tv", MetricKind::kGauge, "tenant",
     "What a tenant's requests have committed of its budget in this window"},
    {"certkv_gate_tenant_budget_tv", MetricKind::kGauge, "tenant",
     "The budget of a tenant in one window; absent when there is none"},
};

double Load(const std::atomic<int64_t>& count) {
  return static_cast<double>(count.load(std::memory_order_relaxed));
}

void CollectReads(const GateCounters& counters, MetricSink* sink) {
  for (const FormatReads& reads : ReadsByFormat(counters)) {
    const std::string format = FormatName(reads.key_format, reads.value_format);
    for (int rung = 1; rung < GateCounters::kRungCount; ++rung) {
      sink->Add("certkv_gate_reads_total", static_cast<double>(reads.by_rung[rung]),
                {{"format", format}, {"rung", RungName(static_cast<Rung>(rung))}});
    }
  }
  for (int outcome = 1; outcome <= static_cast<int>(Outcome::kObserved); ++outcome) {
    sink->Add("certkv_gate_outcomes_total", Load(counters.reads_by_outcome[outcome]),
              {{"outcome", OutcomeName(static_cast<Outcome>(outcome))}});
  }
  HistogramSnapshot tv;
  int64_t count = 0;
  for (int bucket = 0; bucket < kTvBucketCount; ++bucket) {
    count += counters.tv_histogram[bucket].load(std::memory_order_relaxed);
    tv.bounds.push_back(kTvBucketBounds[bucket]);
    tv.cumulative_counts.push_back(count);
  }
  tv.cumulative_counts.push_back(count);
  tv.sum = counters.tv_sum.load(std::memory_order_relaxed);
  sink->AddHistogram("certkv_gate_served_tv_ratio", tv);
  sink->Add("certkv_gate_failed_reads_total", Load(counters.failed_reads));
  sink->Add("certkv_gate_reads_outside_tolerance_total", Load(counters.reads_outside_tolerance));
  sink->Add("certkv_gate_repair_bytes_total", Load(counters.repair_bytes));
  const double mismatches = Load(counters.canary_mismatches);
  sink->Add("certkv_gate_canary_checks_total", Load(counters.canary_checks) - mismatches,
            {{"result", "match"}});
  sink->Add("certkv_gate_canary_checks_total", mismatches, {{"result", "mismatch"}});
}

void CollectCalls(const GateCounters& counters, MetricSink* sink) {
  sink->Add("certkv_gate_batches_total", Load(counters.batches), {{"result", "counted"}});
  sink->Add("certkv_gate_batches_total", Load(counters.batches_repeated), {{"result", "repeated"}});
  sink->AddHistogram("certkv_gate_batch_seconds", counters.batch_seconds.Snapshot());
  const char* const actions[] = {"", "continue", "tighten", "force_exact", "release"};
  for (int action = 1; action <= 4; ++action) {
    sink->Add("certkv_gate_directives_total", Load(counters.directives[action]),
              {{"action", actions[action]}});
  }
  sink->Add("certkv_gate_decisions_total", Load(counters.decisions_accepted),
            {{"result", "accepted"}});
  sink->Add("certkv_gate_decisions_total", Load(counters.decisions_refused),
            {{"result", "refused"}});
  sink->Add("certkv_gate_ledger_failures_total", Load(counters.ledger_failures));
  const std::pair<const char*, const std::atomic<int64_t>*> events[] = {
      {"opened", &counters.requests_opened},
      {"closed", &counters.requests_closed},
      {"idle", &counters.requests_idle},
      {"refused", &counters.requests_refused}};
  for (const auto& [event, event_count] : events) {
    sink->Add("certkv_gate_request_events_total", Load(*event_count), {{"event", event}});
  }
}

}  // namespace

std::string FormatName(int key_format, int value_format) {
  if (key_format == 0 && value_format == 0) return "unknown";
  return absl::StrCat(KeyFormatName(static_cast<KeyFormat>(key_format)),
                      ValueFormatName(static_cast<ValueFormat>(value_format)));
}

absl::Span<const MetricInfo> GateMetricInfos() { return kInfos; }

void CollectGateMetrics(const RequestRegistry& registry, MetricSink* sink) {
  const RegistrySizes sizes = registry.sizes();
  sink->Add("certkv_gate_requests_total", static_cast<double>(sizes.open), {{"state", "open"}});
  sink->Add("certkv_gate_requests_total", static_cast<double>(sizes.closed), {{"state", "closed"}});
  CollectReads(registry.counters(), sink);
  CollectCalls(registry.counters(), sink);
  sink->Add("certkv_gate_policy_version_info", static_cast<double>(registry.policy().version));
  for (const TenantStanding& tenant : registry.Tenants()) {
    sink->Add("certkv_gate_tenant_committed_tv", tenant.committed, {{"tenant", tenant.tenant}});
    if (tenant.budget > 0) {
      sink->Add("certkv_gate_tenant_budget_tv", tenant.budget, {{"tenant", tenant.tenant}});
    }
  }
}

}  // namespace certkv::gate
