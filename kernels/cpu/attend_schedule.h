// How many cache lines of the next tile each step of the loops asks for.
#ifndef CERTKV_KERNELS_CPU_ATTEND_SCHEDULE_H_
#define CERTKV_KERNELS_CPU_ATTEND_SCHEDULE_H_

#include <cstdint>

#include "kernels/cpu/attend_keys.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/attend_values.h"
#include "kernels/cpu/prefetch.h"

namespace certkv::cpu {

[[gnu::always_inline]] inline bool IsAffineFormat(KeyFormat format) {
  return format == KeyFormat::kK8 || format == KeyFormat::kK8D || format == KeyFormat::kK6 ||
         format == KeyFormat::kK4;
}

// How a group is cut for the loops: `wide` chunks of V::kWideHeads heads over affine keys; all
// others in `narrow` chunks of up to `heads`.
struct HeadChunks {
  int wide;
  int narrow;
  int heads;
};

template <typename V>
HeadChunks ChunksOf(int group_size, bool wide_allowed) {
  HeadChunks chunks;
  chunks.wide = wide_allowed ? group_size / V::kWideHeads : 0;
  const int left = group_size - chunks.wide * V::kWideHeads;
  chunks.narrow = (left + V::kChunkHeads - 1) / V::kChunkHeads;
  chunks.heads = left < V::kChunkHeads ? (left > 0 ? left : 1) : V::kChunkHeads;
  return chunks;
}

// Steps of the prefetch cursor while the loops over keys and over values work on one tile.
template <typename V>
int64_t KeySteps(const TileLayout& layout, const HeadChunks& chunks) {
  if (IsAffineFormat(layout.key_format)) {
    constexpr int kVectors = kTileTokens / V::kLanes;
    return (int64_t{chunks.wide} * (kVectors / CodeVectors<V>(V::kWideHeads)) +
            int64_t{chunks.narrow} * (kVectors / CodeVectors<V>(chunks.heads))) *
           layout.head_dim / 8;
  }
  if (layout.key_format == KeyFormat::kFp8E4m3) {
    return int64_t{chunks.narrow} * (kTileTokens / V::kLanes) * layout.head_dim / 16;
  }
  return int64_t{chunks.narrow} * (kSubBlocksPerTile / FloatSubBlocks<V>(chunks.heads)) *
         layout.head_dim / 2;
}

template <typename V, int kBits>
int64_t CodeSteps(const TileLayout& layout, int chunks, int heads) {
  const int64_t pair_bytes = layout.value_bytes / (kSubBlockTokens / 2);
  const int64_t pass_bytes = 4 * V::kLanes * SlicesAtOnce<V, kBits>(heads);
  const int64_t passes = (pair_bytes + pass_bytes - 1) / pass_bytes;
  return chunks * passes * (TwoPasses<V, kBits>(heads) ? 2 : 1) * (kTileTokens / 4);
}

template <typename V>
int64_t ValueSteps(const TileLayout& layout, int chunks, int heads) {
  if (layout.value_format == ValueFormat::kV4) return CodeSteps<V, 4>(layout, chunks, heads);
  if (layout.value_format == ValueFormat::kV8) return CodeSteps<V, 8>(layout, chunks, heads);
  const int64_t channels = V::kLanes * RowVectors<V>(heads);
  return chunks * ((layout.value_dim + channels - 1) / channels) * (kTileTokens / 2);
}

// Cache lines of the next tile per step, so that they are asked for at an even pace over the tile's
// work. Work is counted in vector instructions per 64 numbers: unpacking for each chunk of heads,
// multiplying for each head.
template <typename V>
void SetPrefetchLines(AttendState* s) {
  const TileLayout& layout = *s->args->layout;
  const int group_size = s->args->group_size;
  const HeadChunks keys = ChunksOf<V>(group_size, IsAffineFormat(layout.key_format));
  const HeadChunks values = ChunksOf<V>(group_size, false);
  const int key_unpack = IsAffineFormat(layout.key_format)          ? 12
                         : layout.key_format == KeyFormat::kFp8E4m3 ? 40
                                                                    : 16;
  const int value_unpack = layout.value_format == ValueFormat::kV4   ? 5
                           : layout.value_format == ValueFormat::kV8 ? 4
                                                                     : 16;
  const int64_t key_work =
      int64_t{layout.head_dim} * (key_unpack * (keys.wide + keys.narrow) + 8 * group_size);
  const int64_t value_work =
      int64_t{layout.value_dim} * (value_unpack * values.narrow + 8 * group_size);
  const auto per_step = [](int64_t lines, int64_t steps) {
    const int64_t wanted = lines <= 0 ? 0 : (lines + steps - 1) / steps;
    return static_cast<int32_t>(wanted < kPrefetchLinesMax ? wanted : kPrefetchLinesMax);
  };
  const int64_t lines = layout.tile_bytes() / 64;
  const int64_t key_steps = KeySteps<V>(layout, keys);
  s->key_lines = per_step(lines * key_work / (key_work + value_work), key_steps);
  s->value_lines = per_step(lines - s->key_lines * key_steps,
                            ValueSteps<V>(layout, values.narrow, values.heads));
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_SCHEDULE_H_
