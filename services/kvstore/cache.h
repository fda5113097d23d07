// Cache: the blocks of one CacheSpec and one pool of tenants, their slots in both tiers, and what
// goes when a tier is full.
#ifndef CERTKV_SERVICES_KVSTORE_CACHE_H_
#define CERTKV_SERVICES_KVSTORE_CACHE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"
#include "services/kvstore/block_index.h"
#include "services/kvstore/event_hub.h"
#include "services/kvstore/slot_pool.h"
#include "services/kvstore/spill_tier.h"
#include "services/kvstore/tenant_pool.h"
#include "services/kvstore/tenant_table.h"

namespace certkv::kvstore {

class DeviceSealer;

// What the store has done since its process started.
struct StoreCounters {
  int64_t blocks_sealed = 0;
  int64_t blocks_shared = 0;
  int64_t blocks_demoted = 0;
  int64_t blocks_promoted = 0;
  int64_t blocks_evicted = 0;
  int64_t blocks_aborted = 0;
  int64_t lookups = 0;
  int64_t lookup_blocks_asked = 0;
  int64_t lookup_blocks_found = 0;
  int64_t leases_expired = 0;
  int64_t blocks_scrubbed = 0;  // blocks, bytes and rounds of the background check
  int64_t bytes_scrubbed = 0;
  int64_t scrub_rounds = 0;
  int64_t blocks_rebuilt = 0;      // planes were damaged and made again from the originals
  int64_t blocks_lost = 0;         // originals were damaged
  int64_t blocks_spilled = 0;      // left memory with a copy on disk; not among the evicted
  int64_t blocks_restored = 0;     // came back from there
  int64_t blocks_pulled = 0;       // came from another store
  int64_t blocks_prefetched = 0;   // of these, after the lookup that asked for them
  int64_t prefetches_refused = 0;  // blocks that it left on disk for want of room
  // Blocks whose originals came in staging memory on a GPU, by who sealed them, and those of calls
  // that failed there.
  int64_t device_blocks_sealed = 0;  // the GPU
  int64_t device_blocks_fallen = 0;  // the host
  int64_t device_blocks_failed = 0;
};

// Slots of both tiers, being written. They count to the tenant from now on.
struct SlotGrant {
  TenantIndex tenant{};
  std::vector<int32_t> backing;
  std::vector<int32_t> device;
};

// What a call needs, and for whom.
struct SlotDemand {
  TenantIndex tenant{};
  int32_t backing_count = 0;
  int32_t device_count = 0;
};
// Why it did not get it.
struct SlotRefusal {
  SlabKind tier = SlabKind::kBacking;
  bool by_quota = false;  // the tenant's own limit; else the tier has no more to give
};

// One tenant's part of a tier, in slots.
struct TierShare {
  int32_t guaranteed = 0;  // up to it, others take nothing
  int32_t limit = 0;
  int32_t used = 0;  // blocks and grants
};
struct TenantUse {
  TierShare device;
  TierShare backing;
  int32_t pinned = 0;
};

// Memory of one cache's tiers.
struct TierSizes {
  int64_t device_bytes = 0;
  int64_t backing_bytes = 0;
};

// What a cache has beside its memory.
struct CacheOptions {
  EvictionPolicy eviction = EvictionPolicy::kReuse;
  const SpillTier* spill = nullptr;  // null: none
  TenantPool pool = {"", {""}};
  uint64_t dither_secret = 0;  // not 0 where the spec has dithered keys
  DevicePlace device = {};     // of the copy of its device slab
  bool needs_device = false;   // without that copy there is to be no cache
};

// Invariants:
//  1. Every block has a backing slot; a block in the device tier has a device slot too. The backing
//     slot is sealed, unless the block's originals are pending: then it is being written.
//  2. A slot is free, or one block's, or of a grant that is not yet published or given back.
//  3. No held or pinned block loses a slot, and no block leaves before its children.
//  4. A device slot is given up only while the original is in the backing tier (follows from 1).
//  5. A tenant uses no more of a tier than its limit, but for device slots that others' lookups of
//     its blocks took (a pool that tenants share).
//  6. A tenant that uses no more than its guaranteed share loses nothing to others.
//
// Threads: the caller serializes (the engine's lock), but for the const accessors of geometry.
class Cache {
 public:
  // `spec` is valid. The slabs are the largest that fit `sizes`; the device slab has no more slots
  // than the backing slab, as no block is in it alone. `hub`, `counters`
  // and `options.spill` outlive the cache.
  // Errors: ResourceExhausted [SLAB_TOO_SMALL], not one block fits; as SlabMemory::Create; as
  // SlabMemory::AddDeviceCopy where options.needs_device.
  static absl::StatusOr<std::shared_ptr<Cache>> Create(CacheId id, const CacheSpec& spec,
                                                       const TierSizes& sizes, EventHub* hub,
                                                       StoreCounters* counters,
                                                       const CacheOptions& options = {});

