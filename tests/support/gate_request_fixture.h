// One request under a policy, for the tests of Request.
#ifndef CERTKV_TESTS_SUPPORT_GATE_REQUEST_FIXTURE_H_
#define CERTKV_TESTS_SUPPORT_GATE_REQUEST_FIXTURE_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "services/gate/gate_fixture.h"
#include "services/gate/request.h"

namespace certkv::gate {

inline constexpr int64_t kStart = 1'700'000'000'000;

class RequestTest : public ::testing::Test {
 protected:
  // Opens once and returns the lease.
  PolicyLease Open(const Policy& policy, RequestTerms terms = {}) {
    policy_ = policy;
    const Request::Limits limits{.heads_max = 100, .reporters_max = 1000};
    request_ = std::make_unique<Request>("requests/r", "label", terms, policy_, limits, now_ms_);
    const PolicyLease lease = *request_->Open(terms, policy_, now_ms_);
    lease_ids_ = {{1, lease.lease_id}};
    return lease;
  }
  absl::StatusOr<ReportAnswer> Report(std::vector<ReadCertificate> certificates,
                                      int64_t reporter = 1) {
    OwnedBatch batch{.reporter_id = reporter,
                     .batch_number = ++batches_[reporter],
                     .lease_id = lease_ids_[reporter],
                     .certificates = std::move(certificates)};
    return request_->Report(batch.batch(), policy_, now_ms_);
  }
  std::string LastEvent() const {
    const auto events = request_->Risk(policy_).events;
    return events.empty() ? "" : events.back().kind;
  }

  int64_t now_ms_ = kStart;
  Policy policy_;
  std::unique_ptr<Request> request_;
  std::map<int64_t, int64_t> batches_;    // last batch number by reporter
  std::map<int64_t, int64_t> lease_ids_;  // what each reporter names
};

}  // namespace certkv::gate

#endif  // CERTKV_TESTS_SUPPORT_GATE_REQUEST_FIXTURE_H_
