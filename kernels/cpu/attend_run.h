// The read of one instruction set: units (tiles, then the tail) in order, each for all heads.
#ifndef CERTKV_KERNELS_CPU_ATTEND_RUN_H_
#define CERTKV_KERNELS_CPU_ATTEND_RUN_H_

#include <cstdint>

#include "kernels/cpu/attend_keys.h"
#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_scan.h"
#include "kernels/cpu/attend_schedule.h"
#include "kernels/cpu/attend_softmax.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/attend_sub_blocks.h"
#include "kernels/cpu/attend_unit.h"
#include "kernels/cpu/attend_values.h"
#include "kernels/cpu/attend_witness.h"
#include "kernels/cpu/certificate_parts.h"
#include "kernels/cpu/finish_masses.h"
#include "kernels/cpu/prefetch.h"

namespace certkv::cpu {

// Where the heads of one unit read from.
struct UnitSources {
  uint8_t head[kGroupSizeMax];
  uint8_t any;
  uint8_t all;
};

[[gnu::always_inline]] inline UnitSources ReadSources(const AttendArgs& args, int tile) {
  UnitSources sources;
  sources.any = 0;
  sources.all = kSourceOriginalKeys | kSourceOriginalValues;
  for (int g = 0; g < args.group_size; ++g) {
    const uint8_t bits = args.tile_sources == nullptr
                             ? kSourceQuantized
                             : args.tile_sources[int64_t{g} * args.tile_count + tile];
    sources.head[g] = bits;
    sources.any |= bits;
    sources.all &= bits;
  }
  return sources;
}

// Logits of heads [head, head + count) from the stored planes.
template <typename V>
void ScorePlanes(AttendState& s, const KeyPlanes& planes, float key_scale, int head, int count,
                 Prefetcher<V>& prefetch) {
  WithHeads<V>(
      count, [&](auto n) __attribute__((always_inline)) {
        constexpr int kHeads = decltype(n)::value;
        switch (s.args->layout->key_format) {
          case KeyFormat::kK8:
          case KeyFormat::kK8D:  // without its dither; SubtractDither follows
            return ScoreAffine<V, KeyFormat::kK8, kHeads>(s, planes, head, prefetch);
          case KeyFormat::kK6:
            return ScoreAffine<V, KeyFormat::kK6, kHeads>(s, planes, head, prefetch);
          case KeyFormat::kK4:
            return ScoreAffine<V, KeyFormat::kK4, kHeads>(s, planes, head, prefetch);
          case KeyFormat::kFp8E4m3:
            ScoreFp8<V, kHeads>(s, planes, head, key_scale, prefetch);
            return;
          case KeyFormat::kF16:
            return Score16Bit<V, false, kHeads>(s, planes, head, prefetch);
          case KeyFormat::kBf16:
            return Score16Bit<V, true, kHeads>(s, planes, head, prefetch);
        }
      });
}

// Logits of heads [head, head + V::kWideHeads) from affine keys.
template <typename V>
void ScoreWide(AttendState& s, const KeyPlanes& planes, int head, Prefetcher<V>& prefetch) {
  switch (s.args->layout->key_format) {
    case KeyFormat::kK8:
    case KeyFormat::kK8D:
      return ScoreAffine<V, KeyFormat::kK8, V::kWideHeads>(s, planes, head, prefetch);
    case KeyFormat::kK6:
      return ScoreAffine<V, KeyFormat::kK6, V::kWideHeads>(s, planes, head, prefetch);
    default:
      return ScoreAffine<V, KeyFormat::kK4, V::kWideHeads>(s, planes, head, prefetch);
  }
}

// Logits of head g from rows of originals; returns the slack of their half-widths. Their residuals
// are 0.
template <typename V>
float ScoreOriginals(AttendState& s, const uint16_t* rows, int64_t stride, int count, int g) {
  const float norm = s.args->original_dtype == OriginalDtype::kBf16
                         ? ScoreRows<V, true>(s, rows, stride, count, g)
                         : ScoreRows<V, false>(s, rows, stride, count, g);
  const float reach = s.heads.query_norm[g] * norm;
  const float roundings = static_cast<float>(s.head_dim) * (1.0f / 8) + 16.0f;
  return reach <= kReachMax ? roundings * kUnitRoundoff * reach : __builtin_inff();
}

// What lies between the loops over keys and values takes a tenth of a tile's time with one head;
// memory is not to wait for it.
template <typename V>
[[gnu::always_inline]] inline void AskBetweenLoops(Prefetcher<V>& prefetch) {
  prefetch.KeyStep();
  prefetch.KeyStep();
}

// Widths of heads [head, head + count) for the stored keys of a tile, and their query terms.
template <typename V, typename Count>
[[gnu::always_inline]] inline QuadWidths PrepareQueries(AttendState& s, int head, Count count,
                                                        const TileHeader& header, bool affine,
                                                        float middle_norm) {
  const TileLayout& layout = *s.args->layout;
  QuadWidths widths;
  if (affine) {
    const FoldedWidths folded = FoldQueries<V>(s, head, count, middle_norm);
    widths.tile = folded.residual;
    widths.slack = folded.slack;
  } else {
    const bool exact =
        layout.key_format == KeyFormat::kF16 || layout.key_format == KeyFormat::kBf16;
    const Quad infinity = SplatQuad(__builtin_inff());
    const Quad reach = LoadQuad(s.heads.query_norm + head) * header.key_norm;
    const float roundings = static_cast<float>(s.head_dim) + 8.0f;
    widths.tile = exact ? Quad{} : infinity;
    widths.slack = reach <= kReachMax ? roundings * kUnitRoundoff * reach : infinity;
  }
  for (Quad& residual : widths.residual) residual = widths.tile;
  if (Computes<V>(kHalfWidthPart) && layout.witness_bands > 0) {
    ApplyWitness<V>(s, head, count, header.witness_exponent, widths.residual);
  }
  return widths;
}

// Logits and widths of all heads for a tile; `widths` has one entry for kQuadHeads of them.
template <typename V>
void ScoreTile(AttendState& s, const Unit& unit, const UnitSources& sources, QuadWidths* widths,
               Prefetcher<V>& prefetch) {
  const AttendArgs& args = *s.args;
  const TileLayout& layout = *args.layout;
  const AttendTile& tile = args.tiles[unit.tile];
  const auto* header = reinterpret_cast<const TileHeader*>(tile.scan);
  const KeyPlanes planes = {tile.scan + layout.coarse_offset, tile.detail, layout.coarse_bytes,
                            layout.sub_block_bytes};
  const bool affine = IsAffineFormat(layout.key_format);
  const bool any_stored = (sources.all & kSourceOriginalKeys) == 0;
  if (any_stored) {
    const float middle_norm = affine ? LoadScales<V>(s, tile.scan) : 0.0f;
    if (Computes<V>(kHalfWidthPart) && layout.witness_bands > 0) LoadWitness<V>(s, tile.scan);
    ForQuads(
        args.group_size, [&](int head, auto count) __attribute__((always_inline)) {
          widths[head / kQuadHeads] =
              PrepareQueries<V>(s, head, count, *header, affine, middle_norm);
          AskBetweenLoops<V>(prefetch);
        });
  }
  for (int g = 0; (sources.any & kSourceOriginalKeys) != 0 && g < args.group_size; ++g) {
    if ((sources.head[g] & kSourceOriginalKeys) == 0) continue;
    QuadWidths& width = widths[g / kQuadHeads];
    const int lane = g % kQuadHeads;
    width.slack[lane] = ScoreOriginals<V>(s, tile.original_keys, s.head_dim, kTileTokens, g);
    width.tile[lane] = 0;
    for (Quad& residual : width.residual) residual[lane] = 0;
  }

  const bool mixed = (sources.any & kSourceOriginalKeys) != 0;
  const int chunk = mixed ? 1 : V::kChunkHeads;
  int head = 0;
  if (affine && !mixed) {
    for (; head + V::kWideHeads <= args.group_size; head += V::kWideHeads) {
      ScoreWide<V>(s, planes, head, prefetch);
    }
  }
  for (; head < args.group_size; head += chunk) {
    if ((sources.head[head] & kSourceOriginalKeys) != 0) continue;
    const int left = args.group_size - head;
    ScorePlanes<V>(s, planes, header->key_scale, head, left < chunk ? left : chunk, prefetch);
  }
  if (layout.key_format == KeyFormat::kK8D && any_stored) {
    uint32_t heads = 0;
    for (int g = 0; g < args.group_size; ++g) {
      if ((sources.head[g] & kSourceOriginalKeys) == 0) heads |= 1u << g;
    }
    SubtractDither(&s, header->identity_tag, unit.first, unit.last, heads);
  }
}

// Decodes the tile's value scales and zeros.
template <typename V>
void LoadValueScales(const AttendState& s, const AttendTile& tile, Unit* unit) {
  const auto* header = reinterpret_cast<const TileHeader*>(tile.scan);
  const uint8_t* codes = tile.detail + s.args->layout->value_scale_offset;
  ValueReach<V> reach;
  for (int t = 0; t < kTileTokens; t += V::kLanes) {
    DecodeValueCodings<V>(codes + t, s.value_levels + 1, unit->value_scale + t,
                          unit->value_zero + t, &reach);
  }
  if constexpr (!Computes<V>(kValueErrorPart)) return;
  // The header goes on after the four bounds, so that a whole vector may be read.
  static_assert(offsetof(TileHeader, value_error_bound) + 2 * V::kLanes <= sizeof(TileHeader));
  float eta[V::kLanes];
  V::Store(eta, V::LoadF16(header->value_error_bound));
  for (int b = 0; b < kSubBlocksPerTile; ++b) unit->eta[b] = eta[b];
  unit->rotated_reach = RotatedReach<V>(s.value_levels, reach);
}

template <typename V>
void AddOriginalValues(AttendState& s, const ValueRows& rows, int head, int count,
                       Prefetcher<V>& prefetch) {
  WithHeads<V>(
      count, [&](auto n) __attribute__((always_inline)) {
        constexpr int kHeads = decltype(n)::value;
        if (s.args->original_dtype == OriginalDtype::kBf16) {
          AddRowValues<V, true, kHeads>(s, rows, head, prefetch);
        } else {
          AddRowValues<V, false, kHeads>(s, rows, head, prefetch);
        }
      });
}

// Adds the values of a tile for the heads in `reading` (bit g).
template <typename V>
void AddTileValues(AttendState& s, const Unit& unit, const UnitSources& sources, uint32_t reading,
                   Prefetcher<V>& prefetch) {
  const AttendArgs& args = *s.args;
  const TileLayout& layout = *args.layout;
  const AttendTile& tile = args.tiles[unit.tile];
  ValuePlane plane;
  ValueRows stored;
  ValueRows originals = {};
  plane.pair_bytes = layout.value_bytes / (kSubBlockTokens / 2);
  stored.stride = originals.stride = s.value_dim;
  stored.count = originals.count = kTileTokens;
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    plane.sub_block[b] = tile.detail + b * layout.sub_block_bytes + layout.value_offset;
    stored.sub_block[b] = reinterpret_cast<const uint16_t*>(plane.sub_block[b]);
    if (tile.original_values != nullptr) {
      originals.sub_block[b] = tile.original_values + int64_t{b} * kSubBlockTokens * s.value_dim;
    }
  }
  const uint32_t everyone = (1u << args.group_size) - 1;
  const bool mixed = (sources.any & kSourceOriginalValues) != 0 || reading != everyone;
  const int chunk = mixed ? 1 : V::kChunkHeads;
  for (int head = 0; head < args.group_size; head += chunk) {
    if ((reading >> head & 1) == 0) continue;
    const int left = args.group_size - head;
    const int count = left < chunk ? left : chunk;
    if ((sources.head[head] & kSourceOriginalValues) != 0) {
      AddOriginalValues<V>(s, originals, head, count, prefetch);
    } else {
      AddStoredValues<V>(s, plane, stored, head, count, prefetch);
    }
  }
}

