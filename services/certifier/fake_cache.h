// A store's memory without a store, for tests: slabs in memfds with real tiles, which a MappedCache
// maps read-only, and the originals kept aside so that a test knows the truth.
#ifndef CERTKV_SERVICES_CERTIFIER_FAKE_CACHE_H_
#define CERTKV_SERVICES_CERTIFIER_FAKE_CACHE_H_

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kernels/core/cache_spec.h"
#include "kernels/core/ids.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/slab_layout.h"
#include "services/certifier/mapped_cache.h"
#include "services/certifier/view.h"

namespace certkv::certifier {

// Keys and values of one sequence in their original 16 bits:
// keys[layer][(token * kv_head_count + kv_head) * d + channel], values the same with d_v.
struct SequenceData {
  int64_t token_count = 0;
  std::vector<std::vector<uint16_t>> keys;
  std::vector<std::vector<uint16_t>> values;

  const uint16_t* key(const CacheSpec& spec, int32_t layer, int32_t kv_head, int64_t token) const {
    return keys[layer].data() + (token * spec.kv_head_count + kv_head) * spec.head_dim;
  }
  const uint16_t* value(const CacheSpec& spec, int32_t layer, int32_t kv_head,
                        int64_t token) const {
    return values[layer].data() + (token * spec.kv_head_count + kv_head) * spec.value_dim;
  }
};

// Keys like a model's (channels with offsets of their own, a few of them large, tokens that drift)
// times `key_scale`; values of about norm sqrt(d_v).
SequenceData RandomSequence(const CacheSpec& spec, int64_t token_count, float key_scale,
                            std::mt19937_64* random);

// Dies when something fails: a test can't go on without it.
class FakeCache {
 public:
  FakeCache(const CacheSpec& spec, int32_t slot_count);

  // Seals the whole blocks of `data` into free slots and puts the rest into the staging memory.
  void Put(const SequenceData& data);

  const CacheSpec& spec() const { return spec_; }
  const SequenceData& data() const { return data_; }
  const std::shared_ptr<MappedCache>& cache() const { return cache_; }
  const std::vector<BlockHandle>& blocks() const { return blocks_; }
  ViewTail tail() const;
  std::shared_ptr<const StagingMap> staging() const { return staging_; }

  // A view of everything that was put.
  std::shared_ptr<View> OpenView(const PolicyLease& policy, BudgetBook* book, int64_t now_ms = 0);

  // What a store would hand over; a descriptor lives as long as the cache.
  int device_fd() const { return device_.fd.get(); }
  int backing_fd() const { return backing_.fd.get(); }
  int staging_fd() const { return staging_slab_.fd.get(); }

  // Where the store would write; to break things with.
  uint8_t* scan(int32_t block, int32_t layer, int32_t kv_head, int32_t tile);
  uint8_t* detail(int32_t block, int32_t layer, int32_t kv_head, int32_t tile);
  uint16_t* original_keys(int32_t block, int32_t layer, int32_t kv_head);
  uint16_t* original_values(int32_t block, int32_t layer, int32_t kv_head);
  uint16_t* tail_keys(int32_t layer, int32_t kv_head);
  void BumpDeviceGeneration(int32_t block);
  void BumpBackingGeneration(int32_t block);
  void BumpStagingGeneration();
  // Makes slot and handle agree again, as if the slot had been sealed only now.
  void RestoreGenerations(int32_t block);
  BlockHandle* mutable_block(int32_t block) { return &blocks_[block]; }

 private:
  // A slab with its writer's map.
  struct WriterSlab {
    UniqueFd fd;
    Mapping mapping;
    SlabLayout layout;
  };
  WriterSlab MakeSlab(SlabKind kind, int32_t slot_count);
  void SealBlock(int32_t block);
  void CopyTokens(const WriterSlab& slab, int32_t slot, int64_t first_token, int64_t count);

  const CacheSpec spec_;
  WriterSlab device_;
  WriterSlab backing_;
  WriterSlab staging_slab_;
  std::shared_ptr<MappedCache> cache_;
  std::shared_ptr<const StagingMap> staging_;
  SequenceData data_;
  std::vector<BlockHandle> blocks_;
  int32_t tail_count_ = 0;
};

// The staging memory's id, and the slot that Put leaves the tail in.
inline constexpr int64_t kFakeStagingId = 77;
inline constexpr int32_t kFakeTailSlot = 2;

// A spec with all layers alike, K8V4 of fp16, no RoPE.
CacheSpec SmallSpec(int32_t layer_count, int32_t kv_head_count, int32_t group_size,
                    int32_t head_dim);

// A lease of "requests/test" that never expires.
PolicyLease TestLease(const Tolerances& tolerances, ReadMode mode = ReadMode::kEnforce);

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_FAKE_CACHE_H_
