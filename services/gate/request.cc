#include "services/gate/request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/bounds/risk_budget.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/random_id.h"

namespace certkv::gate {
namespace {

// A new slice is given when this share of the one before is reported as used. What is left of it
// stays spent, so that the share is near 1; it is under 1 because reports come late.
constexpr double kSliceUsedShare = 0.9;

bool SameTerms(const RequestTerms& a, const RequestTerms& b) {
  if (a.read_mode != b.read_mode || a.tenant != b.tenant || a.model != b.model ||
      a.tolerances.has_value() != b.tolerances.has_value()) {
    return false;
  }
  return !a.tolerances.has_value() ||
         (IsAsTightAs(*a.tolerances, *b.tolerances) && IsAsTightAs(*b.tolerances, *a.tolerances));
}

bool SameTolerances(const Tolerances& a, const Tolerances& b) {
  return IsAsTightAs(a, b) && IsAsTightAs(b, a);
}

std::string Describe(const ReadCertificate& certificate) {
  return absl::StrCat(
      "layer ", certificate.layer, ", query head ", certificate.query_head, ", position ",
      certificate.query_position, " (", OutcomeName(certificate.outcome), ", worst_case_tv ",
      certificate.worst_case_tv, ", value_term ", certificate.value_term, " of radius ",
      certificate.value_radius, ", output_error_bound ", certificate.output_error_bound, ")");
}

}  // namespace

bool IsExactByArithmetic(const ReadCertificate& certificate) {
  return certificate.outcome == Outcome::kExact && certificate.worst_case_tv <= kExactTvMax &&
         certificate.failure_probability == 0;
}

absl::Status ClosedError(absl::string_view name) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "REQUEST_CLOSED",
                   absl::StrCat(name, " is closed; open a request under another id"));
}

Request::Request(std::string name, std::string label, RequestTerms terms,
                 const Policy& whole_policy, const Limits& limits, int64_t now_ms,
                 std::shared_ptr<TenantBudget> tenant)
    : name_(std::move(name)),
      label_(std::move(label)),
      terms_(std::move(terms)),
      risk_mode_(whole_policy.risk_mode),
      loss_limit_(Resolve(whole_policy).cumulative_budget),
      failure_probability_(whole_policy.failure_probability),
      slice_share_(whole_policy.budget_slice_share),
      limits_(limits),
      open_time_ms_(now_ms),
      account_(limits.heads_max),
      last_use_ms_(now_ms),
      update_time_ms_(now_ms) {
  if (risk_mode_ == RiskMode::kThreshold) return;
  const bool is_union = risk_mode_ == RiskMode::kUnion;
  // A tenant's budget is one of worst_case_tv, which kUnion does not spend.
  budget_.emplace(BudgetLimit(Resolve(whole_policy)), slice_share_,
                  is_union ? SliceSchedule::kUnion : SliceSchedule::kShare,
                  is_union ? nullptr : std::move(tenant));
}

void Request::Touch(int64_t now_ms) {
  last_use_ms_ = std::max(last_use_ms_, now_ms);
  update_time_ms_ = std::max(update_time_ms_, now_ms);
  ++change_count_;
}

const Policy& Request::Resolve(const Policy& policy) const {
  if (policy.overrides.empty()) return policy;
  if (!resolved_.has_value() || resolved_->version != policy.version) {
    resolved_ = ResolvePolicy(policy, terms_.tenant, terms_.model);
  }
  return *resolved_;
}

std::vector<HeadRule> Request::RulesNow(const Policy& policy, ReadMode mode, int64_t now_ms) const {
  if (mode != ReadMode::kEnforce) return {};
  std::vector<HeadRule> rules = HeadRulesOf(policy);
  for (HeadRule& rule : rules) {
    // An override may be looser than the policy, but not than what the request itself asked for.
    if (terms_.tolerances.has_value() && rule.tv_tolerance >= 0) {
      rule.tv_tolerance = std::min(rule.tv_tolerance, terms_.tolerances->tv_tolerance);
    }
    if (terms_.tolerances.has_value() && rule.skip_tolerance >= 0) {
      rule.skip_tolerance = std::min(rule.skip_tolerance, terms_.tolerances->skip_tolerance);
    }
  }
  for (const HeadRule& rule : escalator_.Rules(now_ms)) rules.push_back(rule);
  return rules;
}