template <typename V>
void RunTile(AttendState& s, int tile_index, Prefetcher<V>& prefetch) {
  const AttendArgs& args = *s.args;
  const AttendTile& tile = args.tiles[tile_index];
  const auto* header = reinterpret_cast<const TileHeader*>(tile.scan);
  const int64_t begin = int64_t{tile_index} * kTileTokens;
  Unit unit;
  unit.tile = tile_index;
  unit.atoms = s.atoms_per_tile;
  unit.first_atom = tile_index * unit.atoms;
  unit.first = args.token_begin > begin ? static_cast<int32_t>(args.token_begin - begin) : 0;
  unit.last = args.token_end < begin + kTileTokens ? static_cast<int32_t>(args.token_end - begin)
                                                   : kTileTokens;
  unit.plain_reach = header->value_radius;
  if (header->value_radius > s.value_radius) s.value_radius = header->value_radius;

  const UnitSources sources = ReadSources(args, tile_index);
  QuadWidths widths[kGroupSizeMax / kQuadHeads];
  ScoreTile<V>(s, unit, sources, widths, prefetch);
  const bool rotated = s.value_levels > 0;
  if (rotated) LoadValueScales<V>(s, tile, &unit);
  const bool bounds_tops = Computes<V>(kHalfWidthPart) && args.layout->witness_bands > 0 &&
                           s.result->top_half_width != nullptr;
  uint32_t reading = 0;
  ForQuads(
      args.group_size, [&](int head, auto count) __attribute__((always_inline)) {
        uint32_t stored_keys = 0;
        uint32_t quantized = 0;
        for (int h = 0; h < count; ++h) {
          const uint8_t source = sources.head[head + h];
          if ((source & kSourceOriginalKeys) == 0) stored_keys |= 1u << h;
          if (rotated && (source & kSourceOriginalValues) == 0) quantized |= 1u << h;
        }
        const QuadWidths& width = widths[head / kQuadHeads];
        uint32_t poisoned = BoundHeads<V>(s, head, count, unit, width);
        const QuadTops tops = TopLogits<V>(s, head, count);
        if (bounds_tops) BoundTopTokens<V>(s, head, unit, tile.scan, width, tops, stored_keys);
        AskBetweenLoops<V>(prefetch);
        reading |= WeighHeads<V>(s, head, count, unit, tops, quantized) << head;
        for (; __builtin_expect(poisoned != 0, 0); poisoned &= poisoned - 1) {
          PoisonAtoms(s, head + __builtin_ctz(poisoned), unit);
        }
      });
  AddTileValues<V>(s, unit, sources, reading, prefetch);
}

