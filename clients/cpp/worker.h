// Worker: one engine worker attached to one cache of the store.
//
//   auto worker = Worker::Attach(options, spec);
//   auto sequence = (*worker)->PutSequence(token_ids, kv);       // lookup, write, seal, lease
//   auto request = Request::Open(options, "req-7");              // gate's policy lease
//   auto attention = Attention::Open(**worker, **sequence, **request);
//   auto reads = (*attention)->Attend({{layer, position, queries}});
//
// A sequence's leases are renewed in the background while its object lives. When the connection to
// the store breaks, every call says UNAVAILABLE [SESSION_LOST]; attach again.
#ifndef CERTKV_CLIENTS_CPP_WORKER_H_
#define CERTKV_CLIENTS_CPP_WORKER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "clients/cpp/options.h"
#include "clients/cpp/pull_order.h"
#include "kernels/core/block_key.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/slab_layout.h"
#include "kernels/ops/imported_slab.h"

namespace grpc {
class Channel;
}  // namespace grpc

namespace certkv::client {

// Originals of one layer of a sequence: token-major rows of all KV heads, 16-bit as in the spec.
struct LayerKv {
  const uint16_t* keys;    // [token_count][kv_head_count][d]
  const uint16_t* values;  // [token_count][kv_head_count][d_v]
};

// Tokens of a sequence for one staging slot, from its first row on.
struct SlotRows {
  int32_t slot = -1;
  int64_t first_token = 0;
  int32_t token_count = 0;
};

// Slots that hold rows: of the mapped staging slab, or of the same slots on the store's GPU.
struct FilledSlots {
  std::vector<int32_t> slots;
  bool on_device = false;
};

// The tail: tokens after the last whole block, in an unsealed staging slot.
struct TailRef {
  int64_t staging_id = 0;
  int32_t staging_slot = -1;  // -1 = no tail
  int32_t token_count = 0;
};

class PagedCache;  // paged_cache.h
class Worker;
struct LeasedBlocks;  // store_client.h

// Whole blocks that were copied into staging slots and aren't sealed. Gives its slots back when it
// is destroyed. The Worker must outlive it. Belongs to one thread at a time.
class StagedBlocks {
 public:
  StagedBlocks(StagedBlocks&& other) noexcept;
  StagedBlocks& operator=(StagedBlocks&& other) noexcept;
  ~StagedBlocks();

  int32_t block_count() const { return static_cast<int32_t>(slots_.size()); }
  // Are they in staging memory on the store's GPU?
  bool is_on_device() const { return on_device_; }
  // Gives back the slots of the first `count` blocks, or of all.
  void DropFirst(int32_t count);

 private:
  friend class Worker;
  StagedBlocks(Worker* worker, FilledSlots filled)
      : worker_(worker), slots_(std::move(filled.slots)), on_device_(filled.on_device) {}

  Worker* worker_;
  std::vector<int32_t> slots_;
  bool on_device_;
};

// A sequence in the store: leased blocks and a tail. Movable only through unique_ptr. Releases its
// lease and its tail's slot when destroyed. The Worker must outlive it.
class Sequence {
 public:
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  const std::vector<BlockHandle>& blocks() const { return blocks_; }
  const TailRef& tail() const { return tail_; }
  int64_t token_count() const { return token_count_; }
  // Blocks that were already in the store when the sequence was put, by another worker or before.
  int32_t shared_block_count() const { return shared_block_count_; }
  // Is the lease still held? Errors: FailedPrecondition [LEASE_LOST] with the reason of the failed
  // renewal.
  absl::Status CheckLease() const;
  // Is the token at `position` there at `layer`? Errors: InvalidArgument [READ_INVALID], that token
  // has begun (Worker::BeginToken) and its layer isn't written.
  absl::Status CheckWritten(int32_t layer, int64_t position) const;

 private:
  friend class Worker;
  static constexpr int32_t kNoOpenToken = -1;
  explicit Sequence(Worker* worker) : worker_(worker) {}

  Worker* worker_;
  std::vector<BlockHandle> blocks_;
  std::vector<LeaseId> leases_;
  std::vector<int32_t> lease_block_counts_;  // of each lease, in the order of blocks_
  TailRef tail_;
  int64_t token_count_ = 0;
  int32_t shared_block_count_ = 0;
  int32_t open_layers_ =
      kNoOpenToken;  // layers of the last token that are written, while it's open
};

// Threads: calls are safe from several threads. All block on RPCs unless they say otherwise.
class Worker {
 public:
  // Registers the cache (idempotent), opens a session and maps its slabs.
  // Errors: InvalidArgument [CACHE_SPEC_INVALID]; Unavailable, the store can't be reached;
  //         ResourceExhausted [SESSION_LIMIT | CACHE_LIMIT | SLAB_TOO_SMALL].
  static absl::StatusOr<std::unique_ptr<Worker>> Attach(const Options& options,
                                                        const CacheSpec& spec);
  ~Worker();  // detaches; every Sequence must be gone
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Puts a whole sequence: finds the longest prefix that the store has, writes and seals the other
  // whole blocks, and writes the rest as the tail. `layers` has one entry per layer of the spec,
  // for all of `token_ids`; the prefix that was found isn't read.
  // Errors: InvalidArgument [SEQUENCE_INVALID | NON_FINITE_KEY | NON_FINITE_VALUE];
  //         ResourceExhausted [STORE_FULL | QUOTA_EXCEEDED | STAGING_FULL], after
  //         Options.pressure_wait_ms; nothing stays reserved or leased.
  absl::StatusOr<std::unique_ptr<Sequence>> PutSequence(absl::Span<const int32_t> token_ids,
                                                        absl::Span<const LayerKv> layers,
                                                        const BlockKeyContext& key_context);

