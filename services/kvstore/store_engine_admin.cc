// Looking after blocks: pins, drops, and lists for people.
#include <algorithm>
#include <limits>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/core/status.h"
#include "services/kvstore/batch_checks.h"
#include "services/kvstore/store_engine.h"
#include "services/kvstore/store_engine_lock.h"

namespace certkv::kvstore {
namespace {

constexpr int32_t kPageSizeDefault = 100;
constexpr int32_t kPageSizeMax = 1000;
constexpr int64_t kPinTtlMsMax = int64_t{30} * 24 * 3'600'000;

absl::Status BlockNotFound(const BlockKey& key) {
  return MakeError(absl::StatusCode::kNotFound, "BLOCK_NOT_FOUND",
                   absl::StrCat("block ", ToHex(key.view(), 8),
                                " is not in the cache: never sealed, evicted or dropped"));
}

// Where the next page starts. On the wire "<cache id>-<block id>", in decimal.
struct PageStart {
  int64_t cache = 0;
  int32_t block = 0;
};

absl::StatusOr<PageStart> ParsePageToken(absl::string_view token) {
  if (token.empty()) return PageStart{};
  PageStart start;
  const std::vector<absl::string_view> parts = absl::StrSplit(token, '-');
  if (parts.size() == 2 && absl::SimpleAtoi(parts[0], &start.cache) &&
      absl::SimpleAtoi(parts[1], &start.block) && start.cache > 0 && start.block >= 0) {
    return start;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "PAGE_TOKEN_INVALID",
                   "page_token is not one that ListBlocks gave; send next_page_token unchanged, "
                   "or nothing for the first page");
}

}  // namespace

absl::Status StoreEngine::PinBlocks(SessionId session_id, absl::Span<const BlockKey> keys,
                                    bool pinned, int64_t ttl_ms) {
  CERTKV_RETURN_IF_ERROR(CheckBatch(keys.size(), "block_keys"));
  if (ttl_ms < 0 || ttl_ms > kPinTtlMsMax) {
    return MakeError(absl::StatusCode::kInvalidArgument, "PIN_TTL_INVALID",
                     absl::StrCat("ttl_ms is ", ttl_ms, ", must be in [1, ", kPinTtlMsMax,
                                  "], or 0 for a pin until it is taken off"));
  }
  Lock lock(this);
  const Now now = ReadClock();
  ExpirePins(now);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindWorker(session_id, now, "PinBlocks"));
  Cache& cache = *session->cache;
  BlockIndex& index = session->cache->index();
  absl::flat_hash_set<BlockId> named;
  absl::flat_hash_set<BlockId> changing;
  absl::flat_hash_map<TenantIndex, int32_t> by_tenant;
  for (const BlockKey& key : keys) {
    const BlockId id = index.Find(key);
    if (id == BlockId::kNone) return BlockNotFound(key);
    named.insert(id);
    if (index.Get(id).pinned == pinned || !changing.insert(id).second) continue;
    ++by_tenant[index.Get(id).tenant];
  }
  const int64_t limit =
      int64_t{session->cache->backing().slot_count()} * config_.pinned_percent_max / 100;
  const int64_t wanted = index.pinned_count() + static_cast<int64_t>(changing.size());
  if (pinned && wanted > limit) {
    return MakeError(
        absl::StatusCode::kResourceExhausted, "PIN_LIMIT",
        absl::StrCat(index.pinned_count(), " blocks are pinned, ", changing.size(),
                     " more would exceed ", limit, ", which is ", config_.pinned_percent_max,
                     " % of the cache's slots; unpin some or raise "
                     "pinned_percent_max"));
  }
  for (const auto& [tenant, count] : by_tenant) {
    const TenantUse use = cache.UseOf(tenant);
    const int64_t most = int64_t{use.backing.limit} * config_.pinned_percent_max / 100;
    if (!pinned || use.pinned + count <= most) continue;
    return MakeError(
        absl::StatusCode::kResourceExhausted, "PIN_LIMIT",
        absl::StrCat("tenant \"", tenants_.NameOf(tenant), "\" has ", use.pinned,
                     " blocks pinned, ", count, " more would exceed ", most, ", which is ",
                     config_.pinned_percent_max, " % of its ", use.backing.limit,
                     " slots; unpin some or raise pinned_percent_max or the tenant's "
                     "backing_limit"));
  }
  const int64_t end_ns = ttl_ms == 0 ? 0 : now.monotonic_ns + ttl_ms * 1'000'000;
  for (const BlockId id : named) cache.SetPinned(id, pinned, end_ns);
  return absl::OkStatus();
}

void StoreEngine::ExpirePins(const Now& now) {
  for (const auto& [cache_id, cache] : caches_) {
    for (BlockId id = cache->FirstEndedPin(now.monotonic_ns); id != BlockId::kNone;
         id = cache->FirstEndedPin(now.monotonic_ns)) {
      cache->SetPinned(id, false);
    }
  }
}

absl::StatusOr<int32_t> StoreEngine::DropBlocks(SessionId session_id,
                                                absl::Span<const BlockKey> keys) {
  CERTKV_RETURN_IF_ERROR(CheckBatch(keys.size(), "block_keys"));
  std::vector<BlockKey> on_disk;
  CERTKV_ASSIGN_OR_RETURN(const Dropped dropped, DropFromIndex(session_id, keys, &on_disk));
  if (spill_ != nullptr) spill_->Delete(dropped.spec, on_disk);
  return dropped.count;
}

