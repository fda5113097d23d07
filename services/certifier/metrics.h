// The certifier's metrics: docs/metrics.md.
#ifndef CERTKV_SERVICES_CERTIFIER_METRICS_H_
#define CERTKV_SERVICES_CERTIFIER_METRICS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "services/certifier/counters.h"
#include "services/common/metrics.h"

namespace certkv::certifier {

absl::Span<const MetricInfo> CertifierMetricInfos();
void CollectCertifierMetrics(const CertifierCounters& counters, int32_t view_count,
                             int32_t budget_count, MetricSink* sink);

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_METRICS_H_
