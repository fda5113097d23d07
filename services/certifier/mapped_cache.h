// The maps of one cache's slabs, read-only: what a reader sees of a store.
#ifndef CERTKV_SERVICES_CERTIFIER_MAPPED_CACHE_H_
#define CERTKV_SERVICES_CERTIFIER_MAPPED_CACHE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/slab_layout.h"
#include "kernels/ops/imported_slab.h"
#include "kernels/ops/pinned_memory.h"

namespace certkv::certifier {

// One mapped slab with its layout. The bytes live as long as the object.
class MappedSlab {
 public:
  // The slot count is taken from the slab's header, then everything in it is checked.
  // Errors: FailedPrecondition [SLAB_MISMATCH].
  static absl::StatusOr<MappedSlab> Create(const CacheSpec& spec, SlabKind kind, Mapping mapping);

  const uint8_t* base() const { return mapping_.data(); }
  const SlabLayout& layout() const { return layout_; }

  // Is the slot still what `ref` names? Before and after a read of it (slab_layout.h).
  bool Matches(const SlotRef& ref) const { return GenerationMatches(base(), layout_, ref); }
  bool StillMatches(const SlotRef& ref) const {
    return GenerationStillMatches(base(), layout_, ref);
  }
  uint64_t Generation(int32_t slot) const {
    return GenerationAt(base(), layout_, slot).load(std::memory_order_acquire);
  }

 private:
  MappedSlab(Mapping mapping, SlabLayout layout)
      : mapping_(std::move(mapping)), layout_(std::move(layout)) {}
  Mapping mapping_;
  SlabLayout layout_;
};

// A worker's staging memory, mapped read-only. Held by the views whose tail lies in it.
struct StagingMap {
  int64_t staging_id = 0;
  MappedSlab slab;
};

// Which tiles of a device slab had their checksums recomputed by this process: once per generation
// of a slot, so that a flipped bit is found before its first use and decoding doesn't pay twice.
// Threads: concurrent calls are safe; a tile may then be verified twice.
class VerifiedTiles {
 public:
  VerifiedTiles(int32_t slot_count, int32_t layer_count, int32_t kv_head_count);

  bool Contains(int32_t layer, int32_t kv_head, const SlotRef& ref) const {
    return words_[Index(layer, kv_head, ref.slot)].load(std::memory_order_relaxed) ==
           ref.generation + 1;
  }
  // All tiles of the slot's layer and KV head were verified while it had that generation.
  void Add(int32_t layer, int32_t kv_head, const SlotRef& ref) {
    words_[Index(layer, kv_head, ref.slot)].store(ref.generation + 1, std::memory_order_relaxed);
  }

 private:
  size_t Index(int32_t layer, int32_t kv_head, int32_t slot) const {
    return (static_cast<size_t>(layer) * kv_head_count_ + kv_head) * slot_count_ + slot;
  }
  int32_t slot_count_;
  int32_t kv_head_count_;
  std::vector<std::atomic<uint64_t>> words_;  // generation + 1; 0 = never verified
};

// Threads: const methods and MarkDead may be called concurrently.
class MappedCache {
 public:
  // `device` and `backing` are the slabs' whole memory.
  // Errors: InvalidArgument [CACHE_SPEC_INVALID]; FailedPrecondition [SLAB_MISMATCH].
  static absl::StatusOr<std::shared_ptr<MappedCache>> Create(CacheSpec spec, Mapping device,
                                                             Mapping backing);

  const CacheSpec& spec() const { return spec_; }
  const SpecDigest& spec_digest() const { return spec_digest_; }
  const MappedSlab& device() const { return device_; }
  const MappedSlab& backing() const { return backing_; }
  VerifiedTiles* verified_tiles() { return &verified_tiles_; }

  // Opens the device slab's copy in a GPU's memory, to be called before others have the cache.
  // Errors: as ImportedSlab::Open; then there is none.
  absl::Status ImportDeviceCopy(DeviceRuntime* runtime);
  ImportedSlab* device_copy() const { return device_copy_.get(); }  // null: there is none
  // Which tiles of it were compared with the mapped slab.
  VerifiedTiles* compared_copies() { return compared_copies_.get(); }

  // Pins the backing slab for the device of the copy, which there is, so that it gathers originals
  // by itself. Blocks while pages are brought to memory, all that the slab has; to be called before
  // others have the cache. Errors: as PinnedMemory::Pin; then the device is brought copies.
  absl::Status PinOriginals(DeviceRuntime* runtime);

  // False once the store that owns the memory is gone: leases may be, so nothing may be served.
  bool alive() const { return alive_.load(std::memory_order_acquire); }
  void MarkDead() { alive_.store(false, std::memory_order_release); }
  // OK, or Unavailable [STORE_UNREACHABLE].
  absl::Status CheckAlive() const;

 private:
  MappedCache(CacheSpec spec, MappedSlab device, MappedSlab backing);

  const CacheSpec spec_;
  const SpecDigest spec_digest_;
  const MappedSlab device_;
  const MappedSlab backing_;
  VerifiedTiles verified_tiles_;
  std::unique_ptr<VerifiedTiles> compared_copies_;
  std::unique_ptr<ImportedSlab> device_copy_;       // after device_, which it reads
  std::unique_ptr<PinnedMemory> pinned_originals_;  // after backing_, which it has pinned
  std::atomic<bool> alive_{true};
};

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_MAPPED_CACHE_H_
