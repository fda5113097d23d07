// Writing: reservation, sealing, aborting.
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"
#include "services/kvstore/batch_checks.h"
#include "services/kvstore/seal_plan.h"
#include "services/kvstore/store_engine.h"
#include "services/kvstore/store_engine_lock.h"

namespace certkv::kvstore {

absl::StatusOr<std::vector<int32_t>> StoreEngine::ReserveBlocks(SessionId session_id,
                                                                int32_t block_count) {
  CERTKV_RETURN_IF_ERROR(CheckBatch(block_count < 0 ? 0 : block_count, "block_count"));
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindWorker(session_id, ReadClock(), "ReserveBlocks"));
  StagingArea& staging = *session->staging;
  if (staging.free_count() >= block_count) return staging.Reserve(block_count);
  return MakeError(
      absl::StatusCode::kResourceExhausted, "STAGING_FULL",
      absl::StrCat("session of ", session->worker_name, " has ", staging.slot_count(),
                   " staging slots, ", staging.free_count(), " free, asked for ", block_count,
                   "; seal or abort some, or attach with more staging_slot_count"));
}

absl::Status StoreEngine::AbortBlocks(SessionId session_id,
                                      absl::Span<const int32_t> staging_slots) {
  CERTKV_RETURN_IF_ERROR(CheckBatch(staging_slots.size(), "staging_slots"));
  Lock lock(this);
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindWorker(session_id, ReadClock(), "AbortBlocks"));
  for (const int32_t slot : staging_slots) {
    if (slot >= 0 && slot < session->staging->slot_count()) continue;
    return MakeError(absl::StatusCode::kInvalidArgument, "STAGING_SLOT_INVALID",
                     absl::StrCat("staging slot ", slot, " is not of this session, which has 0 to ",
                                  session->staging->slot_count() - 1, "; nothing was aborted"));
  }
  for (const int32_t slot : staging_slots) {
    if (session->staging->Abort(slot)) ++counters_.blocks_aborted;
  }
  return absl::OkStatus();
}

absl::StatusOr<LeasedBlocks> StoreEngine::SealBlocks(SessionId session_id,
                                                     absl::Span<const SealEntry> entries,
                                                     const SealOptions& options) {
  CERTKV_RETURN_IF_ERROR(CheckBatch(entries.size(), "entries"));
  const absl::StatusOr<int64_t> duration_ms = CheckLeaseDuration(options.lease_duration_ms);
  Lock lock(this);
  SealPlan plan;
  plan.priority = options.priority;
  plan.from_device_staging = options.from_device_staging;
  absl::Status status = duration_ms.status();
  if (status.ok()) SpillForSeal(session_id, entries.size());
  if (status.ok()) status = BeginSeal(session_id, entries, &plan);
  if (!status.ok() && options.keep_slots_for_retry && RetryDelayMsOf(status) > 0) return status;
  if (!status.ok()) {
    if (ReasonOf(status) == "DEVICE_STAGING_MISSING") {
      counters_.device_blocks_failed += static_cast<int64_t>(entries.size());
    }
    // The slots are freed, so that a worker may forget a call that failed.
    const absl::StatusOr<Session*> session = sessions_.Find(session_id);
    if (session.ok() && (*session)->staging != nullptr) {
      for (const SealEntry& entry : entries) {
        if ((*session)->staging->Abort(entry.staging_slot)) ++counters_.blocks_aborted;
      }
    }
    return status;
  }
  status = WriteSealed(&plan);
  if (status.ok()) {
    absl::StatusOr<LeasedBlocks> published = PublishSeal(&plan, *duration_ms);
    if (published.ok()) return published;
    status = published.status();
  }
  AbandonSeal(&plan);
  return status;
}

void StoreEngine::SpillForSeal(SessionId session_id, size_t count) {
  const absl::StatusOr<Session*> session = sessions_.Find(session_id);
  if (spill_ == nullptr || !session.ok()) return;
  const std::shared_ptr<Cache> cache = (*session)->cache;
  SpillForRoom(cache, (*session)->tenant, static_cast<int32_t>(count));
}

absl::Status StoreEngine::BeginSeal(SessionId session_id, absl::Span<const SealEntry> entries,
                                    SealPlan* plan) {
  while (true) {
    // All is looked up anew after a wait: the session may have ended meanwhile.
    CERTKV_ASSIGN_OR_RETURN(Session * session, FindWorker(session_id, ReadClock(), "SealBlocks"));
    CERTKV_RETURN_IF_ERROR(CheckLeaseLimit(*session));
    CERTKV_RETURN_IF_ERROR(SealPlan::CheckEntries(*session, entries));
    CERTKV_RETURN_IF_ERROR(plan->CheckStaging(*session));
    CERTKV_ASSIGN_OR_RETURN(const bool is_free, plan->Decide(*session, entries));
    if (is_free) break;
    claims_changed_.Wait(&mutex_);
    SpillForSeal(session_id, entries.size());  // others may have taken the room meanwhile
  }
  const absl::Status status = ClaimForSeal(plan);
  if (!status.ok()) *plan = SealPlan{};
  return status;
}

