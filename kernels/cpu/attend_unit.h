// Steps that reads of whole tiles and of single sub-blocks share.
#ifndef CERTKV_KERNELS_CPU_ATTEND_UNIT_H_
#define CERTKV_KERNELS_CPU_ATTEND_UNIT_H_

#include <cstdint>

#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_quad.h"
#include "kernels/cpu/attend_softmax.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/attend_values.h"
#include "kernels/cpu/certificate_parts.h"
#include "kernels/cpu/prefetch.h"

namespace certkv::cpu {

// Calls body(Index<n>()) for n = heads, which is in [1, V::kChunkHeads].
template <typename V, int kHeads = 1, typename Body>
[[gnu::always_inline]] inline void WithHeads(int heads, const Body& body) {
  if constexpr (kHeads < V::kChunkHeads) {
    if (heads != kHeads) return WithHeads<V, kHeads + 1>(heads, body);
  }
  body(Index<kHeads>());
}

// Half-widths of a unit's atoms before caps, nats: what is known of the residuals, and the rest.
struct QuadWidths {
  Quad residual[kSubBlocksPerTile];
  Quad tile;  // residual of any token of the tile, without witnesses
  Quad slack;
};

// What the atoms' half-widths have beside the residuals.
[[gnu::always_inline]] inline Quad SlackOf(const AttendArgs& args, const QuadWidths& widths) {
  const Quad slack = widths.slack + kWeightSlackNat;
  return args.soft_cap > 0 ? slack + args.soft_cap * kSoftCapSlack : slack;
}
[[gnu::always_inline]] inline Quad HalfWidthOf(Quad residual, Quad slack) {
  const Quad c = (residual + slack) * kHalfWidthInflation;
  return c <= kLogitHalfWidthMaxNat ? c : SplatQuad(__builtin_inff());
}

// Writes one row per atom of the unit to those of heads [head, head + count) in `out`.
template <typename Count>
[[gnu::always_inline]] inline void StoreAtoms(const AttendState& s, int head, Count count,
                                              const Unit& unit, const Quad* atoms, float* out) {
  float* at = out + int64_t{head} * s.atom_count + unit.first_atom;
  if (unit.atoms == 1) {
    for (int h = 0; h < count; ++h) at[int64_t{h} * s.atom_count] = atoms[0][h];
    return;
  }
  const QuadRows by_head = Transpose({{atoms[0], atoms[1], atoms[2], atoms[3]}});
  for (int h = 0; h < count; ++h) StoreQuad(at + int64_t{h} * s.atom_count, by_head.row[h]);
}

// Caps the logits of heads [head, head + count), hides those outside the range and writes the
// half-widths of the atoms. Bit h of the result: the logits of lane h can't be used.
template <typename V, typename Count>
[[gnu::always_inline]] inline uint32_t BoundHeads(AttendState& s, int head, Count count,
                                                  const Unit& unit, const QuadWidths& widths) {
  const AttendArgs& args = *s.args;
  const Quad slack = SlackOf(args, widths);
  const uint32_t poisoned = LaneBits(~(slack < __builtin_inff()) & LanesBelow(count));
  const bool whole = unit.first == 0 && unit.last == kTileTokens;
  if (__builtin_expect(args.soft_cap > 0 || !whole || poisoned != 0, 0)) {
    for (int h = 0; h < count; ++h) {
      float* scores = s.scores + (head + h) * kTileTokens;
      if (args.soft_cap > 0) {
        for (int t = 0; t < kTileTokens; t += V::kLanes) {
          V::Store(scores + t, SoftCap<V>(V::Load(scores + t), args.soft_cap));
        }
      }
      const bool hidden = (poisoned >> h & 1) != 0;
      if (hidden) s.heads.poisoned[head + h] = true;
      const int first = hidden ? kTileTokens : unit.first;
      for (int t = 0; t < first; ++t) scores[t] = -__builtin_inff();
      for (int t = unit.last; t < kTileTokens; ++t) scores[t] = -__builtin_inff();
    }
  }
  if constexpr (!Computes<V>(kHalfWidthPart)) return poisoned;

  Quad atoms[kSubBlocksPerTile];
  const int atom_tokens = kTileTokens / unit.atoms;
  for (int a = 0; a < unit.atoms; ++a) {
    const bool empty = unit.last <= a * atom_tokens || unit.first >= (a + 1) * atom_tokens;
    atoms[a] = empty ? Quad{} : HalfWidthOf(widths.residual[a], slack);
  }
  StoreAtoms(s, head, count, unit, atoms, s.result->logit_half_width);
  if (s.result->top_half_width != nullptr) {
    StoreAtoms(s, head, count, unit, atoms, s.result->top_half_width);
  }
  return poisoned;
}

// An atom whose logits couldn't be computed: everything about it is unknown.
[[gnu::always_inline]] inline void PoisonAtoms(AttendState& s, int g, const Unit& unit) {
  const int64_t at = int64_t{g} * s.atom_count + unit.first_atom;
  for (int a = 0; a < unit.atoms; ++a) {
    if (s.result->logit_half_width[at + a] == 0.0f) continue;  // no token in the range
    s.result->block_lse[at + a] = __builtin_inff();
    s.result->block_max_logit[at + a] = __builtin_inff();
    s.atom_ref[at + a] = 0.0f;
  }
}

template <typename V>
void AddStoredValues(AttendState& s, const ValuePlane& plane, const ValueRows& rows, int head,
                     int count, Prefetcher<V>& prefetch) {
  WithHeads<V>(
      count, [&](auto n) __attribute__((always_inline)) {
        constexpr int kHeads = decltype(n)::value;
        switch (s.args->layout->value_format) {
          case ValueFormat::kV4:
            return AddQuantizedValues<V, 4, kHeads>(s, plane, head, prefetch);
          case ValueFormat::kV8:
            return AddQuantizedValues<V, 8, kHeads>(s, plane, head, prefetch);
          case ValueFormat::kF16:
            return AddRowValues<V, false, kHeads>(s, rows, head, prefetch);
          case ValueFormat::kBf16:
            return AddRowValues<V, true, kHeads>(s, rows, head, prefetch);
        }
      });
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_UNIT_H_
