#include "services/gate/convert.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/bounds/rounding.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"

namespace certkv::gate {
namespace {

static_assert(static_cast<int>(DirectiveAction::kRelease) == v1::DIRECTIVE_ACTION_RELEASE);
static_assert(static_cast<int>(DirectiveAction::kContinue) == v1::DIRECTIVE_ACTION_CONTINUE);

void HeadRiskToProto(const HeadRisk& head, v1::HeadRisk* proto) {
  proto->set_layer(head.layer);
  proto->set_query_head(head.query_head);
  proto->set_read_count(head.sums.read_count);
  proto->set_max_worst_case_tv(ToFloatRoundedUp(head.sums.tv_max));
  proto->set_sum_worst_case_tv(head.sums.tv_sum);
  for (const int64_t count : head.sums.histogram) proto->add_histogram(count);
}

absl::StatusOr<PolicyOverride> OverrideFromProto(const v1::PolicyOverride& proto) {
  PolicyOverride one;
  one.tenant = proto.tenant();
  one.model = proto.model();
  if (proto.has_layer()) one.layer = proto.layer();
  if (proto.has_query_head()) one.query_head = proto.query_head();
  if (proto.has_tv_tolerance()) one.tv_tolerance = proto.tv_tolerance();
  if (proto.has_skip_tolerance()) one.skip_tolerance = proto.skip_tolerance();
  if (proto.has_value_tolerance()) one.value_tolerance = proto.value_tolerance();
  if (proto.has_output_tolerance()) one.output_tolerance = proto.output_tolerance();
  if (proto.has_cumulative_budget()) one.cumulative_budget = proto.cumulative_budget();
  if (proto.read_mode() != type::READ_MODE_UNSPECIFIED) {
    CERTKV_ASSIGN_OR_RETURN(one.read_mode, ReadModeFromProto(proto.read_mode()));
  }
  return one;
}

void OverrideToProto(const PolicyOverride& one, v1::PolicyOverride* proto) {
  proto->set_tenant(one.tenant);
  proto->set_model(one.model);
  if (one.layer >= 0) proto->set_layer(one.layer);
  if (one.query_head >= 0) proto->set_query_head(one.query_head);
  if (one.tv_tolerance.has_value()) proto->set_tv_tolerance(*one.tv_tolerance);
  if (one.skip_tolerance.has_value()) proto->set_skip_tolerance(*one.skip_tolerance);
  if (one.value_tolerance.has_value()) proto->set_value_tolerance(*one.value_tolerance);
  if (one.output_tolerance.has_value()) proto->set_output_tolerance(*one.output_tolerance);
  if (one.cumulative_budget.has_value()) proto->set_cumulative_budget(*one.cumulative_budget);
  if (one.read_mode.has_value()) proto->set_read_mode(ReadModeToProto(*one.read_mode));
}

void EventToProto(const RiskEvent& event, v1::RiskEvent* proto) {
  proto->set_time_ms(event.time_ms);
  proto->set_kind(event.kind);
  proto->set_message(event.message);
}

}  // namespace

absl::StatusOr<Policy> PolicyFromProto(const v1::Policy& proto) {
  Policy policy;
  policy.version = proto.version();
  CERTKV_ASSIGN_OR_RETURN(policy.tolerances, TolerancesFromProto(proto.tolerances()));
  CERTKV_ASSIGN_OR_RETURN(policy.risk_mode, RiskModeFromProto(proto.risk_mode()));
  CERTKV_ASSIGN_OR_RETURN(policy.read_mode, ReadModeFromProto(proto.read_mode()));
  policy.cumulative_budget = proto.cumulative_budget();
  policy.budget_slice_share = proto.budget_slice_share();
  policy.lease_duration_ms = proto.lease_duration_ms();
  // A caller that knows nothing of these fields leaves them 0.
  if (proto.failure_probability() != 0) policy.failure_probability = proto.failure_probability();
  if (proto.tenant_window_ms() != 0) policy.tenant_window_ms = proto.tenant_window_ms();
  policy.tenant_budget = proto.tenant_budget();
  policy.only_listed_tenants = proto.only_listed_tenants();
  policy.canary_share = proto.canary_share();
  if (proto.has_escalation()) {
    policy.escalation = {.repairs = proto.escalation().repairs(),
                         .window_ms = proto.escalation().window_ms(),
                         .duration_ms = proto.escalation().duration_ms(),
                         .heads_of_a_layer = proto.escalation().heads_of_a_layer()};
  }
  for (const v1::PolicyOverride& one : proto.overrides()) {
    CERTKV_ASSIGN_OR_RETURN(PolicyOverride converted, OverrideFromProto(one));
    policy.overrides.push_back(std::move(converted));
  }
  CERTKV_RETURN_IF_ERROR(ValidatePolicy(policy));
  return policy;
}

v1::Policy PolicyToProto(const Policy& policy) {
  v1::Policy proto;
  proto.set_version(policy.version);
  *proto.mutable_tolerances() = TolerancesToProto(policy.tolerances);
  proto.set_risk_mode(RiskModeToProto(policy.risk_mode));
  proto.set_cumulative_budget(policy.cumulative_budget);
  proto.set_budget_slice_share(policy.budget_slice_share);
  proto.set_canary_share(policy.canary_share);
  proto.set_lease_duration_ms(policy.lease_duration_ms);
  proto.set_read_mode(ReadModeToProto(policy.read_mode));
  proto.set_failure_probability(policy.failure_probability);
  proto.set_tenant_budget(policy.tenant_budget);
  proto.set_tenant_window_ms(policy.tenant_window_ms);
  proto.mutable_escalation()->set_repairs(policy.escalation.repairs);
  proto.mutable_escalation()->set_window_ms(policy.escalation.window_ms);
  proto.mutable_escalation()->set_duration_ms(policy.escalation.duration_ms);
  proto.mutable_escalation()->set_heads_of_a_layer(policy.escalation.heads_of_a_layer);
  for (const PolicyOverride& one : policy.overrides) {
    OverrideToProto(one, proto.add_overrides());
  }
  proto.set_only_listed_tenants(policy.only_listed_tenants);
  return proto;
}

absl::StatusOr<RequestTerms> TermsFromProto(const v1::OpenRequestRequest& proto) {
  RequestTerms terms;
  if (proto.has_tolerances()) {
    CERTKV_ASSIGN_OR_RETURN(terms.tolerances, TolerancesFromProto(proto.tolerances()));
  }
  if (proto.read_mode() != type::READ_MODE_UNSPECIFIED) {
    CERTKV_ASSIGN_OR_RETURN(terms.read_mode, ReadModeFromProto(proto.read_mode()));
  }
  terms.tenant = proto.tenant();
  terms.model = proto.model();
  return terms;
}

absl::StatusOr<std::vector<ReadCertificate>> CertificatesFromProto(const v1::ReportRequest& proto) {
  if (proto.certificates_size() > kCertificatesPerReportMax) {
    return MakeError(
        absl::StatusCode::kInvalidArgument, "REPORT_INVALID",
        absl::StrCat("a report has ", proto.certificates_size(), " certificates, at most ",
                     kCertificatesPerReportMax, "; send them in several batches"));
  }
  std::vector<ReadCertificate> certificates;
  certificates.reserve(static_cast<size_t>(proto.certificates_size()));
  for (int i = 0; i < proto.certificates_size(); ++i) {
    absl::StatusOr<ReadCertificate> certificate = ReadCertificateFromProto(proto.certificates(i));
    if (!certificate.ok()) {
      return WithContext(certificate.status(),
                         absl::StrCat(proto.request(), ", batch ", proto.batch_number(),
                                      ", certificates[", i, "]"));
    }
    certificates.push_back(*certificate);
  }
  return certificates;
}

absl::StatusOr<std::vector<ReturnedSlice>> ReturnedSlicesFromProto(const v1::ReportRequest& proto) {
  std::vector<ReturnedSlice> slices;
  for (const v1::ReturnedSlice& slice : proto.returned_slices()) {
    const bool repeated = std::any_of(
        slices.begin(), slices.end(),
        [&slice](const ReturnedSlice& other) { return other.lease_id == slice.lease_id(); });
    if (proto.returned_slices_size() > kSlicesPerReporterMax || repeated ||
        !(slice.spent() >= 0 && slice.spent() <= kBudgetMax)) {
      return MakeError(
          absl::StatusCode::kInvalidArgument, "REPORT_INVALID",
          absl::StrCat(proto.request(), ", batch ", proto.batch_number(), " returns ",
                       proto.returned_slices_size(), " slices, lease ", slice.lease_id(),
                       " with spent ", slice.spent(), "; return at most ", kSlicesPerReporterMax,
                       ", each lease once, spent in [0, ", kBudgetMax, "]"));
    }
    slices.push_back(
        {slice.lease_id(), static_cast<int64_t>(std::ceil(slice.spent() * kUnitsPerOne))});
  }
  return slices;
}

absl::StatusOr<RiskQuery> RiskQueryFromProto(const v1::ListRequestRisksRequest& proto) {
  static_assert(static_cast<int>(RiskOrder::kUpdateTime) == v1::RISK_ORDER_UPDATE_TIME);
  if (!v1::RiskOrder_IsValid(proto.order())) {
    return MakeError(absl::StatusCode::kInvalidArgument, "FILTER_INVALID",
                     absl::StrCat("order is ", static_cast<int>(proto.order()),
                                  ", must be a known order, or 0 for SCORE"));
  }
  RiskQuery query;
  query.page_size = proto.page_size();
  query.page_token = proto.page_token();
  if (proto.order() != v1::RISK_ORDER_UNSPECIFIED) {
    query.order = static_cast<RiskOrder>(proto.order());
  }
  query.filter = {.include_closed = proto.include_closed(),
                  .tenant = proto.tenant(),
                  .model = proto.model(),
                  .label_part = proto.label_part(),
                  .score_min = proto.risk_score_min(),
                  .only_troubled = proto.only_troubled()};
  return query;
}

absl::StatusOr<std::vector<CanaryResult>> CanariesFromProto(const v1::ReportRequest& proto) {
  if (proto.canaries_size() > kCertificatesPerReportMax) {
    return MakeError(absl::StatusCode::kInvalidArgument, "REPORT_INVALID",
                     absl::StrCat("a report has ", proto.canaries_size(), " canaries, at most ",
                                  kCertificatesPerReportMax));
  }
  std::vector<CanaryResult> canaries;
  for (const v1::CanaryResult& canary : proto.canaries()) {
    // The numbers are for people and a comparison that takes any of them.
    canaries.push_back({.layer = canary.layer(),
                        .query_head = canary.query_head(),
                        .query_position = canary.query_position(),
                        .error = canary.error(),
                        .bound = canary.bound()});
  }
  return canaries;
}

void ReportAnswerToProto(const ReportAnswer& answer, int64_t now_ms, v1::ReportResponse* proto) {
  proto->mutable_directive()->set_action(static_cast<v1::DirectiveAction>(answer.action));
  proto->mutable_directive()->set_explanation(answer.explanation);
  if (answer.lease.has_value()) *proto->mutable_lease() = PolicyLeaseToProto(*answer.lease, now_ms);
}

void DecisionToProto(const Decision& decision, v1::DecideResponse* proto) {
  proto->set_accepted(decision.accepted);
  if (!decision.accepted) proto->set_next_rung(RungToProto(decision.next_rung));
  proto->set_explanation(decision.explanation);
}

void RequestRiskToProto(const RequestRisk& risk, v1::RequestRisk* proto) {
  const RiskTotals& totals = risk.totals;
  const auto by_rung = [&totals](Rung rung) {
    return totals.reads_by_rung[static_cast<int>(rung)];
  };
  proto->set_request(risk.request);
  proto->set_label(risk.label);
  proto->set_closed(risk.closed);
  proto->set_read_count(totals.sums.read_count);
  proto->set_failed_read_count(totals.failed_read_count);
  proto->set_max_worst_case_tv(ToFloatRoundedUp(totals.sums.tv_max));
  proto->set_sum_worst_case_tv(totals.sums.tv_sum);
  proto->set_budget(risk.budget);
  proto->set_counts_one_replica(risk.counts_one_replica);
  proto->set_max_first_worst_case_tv(totals.max_first_worst_case_tv);
  proto->set_reads_certified_first(totals.reads_certified_first);
  proto->set_reads_repaired_values(by_rung(Rung::kValues));
  proto->set_reads_repaired_keys(by_rung(Rung::kKeys));
  proto->set_reads_repaired_head(by_rung(Rung::kHead));
  proto->set_reads_repaired_layer(by_rung(Rung::kLayer));
  proto->set_reads_exact(totals.reads_exact);
  proto->set_reads_observed(totals.reads_observed);
  proto->set_repair_bytes(totals.repair_bytes);
  for (const float bound : kTvBucketBounds) proto->add_histogram_bounds(bound);
  for (const HeadRisk& head : risk.heads) HeadRiskToProto(head, proto->add_heads());
  proto->set_max_output_error_bound(totals.max_output_error_bound);
  proto->set_risk_score(risk.score);
  proto->set_canary_checks(totals.canary_checks);
  proto->set_canary_mismatches(totals.canary_mismatches);
  proto->set_open_time_ms(risk.open_time_ms);
  proto->set_update_time_ms(risk.update_time_ms);
  proto->set_risk_mode(RiskModeToProto(risk.risk_mode));
  *proto->mutable_tolerances() = TolerancesToProto(risk.tolerances);
  proto->set_reads_outside_tolerance(totals.reads_outside_tolerance);
  proto->set_forced_exact(risk.forced_exact);
  proto->set_budget_committed(risk.budget_committed);
  proto->set_budget_left(risk.budget_left);
  proto->set_loss_bound(risk.loss_bound);
  proto->set_failure_probability_sum(totals.failure_probability_sum);
  proto->set_read_mode(ReadModeToProto(risk.read_mode));
  proto->set_tenant(risk.tenant);
  proto->set_model(risk.model);
  for (const WorstRead& read : risk.worst_reads) {
    v1::WorstRead* out = proto->add_worst_reads();
    out->set_layer(read.layer);
    out->set_query_head(read.query_head);
    out->set_query_position(read.query_position);
    out->set_first_worst_case_tv(read.first_worst_case_tv);
    out->set_worst_case_tv(read.worst_case_tv);
    out->set_output_error_bound(read.output_error_bound);
    out->set_rung(RungToProto(read.rung));
    out->set_outcome(static_cast<type::Outcome>(read.outcome));
  }
  for (const RiskEvent& event : risk.events) EventToProto(event, proto->add_events());
  PolicyLease lease;
  lease.head_rules = risk.head_rules;
  *proto->mutable_head_rules() = std::move(*PolicyLeaseToProto(lease, 0).mutable_head_rules());
}

void PolicyTrialToProto(const PolicyTrial& trial, v1::TryPolicyResponse* proto) {
  proto->set_read_count(trial.read_count);
  proto->set_recorded_first(trial.recorded_first);
  proto->set_recorded_repaired(trial.recorded_repaired);
  proto->set_recorded_bytes(trial.recorded_bytes);
  proto->set_tried_first(trial.tried_first);
  proto->set_tried_repaired(trial.tried_repaired);
  proto->set_tried_exact(trial.tried_exact);
  proto->set_tried_bytes(trial.tried_bytes);
  proto->set_estimated_count(trial.estimated_count);
}

void PolicyChangeToProto(const PolicyChange& change, v1::PolicyChange* proto) {
  proto->set_time_ms(change.time_ms);
  proto->set_version(change.version);
  proto->set_source(change.source);
  proto->set_before(change.before);
  proto->set_after(change.after);
}

void NamedEventToProto(const NamedEvent& event, v1::NamedRiskEvent* proto) {
  proto->set_request(event.request);
  EventToProto(event.event, proto->mutable_event());
}

}  // namespace certkv::gate
