// What a call is told that finds no room: who has it, and when to ask again.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {
namespace {

constexpr size_t kWorkersNamedMax = 8;
// Room comes when a lease is released, which nobody foretells, or ends: the caller asks again
// before that, but not all the time.
constexpr int64_t kRetryMsMin = 20;
constexpr int64_t kRetryMsMax = 1000;

// "a: 3, b: 1", the largest first.
std::string ListHolders(const std::map<std::string, absl::flat_hash_set<BlockId>>& by_worker) {
  std::vector<std::pair<size_t, std::string>> holders;
  for (const auto& [name, blocks] : by_worker) holders.emplace_back(blocks.size(), name);
  std::sort(holders.rbegin(), holders.rend());
  std::string who;
  for (size_t i = 0; i < std::min(holders.size(), kWorkersNamedMax); ++i) {
    absl::StrAppend(&who, i == 0 ? " (" : ", ", holders[i].second, ": ", holders[i].first);
  }
  if (holders.size() > kWorkersNamedMax) {
    absl::StrAppend(&who, ", and ", holders.size() - kWorkersNamedMax, " more workers");
  }
  if (!who.empty()) who += ")";
  return who;
}

}  // namespace

absl::Status StoreEngine::Refused(const Cache& cache, const SlotDemand& demand,
                                  const SlotRefusal& refusal) const {
  std::map<std::string, absl::flat_hash_set<BlockId>> by_worker;
  leases_.ForEach([&](const Lease& lease) {
    mutex_.AssertHeld();
    const absl::StatusOr<Session*> session = sessions_.Find(lease.session);
    if (!session.ok() || (*session)->cache.get() != &cache) return;
    if (refusal.by_quota && (*session)->tenant != demand.tenant) return;
    by_worker[(*session)->worker_name].insert(lease.blocks.begin(), lease.blocks.end());
  });
  const std::string who = ListHolders(by_worker);
  const bool is_device = refusal.tier == SlabKind::kDevice;
  const absl::string_view tier = is_device ? "device" : "backing";
  const int32_t needed = is_device ? demand.device_count : demand.backing_count;
  const TenantUse use = cache.UseOf(demand.tenant);
  const TierShare& share = is_device ? use.device : use.backing;
  const SlotPool& pool = is_device ? cache.device() : cache.backing();
  absl::Status status;
  if (refusal.by_quota) {
    status = MakeError(
        absl::StatusCode::kResourceExhausted, "QUOTA_EXCEEDED",
        absl::StrCat("tenant \"", tenants_.NameOf(demand.tenant), "\" has ", share.used, " of its ",
                     share.limit, " slots in the ", tier, " tier of cache ",
                     static_cast<int64_t>(cache.id()), ", needed ", needed,
                     " more, and too few of its blocks may go: they are leased", who,
                     " or pinned (", use.pinned, "); release leases, unpin, or raise the tenant's ",
                     tier, "_limit in kvstore_tenants"));
  } else {
    status = MakeError(
        absl::StatusCode::kResourceExhausted, "STORE_FULL",
        absl::StrCat(tier, " tier of cache ", static_cast<int64_t>(cache.id()), " has ",
                     pool.slot_count(), " slots, ", pool.free_count(), " free, needed ", needed,
                     "; ", cache.index().held_count(), " of its ", cache.index().size(),
                     " blocks are leased", who, " and ", cache.index().pinned_count(),
                     " pinned; release leases or raise ", tier, "_memory"));
  }
  // More than it can ever have: no wait helps.
  if (needed > share.limit || needed > pool.slot_count()) return status;
  const int64_t first_end_ns = leases_.FirstDeadline();
  const int64_t left_ms =
      first_end_ns == 0 ? kRetryMsMin : (first_end_ns - clock_->MonotonicNs()) / 1'000'000;
  return WithRetryDelay(status, std::clamp(left_ms, kRetryMsMin, kRetryMsMax));
}

}  // namespace certkv::kvstore
