// StoreEngine: the store without its wire. Caches, sessions, leases, sealing, tiers.
#ifndef CERTKV_SERVICES_KVSTORE_STORE_ENGINE_H_
#define CERTKV_SERVICES_KVSTORE_STORE_ENGINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"
#include "services/common/clock.h"
#include "services/kvstore/block_checker.h"
#include "services/kvstore/block_writer.h"
#include "services/kvstore/cache.h"
#include "services/kvstore/compute_pool.h"
#include "services/kvstore/config.h"
#include "services/kvstore/event_hub.h"
#include "services/kvstore/lease_table.h"
#include "services/kvstore/session_table.h"
#include "services/kvstore/spill_tier.h"
#include "services/kvstore/store_pull.h"

namespace certkv::kvstore {

struct RegisteredCache {
  CacheId cache{};
  SpecDigest digest;
  int32_t device_slot_count = 0;
  int32_t backing_slot_count = 0;
  std::string key_salt;  // for the keys of its blocks
};

struct AttachRequest {
  CacheId cache{};
  std::string worker_name;
  SessionRole role = SessionRole::kReader;
  int32_t staging_slot_count = 0;  // 0: the default
  std::string tenant = {};         // one of the cache's pool; its blocks count to that one's quota
  bool wants_device_staging = false;  // workers: the same slots on the store's GPU, if it can
};
struct AttachedSession {
  SessionId session{};
  std::string fd_token;  // 16 bytes
  int32_t staging_slot_count = 0;
  int64_t staging_id = 0;
};

// What goes over the descriptor socket. The memory lives as long as the pointers.
struct SessionSlabs {
  SessionId session{};
  std::shared_ptr<SlabMemory> device;
  std::shared_ptr<SlabMemory> backing;
  std::shared_ptr<SlabMemory> staging;  // workers only
};

struct LeasedBlocks {
  std::vector<BlockHandle> blocks;
  LeaseId lease{};  // 0 when `blocks` is empty
  int64_t expire_time_ms = 0;
  int32_t shared_count = 0;  // seals: how many were there already
};

struct SealEntry {
  int32_t staging_slot = -1;
  BlockKey key;
  BlockKey parent;  // zeros: first of a chain
};

struct SealOptions {
  int64_t lease_duration_ms = 0;  // 0: the default
  BlockPriority priority = BlockPriority::kNormal;
  // On an error with a retry delay the staging slots stay reserved, so that the call can be made
  // again.
  bool keep_slots_for_retry = false;
  // The originals are in the session's staging memory on the GPU.
  bool from_device_staging = false;
};

// A block as lists show it.
struct BlockInfo {
  BlockHandle handle;
  BlockKey parent;
  CacheId cache{};
  int32_t lease_count = 0;
  bool pinned = false;
  int64_t pin_expire_time_ms = 0;  // 0: not pinned, or until it is unpinned
  std::string tenant;
  BlockPriority priority = BlockPriority::kNormal;
  bool lost = false;  // its originals are damaged; lookups do not find it
  int64_t device_bytes = 0;
  int64_t original_bytes = 0;
  int64_t seal_time_ms = 0;
  int64_t last_use_time_ms = 0;
};
struct BlockPage {
  std::vector<BlockInfo> blocks;
  std::string next_page_token;
};

// What one tenant has of a cache, in slots.
struct TenantStats {
  std::string tenant;
  TenantUse use;
};
struct CacheStats {
  CacheId cache{};
  CacheSpec spec;
  SpecDigest digest;
  int32_t device_slot_count = 0;
  int32_t device_slots_used = 0;
  int32_t backing_slot_count = 0;
  int32_t backing_slots_used = 0;
  int64_t device_slot_bytes = 0;
  int64_t backing_slot_bytes = 0;
  int32_t blocks_leased = 0;
  int32_t blocks_pinned = 0;
  int32_t blocks_writing = 0;  // being sealed or promoted now
  int32_t session_count = 0;
  std::vector<TenantStats> tenants;  // those with blocks, or with a quota and a session
  std::vector<std::string> pool_tenants;
  bool has_device_copy = false;  // ready, not withdrawn
  int64_t device_copied_bytes = 0;
  absl::Status device_error;          // why there is none, though there was to be one
  absl::Status device_staging_error;  // why workers or blocks that were to use a GPU did not, first
};
struct StoreStats {
  std::vector<CacheStats> caches;
  int32_t session_count = 0;
  int32_t lease_count = 0;
  StoreCounters counters;
  SpillStats spill;
  int64_t memory_bytes = 0;  // of the slabs of all tiers and of staging memory
  int64_t memory_limit_bytes = 0;
};

// Invariants:
//  1. A leased block keeps its slots until its last lease is released or expires.
//  2. A call that seals publishes all of its blocks or none, and frees its staging slots and what
//     it took when it fails, whenever its session ends.
//  3. A session that ended holds nothing.
//  4. No lock is held while blocks are copied, quantized or checked.
//  5. Calls that wait for another call's seal hold nothing that the other one waits for: a sealing
//     call waits before it claims keys, a promoting call after it published what it claimed.
//
// A lease's deadline is kept on the monotonic clock; expire_time_ms is the same moment on the wall
// clock when the lease was made.
// Threads: all calls are safe concurrently. Calls marked "computes" run for milliseconds to seconds
// and must not be made on gRPC's threads; all others end within microseconds per block.
// Lock order: mutex_, then EventHub's or SpillTier's.
// Errors everywhere: NotFound [SESSION_NOT_FOUND]; InvalidArgument [BATCH_SIZE], not 1 to 4096
// keys or slots; PermissionDenied [ROLE_FORBIDS], a reader writes. Errors of calls that need room
// and would get it later carry a retry delay (services/common/retry_delay.h).
class StoreEngine {
 public:
  // All pointers outlive the engine. `config` is valid. `spill` null: no tier on disk. `device`:
  // where device slabs have copies.
  StoreEngine(const KvStoreConfig& config, const Clock* clock, ComputePool* pool,
              SpillTier* spill = nullptr, const DevicePlace& device = {});
  ~StoreEngine();

