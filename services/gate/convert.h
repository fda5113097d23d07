// Between gate's wire messages and its core types. The *FromProto check what came over the wire.
#ifndef CERTKV_SERVICES_GATE_CONVERT_H_
#define CERTKV_SERVICES_GATE_CONVERT_H_

#include <vector>

#include "absl/status/statusor.h"
#include "certkv/gate/v1/gate.pb.h"
#include "services/gate/policy.h"
#include "services/gate/request.h"
#include "services/gate/request_registry.h"

namespace certkv::gate {

// Errors: InvalidArgument [POLICY_INVALID | READ_MODE_INVALID | RISK_MODE_INVALID].
absl::StatusOr<Policy> PolicyFromProto(const v1::Policy& proto);
v1::Policy PolicyToProto(const Policy& policy);

// Errors: InvalidArgument [TOLERANCE_INVALID | READ_MODE_INVALID].
absl::StatusOr<RequestTerms> TermsFromProto(const v1::OpenRequestRequest& proto);

// Errors: InvalidArgument [CERTIFICATE_INVALID], naming the first bad one; [REPORT_INVALID], too
// many.
absl::StatusOr<std::vector<ReadCertificate>> CertificatesFromProto(const v1::ReportRequest& proto);

// Errors: InvalidArgument [REPORT_INVALID], too many, an amount out of range, or a lease named
// twice.
absl::StatusOr<std::vector<ReturnedSlice>> ReturnedSlicesFromProto(const v1::ReportRequest& proto);

// Errors: InvalidArgument [REPORT_INVALID], too many.
absl::StatusOr<std::vector<CanaryResult>> CanariesFromProto(const v1::ReportRequest& proto);

// Errors: InvalidArgument [FILTER_INVALID], an unknown order.
absl::StatusOr<RiskQuery> RiskQueryFromProto(const v1::ListRequestRisksRequest& proto);

void ReportAnswerToProto(const ReportAnswer& answer, int64_t now_ms, v1::ReportResponse* proto);
void DecisionToProto(const Decision& decision, v1::DecideResponse* proto);
void RequestRiskToProto(const RequestRisk& risk, v1::RequestRisk* proto);
void PolicyTrialToProto(const PolicyTrial& trial, v1::TryPolicyResponse* proto);
void PolicyChangeToProto(const PolicyChange& change, v1::PolicyChange* proto);
void NamedEventToProto(const NamedEvent& event, v1::NamedRiskEvent* proto);

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_CONVERT_H_
