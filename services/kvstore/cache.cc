#include "services/kvstore/cache.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

// So that slot and block ids fit 32 bits with room; 16 million blocks are a billion tokens.
constexpr int64_t kSlotsPerSlabMax = int64_t{1} << 24;

// The most slots whose slab, header and generations included, is at most `bytes`.
int32_t SlotCountFor(const CacheSpec& spec, SlabKind kind, int64_t bytes) {
  const int64_t guess = bytes / (SlabLayout::SlotBytes(spec, kind) + 8);
  auto count = static_cast<int32_t>(std::min(guess, kSlotsPerSlabMax));
  while (count >= 1 && SlabLayout(spec, kind, count).slab_bytes() > bytes) --count;
  return count;
}

absl::Status SlabTooSmall(const CacheSpec& spec, SlabKind kind, int64_t bytes) {
  const bool is_device = kind == SlabKind::kDevice;
  return MakeError(
      absl::StatusCode::kResourceExhausted, "SLAB_TOO_SMALL",
      absl::StrCat(is_device ? "device" : "backing", " tier of ", DescribeCacheSpec(spec), " has ",
                   bytes, " bytes, a slab of one block needs ",
                   SlabLayout(spec, kind, 1).slab_bytes(), "; raise ",
                   is_device ? "device_memory" : "backing_memory", " in the store's config"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<Cache>> Cache::Create(CacheId id, const CacheSpec& spec,
                                                     const TierSizes& sizes, EventHub* hub,
                                                     StoreCounters* counters,
                                                     const CacheOptions& options) {
  const int32_t backing_count = SlotCountFor(spec, SlabKind::kBacking, sizes.backing_bytes);
  if (backing_count < 1) return SlabTooSmall(spec, SlabKind::kBacking, sizes.backing_bytes);
  const int32_t device_count =
      std::min(backing_count, SlotCountFor(spec, SlabKind::kDevice, sizes.device_bytes));
  if (device_count < 1) return SlabTooSmall(spec, SlabKind::kDevice, sizes.device_bytes);
  CERTKV_ASSIGN_OR_RETURN(auto device, SlabMemory::Create(spec, SlabKind::kDevice, device_count,
                                                          options.dither_secret));
  absl::Status device_error;
  if (options.device.runtime != nullptr) {
    device_error = device->AddDeviceCopy(options.device);
    if (!device_error.ok() && options.needs_device) return device_error;
  }
  CERTKV_ASSIGN_OR_RETURN(auto backing,
                          SlabMemory::Create(spec, SlabKind::kBacking, backing_count));
  std::shared_ptr<Cache> cache(
      new Cache(id, spec, std::move(device), std::move(backing), hub, counters, options));
  cache->device_error_ = device_error;
  return cache;
}

Cache::Cache(CacheId id, const CacheSpec& spec, std::shared_ptr<SlabMemory> device,
             std::shared_ptr<SlabMemory> backing, EventHub* hub, StoreCounters* counters,
             const CacheOptions& options)
    : id_(id),
      spec_(spec),
      spec_digest_(DigestCacheSpec(spec)),
      pool_(options.pool),
      cache_digest_(PoolCacheDigest(spec_digest_, options.pool.id)),
      description_(DescribeCacheSpec(spec)),
      hub_(hub),
      counters_(counters),
      spill_(options.spill),
      device_(std::move(device)),
      backing_(std::move(backing)),
      index_(backing_.slot_count(), options.eviction) {}

BlockId Cache::Insert(const NewBlock& block, Originals originals, int64_t seal_time_ms,
                      int64_t now_ms) {
  BlockRecord record;
  record.key = block.key;
  record.pending = originals == Originals::kPending;
  // No slot ever has generation 0.
  record.backing =
      record.pending ? SlotRef{block.backing_slot, 0} : backing_.Seal(block.backing_slot);
  record.device = device_.Seal(block.device_slot);
  record.originals_digest = block.originals_digest;
  record.tenant = block.tenant;
  record.priority = static_cast<uint8_t>(block.priority) & 3;
  record.seal_time_ms = seal_time_ms;
  record.last_use_time_ms = now_ms;
  return index_.Insert(record, block.parent);
}

BlockId Cache::Publish(const NewBlock& block, int64_t now_ms) {
  const BlockId id = Insert(block, Originals::kThere, now_ms, now_ms);
  ++counters_->blocks_sealed;
  hub_->Append(BlockEventKind::kSealed, id_, block.key, now_ms);
  return id;
}

BlockId Cache::Restore(const NewBlock& block, int64_t seal_time_ms, int64_t now_ms) {
  const BlockId id = Insert(block, Originals::kThere, seal_time_ms, now_ms);
  ++counters_->blocks_restored;
  hub_->Append(BlockEventKind::kRestored, id_, block.key, now_ms);
  return id;
}

BlockId Cache::Receive(const NewBlock& block, Originals originals, int64_t seal_time_ms,
                       int64_t now_ms) {
  const BlockId id = Insert(block, originals, seal_time_ms, now_ms);
  ++counters_->blocks_pulled;
  hub_->Append(BlockEventKind::kSealed, id_, block.key, now_ms);
  return id;
}

void Cache::CompleteOriginals(BlockId id) {
  const BlockRecord& record = index_.Get(id);
  CERTKV_CHECK(record.pending && record.hold_count > 0, "originals come once, to a held block");
  index_.SetOriginals(id, backing_.Seal(record.backing.slot), record.originals_digest);
}

void Cache::Promote(BlockId id, const SlotGrant& grant, int32_t device_slot, int64_t now_ms) {
  CERTKV_CHECK(!index_.Get(id).device.present(), "a block is promoted from the backing tier");
  --MutableUse(grant.tenant).device.used;
  ++MutableUse(index_.Get(id).tenant).device.used;
  index_.SetDevice(id, device_.Seal(device_slot));
  ++counters_->blocks_promoted;
  hub_->Append(BlockEventKind::kPromoted, id_, index_.Get(id).key, now_ms);
}

void Cache::MarkLost(BlockId id, int64_t now_ms) {
  if (index_.Get(id).damaged) return;
  index_.SetDamaged(id, true);
  ++counters_->blocks_lost;
  hub_->Append(BlockEventKind::kLost, id_, index_.Get(id).key, now_ms);
}

void Cache::Replace(BlockId id, const NewBlock& block, int64_t now_ms) {
  const BlockRecord old = index_.Get(id);
  CERTKV_CHECK(old.damaged && old.hold_count == 1, "only a damaged block of the caller's own");
  index_.SetOriginals(id, backing_.Seal(block.backing_slot), block.originals_digest);
  index_.SetDevice(id, device_.Seal(block.device_slot));
  index_.SetDamaged(id, false);
  backing_.Free(old.backing.slot);
  if (old.device.present()) device_.Free(old.device.slot);
  // The new slots took the place of the old ones, whoever wrote them.
  TenantUse& writer = MutableUse(block.tenant);
  --writer.backing.used;
  --writer.device.used;
  if (!old.device.present()) ++MutableUse(old.tenant).device.used;
  ++counters_->blocks_sealed;
  hub_->Append(BlockEventKind::kSealed, id_, old.key, now_ms);
}

void Cache::Drop(const absl::flat_hash_set<BlockId>& blocks, int64_t now_ms) {
  std::vector<BlockId> leaves;
  for (const BlockId id : blocks) {
    SetPinned(id, false);
    if (index_.Get(id).first_child == BlockId::kNone) leaves.push_back(id);
  }
  for (size_t i = 0; i < leaves.size(); ++i) {
    const BlockId parent = index_.Get(leaves[i]).parent;
    Remove(leaves[i], BlockEventKind::kDropped, now_ms);
    if (!blocks.contains(parent)) continue;
    if (index_.Get(parent).first_child == BlockId::kNone) leaves.push_back(parent);
  }
  CERTKV_CHECK(leaves.size() == blocks.size(), "all that depends on a dropped block goes with it");
}

void Cache::EvictAll(int64_t now_ms) {
  const auto all = [](TenantIndex) { return true; };
  for (BlockId id = index_.order().NextEvictable(all); id != BlockId::kNone;
       id = index_.order().NextEvictable(all)) {
    Remove(id, BlockEventKind::kEvicted, now_ms);
  }
  CERTKV_CHECK(index_.size() == 0, "a cache that goes has no held or pinned block");
}

BlockHandle Cache::HandleOf(BlockId id) const {
  const BlockRecord& record = index_.Get(id);
  CERTKV_CHECK(record.live, "only live blocks have handles");
  return BlockHandle{record.key, record.device, record.pending ? SlotRef{} : record.backing};
}

int64_t Cache::BytesOf(BlockId id) const {
  const int64_t device_bytes = index_.Get(id).device.present() ? device_.layout().slot_bytes() : 0;
  return backing_.layout().slot_bytes() + device_bytes;
}

void Cache::CheckInvariants() const {
  index_.CheckInvariants();
  int32_t device_count = 0;
  int32_t backing_count = 0;
  std::vector<TenantUse> counted(tenants_.size());
  for (BlockId id = index_.FirstLiveFrom(0); id != BlockId::kNone;
       id = index_.FirstLiveFrom(static_cast<int32_t>(id) + 1)) {
    const BlockRecord& record = index_.Get(id);
    ++backing_count;
    TenantUse& use = counted[static_cast<size_t>(record.tenant)];
    ++use.backing.used;
    use.pinned += record.pinned ? 1 : 0;
    use.device.used += record.device.present() ? 1 : 0;
    CERTKV_CHECK(record.pending || backing_.RefOf(record.backing.slot) == record.backing,
                 "invariant 1, backing");
    if (!record.device.present()) continue;
    ++device_count;
    CERTKV_CHECK(device_.RefOf(record.device.slot) == record.device, "invariant 1, device");
  }
  // Where slots are granted to a running call, more are used.
  CERTKV_CHECK(backing_count <= backing_.slot_count() - backing_.free_count(), "invariant 2");
  CERTKV_CHECK(device_count <= device_.slot_count() - device_.free_count(), "invariant 2");
  int32_t device_used = 0;
  int32_t backing_used = 0;
  for (size_t i = 0; i < tenants_.size(); ++i) {
    const TenantUse& use = tenants_[i];
    CERTKV_CHECK(counted[i].backing.used <= use.backing.used &&
                     counted[i].device.used <= use.device.used && counted[i].pinned == use.pinned,
                 "what a tenant has counts to it");
    CERTKV_CHECK(use.backing.used <= use.backing.limit, "invariant 5");
    backing_used += use.backing.used;
    device_used += use.device.used;
  }
  CERTKV_CHECK(backing_used == backing_.slot_count() - backing_.free_count(), "every slot counts");
  CERTKV_CHECK(device_used == device_.slot_count() - device_.free_count(), "every slot counts");
}

void Cache::Demote(BlockId id, int64_t now_ms) {
  const BlockRecord& record = index_.Get(id);
  CERTKV_CHECK(record.hold_count == 0 && !record.pinned, "held and pinned blocks stay");
  CERTKV_CHECK(record.backing.present(), "the original stays when the planes go");
  device_.Free(record.device.slot);
  --MutableUse(record.tenant).device.used;
  index_.SetDevice(id, SlotRef{});
  ++counters_->blocks_demoted;
  hub_->Append(BlockEventKind::kDemoted, id_, record.key, now_ms);
}

void Cache::Remove(BlockId id, BlockEventKind kind, int64_t now_ms) {
  const BlockRecord record = index_.Get(id);
  index_.Erase(id);
  backing_.Free(record.backing.slot);
  if (record.device.present()) device_.Free(record.device.slot);
  TenantUse& use = MutableUse(record.tenant);
  --use.backing.used;
  if (record.device.present()) --use.device.used;
  const bool is_on_disk = kind == BlockEventKind::kEvicted && !record.damaged &&
                          spill_ != nullptr && spill_->Contains(cache_digest_, record.key);
  if (is_on_disk) {
    kind = BlockEventKind::kSpilled;
    ++counters_->blocks_spilled;
  } else if (kind == BlockEventKind::kEvicted) {
    ++counters_->blocks_evicted;
  }
  hub_->Append(kind, id_, record.key, now_ms);
}

}  // namespace certkv::kvstore
