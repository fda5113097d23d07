#include "services/gate/policy_trial.h"

#include <algorithm>

namespace certkv::gate {
namespace {

bool WasRepaired(const ReadCertificate& read) {
  const bool exact_from_the_start =
      read.outcome == Outcome::kExact && read.first_worst_case_tv == read.worst_case_tv;
  return read.rung != Rung::kNone && !exact_from_the_start;
}

int64_t MeanBytes(int64_t bytes, int64_t count) { return count == 0 ? 0 : bytes / count; }

}  // namespace

void PolicyTrialSample::Add(const std::string& tenant, const std::string& model,
                            absl::Span<const ReadCertificate> certificates) {
  if (certificates.empty()) return;
  const size_t step = 1 + (certificates.size() - 1) / kSampledPerBatchMax;
  absl::MutexLock lock(&mutex_);
  auto found = audience_index_.find({tenant, model});
  if (found == audience_index_.end()) {
    if (audiences_.size() >= kSampledAudiencesMax) return;
    found = audience_index_
                .emplace(std::make_pair(tenant, model), static_cast<int32_t>(audiences_.size()))
                .first;
    audiences_.emplace_back(tenant, model);
  }
  // Another start in every batch, so that not the same heads are taken each time.
  for (size_t i = next_ % step; i < certificates.size(); i += step) {
    const SampledRead read{certificates[i], found->second};
    if (reads_.size() < kSampledReadsMax) {
      reads_.push_back(read);
    } else {
      reads_[next_ % kSampledReadsMax] = read;
    }
    ++next_;
  }
}

PolicyTrial PolicyTrialSample::Try(const Policy& policy) const {
  absl::MutexLock lock(&mutex_);
  std::vector<PolicyLease> leases;
  for (const auto& [tenant, model] : audiences_) {
    const Policy resolved = ResolvePolicy(policy, tenant, model);
    PolicyLease lease;
    lease.read_mode = resolved.read_mode;
    lease.tolerances = resolved.tolerances;
    if (resolved.read_mode == ReadMode::kEnforce) lease.head_rules = HeadRulesOf(resolved);
    leases.push_back(std::move(lease));
  }
  PolicyTrial trial;
  trial.read_count = static_cast<int64_t>(reads_.size());
  int64_t whole_head_bytes = 0;
  int64_t whole_head_count = 0;
  for (const SampledRead& read : reads_) {
    const bool repaired = WasRepaired(read.certificate);
    trial.recorded_first += read.certificate.rung == Rung::kNone ? 1 : 0;
    trial.recorded_repaired += repaired ? 1 : 0;
    trial.recorded_bytes += read.certificate.repair_bytes;
    if (read.certificate.rung >= Rung::kHead) {
      whole_head_bytes += read.certificate.repair_bytes;
      ++whole_head_count;
    }
  }
  const int64_t mean_bytes = MeanBytes(trial.recorded_bytes, trial.recorded_repaired);
  const int64_t mean_head_bytes =
      whole_head_count > 0 ? MeanBytes(whole_head_bytes, whole_head_count) : mean_bytes;
  for (const SampledRead& read : reads_) {
    const PolicyLease& lease = leases[static_cast<size_t>(read.audience)];
    const HeadTerms terms = TermsOf(lease, read.certificate.layer, read.certificate.query_head);
    ReadCertificate first = read.certificate;
    first.worst_case_tv = first.first_worst_case_tv;
    if (lease.read_mode == ReadMode::kObserve ||
        (!terms.exact && MeetsTolerances(first, terms.tolerances))) {
      ++trial.tried_first;
      continue;
    }
    ++(terms.exact ? trial.tried_exact : trial.tried_repaired);
    const bool is_known =
        terms.exact ? read.certificate.rung >= Rung::kHead : WasRepaired(read.certificate);
    trial.tried_bytes +=
        is_known ? read.certificate.repair_bytes : (terms.exact ? mean_head_bytes : mean_bytes);
    trial.estimated_count += is_known ? 0 : 1;
  }
  return trial;
}

}  // namespace certkv::gate
