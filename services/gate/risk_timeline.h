// The bounds and repairs of one request over time, in a fixed number of steps.
//
// Invariants (risk_timeline_test breaks each):
//   1. every read is in one bucket: their reads add up to what was added;
//   2. at most kBucketCountMax buckets; when time goes past the last, pairs of buckets become one,
//      and the steps twice as long;
//   3. a clock that is set back adds to the first bucket, never before it.
//
// Memory: 24 bytes for each bucket that has begun. Threads: none; the owner locks.
#ifndef CERTKV_SERVICES_GATE_RISK_TIMELINE_H_
#define CERTKV_SERVICES_GATE_RISK_TIMELINE_H_

#include <cstdint>
#include <vector>

#include "kernels/core/policy.h"

namespace certkv::gate {

class RiskTimeline {
 public:
  static constexpr int32_t kBucketCountMax = 64;
  static constexpr int64_t kFirstBucketMs = 250;

  struct Bucket {
    uint32_t reads = 0;  // both stay at their largest value
    uint32_t repairs = 0;
    float first_tv_max = 0;   // before repair
    float served_tv_max = 0;  //
    double repair_bytes = 0;
  };

  void Add(const ReadCertificate& certificate, int64_t now_ms);

  int64_t begin_ms() const { return begin_ms_; }  // of the first read; 0 when there is none
  int64_t bucket_ms() const { return bucket_ms_; }
  // The first begins at begin_ms.
  const std::vector<Bucket>& buckets() const { return buckets_; }

 private:
  void Halve();

  int64_t begin_ms_ = 0;
  int64_t bucket_ms_ = kFirstBucketMs;
  std::vector<Bucket> buckets_;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_RISK_TIMELINE_H_
