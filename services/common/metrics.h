// What servers tell of themselves: the table of metrics, and what a service fills in at a scrape.
//
// A service declares its metrics as rows of MetricInfo, which docs/metrics.md is made from, and
// fills a MetricSink with their values whenever somebody asks. It counts for itself, in atomics.
#ifndef CERTKV_SERVICES_COMMON_METRICS_H_
#define CERTKV_SERVICES_COMMON_METRICS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace certkv {

enum class MetricKind : uint8_t { kCounter, kGauge, kHistogram };

struct MetricInfo {
  absl::string_view name;  // certkv_<service>_<noun>_<unit>; the unit of a count is "total"
  MetricKind kind;
  absl::string_view labels;  // names with ", " between them; "" = none
  absl::string_view help;    // a sentence without a full stop
};

// Ascending upper bounds and, for each, how many values were at or below it; a last count of all.
struct HistogramSnapshot {
  std::vector<double> bounds;
  std::vector<int64_t> cumulative_counts;  // bounds.size() + 1
  double sum = 0;
};

class MetricSink {
 public:
  using Labels = std::initializer_list<std::pair<absl::string_view, absl::string_view>>;
  virtual ~MetricSink() = default;
  // `name` is declared, and of that kind. Labels come in the declared order.
  virtual void Add(absl::string_view name, double value, Labels labels = {}) = 0;
  virtual void AddHistogram(absl::string_view name, const HistogramSnapshot& snapshot,
                            Labels labels = {}) = 0;
};

struct MetricSource {
  absl::Span<const MetricInfo> infos;
  // Called from any thread, one call at a time. Takes milliseconds at most.
  std::function<void(MetricSink*)> collect;
};

// How long things took. Threads: all methods are safe; Observe is lock-free.
class LatencyHistogram {
 public:
  void Observe(int64_t nanoseconds);
  // In seconds.
  HistogramSnapshot Snapshot() const;

 private:
  static constexpr int kBoundCount = 19;
  static const std::array<int64_t, kBoundCount> kBoundsNs;
  std::array<std::atomic<int64_t>, kBoundCount + 1> counts_{};
  std::atomic<int64_t> sum_ns_{0};
};

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_METRICS_H_
