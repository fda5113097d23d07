#include "services/gate/request.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "kernels/bounds/risk_budget.h"
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

bool IsExactOutput(const ReadCertificate& certificate) {
  return certificate.outcome == Outcome::kExact && certificate.worst_case_tv <= kExactTvMax;
}

bool IsExactByArithmetic(const ReadCertificate& certificate) {
  return IsExactOutput(certificate) && certificate.failure_probability == 0;
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
  const SliceSchedule schedule = is_union ? SliceSchedule::kUnion : SliceSchedule::kShare;
  const double limit = BudgetLimit(Resolve(whole_policy));
  if (limits_.shared) {
    auto budget = std::make_unique<LedgerBudget>(limit, slice_share_, schedule);
    ledger_budget_ = budget.get();
    budget_ = std::move(budget);
    return;
  }
  // A tenant's budget is one of worst_case_tv, which kUnion does not spend.
  budget_ = std::make_unique<Budget>(limit, slice_share_, schedule,
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
  // Leases of other replicas count, too: by the time, so that the latest is the largest.
  if (limits_.shared) sequence_ = std::max(sequence_, now_ms * 1000);
  lease->sequence = ++sequence_;
  RememberLeased(*lease, now_ms);
}

PolicyLease Request::NewLease(const Policy& policy, int64_t now_ms, Slice* slice) {
  PolicyLease lease;
  lease.request = name_;
  lease.risk_mode = risk_mode_;
  // Only reads that may be certified need a slice.
  if (budget_ != nullptr && ModeNow(policy) == ReadMode::kEnforce) {
    *slice = budget_->GiveSlice();
    lease.budget_slice = slice->amount();
  }
  lease.lease_id = slice->lease_id != 0 ? slice->lease_id : RandomId();
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
  if (certificate.failure_probability > 0 && risk_mode_ != RiskMode::kUnion) {
    return absl::StrCat("its bounds may fail, which ", RiskModeName(risk_mode_),
                        " does not account for");
  }
  if (IsExactOutput(certificate)) return "";
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
  if (budget_ == nullptr) return;
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
  if (budget_ == nullptr || !budget_->overrun() || !forced_reason_.empty() ||
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
  const bool spends = budget_ != nullptr && mode == ReadMode::kEnforce;
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
  risk.budget = budget_ != nullptr ? budget_->limit() : 0;
  risk.budget_committed = budget_ != nullptr ? budget_->committed() : 0;
  risk.budget_left = budget_ != nullptr ? budget_->left() : 0;
  if (risk_mode_ == RiskMode::kAnytime) {
    risk.loss_bound =
        AnytimeLossBound(account_.totals().sums.tv_sum, loss_limit_, failure_probability_);
  }
  risk.read_mode = ModeNow(policy);
  risk.head_rules = RulesNow(policy, risk.read_mode, now_ms);
  risk.tenant = terms_.tenant;
  risk.model = terms_.model;
  risk.forced_exact = !forced_reason_.empty();
  risk.counts_one_replica = limits_.shared;
  risk.open_time_ms = open_time_ms_;
  risk.update_time_ms = update_time_ms_;
  return risk;
}

Standing Request::standing() const {
  const RiskTotals& totals = account_.totals();
  return {.score = account_.score(),
          .tv_sum = totals.sums.tv_sum,
          .repair_bytes = static_cast<double>(totals.repair_bytes),
          .budget_share = budget_ != nullptr && budget_->limit() > 0
                              ? budget_->committed() / budget_->limit()
                              : 0,
          .update_time_ms = static_cast<double>(update_time_ms_),
          .event_time_ms = static_cast<double>(account_.latest_event_ms()),
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