  EventHub* events() { return &events_; }

  // ---- Caches and sessions: store_engine.cc ----
  // The cache of a spec for the tenant's pool. Errors: InvalidArgument [CACHE_SPEC_INVALID |
  // TENANT_INVALID]; ResourceExhausted [CACHE_LIMIT | SLAB_TOO_SMALL].
  absl::StatusOr<RegisteredCache> RegisterCache(const CacheSpec& spec,
                                                absl::string_view tenant = "");
  absl::Status CheckCache(CacheId cache);  // Errors: NotFound [CACHE_NOT_FOUND].
  // Errors: NotFound [CACHE_NOT_FOUND], also where the tenant is not of the cache's pool. Computes
  // where it wants staging memory on a GPU.
  absl::StatusOr<AttachedSession> AttachWorker(const AttachRequest& request);
  // May somebody who acts for the tenants that `may_use` names see the session, or the cache?
  // Errors: as if it did not exist.
  using MayUse = std::function<bool(absl::string_view tenant)>;
  absl::Status CheckSessionTenant(SessionId session, const MayUse& may_use);
  absl::Status CheckCacheTenant(CacheId cache, const MayUse& may_use);
  // Idempotent. `why` is for the errors of later calls.
  void EndSession(SessionId session, absl::string_view why);
  // Binds the session to a connection of the descriptor socket. `on_end` is called when the session
  // ends, with why, under the engine's lock, so that it only arranges for the connection to be
  // closed.
  // Errors: Unauthenticated [FD_TOKEN_INVALID], no such session or already connected.
  absl::StatusOr<SessionSlabs> ConnectSession(
      absl::string_view fd_token, std::function<void(absl::string_view why)> on_end = {});
  // A worker's staging memory, for a reader of the same cache and tenant. Errors: NotFound
  // [STAGING_NOT_FOUND]; PermissionDenied [ROLE_FORBIDS], the session is a worker.
  absl::StatusOr<std::shared_ptr<SlabMemory>> FindStaging(SessionId session, int64_t staging_id);
  // Expires leases and drops sessions that never connected. To be called every now and then.
  void Tick();