// Tokens 64 chunk .. of the tail.
template <typename V>
void RunTail(AttendState& s, int chunk) {
  const AttendArgs& args = *s.args;
  const int64_t begin = int64_t{args.tile_count} * kTileTokens + int64_t{chunk} * kTileTokens;
  const int64_t row = int64_t{chunk} * kTileTokens;
  const int64_t rows_end =
      args.tail_count - row < kTileTokens ? args.tail_count - row : kTileTokens;
  Unit unit;
  unit.tile = -1;
  unit.atoms = 1;
  unit.first_atom = s.first_tail_atom + chunk;
  unit.first = args.token_begin > begin ? static_cast<int32_t>(args.token_begin - begin) : 0;
  unit.last =
      static_cast<int32_t>(args.token_end - begin < rows_end ? args.token_end - begin : rows_end);
  // Rows outside the range are not touched.
  const uint16_t* keys = args.tail_keys + (row + unit.first) * args.tail_key_stride;
  const uint16_t* values = args.tail_values + (row + unit.first) * args.tail_value_stride;
  const int rows_count = unit.last - unit.first;
  const bool bf16 = args.original_dtype == OriginalDtype::kBf16;
  const float norm = bf16 ? RowNormMax<V, true>(s, values, args.tail_value_stride, rows_count)
                          : RowNormMax<V, false>(s, values, args.tail_value_stride, rows_count);
  // At least 8 lanes: under d_v / 8 + 8 roundings; squares below 2^-126 lose under 2^-64 of a norm.
  unit.plain_reach = norm * (1 + 0x1p-18f) + 0x1p-64f;
  if (unit.plain_reach > s.value_radius) s.value_radius = unit.plain_reach;
  unit.first = 0;
  unit.last = rows_count;

  ForQuads(
      args.group_size, [&](int head, auto count) __attribute__((always_inline)) {
        QuadWidths widths = {};  // residuals are 0
        for (int h = 0; h < count; ++h) {
          widths.slack[h] = ScoreOriginals<V>(s, keys, args.tail_key_stride, rows_count, head + h);
        }
        uint32_t poisoned = BoundHeads<V>(s, head, count, unit, widths);
        WeighHeads<V>(s, head, count, unit, TopLogits<V>(s, head, count), 0);
        for (; poisoned != 0; poisoned &= poisoned - 1) {
          PoisonAtoms(s, head + __builtin_ctz(poisoned), unit);
        }
      });
  ValueRows rows;
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    rows.sub_block[b] = values + int64_t{b} * kSubBlockTokens * args.tail_value_stride;
  }
  rows.stride = args.tail_value_stride;
  rows.count = rows_count;
  Prefetcher<V> none = {nullptr, nullptr, nullptr, nullptr, 0, 0};
  for (int head = 0; head < args.group_size; head += V::kChunkHeads) {
    const int left = args.group_size - head;
    AddOriginalValues<V>(s, rows, head, left < V::kChunkHeads ? left : V::kChunkHeads, none);
  }
}

