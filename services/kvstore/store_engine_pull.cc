// Blocks from other stores, and for them.
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/kvstore/batch_checks.h"
#include "services/kvstore/store_engine.h"
#include "services/kvstore/store_engine_lock.h"

namespace certkv::kvstore {

absl::StatusOr<CacheId> StoreEngine::FindCacheOf(const SpecDigest& spec, absl::string_view tenant) {
  const SpecDigest digest = PoolCacheDigest(spec, PoolOf(config_.pools, tenant).id);
  Lock lock(this);
  for (const auto& [id, cache] : caches_) {
    if (cache->cache_digest() == digest) return id;
  }
  return MakeError(absl::StatusCode::kNotFound, "CACHE_NOT_FOUND",
                   absl::StrCat("no cache of spec ", ToHex(spec.view(), 8), " is registered for \"",
                                tenant, "\" with this store; register it here first"));
}

absl::StatusOr<std::shared_ptr<const Cache>> StoreEngine::CacheOf(SessionId session_id) {
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(const Session* session, FindSession(session_id, ReadClock()));
  return session->cache;
}

absl::StatusOr<SharedBlocks> StoreEngine::ShareLeased(SessionId session_id, LeaseId lease_id) {
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ReadClock()));
  const Lease* lease = leases_.Find(lease_id, session->id);
  if (lease == nullptr) return LeaseNotFound(lease_id);
  SharedBlocks shared{session->cache, {}};
  const BlockIndex& index = session->cache->index();
  for (const BlockId id : lease->blocks) {
    const BlockRecord& record = index.Get(id);
    if (record.damaged) return OriginalLost(record.key);
    if (record.pending) return OriginalsPending(record.key);
    SharedBlock block;
    block.key = record.key;
    block.parent = index.ParentKeyOf(id);
    block.originals_digest = record.originals_digest;
    block.seal_time_ms = record.seal_time_ms;
    block.slots.key = record.key;
    block.slots.device_slot = record.device.slot;
    block.slots.backing_slot = record.backing.slot;
    block.slots.originals_digest = record.originals_digest;
    shared.blocks.push_back(block);
  }
  return shared;
}

absl::StatusOr<Pull> StoreEngine::BeginPull(SessionId session_id, absl::Span<const BlockKey> keys) {
  CERTKV_RETURN_IF_ERROR(CheckBatch(keys.size(), "block_keys"));
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(const Session* session, FindSession(session_id, ReadClock()));
  Pull pull{session_id, session->tenant, tenants_.NameOf(session->tenant), session->cache, {}};
  BlockIndex& index = pull.cache->index();
  for (const BlockKey& key : keys) {
    const BlockId id = index.Find(key);
    if (id == BlockId::kNone || index.Get(id).damaged) break;
    index.Hold(id);
    pull.held.push_back(id);
  }
  RestoreAfter(pull.cache, pull.tenant, keys, &pull.held);
  return pull;
}

absl::StatusOr<std::vector<BlockWrite>> StoreEngine::ClaimForPull(const Pull& pull, int32_t count) {
  Lock lock(this);
  CERTKV_RETURN_IF_ERROR(FindSession(pull.session, ReadClock()).status());
  if (spill_ != nullptr) SpillForRoom(pull.cache, pull.tenant, count);
  const SlotDemand demand{pull.tenant, count, count};
  SlotGrant grant;
  SlotRefusal refusal;
  if (!pull.cache->TakeSlots(demand, clock_->NowMs(), &grant, &refusal)) {
    return Refused(*pull.cache, demand, refusal);
  }
  std::vector<BlockWrite> writes(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    writes[i].backing_slot = grant.backing[i];
    writes[i].device_slot = grant.device[i];
  }
  return writes;
}

void StoreEngine::ReturnPulled(const Pull& pull, absl::Span<const BlockWrite> writes) {
  Lock lock(this);
  for (const BlockWrite& write : writes) {
    pull.cache->ReturnSlots({pull.tenant, {write.backing_slot}, {write.device_slot}});
  }
}

absl::StatusOr<PublishedBlock> StoreEngine::PublishPulled(Pull* pull, const PulledBlock& block) {
  Lock lock(this);
  absl::StatusOr<PublishedBlock> published = PublishPulledLocked(*pull, block);
  if (!published.ok() || !published->is_new) {
    pull->cache->ReturnSlots({pull->tenant, {block.write.backing_slot}, {block.write.device_slot}});
  }
  if (published.ok()) pull->held.push_back(published->id);
  return published;
}

absl::StatusOr<PublishedBlock> StoreEngine::PublishPulledLocked(const Pull& pull,
                                                                const PulledBlock& block) {
  Cache& cache = *pull.cache;
  BlockIndex& index = cache.index();
  while (cache.claimed_keys().contains(block.write.key)) claims_changed_.Wait(&mutex_);
  CERTKV_RETURN_IF_ERROR(FindSession(pull.session, ReadClock()).status());
  const int64_t now_ms = clock_->NowMs();
  const BlockId known = index.Find(block.write.key);
  if (known != BlockId::kNone && !index.Get(known).damaged) {
    index.Hold(known);
    return PublishedBlock{known, false};
  }
  const Cache::NewBlock fresh{
      block.write.key,         index.Find(block.parent),     block.write.backing_slot,
      block.write.device_slot, block.write.originals_digest, pull.tenant};
  if (known != BlockId::kNone) {
    // A damaged block is replaced by a whole one only, and only where nobody reads it.
    if (index.Get(known).hold_count > 0 || block.is_pending) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "BLOCK_DAMAGED",
                       absl::StrCat("originals of block ", ToHex(block.write.key.view(), 8),
                                    " are damaged here and ", index.Get(known).hold_count,
                                    " leases still cover it; pull it, with its originals, after "
                                    "they end"));
    }
    index.Hold(known);
    cache.Replace(known, fresh, now_ms);
    return PublishedBlock{known, true};
  }
  const bool has_parent = block.parent.is_zero() ||
                          (fresh.parent != BlockId::kNone && !index.Get(fresh.parent).damaged);
  if (!has_parent) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "PARENT_NOT_FOUND",
                     absl::StrCat("parent ", ToHex(block.parent.view(), 8), " of block ",
                                  ToHex(block.write.key.view(), 8),
                                  " is not in the store; pull a chain from its beginning"));
  }
  const auto originals = block.is_pending ? Cache::Originals::kPending : Cache::Originals::kThere;
  return PublishedBlock{cache.Receive(fresh, originals, block.seal_time_ms, now_ms), true};
}

void StoreEngine::CompletePulled(const Pull& pull, BlockId block) {
  Lock lock(this);
  pull.cache->CompleteOriginals(block);
}

void StoreEngine::AbandonPulled(const Pull& pull, BlockId block) {
  Lock lock(this);
  pull.cache->MarkLost(block, clock_->NowMs());
}

void StoreEngine::EndPull(Pull* pull) {
  if (pull->cache == nullptr) return;
  Lock lock(this);
  Unhold(pull->cache.get(), pull->held);
  pull->held.clear();
  pull->cache = nullptr;
}

}  // namespace certkv::kvstore
