#include "services/gate/request_registry.h"

#include <algorithm>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::gate {
namespace {

absl::Status Invalid(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

absl::Status NotFound(absl::string_view request) {
  return MakeError(absl::StatusCode::kNotFound, "REQUEST_NOT_FOUND",
                   absl::StrCat(request,
                                " is not known here: it was never opened, was closed "
                                "long ago, or gate was restarted; open it"));
}

void CountAnswer(const ReportBatch& batch, const ReportAnswer& answer, GateCounters* counters) {
  counters->directives[static_cast<int>(answer.action)].fetch_add(1, std::memory_order_relaxed);
  counters->reads_outside_tolerance.fetch_add(answer.outside_tolerance, std::memory_order_relaxed);
  counters->canary_mismatches.fetch_add(answer.canary_mismatches, std::memory_order_relaxed);
  if (!answer.counted) {
    // A batch of a request that is not known was not counted before either.
    if (answer.action != DirectiveAction::kRelease) {
      counters->batches_repeated.fetch_add(1, std::memory_order_relaxed);
    }
    return;
  }
  counters->batches.fetch_add(1, std::memory_order_relaxed);
  counters->failed_reads.fetch_add(batch.failed_read_count, std::memory_order_relaxed);
  counters->canary_checks.fetch_add(static_cast<int64_t>(batch.canaries.size()),
                                    std::memory_order_relaxed);
  counters->CountReads(batch.certificates);
}

// The `count` requests whose latest events are the latest, at or after `since_ms`.
std::vector<RiskRank> LatestEvents(const RiskIndex& index, int64_t since_ms, size_t count) {
  std::vector<RiskRank> ranks;
  for (const RiskIndex::Cell& cell : index.cells()) {
    const double time_ms = cell.event_time_ms.load(std::memory_order_relaxed);
    if (cell.request == nullptr || time_ms < 0 || time_ms < static_cast<double>(since_ms)) continue;
    ranks.push_back({time_ms, 0, cell.request->name()});
  }
  const size_t told = std::min(ranks.size(), count);
  std::partial_sort(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(told), ranks.end());
  ranks.resize(told);
  return ranks;
}

// The first `count` requests that match and come after `after`, in their order; *matching counts
// all that do.
std::vector<RiskRank> FirstRanks(const RiskIndex& index, const RiskQuery& query,
                                 const std::optional<RiskRank>& after, size_t count,
                                 int64_t* matching) {
  // Without texts to look for, the request itself, elsewhere in memory, is not touched.
  const bool has_texts = !query.filter.tenant.empty() || !query.filter.model.empty() ||
                         !query.filter.label_part.empty();
  // A heap whose front is the last of those kept.
  std::vector<RiskRank> kept;
  for (const RiskIndex::Cell& cell : index.cells()) {
    if (cell.request == nullptr || !cell.Matches(query.filter)) continue;
    if (has_texts && !cell.request->MatchesTexts(query.filter)) continue;
    const auto [first, second] = cell.Rank(query.order);
    // Names are compared only where the numbers are the same.
    if (after.has_value() && first >= after->first &&
        (first > after->first || !(*after < RiskRank{first, second, cell.request->name()}))) {
      continue;
    }
    ++*matching;
    // Most of many requests are told apart from the last one kept without their name.
    if (kept.size() == count) {
      const RiskRank& last = kept.front();
      if (first < last.first || (first == last.first && second < last.second)) continue;
      if (first == last.first && second == last.second && cell.request->name() > last.request) {
        continue;
      }
    }
    RiskRank rank{first, second, cell.request->name()};
    if (kept.size() == count) {
      if (!(rank < kept.front())) continue;
      std::pop_heap(kept.begin(), kept.end());
      kept.pop_back();
    }
    kept.push_back(std::move(rank));
    std::push_heap(kept.begin(), kept.end());
  }
  std::sort_heap(kept.begin(), kept.end());
  return kept;
}

}  // namespace

RequestRegistry::RequestRegistry(const GateConfig& config, const Clock* clock, Ledger* ledger)
    : config_(config),
      clock_(clock),
      ledger_(ledger),
      policy_(std::make_shared<const Policy>(config.policy)),
      tenant_window_start_ms_(clock->NowMs()) {
  policy_changes_.push_back({.time_ms = clock->NowMs(),
                             .version = config.policy.version,
                             .source = "start",
                             .before = "",
                             .after = DescribePolicy(config.policy)});
}

std::shared_ptr<const Policy> RequestRegistry::SharedPolicy() const {
  absl::ReaderMutexLock lock(&mutex_);
  return policy_;
}

absl::StatusOr<std::shared_ptr<RequestRegistry::Entry>> RequestRegistry::Find(
    absl::string_view request) const {
  CERTKV_RETURN_IF_ERROR(CheckRequestName(request));
  absl::ReaderMutexLock lock(&mutex_);
  const auto found = entries_.find(request);
  if (found == entries_.end()) return NotFound(request);
  return found->second;
}

void RequestRegistry::Retire(const std::string& name, Entry* entry, int64_t now_ms) {
  if (entry->retired) return;
  entry->retired = true;
  retired_.push_back({name, now_ms});
}

void RequestRegistry::Forget(const std::string& name) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return;
  index_.Remove(found->second->cell);
  {
    // A report that found the entry before may still come; its numbers go nowhere.
    absl::MutexLock lock(&found->second->mutex);
    found->second->cell = &found->second->own_cell;
  }
  entries_.erase(found);
}

