// Four query heads of a group at a time: what a tile needs once per head is computed in the lanes
// of one vector, so that its latencies are waited for once.
#ifndef CERTKV_KERNELS_CPU_ATTEND_QUAD_H_
#define CERTKV_KERNELS_CPU_ATTEND_QUAD_H_

#include <cstdint>
#include <type_traits>

#include "kernels/core/limits.h"
#include "kernels/core/tile_layout.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

static_assert(kQuadHeads == kSubBlocksPerTile);  // Transpose turns one into the other

// One number for each of kQuadHeads heads. Lanes past the group's end hold numbers of no meaning.
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t QuadInt __attribute__((vector_size(16)));  // of a comparison: 0 or -1
typedef double DoubleQuad __attribute__((vector_size(32)));

[[gnu::always_inline]] inline Quad LoadQuad(const float* p) {
  Quad x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
[[gnu::always_inline]] inline void StoreQuad(float* p, Quad x) {
  __builtin_memcpy(p, &x, sizeof(x));
}
[[gnu::always_inline]] inline Quad SplatQuad(float x) { return Quad{x, x, x, x}; }
[[gnu::always_inline]] inline Quad MaxQuad(Quad a, Quad b) { return a > b ? a : b; }
[[gnu::always_inline]] inline Quad MinQuad(Quad a, Quad b) { return a < b ? a : b; }

// *p += x for kQuadHeads doubles.
[[gnu::always_inline]] inline void AddTo(double* p, const DoubleQuad& x) {
  DoubleQuad sum;
  __builtin_memcpy(&sum, p, sizeof(sum));
  sum += x;
  __builtin_memcpy(p, &sum, sizeof(sum));
}
[[gnu::always_inline]] inline DoubleQuad Widen(Quad x) {
  return __builtin_convertvector(x, DoubleQuad);
}

// The lanes of `count` heads.
[[gnu::always_inline]] inline QuadInt LanesBelow(int count) {
  return QuadInt{0, 1, 2, 3} < QuadInt{count, count, count, count};
}
// Bit h is set where lane h of a comparison is true.
[[gnu::always_inline]] inline uint32_t LaneBits(QuadInt mask) {
  const QuadInt bits = mask & QuadInt{1, 2, 4, 8};
  return static_cast<uint32_t>((bits[0] | bits[1]) | (bits[2] | bits[3]));
}

// Rows by head become rows by sub-block, and back.
struct QuadRows {
  Quad row[kQuadHeads];
};
[[gnu::always_inline]] inline QuadRows Transpose(const QuadRows& x) {
  const Quad low01 = __builtin_shufflevector(x.row[0], x.row[1], 0, 4, 1, 5);
  const Quad low23 = __builtin_shufflevector(x.row[2], x.row[3], 0, 4, 1, 5);
  const Quad high01 = __builtin_shufflevector(x.row[0], x.row[1], 2, 6, 3, 7);
  const Quad high23 = __builtin_shufflevector(x.row[2], x.row[3], 2, 6, 3, 7);
  return {{__builtin_shufflevector(low01, low23, 0, 1, 4, 5),
           __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
           __builtin_shufflevector(high01, high23, 0, 1, 4, 5),
           __builtin_shufflevector(high01, high23, 2, 3, 6, 7)}};
}

// Makes the rows of absent heads 0. (Of all rows at once, it becomes a slow loop of the processor.)
template <typename Row>
[[gnu::always_inline]] inline void ClearFrom(int count, Row* rows) {
  for (int h = count; h < kQuadHeads; ++h) rows[h] = Row{};
}

// How many heads a function takes at once is an int, or this where it is known to be one: kernels
// for a single head per KV head wait for memory, and then for every instruction between its loads.
using OneHead = Index<1>;

// Lane h: the sum, or the maximum, over x[h]. With OneHead over x[0] alone.
template <typename V, typename Count = int>
[[gnu::always_inline]] inline Quad SumOfEach(const typename V::F* x, Count = kQuadHeads) {
  if constexpr (std::is_same_v<Count, OneHead>) return Quad{V::ReduceAdd(x[0])};
  float out[kQuadHeads];
  V::ReduceAdd4(x[0], x[1], x[2], x[3], out);
  return LoadQuad(out);
}
template <typename V, typename Count = int>
[[gnu::always_inline]] inline Quad MaxOfEach(const typename V::F* x, Count = kQuadHeads) {
  if constexpr (std::is_same_v<Count, OneHead>) return Quad{V::ReduceMax(x[0])};
  float out[kQuadHeads];
  V::ReduceMax4(x[0], x[1], x[2], x[3], out);
  return LoadQuad(out);
}

// Calls body(head, count) for the heads of a group, kQuadHeads at a time.
template <typename Body>
[[gnu::always_inline]] inline void ForQuads(int group_size, const Body& body) {
  if (group_size == 1) return body(0, OneHead());
  for (int head = 0; head < group_size; head += kQuadHeads) {
    const int left = group_size - head;
    body(head, left < kQuadHeads ? left : kQuadHeads);
  }
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_QUAD_H_
