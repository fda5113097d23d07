#include "services/kvstore/config.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/identity.h"
#include "services/common/runtime_directory.h"

namespace certkv {
namespace {

constexpr int64_t kMemoryBytesMin = int64_t{64} << 10;
constexpr int64_t kMemoryBytesMax = int64_t{1} << 46;
constexpr int32_t kPoolsMax = 1024;

ConfigSection PoolSection(kvstore::PoolConfig* pool) {
  ConfigSection section("kvstore_pools", "Tenants that share blocks.");
  section.AddString("name", &pool->name, kTenantNameBytesMax, "name of the pool, for people");
  section.AddString("tenants", &pool->tenants, 65536,
                    "names of its tenants, with commas between; a tenant is in one pool at most");
  return section;
}

void AddMemoryFields(KvStoreConfig* config, ConfigSection* section) {
  const IntegerRange range{kMemoryBytesMin, kMemoryBytesMax};
  section->AddSize("device_memory", &config->device_memory_bytes, range,
                   "memory of the device tier (quantized blocks) of each registered cache; pages "
                   "are taken from the system as blocks are sealed");
  section->AddSize("backing_memory", &config->backing_memory_bytes, range,
                   "memory of the backing tier (originals) of each registered cache; it decides "
                   "how many blocks the cache holds");
  section->AddEnum<DeviceChoice>(
      "device", &config->device, DeviceChoiceNames(),
      "whether a GPU has a copy of the device tier, which certifiers and engines read there: host, "
      "none has; auto, where there is a GPU; cuda, always, and a cache whose copy can't be made is "
      "refused. Takes device_memory of each registered cache from the GPU");
  section->AddInteger("device_index", &config->device_index, {0, 63}, "",
                      "which GPU, as CUDA counts those that the process sees");
  section->AddSize("device_staging_memory", &config->device_staging_memory_bytes,
                   {0, kMemoryBytesMax},
                   "memory of that GPU in which workers whose pages are on it write originals, of "
                   "all sessions together: their blocks are sealed there. Each cache that they use "
                   "takes up to 64 MiB more, or twice a block; 0 means that all blocks are sealed "
                   "on the host");
  section->AddSize("staging_memory", &config->staging_memory_bytes, range,
                   "memory in which workers write originals before they are sealed, of all "
                   "sessions together");
  section->AddInteger("staging_slots", &config->staging_slots, {1, 4096}, "blocks",
                      "staging slots of a worker that does not say how many it wants; fewer when "
                      "staging_memory has no more");
  section->AddEnum<kvstore::EvictionPolicy>(
      "eviction", &config->eviction,
      {{"reuse", kvstore::EvictionPolicy::kReuse}, {"lru", kvstore::EvictionPolicy::kLru}},
      "which block leaves a full cache first: the least recently used one, or, with reuse, one of "
      "low priority, then one that lookups have not found again; the end of a chain before its "
      "beginning in either");
  section->AddInteger("pinned_percent_max", &config->pinned_percent_max, {0, 100}, "percent",
                      "share of a cache's backing slots that may be pinned, and of a tenant's "
                      "backing_limit that it may pin");
  section->AddSize("memory_limit", &config->memory_limit_bytes, {0, kMemoryBytesMax},
                   "memory of the tiers of all caches and of staging memory together: a cache or "
                   "worker that would exceed it is refused; 0 means none but the other limits");
  section->AddInteger(
      "watermark_high_percent", &config->watermark_high_percent, {1, 100}, "percent",
      "when more of a tier's slots are used, room is made in the background: blocks "
      "leave the device tier, and blocks that are on disk leave memory");
  section->AddInteger("watermark_low_percent", &config->watermark_low_percent, {0, 100}, "percent",
                      "share of a tier's slots that are used when that ends");
}

void AddTenantFields(KvStoreConfig* config, ConfigSection* section) {
  section->AddInteger("tenant_limit", &config->tenant_limit, {1, 65536}, "tenants",
                      "tenants with sessions or blocks at a time; quotas are in kvstore_tenants");
  section->AddCheck([config] {
    return kvstore::CheckTenantQuotas(
        config->tenant_quotas,
        {config->device_memory_bytes, config->backing_memory_bytes, config->spill_size_bytes});
  });
  section->AddCheck([config] {
    if (config->watermark_low_percent <= config->watermark_high_percent) return absl::OkStatus();
    return MakeError(
        absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
        absl::StrCat("kvstore.watermark_low_percent is ", config->watermark_low_percent,
                     ", must be at most watermark_high_percent, ", config->watermark_high_percent,
                     "; lower the one or raise the "
                     "other"));
  });
}

ConfigSection QuotaSection(kvstore::TenantQuota* quota) {
  ConfigSection section("kvstore_tenants", "");
  const IntegerRange range{0, kMemoryBytesMax};
  section.AddString("tenant", &quota->tenant, kvstore::kTenantNameBytesMax,
                    "whose quota it is; * for each tenant that has none of its own");
  section.AddSize("device_guaranteed", &quota->device_guaranteed_bytes, range,
                  "of the device tier of each cache: up to it others take nothing from the tenant; "
                  "beyond it the tenant is the first to lose blocks");
  section.AddSize("device_limit", &quota->device_limit_bytes, range,
                  "of the device tier of each cache: the tenant never has more; 0 means no limit");
  section.AddSize("backing_guaranteed", &quota->backing_guaranteed_bytes, range,
                  "the same for the backing tier");
  section.AddSize("backing_limit", &quota->backing_limit_bytes, range,
                  "the same for the backing tier; a write that would need more makes room among "
                  "the tenant's own blocks, or is refused; 0 means no limit");
  section.AddSize("spill_limit", &quota->spill_limit_bytes, {0, int64_t{1} << 50},
                  "of the disk, of all caches together: beyond it the tenant's own oldest blocks "
                  "go, and nobody else's; 0 means no limit but spill_size");
  return section;
}

void AddLeaseFields(KvStoreConfig* config, ConfigSection* section) {
  const IntegerRange range{100, 3'600'000};
  section->AddDuration("lease_duration", &config->lease_duration_ms, range,
                       "how long a lease holds when the call does not say");
  section->AddDuration("lease_duration_max", &config->lease_duration_max_ms, range,
                       "longest lease that a call may ask for");
  section->AddDuration("connect_timeout", &config->connect_timeout_ms, {100, 3'600'000},
                       "how long an attached session may take to connect to fd_socket before it "
                       "is dropped");
}

void AddLimitFields(KvStoreConfig* config, ConfigSection* section) {
  section->AddInteger(
      "cache_limit", &config->cache_limit, {1, 1024}, "caches",
      "registered caches; one without workers, leased and pinned blocks makes room for "
      "another");
  section->AddInteger("session_limit", &config->session_limit, {1, 65536}, "sessions",
                      "workers and readers attached at a time");
  section->AddInteger("lease_limit", &config->lease_limit, {1, 1 << 20}, "leases",
                      "leases that one session may hold at a time");
  section->AddInteger("watcher_limit", &config->watcher_limit, {1, 65536}, "watchers",
                      "WatchBlockEvents streams at a time");
  section->AddInteger("event_queue_limit", &config->event_queue_limit, {1, 1 << 20}, "events",
                      "events that a watcher may be behind before it is cut off");
  section->AddInteger("event_history_limit", &config->event_history_limit, {0, 1 << 20}, "events",
                      "past events that are kept for watchers that were cut off and come back");
  section->AddSize("scrub_rate", &config->scrub_bytes_per_second, {0, int64_t{1} << 40},
                   "bytes per second of stored blocks that are read again in the background and "
                   "compared with their checksums; 0 turns it off");
  section->AddInteger("seal_threads", &config->seal_threads, {0, 1024}, "threads",
                      "threads that seal, promote and check blocks; 0 means one per processor");
  section->AddInteger("seal_queue_limit", &config->seal_queue_limit, {1, 65536}, "calls",
                      "calls that may wait for those threads before more are refused");
}

void AddSpillFields(KvStoreConfig* config, ConfigSection* section) {
  section->AddString("spill_directory", &config->spill_directory, 4096,
                     "directory on a local disk for blocks that memory has no room for, found "
                     "again after a restart; made when missing, and of one store alone; empty "
                     "means none");
  section->AddSize("spill_size", &config->spill_size_bytes, {int64_t{1} << 20, int64_t{1} << 50},
                   "bytes of blocks on disk; the oldest go first. Deleted blocks take space until "
                   "their files are compacted: leave as much again free");
  section->AddDuration("spill_ttl", &config->spill_ttl_ms, {0, int64_t{365} * 24 * 3'600'000},
                       "a block on disk is forgotten so long after it was written; 0s means never");
  section->AddDuration(
      "spill_wait", &config->spill_wait_ms, {0, 3'600'000},
      "how long a lookup goes on bringing blocks back from disk; what is not "
      "back by then ends its prefix, and comes in the background (spill_prefetch)");
  section->AddSize("spill_prefetch", &config->spill_prefetch_bytes, {0, int64_t{1} << 46},
                   "memory of the blocks that lookups found on disk and did not wait for, and that "
                   "are on their way; they take free memory within their tenant's quota alone; 0 "
                   "turns it off");
  section->AddInteger("spill_ahead_percent", &config->spill_ahead_percent, {0, 100}, "percent",
                      "share of a cache's backing slots that are free or hold blocks that are on "
                      "disk already, so that writers need not wait for the disk");
}

}  // namespace

ConfigSection KvStoreConfigSection(KvStoreConfig* config) {
  ConfigSection section("kvstore", "Stores quantized and original KV blocks and shares them.");
  AddMemoryFields(config, &section);
  AddLeaseFields(config, &section);
  AddLimitFields(config, &section);
  AddTenantFields(config, &section);
  AddSpillFields(config, &section);
  kvstore::AddBulkFields(&config->bulk, &section);
  kvstore::AddNcclFields(&config->nccl, &section);
  section.AddString("fd_socket", &config->fd_socket, 107,
                    "path of the Unix socket that hands over the slabs' file descriptors; empty "
                    "means server.unix_socket with .fd after it");
  section.AddCheck([config] { return kvstore::CheckPools(config->pools); });
  section.AddCheck([config] {
    return config->bulk.has_access ? kvstore::CheckNcclPeers(config->nccl, config->bulk)
                                   : absl::OkStatus();
  });
  section.AddCheck([config] {
    if (!config->nccl.is_on() || config->device != DeviceChoice::kHost) return absl::OkStatus();
    return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                     "kvstore.nccl moves blocks between GPUs, and kvstore.device is host; set "
                     "device: auto or cuda, or nccl: off");
  });
  section.AddCheck([config] {
    if (config->device_staging_memory_bytes == 0 || config->device != DeviceChoice::kHost) {
      return absl::OkStatus();
    }
    return MakeError(
        absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
        "kvstore.device_staging_memory is on the GPU of kvstore.device, which is host; "
        "set device: auto or cuda, or device_staging_memory: 0");
  });
  section.AddCheck([config] {
    if (config->lease_duration_ms <= config->lease_duration_max_ms) return absl::OkStatus();
    return MakeError(
        absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
        absl::StrCat("kvstore.lease_duration is ", config->lease_duration_ms,
                     " ms, must be at most kvstore.lease_duration_max, ",
                     config->lease_duration_max_ms, " ms; lower the one or raise the other"));
  });
  return section;
}

