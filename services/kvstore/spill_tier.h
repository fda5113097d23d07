// SpillTier: the third tier. What is on disk, how much of it, for how long, and whether it works.
#ifndef CERTKV_SERVICES_KVSTORE_SPILL_TIER_H_
#define CERTKV_SERVICES_KVSTORE_SPILL_TIER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "services/common/clock.h"
#include "services/kvstore/spill_store.h"
#include "services/kvstore/tenant_table.h"

namespace certkv::kvstore {

struct SpillLimits {
  int64_t size_bytes = 0;                // of payloads; the oldest blocks go first
  int64_t ttl_ms = 0;                    // a block goes so long after it was written; 0: never
  std::vector<TenantQuota> quotas = {};  // spill_limit_bytes: the tenant's own oldest go first
};

// What a tenant has on disk.
struct TenantSpill {
  std::string tenant;
  int64_t limit_bytes = 0;  // 0: none but the size of all
  int64_t blocks = 0;
  int64_t bytes = 0;
};

// How far Load() is.
struct SpillProgress {
  int64_t blocks = 0;
  int64_t bytes = 0;
};

struct SpillStats {
  bool enabled = false;
  bool opening = false;    // Load() has not ended; nothing on disk is found before it has
  SpillProgress progress;  // while opening
  std::string error;       // why nothing is written now; empty when all is well
  int64_t blocks = 0;
  int64_t bytes = 0;
  int64_t blocks_written = 0;
  int64_t blocks_read = 0;
  int64_t blocks_expired = 0;     // by size limit or TTL
  int64_t blocks_over_quota = 0;  // by the limit of their tenant; not among the expired
  int64_t blocks_refused = 0;     // not written: there is no room for them whoever goes
  int64_t blocks_damaged = 0;     // read back otherwise than written, and forgotten
  int64_t write_errors = 0;
  int64_t slow_calls = 0;  // reads and writes of one block that took over kSlowCallNs
  // Is the disk failing now, or was it slow a moment ago? The store serves from memory all the
  // same.
  bool degraded = false;
  std::vector<TenantSpill> tenants;  // that have blocks, by name
};

// One block's read or write that takes longer says that the disk is in trouble; what it says holds
// for kTroubleNs.
inline constexpr int64_t kSlowCallNs = 1'000'000'000;
inline constexpr int64_t kTroubleNs = int64_t{10} * 1'000'000'000;

// Keeps an index of all blocks on disk in memory, so that lookups don't wait for it: about 250
// bytes a block.
//
// Invariants:
//  1. A block is in the index only after its Put returned OK, and until its Delete is issued. A
//     Delete never takes what a later Put of the same key wrote: both hold the key's mutex.
//  2. An error never leaves this class as anything but "not there" or a Status: the store goes on.
//  3. Until Load() has ended the index is empty and nothing is written.
//  4. What is on disk and being written together is within all limits, but for what Load() found
//     under limits that were lowered since: the next Expire() puts that right.
// Threads: all calls are safe concurrently. Contains, Find, Forget and GetStats don't wait for the
// disk.
// Lock order: a key's mutex (held during I/O), or the engine's, then mutex_ (never held during
// I/O).
class SpillTier {
 public:
  // `store` null: disk is configured but can't be used; `why` says why in GetStats().
  SpillTier(std::unique_ptr<SpillStore> store, const SpillLimits& limits, const Clock* clock,
            absl::Status why = absl::OkStatus());

  // Reads the index, once, on any thread. progress(...), where there is one, is called every 1,024
  // blocks, and false from it ends the reading. Errors: those of SpillStore, what was read by then
  // is found all the same; Cancelled, and the tier stays shut.
  absl::Status Load(const std::function<bool(const SpillProgress&)>& progress = nullptr);

  bool Contains(const SpecDigest& spec, const BlockKey& key) const;
  std::optional<SpilledBlock> Find(const SpecDigest& spec, const BlockKey& key) const;
  // May a block of that size be written at all?
  bool Admits(absl::string_view tenant, int64_t bytes) const;
  // Can a Write succeed now? After an error nothing is tried for 10 s.
  bool CanWrite() const;

