// RequestRegistry: what it does in a shared ledger. Each step asks the ledger without a lock, and
// then acts on the answer under the request's.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/gate/budget_units.h"
#include "services/gate/ledger_record.h"
#include "services/gate/request_registry.h"

namespace certkv::gate {
namespace {

constexpr int64_t kAllCommitted = int64_t{1} << 62;  // Ledger::TenantsCommitted

absl::Status UnknownError(absl::string_view name) {
  return MakeError(absl::StatusCode::kNotFound, "REQUEST_NOT_FOUND",
                   absl::StrCat(name,
                                " is not in the shared ledger: it was never opened, was closed "
                                "long ago, or the ledger was lost; open it"));
}

LedgerTenant TenantFor(const RequestTerms& terms, RiskMode risk_mode, const Policy& policy) {
  // A tenant's budget is one of worst_case_tv, which the other modes do not spend.
  if (!SpendsTv(risk_mode)) return {};
  return {.name = terms.tenant,
          .limit_units = policy.tenant_budget == 0 ? kUnitsMax : LimitUnits(policy.tenant_budget),
          .window_ms = policy.tenant_window_ms};
}

}  // namespace

absl::Status RequestRegistry::Adopt(absl::string_view request) {
  if (ledger_ == nullptr) return absl::OkStatus();
  return FindOrAdopt(std::string(request)).status();
}

absl::Status RequestRegistry::Refresh(absl::string_view request) {
  if (ledger_ == nullptr) return absl::OkStatus();
  const std::string name(request);
  absl::StatusOr<std::shared_ptr<Entry>> entry = Find(name);
  if (!entry.ok() && !absl::IsNotFound(entry.status())) return entry.status();
  const absl::StatusOr<LedgerState> state = ledger_->Load(name);
  const bool is_told = state.ok() && state->known;
  if (!is_told && entry.ok()) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(state.status());
  if (!state->known) return UnknownError(name);
  if (!entry.ok()) return AddAdopted(name, *state).status();
  absl::MutexLock lock(&mutex_);
  absl::MutexLock entry_lock(&(*entry)->mutex);
  const bool was_closed = (*entry)->request.closed();
  (*entry)->request.SetLedgerState(*state, clock_->NowMs());
  if (!was_closed && (*entry)->request.closed()) Retire(name, entry->get(), clock_->NowMs());
  (*entry)->UpdateCell();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<RequestRegistry::Entry>> RequestRegistry::FindOrAdopt(
    const std::string& name) {
  absl::StatusOr<std::shared_ptr<Entry>> entry = Find(name);
  if (!absl::IsNotFound(entry.status())) return entry;
  CERTKV_ASSIGN_OR_RETURN(const LedgerState state, ledger_->Load(name));
  if (!state.known) return UnknownError(name);
  return AddAdopted(name, state);
}

absl::StatusOr<std::shared_ptr<RequestRegistry::Entry>> RequestRegistry::AddAdopted(
    const std::string& name, const LedgerState& state) {
  CERTKV_ASSIGN_OR_RETURN(const LedgerRecord record, DecodeLedgerRecord(state.record));
  const int64_t now_ms = clock_->NowMs();
  absl::MutexLock lock(&mutex_);
  if (const auto found = entries_.find(name); found != entries_.end()) return found->second;
  CERTKV_RETURN_IF_ERROR(MakeRoom());
  const Request::Limits limits{.heads_max = config_.heads_per_request_max,
                               .reporters_max = config_.reporters_per_request_max,
                               .shared = true};
  const bool has_room = static_cast<int32_t>(ledger_tenants_.size()) < config_.tenant_limit;
  if (!record.terms.tenant.empty() && SpendsTv(record.risk_mode) && has_room) {
    ledger_tenants_.try_emplace(record.terms.tenant, 0);
  }
  auto entry = std::make_shared<Entry>(name, record.label, record.terms,
                                       PolicyOfRecord(record, *policy_), limits, now_ms);
  entries_[name] = entry;
  entry->cell = index_.Add(&entry->request);
  counters_.requests_opened.fetch_add(1, std::memory_order_relaxed);
  absl::MutexLock entry_lock(&entry->mutex);
  entry->request.Adopt(*policy_, now_ms);
  entry->request.SetLedgerState(state, now_ms);
  if (entry->request.closed()) Retire(name, entry.get(), now_ms);
  entry->UpdateCell();
  return entry;
}

void RequestRegistry::ForgetUnknown(const std::string& name) {
  absl::MutexLock lock(&mutex_);
  for (auto retired = retired_.begin(); retired != retired_.end(); ++retired) {
    if (retired->name != name) continue;
    retired_.erase(retired);
    break;
  }
  Forget(name);
}

absl::StatusOr<PolicyLease> RequestRegistry::OpenInLedger(const std::string& name,
                                                          absl::string_view label,
                                                          const RequestTerms& terms) {
  const std::shared_ptr<const Policy> policy = SharedPolicy();
  CERTKV_RETURN_IF_ERROR(CheckTerms(*policy, terms));
  const Policy resolved = ResolvePolicy(*policy, terms.tenant, terms.model);
  const LedgerRecord record = MakeLedgerRecord(std::string(label), terms, resolved);
  CERTKV_ASSIGN_OR_RETURN(
      const LedgerState state,
      ledger_->Open(name, {EncodeLedgerRecord(record), LimitUnits(BudgetLimit(resolved))}));
  if (!state.known) return UnknownError(name);
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<Entry> entry, AddAdopted(name, state));
  {
    absl::MutexLock lock(&entry->mutex);
    entry->request.SetLedgerState(state, clock_->NowMs());
  }
  CERTKV_RETURN_IF_ERROR(FetchSlice(entry.get(), /*reporter_id=*/0, *policy));
  absl::MutexLock lock(&entry->mutex);
  absl::StatusOr<PolicyLease> lease = entry->request.Open(terms, *policy, clock_->NowMs());
  entry->UpdateCell();
  return lease;
}

absl::Status RequestRegistry::FetchSlice(Entry* entry, int64_t reporter_id, const Policy& policy) {
  std::optional<LedgerGrantAsk> ask;
  std::string name;
  LedgerTenant tenant;
  {
    absl::MutexLock lock(&entry->mutex);
    const Request& request = entry->request;
    ask = request.WantedSlice(reporter_id, policy, clock_->NowMs());
    name = request.name();
    tenant = TenantFor(request.terms(), request.risk_mode(), policy);
  }
  if (!ask.has_value()) return absl::OkStatus();
  CERTKV_ASSIGN_OR_RETURN(const LedgerGrant grant, ledger_->Grant(name, tenant, *ask));
  absl::MutexLock lock(&entry->mutex);
  entry->request.SetLedgerState(grant.state, clock_->NowMs());
  entry->request.PutSlice(ask->lease_id, grant.units);
  return absl::OkStatus();
}

absl::StatusOr<ReportAnswer> RequestRegistry::ReportToLedger(Entry* entry, const ReportBatch& batch,
                                                             const Policy& policy) {
  std::string name;
  LedgerTenant tenant;
  LedgerBatch told;
  {
    absl::MutexLock lock(&entry->mutex);
    CERTKV_RETURN_IF_ERROR(entry->request.CheckBatch(batch));
    name = entry->request.name();
    tenant = TenantFor(entry->request.terms(), entry->request.risk_mode(), policy);
    told = entry->request.BatchForLedger(batch, policy);
  }
  CERTKV_ASSIGN_OR_RETURN(const LedgerCount count, ledger_->Count(name, tenant, told));
  if (!count.state.known) {
    ForgetUnknown(name);
    return ReleaseAnswer(UnknownError(name).message());
  }
  if (count.expected_batch != 0) {
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "BATCH_GAP",
        absl::StrCat(name, ": reporter ", batch.reporter_id, " sent batch ", batch.batch_number,
                     ", expected ", count.expected_batch, "; send the missing batches first"));
  }
  ReportBatch judged = batch;
  judged.ledger_counted = count.counted;
  absl::StatusOr<ReportAnswer> answer;
  {
    absl::MutexLock lock(&entry->mutex);
    answer = entry->request.CountReport(judged, policy, clock_->NowMs());
    entry->request.SetLedgerState(count.state, clock_->NowMs());
  }
  if (!answer.ok()) return answer;
  // The batch is counted; without a slice its reporter reads exactly until the next answer.
  const absl::Status fetched =
      batch.is_last ? absl::OkStatus() : FetchSlice(entry, batch.reporter_id, policy);
  if (!fetched.ok()) counters_.ledger_failures.fetch_add(1, std::memory_order_relaxed);
  absl::MutexLock lock(&entry->mutex);
  entry->request.AnswerReport(judged, policy, clock_->NowMs(), &*answer);
  return answer;
}