ConfigList KvStoreTenantsList(KvStoreConfig* config) {
  auto* quotas = &config->tenant_quotas;
  // Outlives the list as the program does: a sample of what an element is by default.
  static kvstore::TenantQuota sample;
  return {
      .name = "kvstore_tenants",
      .description =
          "What each tenant may have of the store's memory, of each registered cache, and of its "
          "disk. The guarantees of all tenants together fit the tier.",
      .count_max = kvstore::kTenantQuotasMax,
      .clear = [quotas] { quotas->clear(); },
      .add = [quotas] { return QuotaSection(&quotas->emplace_back()); },
      .elements =
          [quotas] {
            std::vector<ConfigSection> sections;
            for (kvstore::TenantQuota& one : *quotas) sections.push_back(QuotaSection(&one));
            return sections;
          },
      .sample = QuotaSection(&sample)};
}

ConfigList KvStorePoolsList(KvStoreConfig* config) {
  auto* pools = &config->pools;
  static kvstore::PoolConfig sample;  // what an element is by default
  return {
      .name = "kvstore_pools",
      .description =
          "Tenants that share blocks: a lookup of one finds what another has sealed, and all of "
          "them can map the pool's memory. A tenant in none shares with nobody.",
      .count_max = kPoolsMax,
      .clear = [pools] { pools->clear(); },
      .add = [pools] { return PoolSection(&pools->emplace_back()); },
      .elements =
          [pools] {
            std::vector<ConfigSection> sections;
            for (kvstore::PoolConfig& pool : *pools) sections.push_back(PoolSection(&pool));
            return sections;
          },
      .sample = PoolSection(&sample)};
}

std::string DefaultFdSocket() { return absl::StrCat(RuntimeDirectory(), "/kvstore-fd.sock"); }

}  // namespace certkv
