// Layout of a slab: one shared allocation of slots, each holding one block of a cache.
//
//   SlabHeader, 4096 bytes | generation u64[slot_count], padded to 4096 | regions
//
//   device slab    for each layer and KV head, two regions: scan records [slot_count][tiles], then
//                  detail records [slot_count][tiles]; so a sequence in neighbouring slots is read
//                  in address order
//   backing slab,  for each slot, each layer and KV head: keys [block_tokens][d] and values
//   staging slab   [block_tokens][d_v], 16-bit, token-major
//
// Generations (device and backing): odd while a slot is free or being written, even while its bytes
// are sealed; every reuse moves it on. A reader checks that it equals its handle's generation
// before and after it reads (a seqlock), and throws away what it read when it does not.
#ifndef CERTKV_KERNELS_CORE_SLAB_LAYOUT_H_
#define CERTKV_KERNELS_CORE_SLAB_LAYOUT_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"
#include "kernels/core/tile_layout.h"

namespace certkv {

enum class SlabKind : uint32_t { kDevice = 1, kBacking = 2, kStaging = 3 };

inline constexpr uint64_t kSlabMagic = 0x3142414c534b4345;  // "ECKSLAB1"
inline constexpr uint32_t kSlabVersion = 1;
inline constexpr int64_t kSlabPageBytes = 4096;

// First bytes of a slab, written once before it is shared.
struct SlabHeader {
  uint64_t magic;
  uint32_t version;
  SlabKind kind;
  uint8_t spec_digest[32];
  int32_t slot_count;
  uint32_t reserved;
  int64_t slab_bytes;
  uint64_t dither_secret;  // device slabs with a K8D layer: not 0; 0 in all others
};
static_assert(sizeof(SlabHeader) == 72);

class SlabLayout {
 public:
  // `spec` is valid; slot_count >= 1. `dither_secret` is the cache's, for device slabs.
  SlabLayout(const CacheSpec& spec, SlabKind kind, int32_t slot_count, uint64_t dither_secret = 0);

  SlabKind kind() const { return kind_; }
  int32_t slot_count() const { return slot_count_; }
  int64_t slab_bytes() const { return slab_bytes_; }  // whole slab, a multiple of 4096
  int64_t slot_bytes() const { return slot_bytes_; }  // what one more slot costs
  int32_t tiles_per_block() const { return tiles_per_block_; }
  int32_t layer_count() const { return static_cast<int32_t>(tile_layouts_.size()); }
  int32_t kv_head_count() const { return kv_head_count_; }
  const TileLayout& tile_layout(int32_t layer) const { return tile_layouts_[layer]; }

  int64_t generation_offset(int32_t slot) const { return kSlabPageBytes + int64_t{8} * slot; }

  // Device slabs: byte offset of a record. `tile` in [0, tiles_per_block).
  int64_t scan_offset(int32_t slot, int32_t layer, int32_t kv_head, int32_t tile) const;
  int64_t detail_offset(int32_t slot, int32_t layer, int32_t kv_head, int32_t tile) const;

  // Backing and staging slabs: byte offset of keys [block_tokens][d] and values
  // [block_tokens][d_v].
  int64_t key_offset(int32_t slot, int32_t layer, int32_t kv_head) const;
  int64_t value_offset(int32_t slot, int32_t layer, int32_t kv_head) const;

  // Writes the header of this slab at `base`.
  void WriteHeader(uint8_t* base) const;
  // Is what lies at `base` (mapped `size_bytes`) such a slab?
  // Errors: FailedPrecondition [SLAB_MISMATCH], naming the field, the value seen and the expected.
  absl::Status CheckHeader(const uint8_t* base, int64_t size_bytes) const;

  // A reader's layout, after CheckHeader: takes over the slab's dither_secret.
  void AdoptDitherSecret(const uint8_t* base);

  // Bytes of one slot for a spec, to size a slab by memory.
  static int64_t SlotBytes(const CacheSpec& spec, SlabKind kind);

 private:
  SlabKind kind_;
  int32_t slot_count_;
  int32_t kv_head_count_;
  int32_t tiles_per_block_;
  SpecDigest digest_;
  uint64_t dither_secret_;  // 0 where no layer is dithered
  bool needs_dither_secret_;
  std::vector<TileLayout> tile_layouts_;  // per layer
  std::vector<int64_t> layer_offsets_;    // device: of the layer's first region
  int64_t regions_offset_ = 0;
  int64_t original_key_bytes_ = 0;  // of one layer and KV head of a block
  int64_t original_value_bytes_ = 0;
  int64_t slot_bytes_ = 0;
  int64_t slab_bytes_ = 0;
};

// The generation word of a slot in a mapped slab.
inline std::atomic<uint64_t>& GenerationAt(uint8_t* base, const SlabLayout& layout, int32_t slot) {
  return *reinterpret_cast<std::atomic<uint64_t>*>(base + layout.generation_offset(slot));
}
inline const std::atomic<uint64_t>& GenerationAt(const uint8_t* base, const SlabLayout& layout,
                                                 int32_t slot) {
  return *reinterpret_cast<const std::atomic<uint64_t>*>(base + layout.generation_offset(slot));
}
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint64_t>) == 8);

// The two fences of the seqlock, for the machine and for the compiler. GCC refuses fences under
// ThreadSanitizer, which does not model them; there only the compiler is held, and the x86 machines
// that ThreadSanitizer runs on keep loads, and stores, in order by themselves.
inline void FenceAfterReads() {
#ifdef __SANITIZE_THREAD__
  std::atomic_signal_fence(std::memory_order_acquire);
#else
  std::atomic_thread_fence(std::memory_order_acquire);
#endif
}
inline void FenceBeforeWrites() {
#ifdef __SANITIZE_THREAD__
  std::atomic_signal_fence(std::memory_order_release);
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

// Before a read: is the slot still what the handle names?
inline bool GenerationMatches(const uint8_t* base, const SlabLayout& layout, const SlotRef& ref) {
  return GenerationAt(base, layout, ref.slot).load(std::memory_order_acquire) == ref.generation;
}
// After a read: was it so all the time? Orders the reads before it.
inline bool GenerationStillMatches(const uint8_t* base, const SlabLayout& layout,
                                   const SlotRef& ref) {
  FenceAfterReads();
  return GenerationAt(base, layout, ref.slot).load(std::memory_order_relaxed) == ref.generation;
}

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_SLAB_LAYOUT_H_
