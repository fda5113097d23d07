// The tier on disk: what goes down before memory is reused, and what lookups bring back.
#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "kernels/core/status.h"
#include "services/kvstore/block_checker.h"
#include "services/kvstore/block_payload.h"
#include "services/kvstore/store_engine.h"
#include "services/kvstore/store_engine_lock.h"

namespace certkv::kvstore {
namespace {

constexpr size_t kRestoreBatch = 16;  // blocks that are read from disk side by side
constexpr size_t kSpillBatch = 32;    // blocks that are written between two looks at the state

}  // namespace

void StoreEngine::AddUnspilled(const Cache& cache, BlockId id,
                               std::vector<BlockCheck>* blocks) const {
  const BlockRecord& record = cache.index().Get(id);
  if (record.damaged || record.pending || spill_->Contains(cache.cache_digest(), record.key))
    return;
  if (!spill_->Admits(tenants_.NameOf(record.tenant), OriginalBytesOf(cache))) return;
  BlockCheck block;
  block.key = record.key;
  block.device = record.device;
  block.backing = record.backing;
  block.originals_digest = record.originals_digest;
  block.parent = cache.index().ParentKeyOf(id);
  block.seal_time_ms = record.seal_time_ms;
  block.tenant = record.tenant;
  blocks->push_back(block);
}

std::vector<BlockCheck> StoreEngine::NextToSpill(const Cache& cache, const TenantIndex* tenant,
                                                 int32_t count) const {
  std::vector<BlockCheck> next;
  for (const BlockId id : cache.PreviewEvictions(tenant, count)) AddUnspilled(cache, id, &next);
  return next;
}

bool StoreEngine::SpillOldest(const std::shared_ptr<Cache>& cache, int32_t count) {
  if (spill_ == nullptr || !spill_->CanWrite()) return false;
  std::vector<BlockCheck> blocks = NextToSpill(*cache, nullptr, count);
  if (blocks.empty()) return false;
  Spill(cache, &blocks);
  return true;
}

void StoreEngine::Spill(const std::shared_ptr<Cache>& cache, std::vector<BlockCheck>* to_write) {
  std::vector<BlockCheck>& blocks = *to_write;
  std::vector<std::string> tenants;
  for (const BlockCheck& block : blocks) tenants.push_back(tenants_.NameOf(block.tenant));
  mutex_.Unlock();
  // Nobody holds the blocks: whoever reuses a slot meanwhile makes the copy void.
  CheckBlocks(*cache, absl::MakeSpan(blocks), pool_);
  const int64_t original_bytes = OriginalBytesOf(*cache);
  const int64_t plane_bytes = PlaneBytesOf(*cache);
  pool_->ParallelFor(static_cast<int64_t>(blocks.size()), [&](int64_t i) {
    const BlockCheck& block = blocks[i];
    if (block.moved || !block.originals_ok) return;
    // Where a limit leaves no room for the planes, they are made again from the originals.
    const bool with_planes = block.device.present() && block.planes_ok &&
                             spill_->Admits(tenants[i], original_bytes + plane_bytes);
    std::vector<uint8_t> payload(
        static_cast<size_t>(original_bytes + (with_planes ? plane_bytes : 0)));
    if (!CopyOut(*cache, block.device, block.backing, absl::MakeSpan(payload))) return;
    SpilledBlock record;
    record.key = block.key;
    record.parent = block.parent;
    record.originals_digest = block.originals_digest;
    record.seal_time_ms = block.seal_time_ms;
    record.tenant = tenants[i];
    // An error is in the tier's statistics; the store goes on from memory.
    spill_->Write(cache->cache_digest(), record, payload).IgnoreError();
  });
  mutex_.Lock();
  for (const BlockCheck& block : blocks) {
    if (block.moved || block.originals_ok) continue;
    const BlockId id = cache->index().Find(block.key);
    if (id == BlockId::kNone || cache->index().Get(id).backing != block.backing) continue;
    cache->MarkLost(id, clock_->NowMs());
  }
}

void StoreEngine::SpillForRoom(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                               int32_t count) {
  // Others take room while blocks are written, so what is missing is looked at anew each time. What
  // the disk refuses is not tried twice.
  absl::flat_hash_set<BlockKey> tried;
  while (spill_->CanWrite()) {
    // A tenant at its limit makes room among its own blocks while others' slots are free.
    const TierShare use = cache->UseOf(tenant).backing;
    const int32_t over = use.used + count - use.limit;
    const int32_t missing = std::max(count - cache->backing().free_count(), over);
    if (missing <= 0) return;
    std::vector<BlockCheck> blocks = NextToSpill(*cache, &tenant, missing);
    const auto is_tried = [&tried](const BlockCheck& block) { return tried.contains(block.key); };
    blocks.erase(std::remove_if(blocks.begin(), blocks.end(), is_tried), blocks.end());
    if (blocks.empty()) return;
    if (blocks.size() > kSpillBatch) blocks.resize(kSpillBatch);
    for (const BlockCheck& block : blocks) tried.insert(block.key);
    Spill(cache, &blocks);
  }
}

void StoreEngine::SpillAhead() {
  Lock lock(this);
  if (spill_ == nullptr) return;
  std::vector<std::shared_ptr<Cache>> caches;
  for (const auto& entry : caches_) caches.push_back(entry.second);
  constexpr int64_t kBatch = kSpillBatch;
  for (const auto& cache : caches) {
    const int64_t wanted =
        int64_t{cache->backing().slot_count()} * config_.spill_ahead_percent / 100;
    const int64_t missing = wanted - cache->backing().free_count();
    for (int64_t done = 0; done < missing; done += kBatch) {
      // What is on disk already counts: the walk begins at the oldest again.
      const auto count = static_cast<int32_t>(std::min(done + kBatch, missing));
      if (!SpillOldest(cache, count) && count == missing) break;
    }
  }
}

void StoreEngine::KeepWatermarks() {
  constexpr int32_t kBlocksPerLock = 256;
  Lock lock(this);
  const int64_t now_ms = clock_->NowMs();
  for (const auto& [id, cache] : caches_) {
    const auto share = [](const SlotPool& pool, int32_t percent) {
      return static_cast<int32_t>(int64_t{pool.slot_count()} * percent / 100);
    };
    const auto used = [](const SlotPool& pool) { return pool.slot_count() - pool.free_count(); };
    if (used(cache->device()) > share(cache->device(), config_.watermark_high_percent)) {
      cache->DemoteDownTo(share(cache->device(), config_.watermark_low_percent), kBlocksPerLock,
                          now_ms);
    }
    if (used(cache->backing()) > share(cache->backing(), config_.watermark_high_percent)) {
      cache->SpillDownTo(share(cache->backing(), config_.watermark_low_percent), kBlocksPerLock,
                         now_ms);
    }
  }
}

void StoreEngine::SpillAll() {
  Lock lock(this);
  if (spill_ == nullptr) return;
  std::vector<std::shared_ptr<Cache>> caches;
  for (const auto& entry : caches_) caches.push_back(entry.second);
  for (const auto& cache : caches) {
    std::vector<BlockCheck> batch;
    for (BlockId id = cache->index().FirstLiveFrom(0);
         id != BlockId::kNone && spill_->CanWrite();) {
      AddUnspilled(*cache, id, &batch);
      id = cache->index().FirstLiveFrom(static_cast<int32_t>(id) + 1);
      if (batch.size() < kSpillBatch && id != BlockId::kNone) continue;
      Spill(cache, &batch);
      batch.clear();
    }
  }
}

std::vector<StoreEngine::Restore> StoreEngine::NextToRestore(const Cache& cache,
                                                             absl::Span<const BlockKey> keys,
                                                             size_t first) {
  std::vector<Restore> next;
  const BlockIndex& index = cache.index();
  for (size_t i = first; i < keys.size() && next.size() < kRestoreBatch; ++i) {
    if (index.Find(keys[i]) != BlockId::kNone || cache.claimed_keys().contains(keys[i])) break;
    const auto block = spill_->Find(cache.cache_digest(), keys[i]);
    if (!block.has_value()) break;
    // The parent is the key before; a chain that is asked for from its middle needs it in memory.
    const BlockId parent = index.Find(block->parent);
    const bool is_after = i > 0 && block->parent == keys[i - 1];
    const bool is_rooted = block->parent.is_zero() ||
                           (parent != BlockId::kNone && !index.Get(parent).damaged) ||
                           (is_after && i > first);
    if (!is_rooted) break;
    next.push_back(Restore{*block, BlockWrite{}, false});
  }
  return next;
}

bool StoreEngine::RestoreBatch(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                               std::vector<Restore>* batch, std::vector<BlockId>* held) {
  auto count = static_cast<int32_t>(batch->size());
  SlotGrant grant;
  SlotRefusal refusal;
  while (!cache->TakeSlots({tenant, count, count}, clock_->NowMs(), &grant, &refusal)) {
    if (count == 1) return false;
    count /= 2;  // as much of the chain as fits
  }
  batch->resize(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    Restore& restore = (*batch)[i];
    restore.write.key = restore.block.key;
    restore.write.backing_slot = grant.backing[i];
    restore.write.device_slot = grant.device[i];
    restore.write.originals_digest = restore.block.originals_digest;
    cache->claimed_keys().insert(restore.block.key);
  }
  mutex_.Unlock();
  pool_->ParallelFor(count, [&](int64_t i) {
    Restore& restore = (*batch)[i];
    std::vector<uint8_t> payload(static_cast<size_t>(restore.block.payload_bytes));
    const SpecDigest& spec = cache->cache_digest();
    absl::Status status = spill_->Read(spec, restore.block, absl::MakeSpan(payload));
    if (status.ok()) {
      status = CopyIn(*cache, restore.write, payload);
      if (!status.ok()) spill_->ForgetDamaged(spec, restore.block);
    }
    restore.done = status.ok();
  });
  mutex_.Lock();
  const int64_t now_ms = clock_->NowMs();
  bool all_done = true;
  for (const Restore& restore : *batch) {
    cache->claimed_keys().erase(restore.block.key);
    all_done = all_done && restore.done;
    if (!all_done) {  // what comes after a gap has no parent
      cache->ReturnSlots({tenant, {restore.write.backing_slot}, {restore.write.device_slot}});
      continue;
    }
    const Cache::NewBlock block{restore.block.key,
                                cache->index().Find(restore.block.parent),
                                restore.write.backing_slot,
                                restore.write.device_slot,
                                restore.block.originals_digest,
                                tenant};
    held->push_back(cache->Restore(block, restore.block.seal_time_ms, now_ms));
  }
  claims_changed_.SignalAll();
  return all_done;
}

void StoreEngine::RestoreAfter(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                               absl::Span<const BlockKey> keys, std::vector<BlockId>* held) {
  if (spill_ == nullptr) return;
  const int64_t deadline_ns = clock_->MonotonicNs() + config_.spill_wait_ms * 1'000'000;
  while (held->size() < keys.size() && clock_->MonotonicNs() <= deadline_ns) {
    const size_t first = held->size();
    const BlockId id = cache->index().Find(keys[first]);
    if (id != BlockId::kNone) {
      if (cache->index().Get(id).damaged) return;
      cache->index().Hold(id);
      held->push_back(id);
      continue;
    }
    if (cache->claimed_keys().contains(keys[first])) {
      claims_changed_.Wait(&mutex_);
      continue;
    }
    const size_t wanted = NextToRestore(*cache, keys, first).size();
    if (wanted == 0) return;
    SpillForRoom(cache, tenant, static_cast<int32_t>(wanted));  // others may have come meanwhile
    std::vector<Restore> batch = NextToRestore(*cache, keys, first);
    if (batch.empty()) continue;
    if (!RestoreBatch(cache, tenant, &batch, held)) return;
  }
}

}  // namespace certkv::kvstore