void Request::CountRepair(const ReadCertificate& certificate, const Policy& policy,
                          int64_t now_ms) {
  // One that was exact from the start is no repair, or an escalation would feed itself.
  const bool from_the_start = certificate.outcome == Outcome::kExact &&
                              certificate.first_worst_case_tv == certificate.worst_case_tv;
  if (certificate.rung == Rung::kNone || from_the_start) return;
  if (escalator_.AddRepair(certificate.layer, certificate.query_head, policy.escalation, now_ms)) {
    account_.AddEvent(
        now_ms, "ESCALATED",
        absl::StrCat("layer ", certificate.layer, ", query head ", certificate.query_head,
                     ", or its layer, is read exactly for ", policy.escalation.duration_ms,
                     " ms: ", policy.escalation.repairs, " repairs in ",
                     policy.escalation.window_ms, " ms"));
  }
}

ReadMode Request::ModeNow(const Policy& policy) const {
  return forced_reason_.empty() ? EffectiveReadMode(policy, terms_) : ReadMode::kExact;
}

void Request::RenewTerms(const Policy& policy, ReadMode mode, int64_t now_ms, PolicyLease* lease) {
  lease->read_mode = mode;
  lease->tolerances = EffectiveTolerances(policy, terms_);
  lease->head_rules = RulesNow(policy, mode, now_ms);
  lease->expire_time_ms = now_ms + policy.lease_duration_ms;
  lease->canary_share = static_cast<float>(policy.canary_share);
  lease->policy_version = policy.version;
  lease->sequence = ++sequence_;
  RememberLeased(*lease, now_ms);
}

PolicyLease Request::NewLease(const Policy& policy, int64_t now_ms, Slice* slice) {
  PolicyLease lease;
  lease.request = name_;
  lease.lease_id = RandomId();
  lease.risk_mode = risk_mode_;
  // Only reads that may be certified need a slice.
  if (budget_.has_value() && ModeNow(policy) == ReadMode::kEnforce) {
    *slice = budget_->GiveSlice();
    lease.budget_slice = slice->amount();
  }
  RenewTerms(policy, ModeNow(policy), now_ms, &lease);
  return lease;
}

void Request::RememberLeased(const PolicyLease& lease, int64_t now_ms) {
  leased_.erase(std::remove_if(leased_.begin(), leased_.end(),
                               [now_ms](const Leased& entry) {
                                 return entry.expire_time_ms + kReportGraceMs < now_ms;
                               }),
                leased_.end());
  for (Leased& entry : leased_) {
    if (entry.terms.read_mode == lease.read_mode &&
        SameTolerances(entry.terms.tolerances, lease.tolerances) &&
        entry.terms.head_rules == lease.head_rules) {
      entry.expire_time_ms = std::max(entry.expire_time_ms, lease.expire_time_ms);
      return;
    }
  }
  Leased entry{{}, lease.expire_time_ms};
  entry.terms.read_mode = lease.read_mode;
  entry.terms.tolerances = lease.tolerances;
  entry.terms.head_rules = lease.head_rules;
  leased_.push_back(std::move(entry));
}

absl::StatusOr<PolicyLease> Request::Open(const RequestTerms& terms, const Policy& whole_policy,
                                          int64_t now_ms) {
  const Policy& policy = Resolve(whole_policy);
  if (closed_) return ClosedError(name_);
  if (!SameTerms(terms, terms_)) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "REQUEST_MISMATCH",
                     absl::StrCat(name_,
                                  " was opened before with other tolerances, read_mode, "
                                  "tenant or model; open it with the same, or under another id"));
  }
  Slice slice;
  PolicyLease lease = NewLease(policy, now_ms, &slice);
  opener_leases_.push_back({lease, slice});
  if (opener_leases_.size() > kOpenerLeasesMax) opener_leases_.pop_front();
  Touch(now_ms);
  return lease;
}

