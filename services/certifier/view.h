// What a certifier knows about one sequence: its blocks in order, its unsealed tail, and the policy
// lease that its reads are under.
#ifndef CERTKV_SERVICES_CERTIFIER_VIEW_H_
#define CERTKV_SERVICES_CERTIFIER_VIEW_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/core/ids.h"
#include "kernels/core/policy.h"
#include "services/certifier/budget.h"
#include "services/certifier/mapped_cache.h"

namespace certkv::certifier {

using BlockList = std::vector<BlockHandle>;

// The last tokens of a sequence, in a worker's staging slot, in their original 16 bits. The worker
// must not write rows below token_count, nor give the slot back, while a read may run.
struct ViewTail {
  std::shared_ptr<const StagingMap> staging;  // null = no tail
  int32_t slot = -1;
  int32_t token_count = 0;
  uint64_t generation = 0;  // of the staging slot when the tail was set
};

// A view at one moment. Immutable and cheap to copy; a read uses one from its start to its end.
struct ViewSnapshot {
  std::shared_ptr<const BlockList> blocks;  // never null
  ViewTail tail;
  std::shared_ptr<const PolicyLease> policy;  // never null
  std::shared_ptr<BudgetAccount> budget;      // null in RiskMode::kThreshold
  int64_t token_count = 0;                    // of the blocks and the tail

  // The account that worst_case_tv is taken from, or null.
  BudgetAccount* tv_budget() const { return SpendsTv(policy->risk_mode) ? budget.get() : nullptr; }
};

// Are these blocks in the slabs now? Every block has a slot in the device tier; one without
// originals (backing.slot -1) is accepted: reads that need them fail.
// Errors: InvalidArgument [HANDLE_INVALID], a slot outside its slab, none in the device tier, or an
//         odd generation; Aborted [BLOCK_REUSED], a generation has moved on.
absl::Status ValidateHandles(const MappedCache& cache, absl::Span<const BlockHandle> blocks);

// The tail at a staging slot, or none when `staging` is null.
// Errors: InvalidArgument [TAIL_INVALID], slot or count outside the staging memory.
absl::StatusOr<ViewTail> MakeTail(const MappedCache& cache,
                                  std::shared_ptr<const StagingMap> staging, int32_t slot,
                                  int32_t token_count);

// What an update changes; all of it at once, for reads that begin afterwards.
struct ViewUpdate {
  absl::Span<const BlockHandle> appended_blocks;
  std::optional<ViewTail> tail;
  std::optional<PolicyLease> policy;
};

// Invariants:
//  1. Every block of the list was valid in the slabs when it was added.
//  2. The policy lease's sequence never falls.
//  3. A snapshot's blocks, tail, policy and budget belong to one state between two updates.
// Threads: all methods may be called concurrently.
class View {
 public:
  // Errors: as ValidateHandles, ValidatePolicyLease and BudgetBook::AccountOf; InvalidArgument
  //         [SEQUENCE_TOO_LONG]. `book` outlives the view.
  static absl::StatusOr<std::shared_ptr<View>> Create(std::shared_ptr<MappedCache> cache,
                                                      absl::Span<const BlockHandle> blocks,
                                                      ViewTail tail, const PolicyLease& policy,
                                                      BudgetBook* book, int64_t now_ms);

  // All or nothing. A policy lease whose sequence is not higher than the present one's is left out
  // without an error, so that leases may arrive in any order.
  // Errors: as Create; InvalidArgument [POLICY_LEASE_INVALID], a lease of another request;
  //         Unavailable [STORE_UNREACHABLE].
  absl::Status Update(const ViewUpdate& update, int64_t now_ms) ABSL_LOCKS_EXCLUDED(mutex_);

  ViewSnapshot Snapshot() const ABSL_LOCKS_EXCLUDED(mutex_);
  const std::shared_ptr<MappedCache>& cache() const { return cache_; }
  // The staging memory of the present tail, or null.
  std::shared_ptr<const StagingMap> staging() const { return Snapshot().tail.staging; }

  // Whose it is. Set before the view is shared.
  void SetTenant(std::string tenant) { tenant_ = std::move(tenant); }
  const std::string& tenant() const { return tenant_; }

  // For closing views that nobody uses.
  void Touch(int64_t now_ms) { last_use_ms_.store(now_ms, std::memory_order_relaxed); }
  int64_t last_use_ms() const { return last_use_ms_.load(std::memory_order_relaxed); }

 private:
  View(std::shared_ptr<MappedCache> cache, BudgetBook* book)
      : cache_(std::move(cache)), book_(book) {}

  const std::shared_ptr<MappedCache> cache_;
  BudgetBook* const book_;
  std::string tenant_;
  std::atomic<int64_t> last_use_ms_{0};
  absl::Mutex update_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);  // one update at a time
  mutable absl::Mutex mutex_;                              // held for a copy of the snapshot only
  ViewSnapshot snapshot_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_VIEW_H_