absl::Status RequestRegistry::MakeRoom() {
  if (static_cast<int64_t>(entries_.size()) < config_.request_limit) return absl::OkStatus();
  if (retired_.empty()) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "REQUEST_LIMIT",
        absl::StrCat(entries_.size(), " requests are open, at most ", config_.request_limit,
                     "; close some, or raise request_limit in gate's config"));
  }
  Forget(retired_.front().name);
  retired_.pop_front();
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<TenantBudget>> RequestRegistry::TenantOf(const std::string& tenant) {
  if (tenant.empty()) return std::shared_ptr<TenantBudget>();
  if (const auto found = tenants_.find(tenant); found != tenants_.end()) return found->second;
  if (static_cast<int64_t>(tenants_.size()) >= config_.tenant_limit) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TENANT_LIMIT",
                     absl::StrCat("gate keeps the budgets of ", tenants_.size(),
                                  " tenants, which is the most; raise tenant_limit in its config"));
  }
  return tenants_[tenant] = std::make_shared<TenantBudget>(policy_->tenant_budget);
}

void RequestRegistry::RollTenantWindow(int64_t now_ms) {
  const int64_t elapsed_ms = now_ms - tenant_window_start_ms_;
  // A clock that was set back lengthens the window; it never gives a budget twice.
  if (elapsed_ms < policy_->tenant_window_ms) return;
  tenant_window_start_ms_ += elapsed_ms / policy_->tenant_window_ms * policy_->tenant_window_ms;
  for (const auto& named : tenants_) named.second->BeginWindow();
}

absl::Status RequestRegistry::CheckOpening(absl::string_view request_id, absl::string_view label,
                                           const RequestTerms& terms) {
  if (!IsRequestId(request_id)) {
    return Invalid("REQUEST_ID_INVALID",
                   absl::StrCat("request_id has ", request_id.size(), " bytes, must be 1 to ",
                                kRequestIdBytesMax, " of [a-zA-Z0-9._-]"));
  }
  if (label.size() > kLabelBytesMax) {
    return Invalid("REQUEST_LABEL_INVALID",
                   absl::StrCat("label has ", label.size(), " bytes, at most ", kLabelBytesMax));
  }
  if (terms.tenant.size() > kTenantBytesMax || !IsWord(terms.tenant, "")) {
    return Invalid("TENANT_INVALID",
                   absl::StrCat("tenant has ", terms.tenant.size(), " bytes, must be at most ",
                                kTenantBytesMax, " of [a-zA-Z0-9._-]"));
  }
  if (terms.model.size() > kModelBytesMax || !IsWord(terms.model, "/")) {
    return Invalid("MODEL_INVALID",
                   absl::StrCat("model has ", terms.model.size(), " bytes, must be at most ",
                                kModelBytesMax, " of [a-zA-Z0-9._/-]"));
  }
  return absl::OkStatus();
}