void Request::AdoptLease(int64_t lease_id, Reporter* reporter) {
  if (reporter->lease.has_value()) return;
  const auto found = std::find_if(
      opener_leases_.begin(), opener_leases_.end(),
      [lease_id](const OpenerLease& opener) { return opener.lease.lease_id == lease_id; });
  if (found == opener_leases_.end()) return;
  reporter->lease = found->lease;
  Hold(lease_id, found->slice, reporter);
  opener_leases_.erase(found);
}

void Request::Hold(int64_t lease_id, const Slice& slice, Reporter* reporter) {
  if (slice.units == 0) return;
  std::vector<HeldSlice>& slices = reporter->slices;
  if (slices.size() >= kSlicesPerReporterMax) slices.erase(slices.begin());
  slices.push_back({lease_id, slice});
}

void Request::TakeBack(absl::Span<const ReturnedSlice> returned, int64_t now_ms,
                       Reporter* reporter) {
  for (const ReturnedSlice& slice : returned) {
    if (reporter->lease.has_value() && reporter->lease->lease_id == slice.lease_id) {
      reporter->lease.reset();  // its holder is done with it: the next is a new one
    }
    const auto held =
        std::find_if(reporter->slices.begin(), reporter->slices.end(),
                     [&slice](const HeldSlice& entry) { return entry.lease_id == slice.lease_id; });
    if (held == reporter->slices.end()) continue;  // without a slice, or spent for good
    if (!budget_->ReturnSlice(held->slice, slice.spent_units)) {
      account_.AddEvent(now_ms, "SLICE_OVERSPENT",
                        absl::StrCat("a reporter spent ", ToAmount(slice.spent_units),
                                     " of a slice of ", held->slice.amount()));
    }
    reporter->slices.erase(held);
  }
}

double Request::AmountOf(const ReadCertificate& certificate) const {
  return risk_mode_ == RiskMode::kUnion ? certificate.failure_probability
                                        : certificate.worst_case_tv;
}

std::string Request::WhyOutside(const ReadCertificate& certificate) const {
  if (IsExactByArithmetic(certificate)) return "";
  if (certificate.failure_probability > 0 && risk_mode_ != RiskMode::kUnion) {
    return absl::StrCat("its bounds may fail, which ", RiskModeName(risk_mode_),
                        " does not account for");
  }
  bool quantized_allowed = false;
  for (const Leased& entry : leased_) {
    const HeadTerms terms = TermsOf(entry.terms, certificate.layer, certificate.query_head);
    if (terms.exact) continue;
    quantized_allowed = true;
    if (certificate.outcome == Outcome::kObserved) {
      if (entry.terms.read_mode == ReadMode::kObserve) return "";
    } else if (MeetsTolerances(certificate, terms.tolerances)) {
      return "";
    }
  }
  if (!quantized_allowed) return "read although every lease says exact";
  return certificate.outcome == Outcome::kObserved ? "served unrepaired although no lease observes"
                                                   : "outside the tolerances of every lease";
}

void Request::Count(const ReadCertificate& certificate, const Policy& policy, int64_t now_ms,
                    Reporter* reporter, ReportAnswer* answer) {
  const std::string why = WhyOutside(certificate);
  account_.Record(certificate, !why.empty(), now_ms);
  if (!why.empty()) {
    ++answer->outside_tolerance;
    const std::string message = absl::StrCat(Describe(certificate), ": ", why);
    // One event for a batch: the sixteen that are kept should not all be of one cause.
    if (answer->outside_tolerance == 1) account_.AddEvent(now_ms, "OUTSIDE_TOLERANCE", message);
    // A request that only observes was promised nothing.
    if (EffectiveReadMode(policy, terms_) != ReadMode::kObserve && forced_reason_.empty()) {
      forced_reason_ = message;
    }
  }
  CountRepair(certificate, policy, now_ms);
  if (!budget_.has_value()) return;
  if (IsExactByArithmetic(certificate)) {
    budget_->ReportExact(AmountOf(certificate));
    if (SpendsTv(risk_mode_) && reporter->lease.has_value()) {
      const PolicyLease& lease = *reporter->lease;
      const float first = certificate.first_worst_case_tv;
      // Within tolerance and yet exact: the slice could not hold it.
      reporter->pressed = reporter->pressed || (first <= lease.tolerances.tv_tolerance &&
                                                reporter->used + first > lease.budget_slice);
    }
    return;
  }
  budget_->ReportCertified(AmountOf(certificate));
  reporter->used += AmountOf(certificate);
}

