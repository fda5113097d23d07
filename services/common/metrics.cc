#include "services/common/metrics.h"

#include <algorithm>

namespace certkv {

// Ten microseconds, a call on a Unix socket, to ten seconds, the longest that a client waits.
const std::array<int64_t, LatencyHistogram::kBoundCount> LatencyHistogram::kBoundsNs = {
    10'000,        25'000,        50'000,        100'000,       250'000,
    500'000,       1'000'000,     2'500'000,     5'000'000,     10'000'000,
    25'000'000,    50'000'000,    100'000'000,   250'000'000,   500'000'000,
    1'000'000'000, 2'500'000'000, 5'000'000'000, 10'000'000'000};

void LatencyHistogram::Observe(int64_t nanoseconds) {
  const auto bound = std::lower_bound(kBoundsNs.begin(), kBoundsNs.end(), nanoseconds);
  counts_[bound - kBoundsNs.begin()].fetch_add(1, std::memory_order_relaxed);
  sum_ns_.fetch_add(std::max<int64_t>(nanoseconds, 0), std::memory_order_relaxed);
}

HistogramSnapshot LatencyHistogram::Snapshot() const {
  HistogramSnapshot snapshot;
  int64_t count = 0;
  for (int i = 0; i <= kBoundCount; ++i) {
    count += counts_[i].load(std::memory_order_relaxed);
    if (i < kBoundCount) snapshot.bounds.push_back(static_cast<double>(kBoundsNs[i]) * 1e-9);
    snapshot.cumulative_counts.push_back(count);
  }
  snapshot.sum = static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) * 1e-9;
  return snapshot;
}

}  // namespace certkv
