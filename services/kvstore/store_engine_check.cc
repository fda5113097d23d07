// Integrity: what is read again and compared with its checksums, and what happens then.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/kvstore/batch_checks.h"
#include "services/kvstore/block_checker.h"
#include "services/kvstore/store_engine.h"
#include "services/kvstore/store_engine_lock.h"

namespace certkv::kvstore {
namespace {

constexpr size_t kScrubBatchMax = 64;  // blocks that one call checks at most

BlockCheck CheckOf(const BlockRecord& record) {
  BlockCheck check;
  check.key = record.key;
  check.device = record.device;
  check.backing = record.backing;
  check.originals_digest = record.originals_digest;
  return check;
}

}  // namespace

absl::StatusOr<std::vector<BlockHandle>> StoreEngine::FetchOriginals(
    SessionId session_id, LeaseId id, absl::Span<const BlockKey> keys) {
  CERTKV_RETURN_IF_ERROR(CheckBatch(keys.size(), "block_keys"));
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ReadClock()));
  const std::shared_ptr<Cache> cache = session->cache;
  BlockIndex& index = cache->index();
  const Lease* lease = leases_.Find(id, session->id);
  if (lease == nullptr) return LeaseNotFound(id);
  const absl::flat_hash_set<BlockId> covered(lease->blocks.begin(), lease->blocks.end());
  std::vector<BlockId> blocks;
  std::vector<BlockCheck> checks;
  for (const BlockKey& key : keys) {
    const BlockId block = index.Find(key);
    if (!covered.contains(block)) {
      return MakeError(absl::StatusCode::kNotFound, "BLOCK_NOT_FOUND",
                       absl::StrCat("block ", ToHex(key.view(), 8), " is not covered by lease ",
                                    static_cast<int64_t>(id), "; look it up first"));
    }
    if (index.Get(block).pending) {
      return index.Get(block).damaged ? OriginalLost(key) : OriginalsPending(key);
    }
    blocks.push_back(block);
    checks.push_back(CheckOf(index.Get(block)));
  }
  for (const BlockId block : blocks) index.Hold(block);  // should the lease end meanwhile
  mutex_.Unlock();
  CheckBlocks(*cache, absl::MakeSpan(checks), pool_);
  mutex_.Lock();
  absl::Status status;
  for (size_t i = 0; i < blocks.size(); ++i) status.Update(RepairHeld(cache, blocks[i], checks[i]));
  std::vector<BlockHandle> handles;
  for (const BlockId block : blocks) handles.push_back(cache->HandleOf(block));
  Unhold(cache.get(), blocks);
  if (!status.ok()) return status;
  return handles;
}

absl::Status StoreEngine::RepairHeld(const std::shared_ptr<Cache>& cache, BlockId id,
                                     const BlockCheck& check) {
  if (!check.originals_ok) {
    cache->MarkLost(id, clock_->NowMs());
    return OriginalLost(check.key);
  }
  if (check.planes_ok) return absl::OkStatus();
  BlockIndex& index = cache->index();
  while (index.Get(id).promoting) claims_changed_.Wait(&mutex_);
  BlockWrite write;
  write.key = check.key;
  write.backing_slot = index.Get(id).backing.slot;
  write.device_slot = index.Get(id).device.slot;
  write.originals_digest = check.originals_digest;
  index.SetPromoting(id, true);
  mutex_.Unlock();
  const absl::StatusOr<int64_t> rewritten = RebuildPlanes(*cache, write, pool_);
  mutex_.Lock();
  index.SetPromoting(id, false);
  claims_changed_.SignalAll();
  if (!rewritten.ok()) {
    cache->MarkLost(id, clock_->NowMs());
    return rewritten.status();
  }
  if (*rewritten > 0) ++counters_.blocks_rebuilt;
  return absl::OkStatus();
}

std::vector<BlockCheck> StoreEngine::NextToScrub(int64_t max_bytes, std::shared_ptr<Cache>* cache) {
  std::vector<BlockCheck> checks;
  int64_t bytes = 0;
  for (auto it = caches_.lower_bound(scrub_cache_); it != caches_.end(); ++it) {
    if (it->first != scrub_cache_) scrub_block_ = 0;
    scrub_cache_ = it->first;
    const BlockIndex& index = it->second->index();
    BlockId id = index.FirstLiveFrom(scrub_block_);
    for (; id != BlockId::kNone; id = index.FirstLiveFrom(scrub_block_)) {
      if (!checks.empty() && (bytes >= max_bytes || checks.size() >= kScrubBatchMax)) break;
      scrub_block_ = static_cast<int32_t>(id) + 1;
      const BlockRecord& record = index.Get(id);
      if (record.damaged || record.promoting || record.pending) continue;
      checks.push_back(CheckOf(record));
      bytes += it->second->BytesOf(id);
    }
    if (checks.empty()) continue;
    *cache = it->second;
    return checks;
  }
  scrub_cache_ = CacheId{};
  scrub_block_ = 0;
  ++counters_.scrub_rounds;
  return checks;
}

int64_t StoreEngine::Scrub(int64_t max_bytes) {
  Lock lock(this);
  std::shared_ptr<Cache> cache;
  std::vector<BlockCheck> checks = NextToScrub(max_bytes, &cache);
  if (checks.empty()) return 0;
  mutex_.Unlock();
  CheckBlocks(*cache, absl::MakeSpan(checks), nullptr);
  mutex_.Lock();
  int64_t bytes = 0;
  BlockIndex& index = cache->index();
  for (const BlockCheck& check : checks) {
    if (check.moved) continue;
    const BlockId id = index.Find(check.key);
    // Whoever took a slot meanwhile has written it anew.
    if (id == BlockId::kNone || index.Get(id).backing != check.backing ||
        index.Get(id).device != check.device) {
      continue;
    }
    ++counters_.blocks_scrubbed;
    bytes += cache->BytesOf(id);
    if (check.originals_ok && check.planes_ok) continue;
    index.Hold(id);
    // What it says has been done and counted.
    RepairHeld(cache, id, check).IgnoreError();
    index.Unhold(id);
  }
  counters_.bytes_scrubbed += bytes;
  return bytes;
}

}  // namespace certkv::kvstore
