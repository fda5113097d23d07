// The store's metrics: docs/metrics.md.
#ifndef CERTKV_SERVICES_KVSTORE_METRICS_H_
#define CERTKV_SERVICES_KVSTORE_METRICS_H_

#include "absl/types/span.h"
#include "services/common/metrics.h"
#include "services/kvstore/bulk_counters.h"
#include "services/kvstore/cluster_link.h"
#include "services/kvstore/nccl_counters.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

absl::Span<const MetricInfo> StoreMetricInfos();
void CollectBulkMetrics(const BulkCounters& counters, MetricSink* sink);
void CollectNcclMetrics(const NcclCounters& counters, MetricSink* sink);
void CollectClusterMetrics(const ClusterLink& link, MetricSink* sink);
void CollectStoreMetrics(const StoreStats& stats, MetricSink* sink);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_METRICS_H_