  // The longest prefix of whole blocks that the store has, leased in the result, which has no tail.
  absl::StatusOr<std::unique_ptr<Sequence>> Lookup(absl::Span<const int32_t> token_ids,
                                                   const BlockKeyContext& key_context);

  // The same for keys that the caller has made, each block's with ComputeBlockKey of this worker's
  // KeyContext and extra keys of its own: the longest prefix of that chain.
  absl::StatusOr<std::unique_ptr<Sequence>> LookupBlocks(absl::Span<const BlockKey> keys);

  // Writes and seals whole blocks after the sequence's last, in calls of some blocks each: blocks
  // of calls that went well stay sealed and leased when a later one fails. originals[i] points at
  // one block's original records, layer by layer, KV head by KV head: keys [block_tokens][d], then
  // values [block_tokens][d_v].
  // Errors: InvalidArgument [SEQUENCE_INVALID], the sequence has a tail, or there aren't as many
  //         keys as blocks; as PutSequence.
  absl::Status AppendBlocks(Sequence& sequence, absl::Span<const BlockKey> keys,
                            absl::Span<const uint16_t* const> originals);

  // PutSequence with the rows where an engine keeps them: token i of the sequence is in page
  // pages[i / page_tokens] of `cache`. Blocks that the store has aren't read, the others and the
  // tail are moved from the pages into staging slots, once. With Options::device_staging and pages
  // on the store's GPU the blocks stay there until they are sealed; where that fails they go
  // through the mapped slots. Errors: InvalidArgument [BLOCK_TABLE_INVALID]; InvalidArgument
  // [PAGED_CACHE_INVALID], `cache`
  //         was made for another spec; on a device those of PagedCache::CopyRows and Internal
  //         [DEVICE_FAILED], staging memory can't be pinned; otherwise as PutSequence.
  absl::StatusOr<std::unique_ptr<Sequence>> PutPaged(absl::Span<const int32_t> token_ids,
                                                     const PagedCache& cache,
                                                     absl::Span<const int32_t> pages,
                                                     const BlockKeyContext& key_context);

  // AppendBlocks from an engine's pages: the blocks after the sequence's last, whose tokens `pages`
  // holds from the sequence's first token on. Errors: as AppendBlocks and PutPaged.
  absl::Status AppendPaged(Sequence& sequence, absl::Span<const BlockKey> keys,
                           const PagedCache& cache, absl::Span<const int32_t> pages);

  // AppendPaged in two steps, for engines that reuse pages before a block can be sealed: copies
  // `block_count` blocks, the first of which begins at `first_token` of the table, and says when
  // pages may change. Doesn't wait for a free slot. Errors: as PutPaged; ResourceExhausted
  // [STAGING_FULL]; InvalidArgument [SEQUENCE_INVALID], fewer than one block.
  absl::StatusOr<StagedBlocks> StageBlocks(const PagedCache& cache, absl::Span<const int32_t> pages,
                                           int64_t first_token, int32_t block_count);
  // Seals them after the sequence's last block, in calls of some blocks each. Errors: as
  // AppendBlocks; the slots are given back then. Of blocks on the store's GPU also Internal
  // [DEVICE_FAILED] and FailedPrecondition [DEVICE_STAGING_MISSING]: they are gone, stage again.
  absl::Status AppendStaged(Sequence& sequence, absl::Span<const BlockKey> keys,
                            StagedBlocks blocks);

  // Has the store fetch what it lacks of the prefix from another store, which its config names,
  // then as Lookup. Blocks that came stay when a later call or batch fails. Errors: InvalidArgument
  // [BULK_PEER_UNKNOWN]; Unavailable [BULK_DISCONNECTED]; DataLoss [BULK_BLOCK_DAMAGED]; and others
  // of PullBlocks in kvstore.proto.
  absl::StatusOr<std::unique_ptr<Sequence>> Pull(const std::string& peer,
                                                 absl::Span<const int32_t> token_ids,
                                                 const BlockKeyContext& key_context,
                                                 PullOrder order = PullOrder::kWhole);

  // Appends one token to the sequence's tail; a tail that becomes a whole block is sealed.
  // `token_ids` is the whole sequence with the new token; `layers` point at that token alone. A
  // view that was opened on the sequence must then be updated (Attention::Refresh).
  // Errors: InvalidArgument [SEQUENCE_INVALID], token_ids isn't one longer than the sequence; as
  //         PutSequence. When sealing a full tail fails, the sequence ends at its
  //         last whole block (the error says so).
  absl::Status AppendToken(Sequence& sequence, absl::Span<const int32_t> token_ids,
                           absl::Span<const LayerKv> layers, const BlockKeyContext& key_context);

