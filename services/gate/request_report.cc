// Request: batches of reports and their answers.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/gate/request.h"

namespace certkv::gate {

void Request::FillDirective(const Policy& policy, const std::optional<PolicyLease>& before,
                            const PolicyLease& lease, ReportAnswer* answer) const {
  answer->lease = lease;
  if (!forced_reason_.empty()) {
    answer->action = DirectiveAction::kForceExact;
    answer->explanation = forced_reason_;
  } else if (lease.read_mode != ModeNow(policy)) {
    answer->action = DirectiveAction::kForceExact;
    answer->explanation = absl::StrCat("the budget of ", budget_->limit(), " is used up (",
                                       budget_->committed(), " given away), or the tenant's is");
  } else if (before.has_value() && !IsAsTightAs(before->tolerances, lease.tolerances)) {
    answer->action = DirectiveAction::kTighten;
    answer->explanation =
        absl::StrCat("policy version ", lease.policy_version, " asks for tighter tolerances");
  }
}

absl::Status Request::CheckBatch(const ReportBatch& batch) const {
  if (batch.reporter_id <= 0 || batch.batch_number <= 0 || batch.failed_read_count < 0 ||
      batch.certificates.size() > kCertificatesPerReportMax) {
    return MakeError(absl::StatusCode::kInvalidArgument, "REPORT_INVALID",
                     absl::StrCat("report of ", name_, " has reporter_id ", batch.reporter_id,
                                  ", batch_number ", batch.batch_number, ", failed_read_count ",
                                  batch.failed_read_count, " and ", batch.certificates.size(),
                                  " certificates; ids and numbers must be > 0, the count >= 0 and "
                                  "certificates at most ",
                                  kCertificatesPerReportMax));
  }
  const auto found = reporters_.find(batch.reporter_id);
  const int64_t last_batch = found == reporters_.end() ? 0 : found->second.last_batch;
  if (!limits_.shared && batch.batch_number > last_batch + 1) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "BATCH_GAP",
        absl::StrCat(name_, ": reporter ", batch.reporter_id, " sent batch ", batch.batch_number,
                     ", expected ", last_batch + 1, "; send the missing batches first"));
  }
  if (found == reporters_.end() &&
      static_cast<int64_t>(reporters_.size()) >= limits_.reporters_max) {
    return MakeError(absl::StatusCode::kResourceExhausted, "REPORTER_LIMIT",
                     absl::StrCat(name_, " has ", reporters_.size(), " reporters, at most ",
                                  limits_.reporters_max,
                                  "; report through fewer, or raise reporters_per_request_max"));
  }
  return absl::OkStatus();
}

absl::StatusOr<ReportAnswer> Request::Report(const ReportBatch& batch, const Policy& policy,
                                             int64_t now_ms) {
  CERTKV_ASSIGN_OR_RETURN(ReportAnswer answer, CountReport(batch, policy, now_ms));
  AnswerReport(batch, policy, now_ms, &answer);
  return answer;
}

absl::StatusOr<ReportAnswer> Request::CountReport(const ReportBatch& batch,
                                                  const Policy& whole_policy, int64_t now_ms) {
  const Policy& policy = Resolve(whole_policy);
  CERTKV_RETURN_IF_ERROR(CheckBatch(batch));
  Reporter& reporter = reporters_[batch.reporter_id];
  if (batch.ledger_counted.has_value() && batch.batch_number > reporter.last_batch + 1) {
    // Another replica has answered it since, and may have taken this one's slices back.
    reporter.lease.reset();
    reporter.slices.clear();
  }
  AdoptLease(batch.lease_id, &reporter);
  ReportAnswer answer;
  answer.counted = batch.ledger_counted.value_or(batch.batch_number == reporter.last_batch + 1);
  reporter.last_batch = std::max(reporter.last_batch, batch.batch_number);
  if (!answer.counted) return answer;
  for (const ReadCertificate& certificate : batch.certificates) {
    Count(certificate, policy, now_ms, &reporter, &answer);
  }
  account_.RecordFailed(batch.failed_read_count);
  CountCanaries(batch.canaries, now_ms, &answer);
  TakeBack(batch.returned, now_ms, &reporter);
  CheckOverrun(policy, now_ms);
  return answer;
}

void Request::AnswerReport(const ReportBatch& batch, const Policy& whole_policy, int64_t now_ms,
                           ReportAnswer* answer) {
  const Policy& policy = Resolve(whole_policy);
  Reporter& reporter = reporters_[batch.reporter_id];
  if (closed_) {
    if (answer->counted) ++change_count_;
    answer->action = DirectiveAction::kRelease;
    answer->explanation = absl::StrCat(name_, " is closed");
    return;
  }
  if (batch.is_last) {
    reporter.lease.reset();
    Touch(now_ms);
    return;
  }
  const std::optional<PolicyLease> before = reporter.lease;
  UpdateReporterLease(policy, now_ms, &reporter);
  FillDirective(policy, before, *reporter.lease, answer);
  Touch(now_ms);
}

}  // namespace certkv::gate