void Request::CountCanaries(absl::Span<const CanaryResult> canaries, int64_t now_ms,
                            ReportAnswer* answer) {
  for (const CanaryResult& canary : canaries) {
    // Written so that a NaN is a mismatch.
    if (canary.error <= canary.bound) continue;
    ++answer->canary_mismatches;
    if (answer->canary_mismatches > 1) continue;  // one event for a batch
    account_.AddEvent(
        now_ms, "CANARY_MISMATCH",
        absl::StrCat("layer ", canary.layer, ", query head ", canary.query_head, ", position ",
                     canary.query_position, ": the output that was used is ", canary.error,
                     " from the exact one, at most ", canary.bound,
                     " is explained; the engine's kernel or memory is broken"));
  }
  account_.RecordCanaries(static_cast<int64_t>(canaries.size()), answer->canary_mismatches);
}

void Request::CheckOverrun(const Policy& policy, int64_t now_ms) {
  if (!budget_.has_value() || !budget_->overrun() || !forced_reason_.empty() ||
      EffectiveReadMode(policy, terms_) != ReadMode::kEnforce) {
    return;
  }
  forced_reason_ =
      "more was reported than all slices together allow; a lease is used by two certifiers, or "
      "one does not keep to its slice";
  account_.AddEvent(now_ms, "BUDGET_OVERRUN", forced_reason_);
}

bool Request::NeedsSlice(const Reporter& reporter) const {
  // Deterministic reads spend nothing of a kUnion slice, however small.
  if (risk_mode_ == RiskMode::kUnion && reporter.used == 0) return false;
  return reporter.pressed || reporter.used >= kSliceUsedShare * reporter.lease->budget_slice;
}

