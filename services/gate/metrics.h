// Gate's metrics: docs/metrics.md.
#ifndef CERTKV_SERVICES_GATE_METRICS_H_
#define CERTKV_SERVICES_GATE_METRICS_H_

#include <string>

#include "absl/types/span.h"
#include "services/common/metrics.h"
#include "services/gate/request_registry.h"

namespace certkv::gate {

absl::Span<const MetricInfo> GateMetricInfos();
void CollectGateMetrics(const RequestRegistry& registry, MetricSink* sink);

// "K8V4"; "unknown" when neither was said.
std::string FormatName(int key_format, int value_format);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_METRICS_H_
