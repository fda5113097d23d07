// Leases: lookup, promotion, renewal, release, expiry, and the reading of originals.
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/random_id.h"
#include "services/kvstore/batch_checks.h"
#include "services/kvstore/store_engine.h"
#include "services/kvstore/store_engine_lock.h"

namespace certkv::kvstore {
namespace {

constexpr int64_t kLeaseDurationMinMs = 100;

}  // namespace

absl::StatusOr<int64_t> StoreEngine::CheckLeaseDuration(int64_t lease_duration_ms) const {
  if (lease_duration_ms == 0) return config_.lease_duration_ms;
  if (lease_duration_ms >= kLeaseDurationMinMs &&
      lease_duration_ms <= config_.lease_duration_max_ms) {
    return lease_duration_ms;
  }
  return MakeError(absl::StatusCode::kInvalidArgument, "LEASE_DURATION_INVALID",
                   absl::StrCat("lease_duration_ms is ", lease_duration_ms, ", must be in [",
                                kLeaseDurationMinMs, ", ", config_.lease_duration_max_ms,
                                "], or 0 for ", config_.lease_duration_ms));
}

absl::Status StoreEngine::CheckLeaseLimit(const Session& session) const {
  if (static_cast<int32_t>(session.leases.size()) < config_.lease_limit) return absl::OkStatus();
  return MakeError(absl::StatusCode::kResourceExhausted, "LEASE_LIMIT",
                   absl::StrCat("session of ", session.worker_name, " holds ",
                                session.leases.size(), " leases, at most ", config_.lease_limit,
                                "; release some or raise lease_limit"));
}

void StoreEngine::Unhold(Cache* cache, absl::Span<const BlockId> blocks) {
  for (auto it = blocks.rbegin(); it != blocks.rend(); ++it) cache->index().Unhold(*it);
}

LeasedBlocks StoreEngine::MakeLease(Session* session, std::vector<BlockId> held,
                                    int64_t duration_ms, const Now& now) {
  LeasedBlocks result;
  result.blocks.reserve(held.size());
  for (const BlockId id : held) {
    session->cache->index().SetLastUse(id, now.epoch_ms);
    result.blocks.push_back(session->cache->HandleOf(id));
  }
  result.lease = LeaseId{RandomId()};
  result.expire_time_ms = now.epoch_ms + duration_ms;
  leases_.Add(result.lease, session->id, std::move(held),
              now.monotonic_ns + duration_ms * 1'000'000);
  session->leases.insert(result.lease);
  return result;
}

void StoreEngine::DropLease(LeaseId id, Session* session) {
  const Lease lease = leases_.TakeOut(id);
  session->leases.erase(id);
  Unhold(session->cache.get(), lease.blocks);
}

void StoreEngine::ExpireLeases(const Now& now) {
  for (LeaseId id = leases_.FirstExpired(now.monotonic_ns); id != LeaseId{};
       id = leases_.FirstExpired(now.monotonic_ns)) {
    const absl::StatusOr<Session*> session = sessions_.Find(leases_.Get(id).session);
    CERTKV_CHECK(session.ok(), "a lease's session is attached");
    DropLease(id, *session);
    ++counters_.leases_expired;
  }
}

std::vector<BlockId> StoreEngine::FindPrefix(const Cache& cache, absl::Span<const BlockKey> keys) {
  std::vector<BlockId> prefix;
  prefix.reserve(keys.size());
  for (const BlockKey& key : keys) {
    const BlockId id = cache.index().Find(key);
    if (id == BlockId::kNone || cache.index().Get(id).damaged) break;
    prefix.push_back(id);
  }
  ++counters_.lookups;
  counters_.lookup_blocks_asked += static_cast<int64_t>(keys.size());
  counters_.lookup_blocks_found += static_cast<int64_t>(prefix.size());
  return prefix;
}

std::optional<absl::StatusOr<LeasedBlocks>> StoreEngine::TryLookupAndLease(
    SessionId session_id, absl::Span<const BlockKey> keys, int64_t lease_duration_ms) {
  using Result = absl::StatusOr<LeasedBlocks>;
  absl::Status batch = CheckBatch(keys.size(), "block_keys");
  if (!batch.ok()) return Result(batch);
  const absl::StatusOr<int64_t> duration_ms = CheckLeaseDuration(lease_duration_ms);
  if (!duration_ms.ok()) return Result(duration_ms.status());
  Lock lock(this);
  const Now now = ReadClock();
  const absl::StatusOr<Session*> session = FindSession(session_id, now);
  if (!session.ok()) return Result(session.status());
  absl::Status limit = CheckLeaseLimit(**session);
  if (!limit.ok()) return Result(limit);
  BlockIndex& index = (*session)->cache->index();
  std::vector<BlockId> prefix = FindPrefix(*(*session)->cache, keys);
  bool must_compute = false;
  for (const BlockId id : prefix) must_compute |= !index.Get(id).device.present();
  const size_t found = prefix.size();
  must_compute |= found < keys.size() && index.Find(keys[found]) == BlockId::kNone &&
                  spill_ != nullptr &&
                  spill_->Contains((*session)->cache->cache_digest(), keys[found]);
  if (must_compute) {
    // The caller comes back by LookupAndLease, which counts again.
    --counters_.lookups;
    counters_.lookup_blocks_asked -= static_cast<int64_t>(keys.size());
    counters_.lookup_blocks_found -= static_cast<int64_t>(prefix.size());
    return std::nullopt;
  }
  if (prefix.empty()) return Result(LeasedBlocks{});
  for (const BlockId id : prefix) {
    index.Hold(id);
    index.NoteHit(id);
  }
  return Result(MakeLease(*session, std::move(prefix), *duration_ms, now));
}

absl::StatusOr<LeasedBlocks> StoreEngine::LookupAndLease(SessionId session_id,
                                                         absl::Span<const BlockKey> keys,
                                                         int64_t lease_duration_ms) {
  CERTKV_RETURN_IF_ERROR(CheckBatch(keys.size(), "block_keys"));
  CERTKV_ASSIGN_OR_RETURN(const int64_t duration_ms, CheckLeaseDuration(lease_duration_ms));
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ReadClock()));
  CERTKV_RETURN_IF_ERROR(CheckLeaseLimit(*session));
  const std::shared_ptr<Cache> cache = session->cache;
  const TenantIndex tenant = session->tenant;
  std::vector<BlockId> held = FindPrefix(*cache, keys);
  for (const BlockId id : held) cache->index().Hold(id);
  const size_t resident_count = held.size();
  RestoreAfter(cache, tenant, keys, &held);
  counters_.lookup_blocks_found += static_cast<int64_t>(held.size() - resident_count);
  QueuePrefetch(*cache, tenant, keys, held.size());
  const absl::StatusOr<size_t> ready_count = PromoteHeld(cache, tenant, held);
  const Now now = ReadClock();
  // The session may have ended, or taken other leases, while blocks were promoted.
  absl::StatusOr<Session*> still = FindSession(session_id, now);
  absl::Status status = ready_count.status();
  if (status.ok()) status = still.status();
  if (status.ok()) status = CheckLeaseLimit(**still);
  const size_t kept = status.ok() ? *ready_count : 0;
  Unhold(cache.get(), absl::MakeConstSpan(held).subspan(kept));
  if (!status.ok()) return status;
  held.resize(kept);
  if (held.empty()) return LeasedBlocks{};
  for (const BlockId id : held) cache->index().NoteHit(id);
  return MakeLease(*still, std::move(held), duration_ms, now);
}

