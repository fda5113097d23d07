// What another policy would have made of the reads that were reported lately.
//
// A sample of reported certificates is kept; TryPolicy holds each against a policy. A recorded read
// knows its worst_case_tv before repair, so whether it had been certified at once is exact, but for
// the value term of a read whose values were repaired: that of the repaired read stands for it.
// Bytes of a repair that did not happen are not known: the mean of those that did stands for them.
//
// Threads: all methods are safe. Memory: about 3 MiB when full.
#ifndef CERTKV_SERVICES_GATE_POLICY_TRIAL_H_
#define CERTKV_SERVICES_GATE_POLICY_TRIAL_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/core/policy.h"
#include "services/gate/policy.h"

namespace certkv::gate {

inline constexpr int32_t kSampledReadsMax = 32768;
inline constexpr int32_t kSampledPerBatchMax = 64;     // spread over the batch
inline constexpr int32_t kSampledAudiencesMax = 1024;  // pairs of tenant and model

struct PolicyTrial {
  int64_t read_count = 0;      // in the sample
  int64_t recorded_first = 0;  // certified at the first read, as it was
  int64_t recorded_repaired = 0;
  int64_t recorded_bytes = 0;
  int64_t tried_first = 0;  // as it would be
  int64_t tried_repaired = 0;
  int64_t tried_exact = 0;      // never tried: the policy reads them exactly
  int64_t tried_bytes = 0;      // an estimate where estimated_count > 0
  int64_t estimated_count = 0;  // reads whose bytes are a mean
};

class PolicyTrialSample {
 public:
  void Add(const std::string& tenant, const std::string& model,
           absl::Span<const ReadCertificate> certificates) ABSL_LOCKS_EXCLUDED(mutex_);
  // `policy` is valid and not resolved.
  PolicyTrial Try(const Policy& policy) const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct SampledRead {
    ReadCertificate certificate;
    int32_t audience = 0;  // index into audiences_
  };
  mutable absl::Mutex mutex_;
  std::vector<SampledRead> reads_ ABSL_GUARDED_BY(mutex_);  // a ring once it is full
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::pair<std::string, std::string>> audiences_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::pair<std::string, std::string>, int32_t> audience_index_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_POLICY_TRIAL_H_
