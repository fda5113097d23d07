#include "services/kvstore/metrics.h"

#include <map>
#include <string>

#include "kernels/core/cache_spec.h"

namespace certkv::kvstore {
namespace {

constexpr MetricInfo kInfos[] = {
    {"certkv_kvstore_tier_bytes", MetricKind::kGauge, "tier",
     "Bytes of blocks in a tier: device (quantized), backing (originals), disk"},
    {"certkv_kvstore_tier_capacity_bytes", MetricKind::kGauge, "tier",
     "Bytes that the device and backing tiers of all registered caches have slots for"},
    {"certkv_kvstore_device_copies_total", MetricKind::kGauge, "state",
     "Caches whose device tier has a copy in a GPU's memory (ready), and whose copy failed "
     "(withdrawn); the log says why"},
    {"certkv_kvstore_device_copied_bytes_total", MetricKind::kCounter, "",
     "Bytes of blocks that were copied to a GPU, for the caches that are registered now"},
    {"certkv_kvstore_device_staged_blocks_total", MetricKind::kCounter, "result",
     "Blocks that workers staged on the GPU: sealed there, fallen (sealed by the host, because the "
     "GPU failed), failed (neither; the worker sends them through host memory)"},
    {"certkv_kvstore_blocks_total", MetricKind::kGauge, "state",
     "Blocks in memory (backing), of them quantized (device), leased, pinned, being written"},
    {"certkv_kvstore_caches_total", MetricKind::kGauge, "", "Registered caches"},
    {"certkv_kvstore_sessions_total", MetricKind::kGauge, "", "Workers and readers attached"},
    {"certkv_kvstore_leases_total", MetricKind::kGauge, "", "Leases held"},
    {"certkv_kvstore_leases_expired_total", MetricKind::kCounter, "",
     "Leases that ran out without being released"},
    {"certkv_kvstore_lookups_total", MetricKind::kCounter, "", "Lookups of prefixes"},
    {"certkv_kvstore_lookup_blocks_total", MetricKind::kCounter, "result",
     "Blocks that lookups asked for, and those they found; the hit rate is found / asked"},
    {"certkv_kvstore_block_events_total", MetricKind::kCounter, "event",
     "What happened to blocks: sealed, shared, pulled, aborted, demoted, promoted, evicted, "
     "spilled, "
     "restored, prefetched (restored after the lookup), prefetch_refused (no room), rebuilt, lost"},
    {"certkv_kvstore_bulk_connections_total", MetricKind::kGauge, "",
     "Connections that other stores have to kvstore.bulk_address"},
    {"certkv_kvstore_bulk_idle_connections_total", MetricKind::kGauge, "",
     "Connections to other stores that are kept for the next pull"},
    {"certkv_kvstore_bulk_connection_events_total", MetricKind::kCounter, "event",
     "Connections to other stores that were made, that a pull had of one before it (reused), and "
     "of these the ones that had ended meanwhile (replaced); connections of others that were idle "
     "and closed for new ones (displaced): raise kvstore.bulk_connection_limit if that goes on"},
    {"certkv_kvstore_bulk_bytes_total", MetricKind::kCounter, "direction",
     "Bytes of blocks sent to and received from other stores"},
    {"certkv_kvstore_bulk_blocks_total", MetricKind::kCounter, "event",
     "Blocks sent to other stores, received from them, damaged (asked for again or refused), "
     "planes_rebuilt (damaged, and made of good originals), originals_lost (did not follow)"},
    {"certkv_kvstore_bulk_pulls_total", MetricKind::kCounter, "event",
     "Pulls that begun and failed, and connections within them that were made anew (reconnected)"},
    {"certkv_kvstore_bulk_refused_total", MetricKind::kCounter, "",
     "Connections of other stores that were refused; the log says why"},
    {"certkv_kvstore_nccl_links_total", MetricKind::kGauge, "",
     "Links by NCCL to other stores and of others to this one; absent where kvstore.nccl is off"},
    {"certkv_kvstore_nccl_links_made_total", MetricKind::kCounter, "", "Links that were made"},
    {"certkv_kvstore_nccl_bytes_total", MetricKind::kCounter, "direction",
     "Bytes of blocks that were sent and received by NCCL"},
    {"certkv_kvstore_nccl_blocks_total", MetricKind::kCounter, "direction",
     "Blocks that were sent and received by NCCL"},
    {"certkv_kvstore_nccl_failures_total", MetricKind::kCounter, "reason",
     "Times that NCCL was given up and TCP took over, by the reason (docs/errors.md)"},
    {"certkv_kvstore_cluster_nodes_total", MetricKind::kGauge, "",
     "Nodes of the cluster, this one included; only in a cluster"},
    {"certkv_kvstore_cluster_registered_info", MetricKind::kGauge, "",
     "1 while this node is registered in etcd, as far as it knows"},
    {"certkv_kvstore_cluster_watching_info", MetricKind::kGauge, "",
     "1 while changes of the cluster come in; at 0 the last nodes known are used"},
    {"certkv_kvstore_cluster_lookups_total", MetricKind::kCounter, "result",
     "Lookups that lacked blocks and asked other nodes: extended, nothing (they had no more), "
     "failed "
     "(not all answered), timed_out (answered without; what comes later stays)"},
    {"certkv_kvstore_cluster_blocks_total", MetricKind::kCounter, "",
     "Blocks that came from other nodes for lookups"},
    {"certkv_kvstore_scrubbed_bytes_total", MetricKind::kCounter, "",
     "Bytes that the background check has read"},
    {"certkv_kvstore_disk_opening_blocks", MetricKind::kGauge, "",
     "Blocks of the disk tier whose index was read so far while the store opens and serves "
     "nothing; 0 once it is open; only with a disk tier"},
    {"certkv_kvstore_disk_opening_bytes", MetricKind::kGauge, "", "Their bytes"},
    {"certkv_kvstore_disk_open_info", MetricKind::kGauge, "",
     "1 when the disk tier is open, 0 while its index is read and the store serves nothing"},
    {"certkv_kvstore_disk_blocks_total", MetricKind::kCounter, "event",
     "Blocks of the disk tier: written, read, expired, over_quota (of their tenant), refused (a "
     "limit leaves no room), damaged, write_error; only with one"},
    {"certkv_kvstore_tenant_bytes", MetricKind::kGauge, "tenant, tier",
     "Bytes of each tenant's blocks in the device and backing tiers of all caches"},
    {"certkv_kvstore_tenant_limit_bytes", MetricKind::kGauge, "tenant, tier",
     "The most that it may have there"},
    {"certkv_kvstore_tenant_disk_bytes", MetricKind::kGauge, "tenant",
     "Bytes on disk of each tenant that has some and a spill_limit"},
    {"certkv_kvstore_tenant_disk_limit_bytes", MetricKind::kGauge, "tenant",
     "spill_limit of each of these"},
};

struct Event {
  const char* name;
  int64_t StoreCounters::*count;
};
constexpr Event kEvents[] = {
    {"sealed", &StoreCounters::blocks_sealed},
    {"shared", &StoreCounters::blocks_shared},
    {"pulled", &StoreCounters::blocks_pulled},
    {"aborted", &StoreCounters::blocks_aborted},
    {"demoted", &StoreCounters::blocks_demoted},
    {"promoted", &StoreCounters::blocks_promoted},
    {"evicted", &StoreCounters::blocks_evicted},
    {"spilled", &StoreCounters::blocks_spilled},
    {"restored", &StoreCounters::blocks_restored},
    {"prefetched", &StoreCounters::blocks_prefetched},
    {"prefetch_refused", &StoreCounters::prefetches_refused},
    {"rebuilt", &StoreCounters::blocks_rebuilt},
    {"lost", &StoreCounters::blocks_lost},
};

void CollectTiers(const StoreStats& stats, MetricSink* sink) {
  double device = 0;
  double device_capacity = 0;
  double backing = 0;
  double backing_capacity = 0;
  int64_t blocks[5] = {};
  for (const CacheStats& cache : stats.caches) {
    device += static_cast<double>(cache.device_slots_used * cache.device_slot_bytes);
    device_capacity += static_cast<double>(cache.device_slot_count * cache.device_slot_bytes);
    backing += static_cast<double>(cache.backing_slots_used * cache.backing_slot_bytes);
    backing_capacity += static_cast<double>(cache.backing_slot_count * cache.backing_slot_bytes);
    blocks[0] += cache.backing_slots_used;
    blocks[1] += cache.device_slots_used;
    blocks[2] += cache.blocks_leased;
    blocks[3] += cache.blocks_pinned;
    blocks[4] += cache.blocks_writing;
  }
  sink->Add("certkv_kvstore_tier_bytes", device, {{"tier", "device"}});
  sink->Add("certkv_kvstore_tier_bytes", backing, {{"tier", "backing"}});
  sink->Add("certkv_kvstore_tier_capacity_bytes", device_capacity, {{"tier", "device"}});
  sink->Add("certkv_kvstore_tier_capacity_bytes", backing_capacity, {{"tier", "backing"}});
  const char* const states[] = {"backing", "device", "leased", "pinned", "writing"};
  for (int i = 0; i < 5; ++i) {
    sink->Add("certkv_kvstore_blocks_total", static_cast<double>(blocks[i]),
              {{"state", states[i]}});
  }
}

// Of tenants with a name, over all caches.
void CollectTenants(const StoreStats& stats, MetricSink* sink) {
  struct Sums {
    double used[2] = {};
    double limit[2] = {};
  };
  std::map<std::string, Sums> tenants;
  for (const CacheStats& cache : stats.caches) {
    for (const TenantStats& tenant : cache.tenants) {
      if (tenant.tenant.empty()) continue;
      Sums& sums = tenants[tenant.tenant];
      const TierShare shares[] = {tenant.use.device, tenant.use.backing};
      const int64_t slot_bytes[] = {cache.device_slot_bytes, cache.backing_slot_bytes};
      for (int tier = 0; tier < 2; ++tier) {
        sums.used[tier] += static_cast<double>(shares[tier].used * slot_bytes[tier]);
        sums.limit[tier] += static_cast<double>(shares[tier].limit * slot_bytes[tier]);
      }
    }
  }
  const char* const tiers[] = {"device", "backing"};
  for (const auto& [tenant, sums] : tenants) {
    for (int tier = 0; tier < 2; ++tier) {
      sink->Add("certkv_kvstore_tenant_bytes", sums.used[tier],
                {{"tenant", tenant}, {"tier", tiers[tier]}});
      sink->Add("certkv_kvstore_tenant_limit_bytes", sums.limit[tier],
                {{"tenant", tenant}, {"tier", tiers[tier]}});
    }
  }
}

void CollectDeviceCopies(const StoreStats& stats, MetricSink* sink) {
  double ready = 0;
  double withdrawn = 0;
  double bytes = 0;
  for (const CacheStats& cache : stats.caches) {
    if (cache.has_device_copy) ++ready;
    if (!cache.device_error.ok()) ++withdrawn;
    bytes += static_cast<double>(cache.device_copied_bytes);
  }
  sink->Add("certkv_kvstore_device_copies_total", ready, {{"state", "ready"}});
  sink->Add("certkv_kvstore_device_copies_total", withdrawn, {{"state", "withdrawn"}});
  sink->Add("certkv_kvstore_device_copied_bytes_total", bytes);
  const StoreCounters& counters = stats.counters;
  const std::pair<const char*, int64_t> staged[] = {{"sealed", counters.device_blocks_sealed},
                                                    {"fallen", counters.device_blocks_fallen},
                                                    {"failed", counters.device_blocks_failed}};
  for (const auto& [result, count] : staged) {
    sink->Add("certkv_kvstore_device_staged_blocks_total", static_cast<double>(count),
              {{"result", result}});
  }
}

}  // namespace

absl::Span<const MetricInfo> StoreMetricInfos() { return kInfos; }

void CollectClusterMetrics(const ClusterLink& link, MetricSink* sink) {
  const cluster::MembershipStatus status = link.status();
  sink->Add("certkv_kvstore_cluster_nodes_total", static_cast<double>(link.map()->nodes().size()));
  sink->Add("certkv_kvstore_cluster_registered_info", status.is_registered ? 1 : 0);
  sink->Add("certkv_kvstore_cluster_watching_info", status.is_watching ? 1 : 0);
  const ClusterCounters& counters = link.counters();
  const std::pair<const char*, const std::atomic<int64_t>*> results[] = {
      {"extended", &counters.extended},
      {"nothing", &counters.nothing},
      {"failed", &counters.failed},
      {"timed_out", &counters.timed_out}};
  for (const auto& [result, count] : results) {
    sink->Add("certkv_kvstore_cluster_lookups_total",
              static_cast<double>(count->load(std::memory_order_relaxed)), {{"result", result}});
  }
  sink->Add("certkv_kvstore_cluster_blocks_total",
            static_cast<double>(counters.blocks.load(std::memory_order_relaxed)));
}

void CollectBulkMetrics(const BulkCounters& counters, MetricSink* sink) {
  const auto add = [sink](const char* name, const std::atomic<int64_t>& count,
                          const char* label = "", const char* value = "") {
    const auto number = static_cast<double>(count.load(std::memory_order_relaxed));
    if (*label == 0) return sink->Add(name, number);
    sink->Add(name, number, {{label, value}});
  };
  add("certkv_kvstore_bulk_connections_total", counters.connections);
  add("certkv_kvstore_bulk_idle_connections_total", counters.idle_connections);
  const char* const connections = "certkv_kvstore_bulk_connection_events_total";
  add(connections, counters.connections_made, "event", "made");
  add(connections, counters.connections_reused, "event", "reused");
  add(connections, counters.connections_replaced, "event", "replaced");
  add(connections, counters.connections_displaced, "event", "displaced");
  add("certkv_kvstore_bulk_bytes_total", counters.bytes_sent, "direction", "sent");
  add("certkv_kvstore_bulk_bytes_total", counters.bytes_received, "direction", "received");
  const char* const blocks = "certkv_kvstore_bulk_blocks_total";
  add(blocks, counters.blocks_sent, "event", "sent");
  add(blocks, counters.blocks_received, "event", "received");
  add(blocks, counters.blocks_damaged, "event", "damaged");
  add(blocks, counters.planes_rebuilt, "event", "planes_rebuilt");
  add(blocks, counters.originals_lost, "event", "originals_lost");
  add("certkv_kvstore_bulk_pulls_total", counters.pulls, "event", "begun");
  add("certkv_kvstore_bulk_pulls_total", counters.pulls_failed, "event", "failed");
  add("certkv_kvstore_bulk_pulls_total", counters.reconnects, "event", "reconnected");
  add("certkv_kvstore_bulk_refused_total", counters.peers_refused);
}

void CollectNcclMetrics(const NcclCounters& counters, MetricSink* sink) {
  const auto add = [sink](const char* name, const std::atomic<int64_t>& count,
                          const char* direction = "") {
    const auto number = static_cast<double>(count.load(std::memory_order_relaxed));
    if (*direction == 0) return sink->Add(name, number);
    sink->Add(name, number, {{"direction", direction}});
  };
  add("certkv_kvstore_nccl_links_total", counters.links);
  add("certkv_kvstore_nccl_links_made_total", counters.links_made);
  add("certkv_kvstore_nccl_bytes_total", counters.bytes_sent, "sent");
  add("certkv_kvstore_nccl_bytes_total", counters.bytes_received, "received");
  add("certkv_kvstore_nccl_blocks_total", counters.blocks_sent, "sent");
  add("certkv_kvstore_nccl_blocks_total", counters.blocks_received, "received");
  for (const auto& [reason, count] : counters.Failures()) {
    sink->Add("certkv_kvstore_nccl_failures_total", static_cast<double>(count),
              {{"reason", reason}});
  }
}

void CollectStoreMetrics(const StoreStats& stats, MetricSink* sink) {
  CollectTiers(stats, sink);
  CollectTenants(stats, sink);
  CollectDeviceCopies(stats, sink);
  sink->Add("certkv_kvstore_caches_total", static_cast<double>(stats.caches.size()));
  sink->Add("certkv_kvstore_sessions_total", stats.session_count);
  sink->Add("certkv_kvstore_leases_total", stats.lease_count);
  const StoreCounters& counters = stats.counters;
  sink->Add("certkv_kvstore_leases_expired_total", static_cast<double>(counters.leases_expired));
  sink->Add("certkv_kvstore_lookups_total", static_cast<double>(counters.lookups));
  sink->Add("certkv_kvstore_lookup_blocks_total", static_cast<double>(counters.lookup_blocks_asked),
            {{"result", "asked"}});
  sink->Add("certkv_kvstore_lookup_blocks_total", static_cast<double>(counters.lookup_blocks_found),
            {{"result", "found"}});
  for (const Event& event : kEvents) {
    sink->Add("certkv_kvstore_block_events_total", static_cast<double>(counters.*event.count),
              {{"event", event.name}});
  }
  sink->Add("certkv_kvstore_scrubbed_bytes_total", static_cast<double>(counters.bytes_scrubbed));
  if (!stats.spill.enabled) return;
  const SpillStats& spill = stats.spill;
  sink->Add("certkv_kvstore_tier_bytes", static_cast<double>(spill.bytes), {{"tier", "disk"}});
  const SpillProgress progress = spill.opening ? spill.progress : SpillProgress{};
  sink->Add("certkv_kvstore_disk_opening_blocks", static_cast<double>(progress.blocks));
  sink->Add("certkv_kvstore_disk_opening_bytes", static_cast<double>(progress.bytes));
  sink->Add("certkv_kvstore_disk_open_info", spill.opening ? 0 : 1);
  const std::pair<const char*, int64_t> disk[] = {
      {"written", spill.blocks_written},  {"read", spill.blocks_read},
      {"expired", spill.blocks_expired},  {"over_quota", spill.blocks_over_quota},
      {"refused", spill.blocks_refused},  {"damaged", spill.blocks_damaged},
      {"write_error", spill.write_errors}};
  for (const auto& [event, count] : disk) {
    sink->Add("certkv_kvstore_disk_blocks_total", static_cast<double>(count), {{"event", event}});
  }
  for (const TenantSpill& tenant : spill.tenants) {
    if (tenant.limit_bytes == 0) continue;
    sink->Add("certkv_kvstore_tenant_disk_bytes", static_cast<double>(tenant.bytes),
              {{"tenant", tenant.tenant}});
    sink->Add("certkv_kvstore_tenant_disk_limit_bytes", static_cast<double>(tenant.limit_bytes),
              {{"tenant", tenant.tenant}});
  }
}

}  // namespace certkv::kvstore