  // Makes room first: by the limit of block.tenant among its own blocks, by the size limit among
  // all. Errors: Unavailable [SPILL_FAILED]; ResourceExhausted [QUOTA_EXCEEDED], the block alone is
  // over a limit, or writes that run are.
  absl::Status Write(const SpecDigest& spec, SpilledBlock block, absl::Span<const uint8_t> payload);
  // Errors: as SpillStore::Get; NotFound [BLOCK_NOT_FOUND], it left the disk or was written again
  // since Find(). A damaged block is forgotten.
  absl::Status Read(const SpecDigest& spec, const SpilledBlock& block, absl::Span<uint8_t> payload);
  // What was read turned out not to be the block. False, and nothing is done, when it is no longer
  // what Find() gave.
  bool ForgetDamaged(const SpecDigest& spec, const SpilledBlock& block);
  // Takes the blocks and all that depend on them out of the index, and returns what is then to be
  // deleted.
  std::vector<BlockKey> Forget(const SpecDigest& spec, absl::Span<const BlockKey> keys);
  // Deletes what Forget returned, but for blocks that were written again since.
  void Delete(const SpecDigest& spec, absl::Span<const BlockKey> keys);
  // Forgets what is over its TTL or a limit. To be called every now and then.
  void Expire();

  SpillStats GetStats() const;
  // Of the store, also before Load(); "" when the disk can't be used or keeps none.
  std::string Secret() const { return store_ == nullptr ? "" : store_->Secret(); }

 private:
  struct Use {
    int64_t limit_bytes = 0;                  // never 0
    int64_t bytes = 0;                        // in the index
    int64_t writing_bytes = 0;                // reserved by calls that run
    absl::btree_set<int64_t> sequences = {};  // in by_age_
  };
  struct Entry {
    SpilledBlock block;
    int64_t sequence = 0;  // in by_age_
  };
  struct Aged {
    SpecDigest spec;
    BlockKey key;
  };
  using Blocks = absl::flat_hash_map<BlockKey, Entry>;

  void Add(const SpecDigest& spec, const SpilledBlock& block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remove(const SpecDigest& spec, const BlockKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Use& UseOf(absl::string_view tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropUnused(absl::string_view tenant) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the block out of the index, for `count`, and appends it to `taken`.
  void Take(int64_t sequence, int64_t* count, std::vector<Aged>* taken)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes blocks out of the index until `size` more bytes of the tenant are within the limits, and
  // appends them to `taken`. False: they cannot be.
  bool MakeRoom(absl::string_view tenant, int64_t size, std::vector<Aged>* taken)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Before a write: makes room, and reserves it.
  absl::Status Reserve(const SpilledBlock& block, int64_t size, std::vector<Aged>* taken,
                       bool* recover);
  // After it: gives the reservation back.
  void EndReservation(absl::string_view tenant, int64_t size) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Put(const SpecDigest& spec, absl::Span<const uint8_t> payload, SpilledBlock* block);
  void DeleteAged(const std::vector<Aged>& blocks);
  void NoteWrite(const absl::Status& status);
  void NoteDuration(int64_t start_ns);
  // A key is a hash already.
  absl::Mutex& MutexOf(const BlockKey& key) {
    return key_mutexes_[key.bytes[0] % key_mutexes_.size()];
  }

  const std::unique_ptr<SpillStore> store_;
  const SpillLimits limits_;
  const Clock* const clock_;
  std::array<absl::Mutex, 64> key_mutexes_;
  mutable absl::Mutex mutex_;
  absl::flat_hash_map<SpecDigest, Blocks> specs_ ABSL_GUARDED_BY(mutex_);
  absl::btree_map<int64_t, Aged> by_age_ ABSL_GUARDED_BY(mutex_);   // by sequence
  absl::btree_map<std::string, Use> uses_ ABSL_GUARDED_BY(mutex_);  // by tenant
  int64_t writing_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t sequence_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t slow_until_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t retry_time_ns_ ABSL_GUARDED_BY(mutex_) = 0;
  bool needs_recovery_ ABSL_GUARDED_BY(mutex_) = false;
  SpillStats stats_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SPILL_TIER_H_
