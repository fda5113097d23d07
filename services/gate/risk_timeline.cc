#include "services/gate/risk_timeline.h"

#include <algorithm>
#include <limits>

namespace certkv::gate {
namespace {

uint32_t AddSaturated(uint32_t a, uint32_t b) {
  return a > std::numeric_limits<uint32_t>::max() - b ? std::numeric_limits<uint32_t>::max()
                                                      : a + b;
}

}  // namespace

void RiskTimeline::Halve() {
  const size_t kept = (buckets_.size() + 1) / 2;
  for (size_t i = 0; i < kept; ++i) {
    Bucket one = buckets_[2 * i];
    if (2 * i + 1 < buckets_.size()) {
      const Bucket& other = buckets_[2 * i + 1];
      one.reads = AddSaturated(one.reads, other.reads);
      one.repairs = AddSaturated(one.repairs, other.repairs);
      one.first_tv_max = std::max(one.first_tv_max, other.first_tv_max);
      one.served_tv_max = std::max(one.served_tv_max, other.served_tv_max);
      one.repair_bytes += other.repair_bytes;
    }
    buckets_[i] = one;
  }
  buckets_.resize(kept);
  bucket_ms_ *= 2;
}

void RiskTimeline::Add(const ReadCertificate& certificate, int64_t now_ms) {
  if (buckets_.empty()) begin_ms_ = now_ms;
  int64_t index = std::max<int64_t>(now_ms - begin_ms_, 0) / bucket_ms_;
  while (index >= kBucketCountMax) {
    Halve();
    index = std::max<int64_t>(now_ms - begin_ms_, 0) / bucket_ms_;
  }
  if (index >= static_cast<int64_t>(buckets_.size())) {
    buckets_.resize(static_cast<size_t>(index) + 1);
  }
  Bucket& bucket = buckets_[static_cast<size_t>(index)];
  bucket.reads = AddSaturated(bucket.reads, 1);
  if (certificate.rung != Rung::kNone) bucket.repairs = AddSaturated(bucket.repairs, 1);
  bucket.first_tv_max = std::max(bucket.first_tv_max, certificate.first_worst_case_tv);
  bucket.served_tv_max = std::max(bucket.served_tv_max, certificate.worst_case_tv);
  bucket.repair_bytes += static_cast<double>(certificate.repair_bytes);
}

}  // namespace certkv::gate