  // ---- Leases: store_engine_lease.cc ----
  // Leases the longest prefix of `keys` that is sealed. Computes when blocks must be promoted, or
  // brought back from disk, which goes on for spill_wait: what is not back by then ends the prefix,
  // and is left to Prefetch().
  // lease_duration_ms 0 means the default.
  // Errors: ResourceExhausted [STORE_FULL | QUOTA_EXCEEDED], with a retry delay; [LEASE_LIMIT];
  // InvalidArgument [LEASE_DURATION_INVALID].
  absl::StatusOr<LeasedBlocks> LookupAndLease(SessionId session, absl::Span<const BlockKey> keys,
                                              int64_t lease_duration_ms);
  // The same, or nullopt, and nothing done, when blocks must be promoted or brought back first.
  std::optional<absl::StatusOr<LeasedBlocks>> TryLookupAndLease(SessionId session,
                                                                absl::Span<const BlockKey> keys,
                                                                int64_t lease_duration_ms);
  // Returns the new deadline, Unix epoch in ms. Errors: NotFound [LEASE_NOT_FOUND].
  absl::StatusOr<int64_t> RenewLease(SessionId session, LeaseId lease, int64_t lease_duration_ms);
  absl::Status ReleaseLease(SessionId session, LeaseId lease);  // idempotent
  // Computes: the blocks are read and compared with their checksums. Planes that are damaged are
  // made again from the originals; after success both are what was sealed. store_engine_check.cc
  // Errors: NotFound [LEASE_NOT_FOUND | BLOCK_NOT_FOUND]; DataLoss [ORIGINAL_LOST].
  absl::StatusOr<std::vector<BlockHandle>> FetchOriginals(SessionId session, LeaseId lease,
                                                          absl::Span<const BlockKey> keys);

  // ---- Writing: store_engine_seal.cc ----
  // Errors: ResourceExhausted [STAGING_FULL].
  absl::StatusOr<std::vector<int32_t>> ReserveBlocks(SessionId session, int32_t block_count);
  // Computes. Whatever the outcome, the staging slots that the entries name are free afterwards,
  // and on an error nothing is published.
  // Errors: FailedPrecondition [RESERVATION_NOT_FOUND | PARENT_NOT_FOUND | BLOCK_DAMAGED];
  // InvalidArgument [DUPLICATE_ENTRY | BLOCK_KEY_INVALID | PARENT_MISMATCH | NON_FINITE_KEY |
  // NON_FINITE_VALUE | KEY_OUT_OF_RANGE | LEASE_DURATION_INVALID]; ResourceExhausted [STORE_FULL |
  // QUOTA_EXCEEDED], with a retry delay; [LEASE_LIMIT]; DataLoss [ORIGINAL_LOST]. From a GPU also:
  // FailedPrecondition [DEVICE_STAGING_MISSING], the session has none, or not any more; Internal
  // [DEVICE_FAILED], originals can't be brought from there.
  absl::StatusOr<LeasedBlocks> SealBlocks(SessionId session, absl::Span<const SealEntry> entries,
                                          const SealOptions& options);
  absl::StatusOr<LeasedBlocks> SealBlocks(SessionId session, absl::Span<const SealEntry> entries,
                                          int64_t lease_duration_ms) {
    return SealBlocks(session, entries, SealOptions{.lease_duration_ms = lease_duration_ms});
  }
  // Idempotent. Errors: InvalidArgument [STAGING_SLOT_INVALID], no such slot.
  absl::Status AbortBlocks(SessionId session, absl::Span<const int32_t> staging_slots);

  // ---- Integrity: store_engine_check.cc ----
  // Checks the next blocks, about `max_bytes` and at least one, on the calling thread; repairs
  // damaged planes, and takes blocks with damaged originals away from lookups. Computes. Returns
  // how many bytes were checked; 0 at the end of a round over all blocks, the next call begins
  // anew.
  int64_t Scrub(int64_t max_bytes);

  // ---- The tier on disk: store_engine_spill.cc ----
  // Writes the blocks that would be evicted next to disk, until spill_ahead_percent of each cache's
  // slots are free or can go without a wait. Computes. To be called every now and then.
  void SpillAhead();
  // Makes room in tiers that are over their high watermark, down to the low one: demotes, and
  // evicts what is on disk. To be called every now and then; a few hundred blocks at a time.
  void KeepWatermarks();
  // Writes all blocks to disk. For a store that stops. Computes.
  void SpillAll();
  // Brings the next blocks to memory that a lookup found on disk and had no time to wait for, as
  // far as there is room that nobody loses: store_engine_prefetch.cc. They are not leased.
  // Computes. To be called every now and then, and again while it is true: there are more.
  bool Prefetch();