void Request::UpdateReporterLease(const Policy& policy, int64_t now_ms, Reporter* reporter) {
  std::optional<PolicyLease>& lease = reporter->lease;
  ReadMode mode = ModeNow(policy);
  const bool spends = budget_.has_value() && mode == ReadMode::kEnforce;
  const bool is_live = lease.has_value() && now_ms < lease->expire_time_ms;
  if (!is_live || (spends && NeedsSlice(*reporter) && budget_->HasSlice())) {
    Slice slice;
    lease = NewLease(policy, now_ms, &slice);
    Hold(lease->lease_id, slice, reporter);
    reporter->used = 0;
    reporter->pressed = false;
  }
  // Nothing is left to be given and the last slice is gone. Reads would climb to exact by
  // themselves; so they need not try.
  if (spends && SpendsTv(risk_mode_) && NeedsSlice(*reporter)) {
    mode = ReadMode::kExact;
    if (!exhausted_told_) {
      exhausted_told_ = true;
      account_.AddEvent(now_ms, "BUDGET_EXHAUSTED",
                        absl::StrCat("no slice is left of the budget of ", budget_->limit(),
                                     ", or of the tenant's"));
    }
  }
  const bool terms_changed = lease->read_mode != mode || lease->policy_version != policy.version ||
                             lease->head_rules != RulesNow(policy, mode, now_ms);
  const bool is_old = lease->expire_time_ms - now_ms < policy.lease_duration_ms * 2 / 3;
  if (terms_changed || is_old) RenewTerms(policy, mode, now_ms, &*lease);
}

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
  if (batch.batch_number > last_batch + 1) {
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

absl::StatusOr<ReportAnswer> Request::Report(const ReportBatch& batch, const Policy& whole_policy,
                                             int64_t now_ms) {
  const Policy& policy = Resolve(whole_policy);
  CERTKV_RETURN_IF_ERROR(CheckBatch(batch));
  Reporter& reporter = reporters_[batch.reporter_id];
  AdoptLease(batch.lease_id, &reporter);
  ReportAnswer answer;
  answer.counted = batch.batch_number == reporter.last_batch + 1;
  if (answer.counted) {
    reporter.last_batch = batch.batch_number;
    for (const ReadCertificate& certificate : batch.certificates) {
      Count(certificate, policy, now_ms, &reporter, &answer);
    }
    account_.RecordFailed(batch.failed_read_count);
    CountCanaries(batch.canaries, now_ms, &answer);
    TakeBack(batch.returned, now_ms, &reporter);
    CheckOverrun(policy, now_ms);
  }
  if (closed_) {
    if (answer.counted) ++change_count_;
    answer.action = DirectiveAction::kRelease;
    answer.explanation = absl::StrCat(name_, " is closed");
    return answer;
  }
  if (batch.is_last) {
    reporter.lease.reset();
    Touch(now_ms);
    return answer;
  }
  const std::optional<PolicyLease> before = reporter.lease;
  UpdateReporterLease(policy, now_ms, &reporter);
  FillDirective(policy, before, *reporter.lease, &answer);
  Touch(now_ms);
  return answer;
}

void Request::Close(int64_t now_ms, absl::string_view event_kind, absl::string_view message) {
  if (closed_) return;
  closed_ = true;
  if (!event_kind.empty()) account_.AddEvent(now_ms, event_kind, message);
  Touch(now_ms);
}

RequestRisk Request::Risk(const Policy& whole_policy, bool all_heads, int64_t now_ms) const {
  const Policy& policy = Resolve(whole_policy);
  RequestRisk risk;
  risk.request = name_;
  risk.label = label_;
  risk.closed = closed_;
  risk.totals = account_.totals();
  risk.heads = all_heads ? account_.AllHeads() : account_.RiskiestHeads(kRiskiestHeads);
  risk.worst_reads = account_.WorstReads();
  if (all_heads) risk.timeline = account_.timeline();
  risk.score = account_.score();
  risk.events.assign(account_.events().begin(), account_.events().end());
  risk.risk_mode = risk_mode_;
  risk.tolerances = EffectiveTolerances(policy, terms_);
  risk.budget = budget_.has_value() ? budget_->limit() : 0;
  risk.budget_committed = budget_.has_value() ? budget_->committed() : 0;
  risk.budget_left = budget_.has_value() ? budget_->left() : 0;
  if (risk_mode_ == RiskMode::kAnytime) {
    risk.loss_bound =
        AnytimeLossBound(account_.totals().sums.tv_sum, loss_limit_, failure_probability_);
  }
  risk.read_mode = ModeNow(policy);
  risk.head_rules = RulesNow(policy, risk.read_mode, now_ms);
  risk.tenant = terms_.tenant;
  risk.model = terms_.model;
  risk.forced_exact = !forced_reason_.empty();
  risk.open_time_ms = open_time_ms_;
  risk.update_time_ms = update_time_ms_;
  return risk;
}

Standing Request::standing() const {
  const RiskTotals& totals = account_.totals();
  return {.score = account_.score(),
          .tv_sum = totals.sums.tv_sum,
          .repair_bytes = static_cast<double>(totals.repair_bytes),
          .budget_share = budget_.has_value() && budget_->limit() > 0
                              ? budget_->committed() / budget_->limit()
                              : 0,
          .update_time_ms = static_cast<double>(update_time_ms_),
          .closed = closed_,
          .troubled = totals.reads_outside_tolerance > 0 || totals.failed_read_count > 0 ||
                      totals.canary_mismatches > 0 || !forced_reason_.empty()};
}

bool Request::MatchesTexts(const RiskFilter& filter) const {
  if (!filter.tenant.empty() && filter.tenant != terms_.tenant) return false;
  if (!filter.model.empty() && filter.model != terms_.model) return false;
  return absl::StrContains(label_, filter.label_part);
}

}  // namespace certkv::gate