absl::StatusOr<PolicyLease> RequestRegistry::OpenRequest(absl::string_view request_id,
                                                         absl::string_view label,
                                                         const RequestTerms& terms) {
  CERTKV_RETURN_IF_ERROR(CheckOpening(request_id, label, terms));
  const std::string name = absl::StrCat(kRequestNamePrefix, request_id);
  absl::StatusOr<PolicyLease> lease;
  if (ledger_ != nullptr) {
    lease = OpenInLedger(name, label, terms);
  } else {
    absl::MutexLock lock(&mutex_);
    lease = OpenLocked(name, label, terms);
  }
  if (!lease.ok()) counters_.requests_refused.fetch_add(1, std::memory_order_relaxed);
  return lease;
}

absl::StatusOr<PolicyLease> RequestRegistry::OpenLocked(const std::string& name,
                                                        absl::string_view label,
                                                        const RequestTerms& terms) {
  const int64_t now_ms = clock_->NowMs();
  CERTKV_RETURN_IF_ERROR(CheckTerms(*policy_, terms));
  if (const auto found = entries_.find(name); found != entries_.end()) {
    absl::MutexLock entry_lock(&found->second->mutex);
    absl::StatusOr<PolicyLease> lease = found->second->request.Open(terms, *policy_, now_ms);
    found->second->UpdateCell();
    return lease;
  }
  CERTKV_RETURN_IF_ERROR(MakeRoom());
  CERTKV_ASSIGN_OR_RETURN(std::shared_ptr<TenantBudget> tenant, TenantOf(terms.tenant));
  const Request::Limits limits{config_.heads_per_request_max, config_.reporters_per_request_max};
  auto entry = std::make_shared<Entry>(name, std::string(label), terms, *policy_, limits, now_ms,
                                       std::move(tenant));
  entries_[name] = entry;
  entry->cell = index_.Add(&entry->request);
  counters_.requests_opened.fetch_add(1, std::memory_order_relaxed);
  absl::MutexLock entry_lock(&entry->mutex);
  absl::StatusOr<PolicyLease> lease = entry->request.Open(terms, *policy_, now_ms);
  entry->UpdateCell();
  return lease;
}

ReportAnswer RequestRegistry::ReleaseAnswer(absl::string_view explanation) {
  ReportAnswer answer;
  answer.action = DirectiveAction::kRelease;
  answer.explanation = std::string(explanation);
  return answer;
}

absl::Status RequestRegistry::CheckTenant(
    absl::string_view request, const std::function<bool(absl::string_view)>& may_use) const {
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<Entry> entry, Find(request));
  absl::MutexLock lock(&entry->mutex);
  return may_use(entry->request.terms().tenant) ? absl::OkStatus() : NotFound(request);
}

absl::StatusOr<ReportAnswer> RequestRegistry::Report(absl::string_view request,
                                                     const ReportBatch& batch) {
  absl::StatusOr<std::shared_ptr<Entry>> entry =
      ledger_ != nullptr ? FindOrAdopt(std::string(request)) : Find(request);
  if (absl::IsNotFound(entry.status())) {
    ReportAnswer answer = ReleaseAnswer(entry.status().message());
    CountAnswer(batch, answer, &counters_);
    return answer;
  }
  if (!entry.ok()) return entry.status();
  const std::shared_ptr<const Policy> policy = SharedPolicy();
  absl::StatusOr<ReportAnswer> answer;
  const RequestTerms* terms = nullptr;
  if (ledger_ != nullptr) answer = ReportToLedger(entry->get(), batch, *policy);
  {
    absl::MutexLock lock(&(*entry)->mutex);
    if (ledger_ == nullptr) {
      answer = (*entry)->request.Report(batch, *policy, clock_->NowMs());
    }
    (*entry)->UpdateCell();
    terms = &(*entry)->request.terms();
  }
  if (!answer.ok()) return answer;
  // The terms of a request never change.
  if (answer->counted) sample_.Add(terms->tenant, terms->model, batch.certificates);
  CountAnswer(batch, *answer, &counters_);
  return answer;
}

