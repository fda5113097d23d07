// What lookups found on disk and had no time to wait for: brought to memory afterwards.
#include <algorithm>
#include <utility>

#include "services/kvstore/store_engine.h"
#include "services/kvstore/store_engine_lock.h"

namespace certkv::kvstore {
namespace {

constexpr size_t kPrefetchesMax = 64;  // chains that wait

int64_t MemoryOfBlock(const Cache& cache) {
  return cache.device().layout().slot_bytes() + cache.backing().layout().slot_bytes();
}

// Slots that the tenant can take without anybody's losing one.
int32_t FreeRoom(const Cache& cache, TenantIndex tenant) {
  const TenantUse use = cache.UseOf(tenant);
  const int32_t by_quota =
      std::min(use.backing.limit - use.backing.used, use.device.limit - use.device.used);
  return std::max(0,
                  std::min({by_quota, cache.backing().free_count(), cache.device().free_count()}));
}

}  // namespace

void StoreEngine::QueuePrefetch(const Cache& cache, TenantIndex tenant,
                                absl::Span<const BlockKey> keys, size_t first) {
  if (spill_ == nullptr || config_.spill_prefetch_bytes == 0 || first >= keys.size()) return;
  Prefetching next{cache.id(), tenant, tenants_.NameOf(tenant), MemoryOfBlock(cache), {}};
  for (size_t i = first; i < keys.size(); ++i) {
    const auto block = spill_->Find(cache.cache_digest(), keys[i]);
    if (!block.has_value() || (i > 0 && block->parent != keys[i - 1])) break;
    next.keys.push_back(keys[i]);
  }
  if (next.keys.empty()) return;
  const auto wanted = static_cast<int64_t>(next.keys.size());
  const bool is_queued =
      std::any_of(prefetches_.begin(), prefetches_.end(), [&next](const Prefetching& other) {
        return other.cache == next.cache && other.keys.front() == next.keys.front();
      });
  if (is_queued) return;
  const int64_t room_bytes = config_.spill_prefetch_bytes - prefetch_bytes_;
  const int64_t count =
      prefetches_.size() >= kPrefetchesMax
          ? 0
          : std::min({wanted, room_bytes / next.block_bytes, int64_t{FreeRoom(cache, tenant)}});
  counters_.prefetches_refused += wanted - count;
  if (count == 0) return;
  next.keys.resize(static_cast<size_t>(count));
  prefetch_bytes_ += count * next.block_bytes;
  prefetches_.push_back(std::move(next));
}

size_t StoreEngine::PrefetchBatch(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                                  absl::Span<const BlockKey> keys) {
  // What others have brought back meanwhile is passed over.
  size_t first = 0;
  while (first < keys.size() && cache->index().Find(keys[first]) != BlockId::kNone) ++first;
  std::vector<Restore> batch = NextToRestore(*cache, keys, first);
  const auto room = static_cast<size_t>(FreeRoom(*cache, tenant));
  if (batch.size() > room) batch.resize(room);
  if (batch.empty()) return first;
  std::vector<BlockId> held;
  RestoreBatch(cache, tenant, &batch, &held);
  counters_.blocks_prefetched += static_cast<int64_t>(held.size());
  Unhold(cache.get(), held);
  return first + held.size();
}

bool StoreEngine::Prefetch() {
  Lock lock(this);
  if (prefetches_.empty()) return false;
  Prefetching next = std::move(prefetches_.front());
  prefetches_.pop_front();
  const auto found = caches_.find(next.cache);
  size_t done = 0;
  // A cache may have made room for another, and the tenant's index may be another tenant's now.
  if (found != caches_.end() && tenants_.NameOf(next.tenant) == next.tenant_name) {
    const std::shared_ptr<Cache> cache = found->second;
    done = PrefetchBatch(cache, next.tenant, next.keys);
  }
  const size_t left = done == 0 ? 0 : next.keys.size() - done;  // what can't be done is given up
  prefetch_bytes_ -= static_cast<int64_t>(next.keys.size() - left) * next.block_bytes;
  if (done == 0) counters_.prefetches_refused += static_cast<int64_t>(next.keys.size());
  if (left > 0) {
    next.keys.erase(next.keys.begin(), next.keys.end() - static_cast<ptrdiff_t>(left));
    prefetches_.push_front(std::move(next));
  }
  return !prefetches_.empty();
}

}  // namespace certkv::kvstore
