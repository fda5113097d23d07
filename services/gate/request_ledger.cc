// Request: what it tells to and takes from a shared ledger.
#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "services/common/random_id.h"
#include "services/gate/budget_units.h"
#include "services/gate/request.h"

namespace certkv::gate {
namespace {

constexpr size_t kReasonBytesMax = 512;

}  // namespace

void Request::Adopt(const Policy& whole_policy, int64_t now_ms) {
  const Policy& policy = Resolve(whole_policy);
  PolicyLease lease;
  RenewTerms(policy, ModeNow(policy), now_ms, &lease);
}

LedgerBatch Request::BatchForLedger(const ReportBatch& batch, const Policy& whole_policy) const {
  const Policy& policy = Resolve(whole_policy);
  LedgerBatch told{.reporter_id = batch.reporter_id,
                   .batch_number = batch.batch_number,
                   .read_count = static_cast<int64_t>(batch.certificates.size())};
  for (const ReadCertificate& certificate : batch.certificates) {
    const std::string why = WhyOutside(certificate);
    if (!why.empty() && told.forced_reason.empty() &&
        EffectiveReadMode(policy, terms_) != ReadMode::kObserve) {
      told.forced_reason = why.substr(0, kReasonBytesMax);
    }
    int64_t& units = IsExactByArithmetic(certificate) ? told.exact_units : told.certified_units;
    units = AddUnits(units, UnitsOf(certificate));
  }
  for (const ReturnedSlice& slice : batch.returned) {
    told.returned.push_back({slice.lease_id, slice.spent_units});
  }
  return told;
}

void Request::SetLedgerState(const LedgerState& state, int64_t now_ms) {
  if (ledger_budget_ != nullptr) ledger_budget_->SetState(state);
  if (state.closed) Close(now_ms, "CLOSED", "closed at another replica of gate");
  if (!forced_reason_.empty()) return;
  if (state.is_void && budget_ != nullptr) {
    forced_reason_ =
        "the shared ledger was lost or restarted since the request was opened, and what was spent "
        "of the budget is not known any more";
    account_.AddEvent(now_ms, "LEDGER_LOST", forced_reason_);
  } else if (!state.forced_reason.empty()) {
    forced_reason_ = absl::StrCat("another replica of gate says: ", state.forced_reason);
    account_.AddEvent(now_ms, "FORCED_EXACT", forced_reason_);
  }
}

std::optional<LedgerGrantAsk> Request::WantedSlice(int64_t reporter_id, const Policy& whole_policy,
                                                   int64_t now_ms) const {
  const Policy& policy = Resolve(whole_policy);
  if (ledger_budget_ == nullptr || closed_ || ModeNow(policy) != ReadMode::kEnforce ||
      !ledger_budget_->WantsSlice()) {
    return std::nullopt;
  }
  const auto found = reporters_.find(reporter_id);
  if (found != reporters_.end()) {
    const Reporter& reporter = found->second;
    const bool is_live = reporter.lease.has_value() && now_ms < reporter.lease->expire_time_ms;
    if (is_live && !NeedsSlice(reporter)) return std::nullopt;
  }
  return ledger_budget_->NextAsk(RandomId());
}

void Request::PutSlice(int64_t lease_id, int64_t units) {
  if (ledger_budget_ != nullptr) ledger_budget_->PutSlice(lease_id, units);
}

int64_t Request::WantedByDecide(const ReadCertificate& certificate, const Policy& whole_policy,
                                int64_t now_ms) const {
  const Policy& policy = Resolve(whole_policy);
  if (ledger_budget_ == nullptr || closed_ || IsExactByArithmetic(certificate) ||
      ModeNow(policy) != ReadMode::kEnforce) {
    return 0;
  }
  const HeadTerms terms = TermsForDecide(policy, certificate, now_ms);
  const bool may_fail = certificate.failure_probability > 0 && risk_mode_ != RiskMode::kUnion;
  const bool is_served =
      IsExactOutput(certificate) || MeetsTolerances(certificate, terms.tolerances);
  if (terms.exact || may_fail || !is_served) return 0;
  return UnitsOf(certificate);
}

int64_t Request::UnitsOf(const ReadCertificate& certificate) const {
  return budget_ == nullptr ? 0 : SpentUnits(AmountOf(certificate));
}

void Request::PutDecided(int64_t units) {
  if (ledger_budget_ != nullptr) ledger_budget_->PutDecided(units);
}

}  // namespace certkv::gate
