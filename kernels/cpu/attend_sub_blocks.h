// The second pass of a progressive read: single sub-blocks in full, for one head, four at a time as
// one unit of 64 tokens. Arithmetic and bounds are those of a dense read (attend_keys.h,
// attend_softmax.h, attend_values.h); each sub-block is an atom of its own.
#ifndef CERTKV_KERNELS_CPU_ATTEND_SUB_BLOCKS_H_
#define CERTKV_KERNELS_CPU_ATTEND_SUB_BLOCKS_H_

#include <cstdint>

#include "kernels/cpu/attend_keys.h"
#include "kernels/cpu/attend_softmax.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/attend_unit.h"
#include "kernels/cpu/attend_values.h"
#include "kernels/cpu/attend_witness.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

// The query terms that s.terms holds, and the half-widths of the tile's sub-blocks.
struct FoldedTile {
  int32_t tile;  // -1: none
  float width[kSubBlocksPerTile];
  float slack;
};

template <typename V>
void FoldTile(AttendState& s, int g, int32_t tile, FoldedTile* folded) {
  const uint8_t* scan = s.args->tiles[tile].scan;
  const FoldedWidths widths = FoldQueries<V>(s, g, OneHead(), LoadScales<V>(s, scan));
  folded->tile = tile;
  folded->slack = widths.slack[0];
  Quad residual[kSubBlocksPerTile] = {widths.residual, widths.residual, widths.residual,
                                      widths.residual};
  if (s.args->layout->witness_bands > 0) {
    LoadWitness<V>(s, scan);
    ApplyWitness<V>(s, g, OneHead(), reinterpret_cast<const TileHeader*>(scan)->witness_exponent,
                    residual);
  }
  for (int b = 0; b < kSubBlocksPerTile; ++b) folded->width[b] = residual[b][0] + folded->slack;
}

// Logits of head g for the 16 tokens at `coarse` and `fine`.
template <typename V, KeyFormat kFormat>
void ScoreSubBlock(AttendState& s, const uint8_t* coarse, const uint8_t* fine, int g, float* scores,
                   Prefetcher<V> prefetch) {
  constexpr int kVectors = kSubBlockTokens / V::kLanes;
  const KeyPlanes planes = {coarse, fine, 0, 0};  // one sub-block: no steps between them
  typename V::Dot dots[kVectors];
  Unroll<kVectors>([&](auto k) __attribute__((always_inline)) { dots[k] = V::ZeroDot(); });
  const int32_t* terms = s.terms + g * kTermRow;
  for (int j = 0; j < s.head_dim / 16; ++j) {
    prefetch.KeyStep();
    ScoreGroup<V, kFormat, 0, 1, kVectors>(planes, coarse, fine, terms, dots);
    constexpr int kNext = kFormat == KeyFormat::kK6 ? 0 : kFineStepBytes<kFormat> / 2;
    ScoreGroup<V, kFormat, 1, 1, kVectors>(planes, coarse + 64, fine + kNext, terms + 4, dots);
    coarse += 128;
    fine += kFineStepBytes<kFormat>;
    terms += 8;
  }
  Unroll<kVectors>([&](auto k) __attribute__((always_inline)) {
    const typename V::I sum = V::AddI(V::Total(dots[k]), V::SetI(s.term_bias[g]));
    V::Store(scores + k * V::kLanes,
             V::MulAdd(V::ToFloat(sum), V::Set(s.term_unit[g]), V::Set(s.term_base[g])));
  });
}

template <typename V>
void ScoreStoredSubBlock(AttendState& s, const uint8_t* coarse, const uint8_t* fine, int g,
                         float* scores, const Prefetcher<V>& prefetch) {
  switch (s.args->layout->key_format) {
    case KeyFormat::kK8:
      return ScoreSubBlock<V, KeyFormat::kK8>(s, coarse, fine, g, scores, prefetch);
    case KeyFormat::kK6:
      return ScoreSubBlock<V, KeyFormat::kK6>(s, coarse, fine, g, scores, prefetch);
    default:
      return ScoreSubBlock<V, KeyFormat::kK4>(s, coarse, fine, g, scores, prefetch);
  }
}

// Asks for everything before the coarse planes of the sub-block's tile and for its value scales and
// zeros, and returns a cursor over its coarse plane and its detail.
template <typename V>
[[gnu::always_inline]] inline Prefetcher<V> PrefetchSubBlock(const AttendState& s,
                                                             int32_t sub_block, int lines) {
  const TileLayout& layout = *s.args->layout;
  const AttendTile& tile = s.args->tiles[sub_block / kSubBlocksPerTile];
  const int b = sub_block % kSubBlocksPerTile;
  for (int64_t at = 0; at < layout.coarse_offset; at += 128) {  // an odd number: one line more
    V::Prefetch(tile.scan + at);
    V::Prefetch(tile.scan + at + 64);
  }
  V::Prefetch(tile.detail + layout.value_scale_offset);
  V::Prefetch(tile.detail + layout.value_scale_offset + kTileTokens);
  const uint8_t* coarse = tile.scan + layout.coarse_offset + b * layout.coarse_bytes;
  const uint8_t* detail = tile.detail + b * layout.sub_block_bytes;
  return {detail, detail + layout.sub_block_bytes, coarse, coarse + layout.coarse_bytes, lines, 0};
}