absl::StatusOr<Decision> RequestRegistry::Decide(absl::string_view request,
                                                 const ReadCertificate& certificate) {
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<Entry> entry, Find(request));
  const std::shared_ptr<const Policy> policy = SharedPolicy();
  absl::StatusOr<Decision> decision;
  if (ledger_ != nullptr) {
    decision = DecideInLedger(entry.get(), certificate, *policy);
  } else {
    absl::MutexLock lock(&entry->mutex);
    decision = entry->request.Decide(certificate, *policy, clock_->NowMs());
    entry->UpdateCell();
  }
  if (decision.ok()) {
    (decision->accepted ? counters_.decisions_accepted : counters_.decisions_refused)
        .fetch_add(1, std::memory_order_relaxed);
    if (decision->accepted) counters_.CountReads({&certificate, 1});
  }
  return decision;
}

absl::StatusOr<RequestRisk> RequestRegistry::CloseRequest(absl::string_view request) {
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<Entry> entry, Find(request));
  if (ledger_ != nullptr) {
    CERTKV_RETURN_IF_ERROR(ledger_->Close(std::string(request)).status());
  }
  const int64_t now_ms = clock_->NowMs();
  absl::MutexLock lock(&mutex_);
  absl::MutexLock entry_lock(&entry->mutex);
  if (!entry->request.closed()) {
    entry->request.Close(now_ms);
    entry->UpdateCell();
    Retire(std::string(request), entry.get(), now_ms);
    counters_.requests_closed.fetch_add(1, std::memory_order_relaxed);
  }
  return entry->request.Risk(*policy_, /*all_heads=*/false, now_ms);
}

absl::StatusOr<RequestRisk> RequestRegistry::GetRisk(absl::string_view request,
                                                     bool all_heads) const {
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<Entry> entry, Find(request));
  const std::shared_ptr<const Policy> policy = SharedPolicy();
  absl::MutexLock lock(&entry->mutex);
  return entry->request.Risk(*policy, all_heads, clock_->NowMs());
}

absl::StatusOr<std::optional<RequestRisk>> RequestRegistry::GetRiskIfChanged(
    absl::string_view request, int64_t* change_count) const {
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<Entry> entry, Find(request));
  const std::shared_ptr<const Policy> policy = SharedPolicy();
  absl::MutexLock lock(&entry->mutex);
  if (entry->request.change_count() == *change_count) return std::optional<RequestRisk>();
  *change_count = entry->request.change_count();
  return std::optional<RequestRisk>(
      entry->request.Risk(*policy, /*all_heads=*/false, clock_->NowMs()));
}

absl::StatusOr<RiskPage> RequestRegistry::ListRisks(const RiskQuery& query) const {
  if (query.page_size < 0 || query.page_size > kPageSizeMax) {
    return Invalid("PAGE_SIZE_INVALID",
                   absl::StrCat("page_size is ", query.page_size, ", must be in [1, ", kPageSizeMax,
                                "], or 0 for ", kPageSizeDefault));
  }
  if (!(query.filter.score_min >= 0 && query.filter.score_min <= 1)) {
    return Invalid("FILTER_INVALID", absl::StrCat("risk_score_min is ", query.filter.score_min,
                                                  ", must be in [0, 1]"));
  }
  const size_t count =
      static_cast<size_t>(query.page_size == 0 ? kPageSizeDefault : query.page_size);
  std::optional<RiskRank> after;
  if (!query.page_token.empty()) {
    CERTKV_ASSIGN_OR_RETURN(after, DecodePageToken(query.order, query.page_token));
  }
  RiskPage page;
  std::vector<RiskRank> told;
  std::vector<std::shared_ptr<Entry>> entries;
  {
    absl::ReaderMutexLock lock(&mutex_);
    told = FirstRanks(index_, query, after, count, &page.request_count);
    for (const RiskRank& rank : told) entries.push_back(entries_.find(rank.request)->second);
  }
  const std::shared_ptr<const Policy> policy = SharedPolicy();
  for (const std::shared_ptr<Entry>& entry : entries) {
    absl::MutexLock lock(&entry->mutex);
    page.risks.push_back(entry->request.Risk(*policy, /*all_heads=*/false, clock_->NowMs()));
  }
  if (static_cast<int64_t>(told.size()) < page.request_count) {
    page.next_page_token = EncodePageToken(query.order, told.back());
  }
  return page;
}

