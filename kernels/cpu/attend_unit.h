// Steps that reads of whole tiles and of single sub-blocks share.
#ifndef CERTKV_KERNELS_CPU_ATTEND_UNIT_H_
#define CERTKV_KERNELS_CPU_ATTEND_UNIT_H_

#include <cstdint>

#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_softmax.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/attend_values.h"
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

// Half-width of one head's atom before caps: what is known of the residuals, and the rest.
struct HeadWidth {
  float residual[kSubBlocksPerTile];
  float tile;  // residual of any token of the tile, without witnesses
  float slack;
};

// What the atom's half-width has beside the residual.
[[gnu::always_inline]] inline float SlackOf(const AttendArgs& args, const HeadWidth& width) {
  const float slack = width.slack + kWeightSlackNat;
  return args.soft_cap > 0 ? slack + args.soft_cap * kSoftCapSlack : slack;
}
[[gnu::always_inline]] inline float HalfWidthOf(float residual, float slack) {
  const float c = (residual + slack) * kHalfWidthInflation;
  return c <= kLogitHalfWidthMaxNat ? c : __builtin_inff();
}

// Caps the logits, hides those outside the range and writes the half-widths of head g's atoms.
template <typename V>
void BoundHead(AttendState& s, int g, const Unit& unit, const HeadWidth& width) {
  const AttendArgs& args = *s.args;
  float* scores = s.scores + g * kTileTokens;
  const float slack = SlackOf(args, width);
  if (args.soft_cap > 0) {
    for (int t = 0; t < kTileTokens; t += V::kLanes) {
      V::Store(scores + t, SoftCap<V>(V::Load(scores + t), args.soft_cap));
    }
  }
  const bool poisoned = !(slack < __builtin_inff());
  const int first = poisoned ? kTileTokens : unit.first;
  for (int t = 0; t < first; ++t) scores[t] = -__builtin_inff();
  for (int t = unit.last; t < kTileTokens; ++t) scores[t] = -__builtin_inff();
  if (poisoned) s.heads[g].poisoned = true;
  if constexpr (!V::kCertified) return;

  float* half_widths = s.result->logit_half_width + int64_t{g} * s.atom_count + unit.first_atom;
  const int atom_tokens = kTileTokens / unit.atoms;
  for (int a = 0; a < unit.atoms; ++a) {
    const bool empty = unit.last <= a * atom_tokens || unit.first >= (a + 1) * atom_tokens;
    half_widths[a] = empty ? 0.0f : HalfWidthOf(width.residual[a], slack);
  }
  if (s.result->top_half_width == nullptr) return;
  float* tops = s.result->top_half_width + int64_t{g} * s.atom_count + unit.first_atom;
  for (int a = 0; a < unit.atoms; ++a) tops[a] = half_widths[a];
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