absl::StatusOr<size_t> StoreEngine::PromoteHeld(const std::shared_ptr<Cache>& cache,
                                                TenantIndex tenant,
                                                const std::vector<BlockId>& held) {
  BlockIndex& index = cache->index();
  while (true) {
    std::vector<BlockId> claimed;
    absl::flat_hash_set<BlockId> seen;  // a key that is asked for twice is claimed once
    bool must_wait = false;
    size_t damaged_at = held.size();
    for (size_t i = 0; i < held.size(); ++i) {
      const BlockRecord& record = index.Get(held[i]);
      if (record.damaged) {
        damaged_at = i;
        break;
      }
      if (record.device.present() || !seen.insert(held[i]).second) continue;
      if (record.promoting) {
        must_wait = true;
      } else {
        claimed.push_back(held[i]);
      }
    }
    if (!claimed.empty()) {
      const absl::Status status = PromoteClaimed(cache, tenant, claimed);
      // Damaged blocks were marked; the next round ends the prefix before them.
      if (!status.ok() && !absl::IsDataLoss(status)) return status;
      continue;
    }
    if (!must_wait) return damaged_at;
    claims_changed_.Wait(&mutex_);
  }
}

absl::Status StoreEngine::PromoteClaimed(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                                         const std::vector<BlockId>& claimed) {
  const SlotDemand demand{tenant, 0, static_cast<int32_t>(claimed.size())};
  SlotGrant grant;
  SlotRefusal refusal;
  if (!cache->TakeSlots(demand, clock_->NowMs(), &grant, &refusal)) {
    return Refused(*cache, demand, refusal);
  }
  std::vector<BlockWrite> writes(claimed.size());
  for (size_t i = 0; i < claimed.size(); ++i) {
    const BlockRecord& record = cache->index().Get(claimed[i]);
    writes[i].key = record.key;
    writes[i].backing_slot = record.backing.slot;
    writes[i].device_slot = grant.device[i];
    writes[i].originals_digest = record.originals_digest;
    cache->index().SetPromoting(claimed[i], true);
  }
  mutex_.Unlock();
  const absl::Status status = WriteBlocks(*cache, nullptr, absl::MakeSpan(writes), pool_);
  mutex_.Lock();
  const int64_t now_ms = clock_->NowMs();
  for (size_t i = 0; i < claimed.size(); ++i) {
    cache->index().SetPromoting(claimed[i], false);
    if (writes[i].digest_matches) {
      cache->Promote(claimed[i], grant, writes[i].device_slot, now_ms);
    } else {
      cache->MarkLost(claimed[i], now_ms);
      cache->ReturnSlots(SlotGrant{tenant, {}, {writes[i].device_slot}});
    }
  }
  claims_changed_.SignalAll();
  return status;
}

absl::StatusOr<int64_t> StoreEngine::RenewLease(SessionId session_id, LeaseId id,
                                                int64_t lease_duration_ms) {
  CERTKV_ASSIGN_OR_RETURN(const int64_t duration_ms, CheckLeaseDuration(lease_duration_ms));
  Lock lock(this);
  const Now now = ReadClock();
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, now));
  if (leases_.Find(id, session->id) == nullptr) return LeaseNotFound(id);
  leases_.SetDeadline(id, now.monotonic_ns + duration_ms * 1'000'000);
  return now.epoch_ms + duration_ms;
}

absl::Status StoreEngine::ReleaseLease(SessionId session_id, LeaseId id) {
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindSession(session_id, ReadClock()));
  if (leases_.Find(id, session->id) != nullptr) DropLease(id, session);
  return absl::OkStatus();
}

}  // namespace certkv::kvstore
