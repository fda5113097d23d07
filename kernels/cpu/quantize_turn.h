// Originals by channel, for encoders whose lanes are tokens, and the other way. Not for translation
// units of an instruction set of their own.
#ifndef CERTKV_KERNELS_CPU_QUANTIZE_TURN_H_
#define CERTKV_KERNELS_CPU_QUANTIZE_TURN_H_

#include <cstdint>
#include <cstring>

#include "kernels/core/limits.h"

namespace certkv::cpu {

typedef uint16_t Words8 __attribute__((vector_size(16)));

inline Words8 InterleaveLow(Words8 a, Words8 b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline Words8 InterleaveHigh(Words8 a, Words8 b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

// Transposes 8 x 8 words: three rounds of interleaving row r with row r + 4.
inline void TurnSquare(Words8 x[8]) {
  Words8 y[8];
#pragma GCC unroll 3
  for (int round = 0; round < 3; ++round) {
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      y[2 * r] = InterleaveLow(x[r], x[r + 4]);
      y[2 * r + 1] = InterleaveHigh(x[r], x[r + 4]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) x[r] = y[r];
  }
}

// rows[64][width] to words[width][64], in squares.
inline void Turn(const uint16_t* rows, int64_t stride, int width, uint16_t (*words)[kTileTokens]) {
  for (int t = 0; t < kTileTokens; t += 8) {
    for (int i = 0; i < width; i += 8) {
      Words8 x[8];
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) std::memcpy(&x[r], rows + (t + r) * stride + i, sizeof(x[r]));
      TurnSquare(x);
#pragma GCC unroll 8
      for (int r = 0; r < 8; ++r) std::memcpy(&words[i + r][t], &x[r], sizeof(x[r]));
    }
  }
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_QUANTIZE_TURN_H_