std::vector<NamedEvent> RequestRegistry::ListEvents(int64_t since_ms, int32_t count) const {
  // The `count` requests with the latest events have all that is told: each has one at least that
  // comes before those of the others. No other request is locked.
  std::vector<std::shared_ptr<Entry>> entries;
  {
    absl::ReaderMutexLock lock(&mutex_);
    for (const RiskRank& rank : LatestEvents(index_, since_ms, static_cast<size_t>(count))) {
      entries.push_back(entries_.find(rank.request)->second);
    }
  }
  std::vector<NamedEvent> events;
  for (const std::shared_ptr<Entry>& entry : entries) {
    absl::MutexLock lock(&entry->mutex);
    for (const RiskEvent& event : entry->request.events()) {
      if (event.time_ms >= since_ms) events.push_back({entry->request.name(), event});
    }
  }
  const size_t told = std::min(events.size(), static_cast<size_t>(count));
  std::partial_sort(events.begin(), events.begin() + static_cast<std::ptrdiff_t>(told),
                    events.end(), [](const NamedEvent& a, const NamedEvent& b) {
                      return std::tie(b.event.time_ms, a.request) <
                             std::tie(a.event.time_ms, b.request);
                    });
  events.resize(told);
  return events;
}

RegistrySizes RequestRegistry::sizes() const {
  absl::ReaderMutexLock lock(&mutex_);
  const auto closed = static_cast<int64_t>(retired_.size());
  return {.open = static_cast<int64_t>(entries_.size()) - closed, .closed = closed};
}

std::vector<TenantStanding> RequestRegistry::Tenants() const {
  std::vector<TenantStanding> tenants;
  {
    absl::ReaderMutexLock lock(&mutex_);
    for (const auto& [name, budget] : tenants_) {
      tenants.push_back(
          {.tenant = name, .budget = budget->limit(), .committed = budget->committed()});
    }
    for (const auto& [name, committed] : ledger_tenants_) {
      if (policy_->tenant_budget == 0) break;  // then the ledger keeps no account of them
      tenants.push_back({.tenant = name, .budget = policy_->tenant_budget, .committed = committed});
    }
  }
  std::sort(tenants.begin(), tenants.end(),
            [](const auto& a, const auto& b) { return a.tenant < b.tenant; });
  return tenants;
}

int32_t RequestRegistry::Sweep() {
  const int64_t now_ms = clock_->NowMs();
  int32_t idle_count = 0;
  absl::MutexLock lock(&mutex_);
  RollTenantWindow(now_ms);
  // A lease that an update made longer than idle_timeout must not be cut.
  const int64_t idle_ms = std::max(config_.idle_timeout_ms, policy_->lease_duration_ms);
  std::vector<std::string> elsewhere;
  for (const auto& [name, entry] : entries_) {
    absl::MutexLock entry_lock(&entry->mutex);
    if (entry->request.closed()) {
      Retire(name, entry.get(), now_ms);  // unless it is: it may be another replica that closed it
      continue;
    }
    if (now_ms - entry->request.last_use_ms() < idle_ms) continue;
    ++idle_count;
    // With a shared ledger it may be in use at another replica.
    if (ledger_ != nullptr) {
      elsewhere.push_back(name);
      continue;
    }
    entry->request.Close(now_ms, "IDLE",
                         absl::StrCat("closed after ", idle_ms / 1000, " s without a report"));
    entry->UpdateCell();
    Retire(name, entry.get(), now_ms);
  }
  for (const std::string& name : elsewhere) Forget(name);
  counters_.requests_idle.fetch_add(idle_count, std::memory_order_relaxed);
  while (!retired_.empty() && (now_ms - retired_.front().close_time_ms >= config_.retention_ms ||
                               static_cast<int64_t>(retired_.size()) > config_.retained_limit)) {
    Forget(retired_.front().name);
    retired_.pop_front();
  }
  return idle_count;
}

}  // namespace certkv::gate
