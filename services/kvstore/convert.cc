#include "services/kvstore/convert.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"

namespace certkv::kvstore {
namespace {

std::string BytesOf(absl::string_view view) { return std::string(view); }

// A list that is over its limit is not looked at entry by entry; the engine refuses it.
bool IsTooLong(int count) { return count > kBlocksPerCallMax; }

absl::StatusOr<BlockKey> KeyFromProto(const std::string& bytes, absl::string_view field,
                                      int index) {
  absl::StatusOr<BlockKey> key = BlockKeyFromBytes(bytes);
  if (key.ok()) return key;
  return WithContext(key.status(), absl::StrCat(field, "[", index, "]"));
}

void SpillStatsToProto(const SpillStats& stats, v1::SpillStats* proto) {
  proto->set_error(stats.error);
  const bool opening = stats.opening;
  proto->set_blocks(opening ? stats.progress.blocks : stats.blocks);
  proto->set_bytes(opening ? stats.progress.bytes : stats.bytes);
  proto->set_blocks_written(stats.blocks_written);
  proto->set_blocks_read(stats.blocks_read);
  proto->set_blocks_expired(stats.blocks_expired);
  proto->set_blocks_damaged(stats.blocks_damaged);
  proto->set_write_errors(stats.write_errors);
  proto->set_state(opening          ? v1::SPILL_STATE_OPENING
                   : stats.degraded ? v1::SPILL_STATE_DEGRADED
                                    : v1::SPILL_STATE_WORKS);
  proto->set_slow_calls(stats.slow_calls);
  proto->set_blocks_over_quota(stats.blocks_over_quota);
  proto->set_blocks_refused(stats.blocks_refused);
  for (const TenantSpill& tenant : stats.tenants) {
    v1::TenantSpill* entry = proto->add_tenants();
    entry->set_tenant(tenant.tenant);
    entry->set_blocks(tenant.blocks);
    entry->set_bytes(tenant.bytes);
    entry->set_limit_bytes(tenant.limit_bytes);
  }
}

}  // namespace

absl::StatusOr<std::vector<BlockKey>> BlockKeysFromProto(
    const google::protobuf::RepeatedPtrField<std::string>& keys) {
  std::vector<BlockKey> result(static_cast<size_t>(keys.size()));
  if (IsTooLong(keys.size())) return result;
  for (int i = 0; i < keys.size(); ++i) {
    CERTKV_ASSIGN_OR_RETURN(result[i], KeyFromProto(keys[i], "block_keys", i));
  }
  return result;
}

absl::StatusOr<std::vector<SealEntry>> SealEntriesFromProto(
    const google::protobuf::RepeatedPtrField<v1::SealEntry>& entries) {
  std::vector<SealEntry> result(static_cast<size_t>(entries.size()));
  if (IsTooLong(entries.size())) return result;
  for (int i = 0; i < entries.size(); ++i) {
    result[i].staging_slot = entries[i].staging_slot();
    CERTKV_ASSIGN_OR_RETURN(result[i].key, KeyFromProto(entries[i].block_key(), "block_key", i));
    CERTKV_ASSIGN_OR_RETURN(result[i].parent,
                            KeyFromProto(entries[i].parent_key(), "parent_key", i));
  }
  return result;
}

absl::StatusOr<SealOptions> SealOptionsFromProto(const v1::SealBlocksRequest& request) {
  SealOptions options;
  options.lease_duration_ms = request.lease_duration_ms();
  options.keep_slots_for_retry = request.keep_slots_for_retry();
  options.from_device_staging = request.from_device_staging();
  if (request.priority() == v1::BLOCK_PRIORITY_UNSPECIFIED) return options;
  if (!v1::BlockPriority_IsValid(request.priority())) {
    return MakeError(absl::StatusCode::kInvalidArgument, "PRIORITY_INVALID",
                     absl::StrCat("priority is ", static_cast<int>(request.priority()),
                                  ", must be BLOCK_PRIORITY_LOW, _NORMAL or _HIGH"));
  }
  options.priority = static_cast<BlockPriority>(request.priority() - v1::BLOCK_PRIORITY_LOW);
  return options;
}

absl::StatusOr<AttachRequest> AttachRequestFromProto(const v1::AttachWorkerRequest& request) {
  AttachRequest result;
  result.cache = CacheId{request.cache_id()};
  result.worker_name = request.worker_name();
  result.staging_slot_count = request.staging_slot_count();
  result.tenant = request.tenant();
  result.wants_device_staging = request.wants_device_staging();
  switch (request.role()) {
    case v1::SESSION_ROLE_WORKER:
      result.role = SessionRole::kWorker;
      return result;
    case v1::SESSION_ROLE_READER:
      result.role = SessionRole::kReader;
      return result;
    default:
      return MakeError(absl::StatusCode::kInvalidArgument, "SESSION_ROLE_INVALID",
                       absl::StrCat("role is ", static_cast<int>(request.role()),
                                    ", must be SESSION_ROLE_WORKER or SESSION_ROLE_READER"));
  }
}

absl::StatusOr<PullRequest> PullRequestFromProto(const v1::PullBlocksRequest& request) {
  PullRequest pull;
  pull.session = SessionId{request.session_id()};
  pull.peer = request.peer();
  CERTKV_ASSIGN_OR_RETURN(pull.keys, BlockKeysFromProto(request.block_keys()));
  switch (request.order()) {
    case v1::PULL_ORDER_UNSPECIFIED:
    case v1::PULL_ORDER_WHOLE:
      pull.order = PullOrder::kWhole;
      return pull;
    case v1::PULL_ORDER_ORIGINALS_LATER:
      pull.order = PullOrder::kOriginalsLater;
      return pull;
    case v1::PULL_ORDER_ORIGINALS_ONLY:
      pull.order = PullOrder::kOriginalsOnly;
      return pull;
    default:
      return MakeError(absl::StatusCode::kInvalidArgument, "PULL_ORDER_INVALID",
                       absl::StrCat("order is ", static_cast<int>(request.order()),
                                    ", must be WHOLE, ORIGINALS_LATER or ORIGINALS_ONLY"));
  }
}

void BlockInfoToProto(const BlockInfo& info, v1::Block* block) {
  block->set_block_key(BytesOf(info.handle.key.view()));
  block->set_parent_key(BytesOf(info.parent.view()));
  block->set_cache_id(static_cast<int64_t>(info.cache));
  block->set_tier(info.handle.device.present() ? v1::BLOCK_TIER_DEVICE
                                               : v1::BLOCK_TIER_BACKING_ONLY);
  block->set_lease_count(info.lease_count);
  block->set_pinned(info.pinned);
  block->set_lost(info.lost);
  block->set_tenant(info.tenant);
  static_assert(static_cast<int>(BlockPriority::kHigh) + v1::BLOCK_PRIORITY_LOW ==
                v1::BLOCK_PRIORITY_HIGH);
  block->set_priority(
      static_cast<v1::BlockPriority>(static_cast<int>(info.priority) + v1::BLOCK_PRIORITY_LOW));
  block->set_pin_expire_time_ms(info.pin_expire_time_ms);
  block->set_device_bytes(info.device_bytes);
  block->set_original_bytes(info.original_bytes);
  block->set_seal_time_ms(info.seal_time_ms);
  block->set_last_use_time_ms(info.last_use_time_ms);
  *block->mutable_handle() = BlockHandleToProto(info.handle);
}

void BlockEventToProto(const BlockEvent& event, v1::BlockEvent* proto) {
  static_assert(static_cast<int>(BlockEventKind::kSealed) == v1::BlockEvent::KIND_SEALED &&
                static_cast<int>(BlockEventKind::kDropped) == v1::BlockEvent::KIND_DROPPED &&
                static_cast<int>(BlockEventKind::kRestored) == v1::BlockEvent::KIND_RESTORED);
  proto->set_kind(static_cast<v1::BlockEvent::Kind>(event.kind));
  proto->set_cache_id(static_cast<int64_t>(event.cache));
  proto->set_block_key(BytesOf(event.key.view()));
  proto->set_sequence(event.sequence);
  proto->set_time_ms(event.time_ms);
  proto->set_store_id(event.store_id);
}

namespace {

void TierShareToProto(const TierShare& share, v1::TierShare* proto) {
  proto->set_used(share.used);
  proto->set_guaranteed(share.guaranteed);
  proto->set_limit(share.limit);
}

}  // namespace

void StatsToProto(const StoreStats& stats, v1::Stats* proto) {
  for (const CacheStats& cache : stats.caches) {
    v1::CacheStats* entry = proto->add_caches();
    entry->set_cache_id(static_cast<int64_t>(cache.cache));
    entry->set_description(DescribeCacheSpec(cache.spec));
    entry->set_spec_digest(BytesOf(cache.digest.view()));
    entry->set_device_slot_count(cache.device_slot_count);
    entry->set_device_slots_used(cache.device_slots_used);
    entry->set_backing_slot_count(cache.backing_slot_count);
    entry->set_backing_slots_used(cache.backing_slots_used);
    entry->set_device_slot_bytes(cache.device_slot_bytes);
    entry->set_backing_slot_bytes(cache.backing_slot_bytes);
    entry->set_blocks_leased(cache.blocks_leased);
    entry->set_blocks_pinned(cache.blocks_pinned);
    entry->set_blocks_writing(cache.blocks_writing);
    entry->set_session_count(cache.session_count);
    *entry->mutable_spec() = CacheSpecToProto(cache.spec);
    for (const TenantStats& tenant : cache.tenants) {
      v1::TenantStats* one = entry->add_tenants();
      one->set_tenant(tenant.tenant);
      TierShareToProto(tenant.use.device, one->mutable_device());
      TierShareToProto(tenant.use.backing, one->mutable_backing());
      one->set_pinned(tenant.use.pinned);
    }
    for (const std::string& tenant : cache.pool_tenants) entry->add_pool_tenants(tenant);
  }
  proto->set_session_count(stats.session_count);
  proto->set_lease_count(stats.lease_count);
  proto->set_blocks_sealed(stats.counters.blocks_sealed);
  proto->set_blocks_shared(stats.counters.blocks_shared);
  proto->set_blocks_demoted(stats.counters.blocks_demoted);
  proto->set_blocks_promoted(stats.counters.blocks_promoted);
  proto->set_blocks_evicted(stats.counters.blocks_evicted);
  proto->set_blocks_aborted(stats.counters.blocks_aborted);
  proto->set_lookups(stats.counters.lookups);
  proto->set_lookup_blocks_asked(stats.counters.lookup_blocks_asked);
  proto->set_lookup_blocks_found(stats.counters.lookup_blocks_found);
  proto->set_leases_expired(stats.counters.leases_expired);
  proto->set_blocks_scrubbed(stats.counters.blocks_scrubbed);
  proto->set_bytes_scrubbed(stats.counters.bytes_scrubbed);
  proto->set_scrub_rounds(stats.counters.scrub_rounds);
  proto->set_blocks_rebuilt(stats.counters.blocks_rebuilt);
  proto->set_blocks_lost(stats.counters.blocks_lost);
  proto->set_blocks_spilled(stats.counters.blocks_spilled);
  proto->set_blocks_restored(stats.counters.blocks_restored);
  proto->set_blocks_prefetched(stats.counters.blocks_prefetched);
  proto->set_prefetches_refused(stats.counters.prefetches_refused);
  proto->set_memory_bytes(stats.memory_bytes);
  proto->set_memory_limit_bytes(stats.memory_limit_bytes);
  if (stats.spill.enabled) SpillStatsToProto(stats.spill, proto->mutable_spill());
}

StoreStats VisibleStats(StoreStats stats, const Identity& caller) {
  if (caller.any_tenant) return stats;
  StoreStats visible;
  for (CacheStats& cache : stats.caches) {
    const auto may_use = [&caller](const std::string& tenant) { return caller.MayUse(tenant); };
    if (std::any_of(cache.pool_tenants.begin(), cache.pool_tenants.end(), may_use)) {
      visible.caches.push_back(std::move(cache));
    }
  }
  return visible;
}

}  // namespace certkv::kvstore