  // Geometry; never changes.
  CacheId id() const { return id_; }
  const CacheSpec& spec() const { return spec_; }
  const SpecDigest& spec_digest() const { return spec_digest_; }
  const TenantPool& pool() const { return pool_; }
  // Its name in memory and on disk, unlike that of any other pool of this spec.
  const SpecDigest& cache_digest() const { return cache_digest_; }
  const std::string& description() const { return description_; }
  const std::shared_ptr<SlabMemory>& device_memory() const { return device_.memory(); }
  const std::shared_ptr<SlabMemory>& backing_memory() const { return backing_.memory(); }

  // Why a GPU has no copy of the device slab, or not any more; OK where it has, or was not to.
  absl::Status device_error() const {
    const DeviceCopy* const copy = device_memory()->device_copy();
    return copy == nullptr ? device_error_ : copy->error();
  }

  // Null until a worker was given staging memory on the GPU, then the same to the end.
  const std::shared_ptr<DeviceSealer>& device_sealer() const { return device_sealer_; }
  void SetDeviceSealer(std::shared_ptr<DeviceSealer> sealer) {
    if (device_sealer_ == nullptr) device_sealer_ = std::move(sealer);
  }
  // The first error of giving workers that memory or of sealing from it; OK: none yet.
  const absl::Status& device_staging_error() const { return device_staging_error_; }
  void NoteDeviceStaging(const absl::Status& status) { device_staging_error_.Update(status); }

  int64_t slab_bytes() const {
    return device_.layout().slab_bytes() + backing_.layout().slab_bytes();
  }

  BlockIndex& index() { return index_; }
  const BlockIndex& index() const { return index_; }
  const SlotPool& device() const { return device_; }
  const SlotPool& backing() const { return backing_; }

  // Sets what a tenant may have; to be called before it takes slots. Idempotent.
  void SetQuota(TenantIndex tenant, const TenantQuota& quota);
  // Zeros for a tenant that was never here.
  TenantUse UseOf(TenantIndex tenant) const;

  // Takes slots to write blocks into, making room by demotion and eviction in EvictionOrder: first
  // the tenant's own where it is at its limit, then of tenants above their guaranteed share, then
  // its own. On false nothing was taken and `refusal` says why.
  bool TakeSlots(const SlotDemand& demand, int64_t now_ms, SlotGrant* grant, SlotRefusal* refusal);
  // About the next `count` blocks that would go for the tenant's sake; for nobody's when it is
  // null.
  std::vector<BlockId> PreviewEvictions(const TenantIndex* tenant, int32_t count) const;
  // Demotes blocks of tenants above their guaranteed share until at most `used_max` device slots
  // are used, `count_max` at most. Returns how many.
  int32_t DemoteDownTo(int32_t used_max, int32_t count_max, int64_t now_ms);
  // The same for the backing tier, with blocks that are on disk; ends at one that is not.
  int32_t SpillDownTo(int32_t used_max, int32_t count_max, int64_t now_ms);

  // Gives a grant back unpublished.
  void ReturnSlots(const SlotGrant& grant);

