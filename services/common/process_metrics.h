// Metrics of the process that no service owns: its version, memory, processor time and log.
#ifndef CERTKV_SERVICES_COMMON_PROCESS_METRICS_H_
#define CERTKV_SERVICES_COMMON_PROCESS_METRICS_H_

#include "absl/types/span.h"
#include "services/common/metrics.h"

namespace certkv {

absl::Span<const MetricInfo> ProcessMetricInfos();
void CollectProcessMetrics(MetricSink* sink);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_PROCESS_METRICS_H_