template <typename V>
void RunWholeTail(AttendState* state) {
  const AttendArgs& args = *state->args;
  const int64_t tail_begin = int64_t{args.tile_count} * kTileTokens;
  const int chunks = (args.tail_count + kTileTokens - 1) / kTileTokens;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int64_t begin = tail_begin + int64_t{chunk} * kTileTokens;
    if (begin + kTileTokens <= args.token_begin || begin >= args.token_end) continue;
    RunTail<V>(*state, chunk);
  }
}

template <typename V>
void Run(AttendState* state) {
  AttendState& s = *state;
  const AttendArgs& args = *s.args;
  const TileLayout& layout = *args.layout;
  if (s.key_lines < 0) SetPrefetchLines<V>(state);
  for (int t = s.tile_begin; t < s.tile_end; ++t) {
    const AttendTile& next = args.tiles[t + 1 < s.tile_end ? t + 1 : t];
    Prefetcher<V> prefetch = {next.scan,   next.scan + layout.scan_bytes,
                              next.detail, next.detail + layout.detail_bytes,
                              s.key_lines, s.value_lines};
    RunTile<V>(s, t, prefetch);
  }
  RunWholeTail<V>(state);
}

// One row of `count` floats in vectors; the last one through a padded copy.
template <typename V, typename Body>
[[gnu::always_inline]] inline void ForVectors(int64_t count, float* a, const float* b,
                                              const Body& body) {
  int64_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    V::Store(a + i, body(V::Load(a + i), V::Load(b + i)));
  }
  if (i == count) return;
  float last_a[V::kLanes] = {};
  float last_b[V::kLanes] = {};
  for (int64_t k = i; k < count; ++k) {
    last_a[k - i] = a[k];
    last_b[k - i] = b[k];
  }
  V::Store(last_a, body(V::Load(last_a), V::Load(last_b)));
  for (int64_t k = i; k < count; ++k) a[k] = last_a[k - i];
}