absl::StatusOr<StoreEngine::Dropped> StoreEngine::DropFromIndex(SessionId session_id,
                                                                absl::Span<const BlockKey> keys,
                                                                std::vector<BlockKey>* on_disk) {
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindWorker(session_id, ReadClock(), "DropBlocks"));
  Cache& cache = *session->cache;
  absl::flat_hash_set<BlockId> doomed;
  for (const BlockKey& key : keys) {
    const BlockId id = cache.index().Find(key);
    if (id != BlockId::kNone) cache.index().AddSubtree(id, &doomed);
  }
  absl::flat_hash_set<BlockKey> doomed_keys(keys.begin(), keys.end());
  for (const BlockId id : doomed) {
    const BlockRecord& record = cache.index().Get(id);
    doomed_keys.insert(record.key);
    if (record.hold_count == 0) continue;
    return MakeError(absl::StatusCode::kFailedPrecondition, "BLOCK_LEASED",
                     absl::StrCat("block ", ToHex(record.key.view(), 8), " has ", record.hold_count,
                                  " leases and is or depends on a block to be dropped; nothing "
                                  "was dropped, release them or wait for their end"));
  }
  auto count = static_cast<int32_t>(doomed.size());
  if (spill_ != nullptr) {
    const std::vector<BlockKey> all(doomed_keys.begin(), doomed_keys.end());
    *on_disk = spill_->Forget(cache.cache_digest(), all);
    for (const BlockKey& key : *on_disk) count += cache.index().Find(key) == BlockId::kNone ? 1 : 0;
  }
  cache.Drop(doomed, clock_->NowMs());
  return Dropped{cache.cache_digest(), count};
}

BlockInfo StoreEngine::InfoOf(const Cache& cache, BlockId id) const {
  const BlockRecord& record = cache.index().Get(id);
  BlockInfo info;
  info.handle = cache.HandleOf(id);
  info.parent = cache.index().ParentKeyOf(id);
  info.cache = cache.id();
  info.lease_count = record.hold_count;
  info.pinned = record.pinned;
  info.tenant = tenants_.NameOf(record.tenant);
  info.priority = BlockPriority{record.priority};
  const int64_t pin_end_ns = cache.PinEndOf(id);
  if (pin_end_ns != 0) {
    info.pin_expire_time_ms = clock_->NowMs() + (pin_end_ns - clock_->MonotonicNs()) / 1'000'000;
  }
  info.lost = record.damaged;
  info.device_bytes = record.device.present() ? cache.device().layout().slot_bytes() : 0;
  info.original_bytes = cache.backing().layout().slot_bytes();
  info.seal_time_ms = record.seal_time_ms;
  info.last_use_time_ms = record.last_use_time_ms;
  return info;
}

absl::StatusOr<BlockInfo> StoreEngine::GetBlock(CacheId cache_id, const BlockKey& key) {
  Lock lock(this);
  ExpireLeases(ReadClock());
  CERTKV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(cache_id));
  const BlockId id = cache->index().Find(key);
  if (id == BlockId::kNone) return BlockNotFound(key);
  return InfoOf(*cache, id);
}

absl::StatusOr<BlockPage> StoreEngine::ListBlocks(CacheId cache_id, int32_t page_size,
                                                  absl::string_view page_token) {
  if (page_size < 0 || page_size > kPageSizeMax) {
    return MakeError(absl::StatusCode::kInvalidArgument, "PAGE_SIZE_INVALID",
                     absl::StrCat("page_size is ", page_size, ", must be in [1, ", kPageSizeMax,
                                  "], or 0 for ", kPageSizeDefault));
  }
  const size_t limit = page_size == 0 ? kPageSizeDefault : page_size;
  CERTKV_ASSIGN_OR_RETURN(PageStart start, ParsePageToken(page_token));
  Lock lock(this);
  ExpireLeases(ReadClock());
  if (cache_id != CacheId{}) CERTKV_RETURN_IF_ERROR(FindCache(cache_id).status());
  BlockPage page;
  for (auto it = caches_.lower_bound(CacheId{start.cache}); it != caches_.end(); ++it) {
    const auto& [id, cache] = *it;
    if (cache_id != CacheId{} && id != cache_id) continue;
    const int32_t first = static_cast<int64_t>(id) == start.cache ? start.block : 0;
    for (BlockId block = cache->index().FirstLiveFrom(first); block != BlockId::kNone;
         block = cache->index().FirstLiveFrom(static_cast<int32_t>(block) + 1)) {
      if (page.blocks.size() == limit) {
        page.next_page_token =
            absl::StrCat(static_cast<int64_t>(id), "-", static_cast<int32_t>(block));
        return page;
      }
      page.blocks.push_back(InfoOf(*cache, block));
    }
  }
  return page;
}

void StoreEngine::CheckInvariants() {
  Lock lock(this);
  for (const auto& [id, cache] : caches_) cache->CheckInvariants();
}

}  // namespace certkv::kvstore