// Hides tokens outside the range of slot k, which holds `sub_block`.
[[gnu::always_inline]] inline void HideOutside(AttendState& s, int g, int k, int32_t sub_block) {
  const int64_t begin = int64_t{sub_block} * kSubBlockTokens;
  if (begin >= s.args->token_begin && begin + kSubBlockTokens <= s.args->token_end) return;
  float* scores = s.scores + g * kTileTokens + k * kSubBlockTokens;
  for (int t = 0; t < kSubBlockTokens; ++t) {
    const int64_t token = begin + t;
    if (token < s.args->token_begin || token >= s.args->token_end) scores[t] = -__builtin_inff();
  }
}

// Value scales, zeros and eta of `sub_block` into slot k.
template <typename V>
[[gnu::always_inline]] inline void LoadSlot(const AttendState& s, int k, int32_t sub_block,
                                            Unit* unit, ValueReach<V>* reach) {
  const AttendTile& tile = s.args->tiles[sub_block / kSubBlocksPerTile];
  const int b = sub_block % kSubBlocksPerTile;
  const uint8_t* codes =
      tile.detail + s.args->layout->value_scale_offset + int64_t{kSubBlockTokens} * b;
  for (int t = 0; t < kSubBlockTokens; t += V::kLanes) {
    const int slot = k * kSubBlockTokens + t;
    DecodeValueCodings<V>(codes + t, s.value_levels + 1, unit->value_scale + slot,
                          unit->value_zero + slot, reach);
  }
  uint16_t bits[V::kLanes] = {};
  bits[0] = reinterpret_cast<const TileHeader*>(tile.scan)->value_error_bound[b];
  float eta[V::kLanes];
  V::Store(eta, V::LoadF16(bits));
  unit->eta[k] = eta[0];
}

// Up to four sub-blocks. `ahead` are those that follow, `ahead_count` of them.
template <typename V>
void ReadBatch(AttendState& s, int g, const int32_t* batch, int count, int ahead_count,
               int32_t first_atom, int lines, FoldedTile* folded) {
  const TileLayout& layout = *s.args->layout;
  Unit unit;
  unit.tile = -1;  // no sum of errors by tile
  unit.first_atom = first_atom;
  unit.atoms = kSubBlocksPerTile;
  unit.first = 0;
  unit.last = count * kSubBlockTokens;
  unit.plain_reach = 0;
  QuadWidths widths = {};  // of one head
  ValuePlane plane;
  plane.pair_bytes = layout.value_bytes / (kSubBlockTokens / 2);
  ValueReach<V> reach;
  for (int k = 0; k < kSubBlocksPerTile; ++k) {
    // Slots that are not used have weight 0; they read the first one's bytes.
    const int32_t sub_block = batch[k < count ? k : 0];
    const AttendTile& tile = s.args->tiles[sub_block / kSubBlocksPerTile];
    const int b = sub_block % kSubBlocksPerTile;
    const uint8_t* detail = tile.detail + b * layout.sub_block_bytes;
    plane.sub_block[k] = detail + layout.value_offset;
    LoadSlot<V>(s, k, sub_block, &unit, &reach);
    if (k >= count) {
      unit.eta[k] = 0;
      continue;
    }
    if (sub_block / kSubBlocksPerTile != folded->tile) {
      FoldTile<V>(s, g, sub_block / kSubBlocksPerTile, folded);
    }
    if (!(folded->slack < __builtin_inff())) widths.slack[0] = __builtin_inff();
    widths.residual[k][0] = folded->width[b];
    Prefetcher<V> prefetch = {nullptr, nullptr, nullptr, nullptr, 0, 0};
    if (k < ahead_count) {
      prefetch = PrefetchSubBlock<V>(s, batch[kSubBlocksPerTile + k], lines);
    }
    ScoreStoredSubBlock<V>(s, tile.scan + layout.coarse_offset + b * layout.coarse_bytes, detail, g,
                           s.scores + g * kTileTokens + k * kSubBlockTokens, prefetch);
  }
  unit.rotated_reach = RotatedReach<V>(s.value_levels, reach);

  const uint32_t poisoned = BoundHeads<V>(s, g, OneHead(), unit, widths);
  for (int k = 0; k < count; ++k) HideOutside(s, g, k, batch[k]);
  const uint32_t reading = WeighHeads<V>(s, g, OneHead(), unit, TopLogits<V>(s, g, OneHead()), 1);
  if (poisoned != 0) PoisonAtoms(s, g, unit);
  if (reading == 0) return;
  Prefetcher<V> none = {nullptr, nullptr, nullptr, nullptr, 0, 0};
  const ValueRows no_rows = {};
  AddStoredValues<V>(s, plane, no_rows, g, 1, none);
}

template <typename V>
void ReadSubBlocks(AttendState* state, int g, const int32_t* sub_blocks, int32_t count,
                   int32_t first_atom) {
  AttendState& s = *state;
  const TileLayout& layout = *s.args->layout;
  const int steps = s.head_dim / 16;
  const auto all = static_cast<int>((layout.sub_block_bytes + layout.coarse_bytes) / 64);
  const int wanted = (all + steps - 1) / steps;
  const int lines = wanted < kPrefetchLinesMax ? wanted : kPrefetchLinesMax;
  FoldedTile folded;
  folded.tile = -1;
  for (int32_t i = 0; i < count; i += kSubBlocksPerTile) {
    const int32_t left = count - i;
    const int in_batch = left < kSubBlocksPerTile ? left : kSubBlocksPerTile;
    ReadBatch<V>(s, g, sub_blocks + i, in_batch, left - in_batch, first_atom + i, lines, &folded);
  }
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_SUB_BLOCKS_H_