template <typename V>
void FinishAtoms(const AttendState* state) {
  const AttendState& s = *state;
  const int tile_count = s.args->tile_count;
  for (int g = 0; g < s.args->group_size; ++g) {
    const double head_mass = s.heads.mass[g];
    if constexpr (Computes<V>(kAtomPart)) {
      ForVectors<V>(
          s.atom_count, s.result->block_lse + int64_t{g} * s.atom_count,
          s.atom_ref + int64_t{g} * s.atom_count,
          [&](typename V::F mass, typename V::F ref)
              __attribute__((always_inline)) { return LogNat<V>(mass, ref); });
    }
    if constexpr (!Computes<V>(kValueErrorPart)) continue;
    // eta * 2^(tile_ref - ref) / mass. Rounded up: the power is at least 2^-125 (below, Exp2 would
    // give 0), and the factor covers the roundings of the sum (12u), Exp2 (2^-20), product,
    // quotient. A sum of 0 stays 0, any other is at least the smallest normal float.
    const typename V::F inverse =
        V::Set(static_cast<float>((1 + 0x1p-17) / (head_mass > 0 ? head_mass : 1.0)));
    const typename V::F ref = V::Set(s.heads.ref[g]);
    ForVectors<V>(
        tile_count, s.result->tile_value_error + int64_t{g} * tile_count,
        s.tile_ref + int64_t{g} * tile_count,
        [&](typename V::F eta, typename V::F tile_ref) __attribute__((always_inline)) {
          const typename V::F exponent = V::Max(V::Sub(tile_ref, ref), V::Set(kExponentMin));
          const typename V::F share = V::Mul(V::Mul(eta, inverse), Exp2<V>(exponent));
          const typename V::F least = V::Set(0x1p-126f);
          return V::Max(share, V::WhereAtLeast(eta, least, least));
        });
  }
}

template <typename V>
void FinishHeadAtoms(const AttendState* state, int g, int32_t count) {
  const int64_t row = int64_t{g} * state->atom_count;
  ForVectors<V>(
      count, state->result->block_lse + row, state->atom_ref + row,
      [&](typename V::F mass, typename V::F ref)
          __attribute__((always_inline)) { return LogNat<V>(mass, ref); });
}

template <typename V>
int RotatedIndexOf(const AttendState* s, int channel) {
  return s->args->layout->value_format == ValueFormat::kV4 ? RotatedIndex<V, 4>(channel)
                                                           : RotatedIndex<V, 8>(channel);
}

template <typename V>
constexpr AttendKernels MakeAttendKernels() {
  return {Run<V>,          FinishAtoms<V>, RotatedIndexOf<V>, ComputeFinishMasses<V>,
          RunWholeTail<V>, ScanTiles<V>,   ReadSubBlocks<V>,  FinishHeadAtoms<V>};
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_RUN_H_