absl::Status StoreEngine::ClaimForSeal(SealPlan* plan) {
  Cache& cache = *plan->cache;
  // Held first, so that making room for the others does not take these.
  for (const BlockId id : plan->held) cache.index().Hold(id);
  for (const BlockId id : plan->held_parents) cache.index().Hold(id);
  SlotDemand demand{plan->tenant, 0, 0};
  for (const SealPlan::Item& item : plan->items) {
    if (item.action == SealAction::kShare) continue;
    ++demand.device_count;
    if (item.action != SealAction::kPromote) ++demand.backing_count;
  }
  SlotRefusal refusal;
  if (!cache.TakeSlots(demand, clock_->NowMs(), &plan->grant, &refusal)) {
    const absl::Status full = Refused(cache, demand, refusal);
    Unhold(&cache, plan->held);
    Unhold(&cache, plan->held_parents);
    return full;
  }
  auto next_backing = plan->grant.backing.begin();
  auto next_device = plan->grant.device.begin();
  for (SealPlan::Item& item : plan->items) {
    plan->staging->BeginSeal(item.entry.staging_slot);
    if (item.action == SealAction::kShare) continue;
    BlockWrite write;
    write.key = item.entry.key;
    write.device_slot = *next_device++;
    if (item.action == SealAction::kPromote) {
      const BlockRecord& record = cache.index().Get(item.block);
      write.backing_slot = record.backing.slot;
      write.originals_digest = record.originals_digest;
      cache.index().SetPromoting(item.block, true);
    } else {
      write.staging_slot = item.entry.staging_slot;
      write.backing_slot = *next_backing++;
      cache.claimed_keys().insert(item.entry.key);
    }
    item.write = static_cast<int32_t>(plan->writes.size());
    plan->writes.push_back(write);
  }
  plan->claimed = true;
  return absl::OkStatus();
}

void StoreEngine::ReleaseClaims(SealPlan* plan) {
  CERTKV_CHECK(plan->claimed, "claims are released once");
  plan->claimed = false;
  for (const SealPlan::Item& item : plan->items) {
    plan->staging->FinishSeal(item.entry.staging_slot);
    plan->cache->claimed_keys().erase(item.entry.key);
    if (item.action == SealAction::kPromote) plan->cache->index().SetPromoting(item.block, false);
  }
  claims_changed_.SignalAll();
}

absl::StatusOr<LeasedBlocks> StoreEngine::PublishSeal(SealPlan* plan, int64_t duration_ms) {
  const Now now = ReadClock();
  CERTKV_ASSIGN_OR_RETURN(Session * session, FindSession(plan->session, now));
  CERTKV_RETURN_IF_ERROR(CheckLeaseLimit(*session));
  Cache& cache = *plan->cache;
  std::vector<BlockId> blocks;
  int32_t shared_count = 0;
  for (const SealPlan::Item& item : plan->items) {
    blocks.push_back(item.block);
    const bool is_shared = item.action == SealAction::kShare || item.action == SealAction::kPromote;
    if (is_shared) ++shared_count;
    if (item.write < 0) continue;
    const BlockWrite& write = plan->writes[item.write];
    if (item.action == SealAction::kPromote) {
      cache.Promote(item.block, plan->grant, write.device_slot, now.epoch_ms);
      continue;
    }
    const Cache::NewBlock block{item.entry.key,         cache.index().Find(item.entry.parent),
                                write.backing_slot,     write.device_slot,
                                write.originals_digest, plan->tenant,
                                plan->priority};
    if (item.action == SealAction::kReplace) {
      cache.Replace(item.block, block, now.epoch_ms);
    } else {
      blocks.back() = cache.Publish(block, now.epoch_ms);
    }
  }
  for (const BlockId id : blocks) cache.index().RaisePriority(id, plan->priority);
  ReleaseClaims(plan);
  Unhold(&cache, plan->held_parents);
  counters_.blocks_shared += shared_count;
  LeasedBlocks result = MakeLease(session, std::move(blocks), duration_ms, now);
  result.shared_count = shared_count;
  return result;
}

void StoreEngine::AbandonSeal(SealPlan* plan) {
  Cache& cache = *plan->cache;
  for (const SealPlan::Item& item : plan->items) {
    const bool is_damaged = item.write >= 0 && !plan->writes[item.write].digest_matches;
    if (is_damaged) cache.MarkLost(item.block, clock_->NowMs());
  }
  cache.ReturnSlots(plan->grant);
  ReleaseClaims(plan);
  Unhold(&cache, plan->held);
  Unhold(&cache, plan->held_parents);
  counters_.blocks_aborted += static_cast<int64_t>(plan->items.size());
}

}  // namespace certkv::kvstore