  // ---- Blocks from and for other stores: store_engine_pull.cc ----
  // The cache of a spec for a tenant, if there is one; none is made.
  // Errors: NotFound [CACHE_NOT_FOUND].
  absl::StatusOr<CacheId> FindCacheOf(const SpecDigest& spec, absl::string_view tenant);
  absl::StatusOr<std::shared_ptr<const Cache>> CacheOf(SessionId session);
  // What the bytes of leased blocks are, in the order of the lease. Memory lives with `cache`, and
  // is the blocks' while the lease is held. Errors: NotFound [LEASE_NOT_FOUND]; Unavailable
  // [ORIGINALS_PENDING], of one of the blocks.
  absl::StatusOr<SharedBlocks> ShareLeased(SessionId session, LeaseId lease);

  // Holds what there is of a chain, from its beginning on, and brings it back from disk. Computes.
  // Until EndPull, which must come, all that the pull publishes is held too.
  absl::StatusOr<Pull> BeginPull(SessionId session, absl::Span<const BlockKey> keys);
  // Slots for the next `count` blocks, which the caller writes and brings to the device
  // (SlabMemory::CopyToDevice), then publishes or gives back. Makes room. Errors: NotFound
  // [SESSION_NOT_FOUND]; ResourceExhausted [STORE_FULL | QUOTA_EXCEEDED], with a retry delay.
  absl::StatusOr<std::vector<BlockWrite>> ClaimForPull(const Pull& pull, int32_t count);
  void ReturnPulled(const Pull& pull, absl::Span<const BlockWrite> writes);
  // Publishes one block, after those before it in its chain, or finds it published by another call
  // meanwhile; its slots are taken over either way, and given back on errors. Waits for a call that
  // seals it. Errors: NotFound [SESSION_NOT_FOUND]; FailedPrecondition [PARENT_NOT_FOUND |
  // BLOCK_DAMAGED].
  absl::StatusOr<PublishedBlock> PublishPulled(Pull* pull, const PulledBlock& block);
  // The originals of a block that was published without them are written, or will not come: then
  // lookups do not find it any more.
  void CompletePulled(const Pull& pull, BlockId block);
  void AbandonPulled(const Pull& pull, BlockId block);
  void EndPull(Pull* pull);

  // ---- Looking after blocks: store_engine_admin.cc ----
  // All or nothing. ttl_ms 0: until it is unpinned; a pin that is there gets the new end.
  // Errors: NotFound [BLOCK_NOT_FOUND]; ResourceExhausted [PIN_LIMIT], of the cache or the tenant;
  // InvalidArgument [PIN_TTL_INVALID].
  absl::Status PinBlocks(SessionId session, absl::Span<const BlockKey> keys, bool pinned,
                         int64_t ttl_ms = 0);
  // Drops the blocks and those that depend on them, pinned or not, in memory and on disk; unknown
  // keys are passed over.
  // Returns how many went. Errors: FailedPrecondition [BLOCK_LEASED], nothing was dropped.
  absl::StatusOr<int32_t> DropBlocks(SessionId session, absl::Span<const BlockKey> keys);
  // Errors: NotFound [CACHE_NOT_FOUND | BLOCK_NOT_FOUND].
  absl::StatusOr<BlockInfo> GetBlock(CacheId cache, const BlockKey& key);
  // Cache 0: all. Every block that lives throughout the listing is on one of its pages, once.
  // Errors: NotFound [CACHE_NOT_FOUND]; InvalidArgument [PAGE_TOKEN_INVALID | PAGE_SIZE_INVALID].
  absl::StatusOr<BlockPage> ListBlocks(CacheId cache, int32_t page_size,
                                       absl::string_view page_token);
  StoreStats GetStats();
  SpillStats GetSpillStats() const;  // does not wait for running calls

  // Aborts when a cache breaks its invariants. For tests; walks everything.
  void CheckInvariants();

 private:
  // Holds mutex_; notifies the watchers of events once it is released.
  class Lock;
  struct SealPlan;

