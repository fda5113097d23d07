// MetricTable: the metrics of a process, as Prometheus' text and as documentation.
#ifndef CERTKV_SERVICES_COMMON_METRIC_TABLE_H_
#define CERTKV_SERVICES_COMMON_METRIC_TABLE_H_

#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "services/common/metrics.h"

namespace certkv {

// Threads: all methods are safe. A source outlives the table, or is the last to be asked.
class MetricTable {
 public:
  // No two sources declare a metric of one name.
  void AddSource(MetricSource source) ABSL_LOCKS_EXCLUDED(mutex_);

  // Asks every source, one after the other. Prometheus' text format, version 0.0.4.
  std::string ToText() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  mutable absl::Mutex mutex_;
  std::vector<MetricSource> sources_ ABSL_GUARDED_BY(mutex_);
};

// A Markdown table of the rows, in their order.
std::string MetricsToMarkdown(absl::Span<const MetricInfo> infos);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_METRIC_TABLE_H_
