// Certificates, leases and batches for the tests of gate.
#ifndef CERTKV_SERVICES_GATE_GATE_FIXTURE_H_
#define CERTKV_SERVICES_GATE_GATE_FIXTURE_H_

#include <cstdint>
#include <vector>

#include "kernels/core/policy.h"
#include "services/gate/policy.h"
#include "services/gate/request.h"

namespace certkv::gate {

inline ReadCertificate Certified(float worst_case_tv, int32_t layer = 0, int32_t query_head = 0) {
  ReadCertificate certificate;
  certificate.layer = layer;
  certificate.query_head = query_head;
  certificate.worst_case_tv = worst_case_tv;
  certificate.first_worst_case_tv = worst_case_tv;
  certificate.value_radius = 1;
  certificate.outcome = Outcome::kCertified;
  return certificate;
}

inline ReadCertificate Exact(float first_worst_case_tv) {
  ReadCertificate certificate = Certified(0);
  certificate.first_worst_case_tv = first_worst_case_tv;
  certificate.rung = Rung::kHead;
  certificate.outcome = Outcome::kExact;
  return certificate;
}

inline Policy CumulativePolicy(double budget, double slice_share) {
  Policy policy;
  policy.risk_mode = RiskMode::kCumulative;
  policy.cumulative_budget = budget;
  policy.budget_slice_share = slice_share;
  return policy;
}

// A batch that owns its certificates.
struct OwnedBatch {
  int64_t reporter_id = 1;
  int64_t batch_number = 1;
  int64_t lease_id = 0;
  std::vector<ReadCertificate> certificates = {};
  int64_t failed_read_count = 0;
  std::vector<ReturnedSlice> returned = {};
  bool is_last = false;
  ReportBatch batch() const {
    return {reporter_id,       batch_number, lease_id, certificates,
            failed_read_count, returned,     is_last};
  }
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_GATE_FIXTURE_H_