  // Of all, in nanoseconds and milliseconds, at one moment.
  struct Now {
    int64_t monotonic_ns;
    int64_t epoch_ms;
  };
  Now ReadClock() const;
  void ExpireLeases(const Now& now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndSessionLocked(SessionId session, absl::string_view why)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends expired leases first, so that no call sees one.
  absl::StatusOr<Session*> FindSession(SessionId session, const Now& now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Session*> FindWorker(SessionId session, const Now& now, absl::string_view call)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Cache>> FindCache(CacheId cache) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Errors: ResourceExhausted [CACHE_LIMIT | MEMORY_LIMIT].
  absl::Status MakeRoomForCache(const TenantPool& pool, const CacheSpec& spec, const Now& now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<TenantIndex> TenantFor(const AttachRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of slabs and staging memory, as they are allotted.
  int64_t MemoryBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ExpirePins(const Now& now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<int32_t> StagingSlotsFor(const AttachRequest& request, const CacheSpec& spec)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<int64_t> CheckLeaseDuration(int64_t lease_duration_ms) const;
  absl::Status CheckLeaseLimit(const Session& session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Lets blocks go that were held once per mention, children before parents.
  static void Unhold(Cache* cache, absl::Span<const BlockId> blocks);
  // Turns holds that the caller has into a lease.
  LeasedBlocks MakeLease(Session* session, std::vector<BlockId> held, int64_t duration_ms,
                         const Now& now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropLease(LeaseId lease, Session* session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<BlockId> FindPrefix(const Cache& cache, absl::Span<const BlockKey> keys)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives every held block its device tier planes. Releases mutex_ while it computes. Returns how
  // many leading blocks are there; fewer than all when originals turned out damaged.
  absl::StatusOr<size_t> PromoteHeld(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                                     const std::vector<BlockId>& held)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PromoteClaimed(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                              const std::vector<BlockId>& claimed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // SpillForRoom for the session's tenant, if there is a disk and the session.
  void SpillForSeal(SessionId session, size_t count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until no other call seals or promotes what this one needs, then claims keys and slots.
  absl::Status BeginSeal(SessionId session, absl::Span<const SealEntry> entries, SealPlan* plan)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ClaimForSeal(SealPlan* plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseClaims(SealPlan* plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<LeasedBlocks> PublishSeal(SealPlan* plan, int64_t duration_ms)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AbandonSeal(SealPlan* plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // ---- store_engine_device.cc ----
  // Gives the worker its staging slots on the GPU, too, or notes why not. Releases mutex_ while the
  // device works.
  void GiveDeviceStaging(SessionId session, const std::shared_ptr<Cache>& cache,
                         const std::shared_ptr<StagingArea>& staging)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Errors: FailedPrecondition [DEVICE_STAGING_MISSING]; ResourceExhausted [STAGING_MEMORY_FULL].
  absl::Status CheckDeviceStaging(const Cache& cache, int64_t size_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Writes the plan's blocks. Releases mutex_ meanwhile.
  absl::Status WriteSealed(SealPlan* plan) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // What `check` found out about a block that the caller holds and that did not move: rebuilds its
  // planes, or marks it lost. Releases mutex_ meanwhile. Errors: DataLoss [ORIGINAL_LOST].
  absl::Status RepairHeld(const std::shared_ptr<Cache>& cache, BlockId id, const BlockCheck& check)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes blocks out of memory and out of the index of the disk.
  struct Dropped {
    SpecDigest spec;
    int32_t count = 0;
  };
  absl::StatusOr<Dropped> DropFromIndex(SessionId session, absl::Span<const BlockKey> keys,
                                        std::vector<BlockKey>* on_disk);

  // The rest of a chain, waiting for Prefetch().
  struct Prefetching {
    CacheId cache{};
    TenantIndex tenant{};
    std::string tenant_name;
    int64_t block_bytes = 0;  // that one takes in memory
    std::vector<BlockKey> keys;
  };
  // One block on its way from disk.
  struct Restore {
    SpilledBlock block;
    BlockWrite write;
    bool done = false;
  };
  // Adds the block, unless it is damaged or on disk already.
  void AddUnspilled(const Cache& cache, BlockId id, std::vector<BlockCheck>* blocks) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Those of the `count` blocks that go next, for the tenant or (null) for any, that are not on
  // disk yet.
  std::vector<BlockCheck> NextToSpill(const Cache& cache, const TenantIndex* tenant,
                                      int32_t count) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks the blocks and writes them; those with damaged originals are marked lost. Releases
  // mutex_ meanwhile; the blocks need not be held.
  void Spill(const std::shared_ptr<Cache>& cache, std::vector<BlockCheck>* blocks)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // PublishPulled, but for the slots when it fails or publishes nothing. Releases mutex_ where it
  // waits.
  absl::StatusOr<PublishedBlock> PublishPulledLocked(const Pull& pull, const PulledBlock& block)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Writes those of any tenant. Releases mutex_ meanwhile. False: nothing to write, or the disk
  // does not take it.
  bool SpillOldest(const std::shared_ptr<Cache>& cache, int32_t count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Before `count` slots are taken: the blocks that will make room go to disk first, as far as it
  // takes them. The caller waits for that, which is the back-pressure on bursts. Releases mutex_
  // meanwhile; when it returns, nothing has to be written before they are taken.
  void SpillForRoom(const std::shared_ptr<Cache>& cache, TenantIndex tenant, int32_t count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Blocks from keys[first] on that are on disk, in a row, and may be published.
  std::vector<Restore> NextToRestore(const Cache& cache, absl::Span<const BlockKey> keys,
                                     size_t first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Reads and publishes them, held, up to the first that fails; false when one did. Releases
  // mutex_.
  bool RestoreBatch(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                    std::vector<Restore>* batch, std::vector<BlockId>* held)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Goes on from a prefix that is held, with blocks from disk and from memory. Releases mutex_.
  void RestoreAfter(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                    absl::Span<const BlockKey> keys, std::vector<BlockId>* held)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Has Prefetch() bring those of keys[first] on that are on disk, in a row; as many as there is
  // room for in its queue, in the tenant's quota and in memory.
  void QueuePrefetch(const Cache& cache, TenantIndex tenant, absl::Span<const BlockKey> keys,
                     size_t first) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Brings a batch of them. Returns how many leading keys are done with; 0: nothing can be done.
  // Releases mutex_.
  size_t PrefetchBatch(const std::shared_ptr<Cache>& cache, TenantIndex tenant,
                       absl::Span<const BlockKey> keys) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The blocks after the last ones, of one cache; none at the end of a round.
  std::vector<BlockCheck> NextToScrub(int64_t max_bytes, std::shared_ptr<Cache>* cache)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Why `demand` was refused, and when to ask again: store_engine_refusal.cc
  absl::Status Refused(const Cache& cache, const SlotDemand& demand,
                       const SlotRefusal& refusal) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  BlockInfo InfoOf(const Cache& cache, BlockId id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const KvStoreConfig config_;
  const Clock* const clock_;
  ComputePool* const pool_;
  SpillTier* const spill_;  // null: none
  const DevicePlace device_;
  // What the dither secrets of caches are made of: of the tier on disk, so that blocks that come
  // back from there are read with the secret that they were made with; else of this process.
  const std::string dither_root_;
  EventHub events_;
  absl::Mutex mutex_;
  // Signalled when a call has published or given up what it had claimed.
  absl::CondVar claims_changed_;
  StoreCounters counters_ ABSL_GUARDED_BY(mutex_);
  int64_t attach_sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  CacheId scrub_cache_ ABSL_GUARDED_BY(mutex_){};  // where the next Scrub() begins
  int32_t scrub_block_ ABSL_GUARDED_BY(mutex_) = 0;
  // The blocks and slots inside are guarded too; their geometry is not.
  absl::btree_map<CacheId, std::shared_ptr<Cache>> caches_ ABSL_GUARDED_BY(mutex_);
  TenantTable tenants_ ABSL_GUARDED_BY(mutex_);
  std::deque<Prefetching> prefetches_ ABSL_GUARDED_BY(mutex_);
  int64_t prefetch_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // of those, and of the batch that runs
  std::vector<int32_t> tenant_sessions_ ABSL_GUARDED_BY(mutex_);  // by TenantIndex
  SessionTable sessions_ ABSL_GUARDED_BY(mutex_);
  LeaseTable leases_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_STORE_ENGINE_H_