  // Publishes a new block, held once by the caller. Its slots are of a grant and written.
  struct NewBlock {
    BlockKey key;
    BlockId parent = BlockId::kNone;
    int32_t backing_slot = -1;
    int32_t device_slot = -1;
    uint64_t originals_digest = 0;
    TenantIndex tenant{};  // of the grant
    BlockPriority priority = BlockPriority::kNormal;
  };
  BlockId Publish(const NewBlock& block, int64_t now_ms);
  // As Publish, for a block that comes back from disk.
  BlockId Restore(const NewBlock& block, int64_t seal_time_ms, int64_t now_ms);
  // As Publish, for a block that comes from another store. Where its originals are still to come,
  // the caller holds it until SetOriginals or MarkLost; until then its handle has no originals, and
  // whoever looks at them meets another generation.
  enum class Originals : uint8_t { kThere, kPending };
  BlockId Receive(const NewBlock& block, Originals originals, int64_t seal_time_ms, int64_t now_ms);
  // The originals of such a block are written in its backing slot.
  void CompleteOriginals(BlockId id);
  // Publishes the device tier planes of a block that was in the backing tier only. The slot counts
  // to the block's tenant now, no more to the grant's.
  void Promote(BlockId id, const SlotGrant& grant, int32_t device_slot, int64_t now_ms);
  // The originals of a block turned out damaged: lookups do not find it any more. Idempotent.
  void MarkLost(BlockId id, int64_t now_ms);
  // Puts written slots in the place of a damaged block's, which nobody but the caller holds.
  void Replace(BlockId id, const NewBlock& block, int64_t now_ms);
  // Pins a block, or takes the pin off. end_ns: when it ends by itself, on the monotonic clock; 0:
  // never. A pin that is there gets the new end.
  void SetPinned(BlockId id, bool pinned, int64_t end_ns = 0);
  // 0: not pinned, or without an end.
  int64_t PinEndOf(BlockId id) const;
  // A block whose pin ends at or before `now_ns`, or kNone.
  BlockId FirstEndedPin(int64_t now_ns) const;
  // Forgets blocks, each after its children, because a client asked for it. None is held, and all
  // that depend on them are among them.
  void Drop(const absl::flat_hash_set<BlockId>& blocks, int64_t now_ms);
  // Forgets all blocks; none is held or pinned. For a cache that makes room for another.
  void EvictAll(int64_t now_ms);

  // Walks everything and aborts when an invariant does not hold. For tests.
  void CheckInvariants() const;

  // The handle of a live block.
  BlockHandle HandleOf(BlockId id) const;
  // What a live block takes in both tiers.
  int64_t BytesOf(BlockId id) const;

  // Keys that a running call is sealing; others that want them wait for it.
  absl::flat_hash_set<BlockKey>& claimed_keys() { return claimed_keys_; }
  const absl::flat_hash_set<BlockKey>& claimed_keys() const { return claimed_keys_; }

  // Sessions attached now, those of them that are workers', and when one last came or went.
  int32_t session_count = 0;
  int32_t worker_count = 0;
  int64_t last_attach_sequence = 0;

 private:
  Cache(CacheId id, const CacheSpec& spec, std::shared_ptr<SlabMemory> device,
        std::shared_ptr<SlabMemory> backing, EventHub* hub, StoreCounters* counters,
        const CacheOptions& options);

  BlockId Insert(const NewBlock& block, Originals originals, int64_t seal_time_ms, int64_t now_ms);
  bool MakeBackingRoom(TenantIndex tenant, int32_t count, int64_t now_ms, SlotRefusal* refusal);
  bool MakeDeviceRoom(TenantIndex tenant, int32_t count, int64_t now_ms, SlotRefusal* refusal);
  TenantUse& MutableUse(TenantIndex tenant);
  bool IsOverBacking(TenantIndex tenant) const;
  bool IsOverDevice(TenantIndex tenant) const;
  void Demote(BlockId id, int64_t now_ms);
  void Remove(BlockId id, BlockEventKind kind, int64_t now_ms);

  const CacheId id_;
  const CacheSpec spec_;
  const SpecDigest spec_digest_;
  const TenantPool pool_;
  const SpecDigest cache_digest_;
  const std::string description_;
  EventHub* const hub_;
  StoreCounters* const counters_;
  const SpillTier* const spill_;  // null: none
  absl::Status device_error_;     // of making the copy
  std::shared_ptr<DeviceSealer> device_sealer_;
  absl::Status device_staging_error_;
  SlotPool device_;
  SlotPool backing_;
  BlockIndex index_;
  std::vector<TenantUse> tenants_;  // by TenantIndex
  absl::flat_hash_set<BlockKey> claimed_keys_;
  // Pins that end by themselves, and when on the monotonic clock: one order, both ways.
  absl::flat_hash_map<BlockId, int64_t> pin_ends_;
  absl::btree_set<std::pair<int64_t, BlockId>> pins_by_end_;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_CACHE_H_
