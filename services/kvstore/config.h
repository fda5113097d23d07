// Settings of the store: section "kvstore" of a config file.
#ifndef CERTKV_SERVICES_KVSTORE_CONFIG_H_
#define CERTKV_SERVICES_KVSTORE_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "services/cluster/config.h"
#include "services/common/config_reader.h"
#include "services/common/device_choice.h"
#include "services/kvstore/bulk_config.h"
#include "services/kvstore/eviction_order.h"
#include "services/kvstore/nccl_config.h"
#include "services/kvstore/tenant_pool.h"
#include "services/kvstore/tenant_table.h"

namespace certkv {

// What each field is stands in config.cc, where docs/config.md comes from.
struct KvStoreConfig {
  int64_t device_memory_bytes = int64_t{512} << 20;  // of each registered cache
  int64_t backing_memory_bytes = int64_t{1} << 30;   // of each registered cache
  int64_t staging_memory_bytes = int64_t{1} << 30;   // of all sessions together
  int32_t staging_slots = 64;                        // of a worker that asks for none
  kvstore::EvictionPolicy eviction = kvstore::EvictionPolicy::kReuse;
  int32_t cache_limit = 8;
  int32_t session_limit = 256;
  int32_t lease_limit = 16384;         // of one session
  int64_t lease_duration_ms = 30'000;  // of a call that asks for none
  int64_t lease_duration_max_ms = int64_t{3'600'000};
  int64_t connect_timeout_ms = 10'000;
  int32_t pinned_percent_max = 50;  // of a cache's backing slots
  int64_t memory_limit_bytes = 0;   // of all tiers and staging memory together; 0: their own limits
  int32_t watermark_high_percent = 95;  // of a tier's slots
  int32_t watermark_low_percent = 90;
  int32_t tenant_limit = 1024;
  std::vector<kvstore::TenantQuota> tenant_quotas;
  int32_t watcher_limit = 64;
  int32_t event_queue_limit = 16384;  // of one watcher
  int32_t event_history_limit = 65536;
  int32_t seal_threads = 0;  // 0: one per processor
  int32_t seal_queue_limit = 256;
  int64_t scrub_bytes_per_second = int64_t{32} << 20;
  std::string spill_directory;  // "": no tier on disk
  int64_t spill_size_bytes = int64_t{64} << 30;
  int64_t spill_ttl_ms = int64_t{7} * 24 * 3'600'000;
  int64_t spill_wait_ms = 2000;
  int64_t spill_prefetch_bytes = int64_t{256} << 20;
  int32_t spill_ahead_percent = 10;
  std::string fd_socket;  // "": DefaultFdSocket()
  DeviceChoice device = DeviceChoice::kHost;
  int32_t device_index = 0;
  int64_t device_staging_memory_bytes = 0;  // of all sessions together; 0: none
  absl::Status device_error =
      {};  // no setting: why this process has no GPU, where it looked for one
  std::vector<kvstore::PoolConfig> pools;
  ClusterConfig cluster;  // a section of its own
  kvstore::BulkConfig bulk;
  kvstore::NcclConfig nccl;
};

// `config` must live as long as the section is used.
ConfigSection KvStoreConfigSection(KvStoreConfig* config);

// List "kvstore_tenants" of a config file. `config` must live as long as the list is used.
ConfigList KvStoreTenantsList(KvStoreConfig* config);
// List "kvstore_pools": tenants that share blocks.
ConfigList KvStorePoolsList(KvStoreConfig* config);

// <runtime directory>/kvstore-fd.sock.
std::string DefaultFdSocket();

}  // namespace certkv

#endif  // CERTKV_SERVICES_KVSTORE_CONFIG_H_
