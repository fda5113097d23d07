// Sealed sequences for benchmarks, far larger than the caches.
#ifndef CERTKV_BENCH_KERNELS_BENCH_DATA_H_
#define CERTKV_BENCH_KERNELS_BENCH_DATA_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "kernels/core/cache_spec.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/attend.h"

namespace certkv::bench {

// Zeroed memory on 2 MiB pages, where the system gives them.
class HugeBuffer {
 public:
  explicit HugeBuffer(int64_t size_bytes);
  ~HugeBuffer();
  HugeBuffer(const HugeBuffer&) = delete;
  HugeBuffer& operator=(const HugeBuffer&) = delete;
  uint8_t* data() const { return data_; }

 private:
  void* mapping_;
  int64_t mapping_bytes_;
  uint8_t* data_;
};

// Originals of one tile, [64][dim] keys and values.
using FillTile =
    std::function<void(int32_t tile, std::vector<uint16_t>* keys, std::vector<uint16_t>* values)>;

// One layer of `head_count` KV heads, each `tile_count` tiles: per head an array of scan records,
// then an array of detail records. All heads hold the same numbers at different addresses: a read
// of one head finds none of its bytes in a cache.
class SealedCache {
 public:
  SealedCache(const CacheSpec& spec, int32_t tile_count, int64_t bytes_min, const FillTile& fill);
  int32_t head_count() const { return head_count_; }
  int64_t size_bytes() const { return head_count_ * head_bytes(); }
  int64_t head_bytes() const { return tile_count_ * layout_.tile_bytes(); }
  const TileLayout& layout() const { return layout_; }
  // The heads in turn, whoever asks.
  const std::vector<AttendTile>& NextHead() { return heads_[next_head_++ % head_count_]; }
  const uint8_t* NextHeadData() {
    return buffer_.data() + next_head_++ % head_count_ * head_bytes();
  }

 private:
  TileLayout layout_;
  int32_t tile_count_;
  int32_t head_count_;
  HugeBuffer buffer_;
  std::vector<std::vector<AttendTile>> heads_;
  int64_t next_head_ = 0;
};

// A spec of one layer in these formats.
CacheSpec BenchSpec(KeyFormat key_format, ValueFormat value_format, int32_t dim, int32_t group_size,
                    int32_t witness_bands);

// Originals [64][dim] of one tile: channels of different centres and spreads, as keys after RoPE
// have. `seed` picks the numbers.
void FillOriginals(uint64_t seed, int32_t dim, std::vector<uint16_t>* keys,
                   std::vector<uint16_t>* values);

// Queries [group_size][dim] that see the cache's keys as a model's would: logits a few nats apart.
std::vector<float> BenchQueries(int32_t group_size, int32_t dim);

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_KERNELS_BENCH_DATA_H_