absl::StatusOr<Decision> RequestRegistry::DecideInLedger(Entry* entry,
                                                         const ReadCertificate& certificate,
                                                         const Policy& policy) {
  std::string name;
  LedgerTenant tenant;
  int64_t wanted = 0;
  {
    absl::MutexLock lock(&entry->mutex);
    name = entry->request.name();
    tenant = TenantFor(entry->request.terms(), entry->request.risk_mode(), policy);
    wanted = entry->request.WantedByDecide(certificate, policy, clock_->NowMs());
  }
  absl::Status asked;
  const auto ask = [&](int64_t units, bool exact) {
    const absl::StatusOr<LedgerGrant> taken = ledger_->Decide(name, tenant, units, exact);
    asked = taken.status();
    if (!taken.ok()) {
      counters_.ledger_failures.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    absl::MutexLock lock(&entry->mutex);
    entry->request.SetLedgerState(taken->state, clock_->NowMs());
    if (!exact) entry->request.PutDecided(taken->units);
  };
  if (wanted > 0) ask(wanted, /*exact=*/false);
  absl::StatusOr<Decision> decision;
  int64_t unrefused = 0;
  {
    absl::MutexLock lock(&entry->mutex);
    decision = entry->request.Decide(certificate, policy, clock_->NowMs());
    entry->UpdateCell();
    if (wanted == 0) unrefused = entry->request.UnitsOf(certificate);
  }
  if (!decision.ok()) return decision;
  if (!asked.ok() && !decision->accepted) decision->explanation = std::string(asked.message());
  // Exact and observed reads are charged, but not refused.
  if (decision->accepted && unrefused > 0) ask(unrefused, /*exact=*/true);
  return decision;
}

absl::Status RequestRegistry::RefreshTenants() {
  if (ledger_ == nullptr) return absl::OkStatus();
  std::vector<std::string> names;
  {
    absl::ReaderMutexLock lock(&mutex_);
    for (const auto& [name, committed] : ledger_tenants_) names.push_back(name);
  }
  const std::shared_ptr<const Policy> policy = SharedPolicy();
  if (names.empty() || policy->tenant_budget == 0) return absl::OkStatus();
  CERTKV_ASSIGN_OR_RETURN(const std::vector<int64_t> committed,
                          ledger_->TenantsCommitted(names, policy->tenant_window_ms));
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < names.size(); ++i) {
    ledger_tenants_[names[i]] =
        committed[i] < kAllCommitted ? ToAmount(committed[i]) : policy->tenant_budget;
  }
  return absl::OkStatus();
}

}  // namespace certkv::gate