  // AppendToken in steps, for engines that compute a token's layers one after the other, each from
  // reads of the one before: BeginToken, then for each layer in order WriteLayer and its reads,
  // then FinishToken. From BeginToken on the token is the sequence's last; reads of it at layers
  // that are not written yet are refused (READ_INVALID). The read of a token that fills its block
  // is exact, in this process, until FinishToken has sealed the block. Errors: InvalidArgument
  // [SEQUENCE_INVALID], a step out of order; otherwise as AppendToken.
  absl::Status BeginToken(Sequence& sequence);
  // `kv` points at the token's row of that layer. Doesn't block.
  absl::Status WriteLayer(Sequence& sequence, int32_t layer, const LayerKv& kv);
  // `token_ids` is the whole sequence with the new token.
  absl::Status FinishToken(Sequence& sequence, absl::Span<const int32_t> token_ids,
                           const BlockKeyContext& key_context);

  // Keeps the sequence's whole blocks in memory for ttl_ms (0: until it is unpinned), also when
  // nobody leases them; or lets them go. Errors: ResourceExhausted [PIN_LIMIT]; NotFound
  // [BLOCK_NOT_FOUND].
  absl::Status PinSequence(const Sequence& sequence, bool pinned, int64_t ttl_ms = 0);

  // Has the store compare all blocks of the sequence with their checksums; quantized bytes that are
  // damaged are then made again from the originals, in place. For a read that met DATA_LOSS.
  // Errors: DataLoss [ORIGINAL_LOST], a block is gone for good; NotFound [LEASE_NOT_FOUND].
  absl::Status RepairBlocks(const Sequence& sequence);

  const CacheSpec& spec() const;
  const SpecDigest& spec_digest() const;
  // What keys of this worker's blocks depend on: DefaultKeyContext with its tenant's salt, and
  // `rank`, the tensor-parallel rank whose KV heads the blocks hold.
  BlockKeyContext KeyContext(int32_t rank) const;
  const Options& options() const;  // targets resolved
  // See certifier_link.h; null when there is one certifier.
  const std::shared_ptr<grpc::Channel>& certifier_balancer() const;

  // The maps, for in-process reads. Writing to a slab dies; the staging map is this worker's own.
  const SlabLayout& device_layout() const;
  const SlabLayout& backing_layout() const;
  const SlabLayout& staging_layout() const;
  const uint8_t* device_base() const;
  const uint8_t* backing_base() const;
  const uint8_t* staging_base() const;
  // Opens the copy that a GPU has of the device slab, for kernels of this process; it ends before
  // the worker. imported_slab.h says how to read it. Errors: as ImportedSlab::Open.
  absl::StatusOr<std::unique_ptr<ImportedSlab>> OpenDeviceCopy(DeviceRuntime* runtime) const;
  // OK while pages on the store's GPU are sealed there, or none were tried; otherwise why the last
  // ones went through the mapped slots: DEVICE_STAGING_MISSING, DEVICE_NOT_HERE,
  // DEVICE_HANDLE_STALE, DEVICE_IMPORT_REFUSED, DEVICE_MEMORY_FULL, DEVICE_FAILED.
  absl::Status device_staging() const;

 private:
  friend class Sequence;
  friend class StagedBlocks;
  struct Impl;

  explicit Worker(std::unique_ptr<Impl> impl);
  // A sequence of what `find` finds of each batch of keys.
  absl::StatusOr<std::unique_ptr<Sequence>> FindPrefix(
      absl::Span<const BlockKey> keys,
      const std::function<absl::StatusOr<LeasedBlocks>(absl::Span<const BlockKey>)>& find);
  absl::Status AddSealed(Sequence& sequence, absl::Span<const BlockKey> keys, int64_t first_block,
                         const FilledSlots& filled);
  // PutSequence of the slots that `fill` reserves and fills.
  absl::StatusOr<std::unique_ptr<Sequence>> Put(
      absl::Span<const int32_t> token_ids, const BlockKeyContext& key_context,
      const std::function<absl::StatusOr<FilledSlots>(const std::vector<SlotRows>&)>& fill);
  // Seals slots after the sequence's last block, which has no tail.
  absl::Status AppendSlots(Sequence& sequence, absl::Span<const BlockKey> keys,
                           const FilledSlots& filled);
  absl::Status CheckAppend(const Sequence& sequence, size_t key_count, size_t block_count,
                           absl::string_view call) const;
  absl::StatusOr<StagedBlocks> Stage(const PagedCache& cache, absl::Span<const int32_t> pages,
                                     int64_t first_token, int32_t block_count, bool waits);

  std::unique_ptr<Impl> impl_;
};

// The key context of a spec with rank 0. A worker salts keys of an empty tenant_salt with what the
// store gave its tenant.
BlockKeyContext DefaultKeyContext(const CacheSpec& spec);

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_WORKER_H_
