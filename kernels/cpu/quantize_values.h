// V4 and V8 by rows of tokens: lanes of vectors are channels, as the originals lie and as the codes
// are stored, so that nothing is transposed. For instruction sets of 8 lanes. Float operations are
// those of docs/formats.md, one for one: a butterfly inside a vector is x * (+-1) + partner, whose
// product is exact.
#ifndef CERTKV_KERNELS_CPU_QUANTIZE_VALUES_H_
#define CERTKV_KERNELS_CPU_QUANTIZE_VALUES_H_

#include <cstdint>

#include "kernels/cpu/attend_keys.h"
#include "kernels/cpu/quantize_coding.h"
#include "kernels/cpu/quantize_state.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

inline constexpr int kRowTokens = 8;  // tokens whose codings are chosen together

// Rotated rows of kRowTokens tokens and what their codings and bounds need.
template <typename V>
struct RotatedRows {
  alignas(64) float row[kRowTokens][kHeadDimMax];
  float min[kRowTokens];
  float max[kRowTokens];
  // Largest magnitudes of the originals where they are BF16, else 0: those of FP16 have squares
  // that say as much.
  float original[kRowTokens];
  float square[kRowTokens];  // their sums of squares
};

// Butterflies of distance 8 kDistance channels among kVectors vectors, then of twice that, ...
template <typename V, int kVectors, int kDistance = 1>
[[gnu::always_inline]] inline void VectorButterflies(typename V::F* x) {
  if constexpr (kDistance < kVectors) {
    Unroll<kVectors / 2>([&](auto pair) __attribute__((always_inline)) {
      constexpr int kIndex = decltype(pair)::value;
      constexpr int a = kIndex / kDistance * 2 * kDistance + kIndex % kDistance;
      const typename V::F first = x[a];
      const typename V::F second = x[a + kDistance];
      x[a] = V::Add(first, second);
      x[a + kDistance] = V::Sub(first, second);
    });
    VectorButterflies<V, kVectors, 2 * kDistance>(x);
  }
}

template <typename V>
struct RowSums {
  typename V::I original = V::ZeroI();  // as bits
  typename V::F square = V::Zero();
  typename V::F min = V::Zero();
  typename V::F max = V::Zero();

  [[gnu::always_inline]] void AddRotated(typename V::F y) {
    min = V::Min(min, y);
    max = V::Max(max, y);
  }
};

// The first stages of a block of n >= 8 kVectors channels: distances below 8 kVectors. The last
// ones, when the block is larger, are up to JoinChunks.
template <typename V, bool kBf16, int kVectors, bool kWhole>
[[gnu::always_inline]] inline void RotateChunk(const uint16_t* words, float factor, float* out,
                                               RowSums<V>* sums) {
  typename V::F x[kVectors];
  Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
    const typename V::F value = Load16<V, kBf16>(words + v * V::kLanes);
    if constexpr (kBf16) {
      sums->original = V::MaxUnsigned(sums->original, V::AsInt(V::Abs(value)));
    }
    sums->square = V::MulAdd(value, value, sums->square);
    x[v] = V::LaneButterflies(value);
  });
  VectorButterflies<V, kVectors>(x);
  Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
    if constexpr (kWhole) {
      x[v] = V::Mul(x[v], V::Set(factor));
      sums->AddRotated(x[v]);
    }
    V::Store(out + v * V::kLanes, x[v]);
  });
}

// Distances 64, 128, ... of a block of kChunks * 64 channels, and its factor.
template <typename V, int kChunks>
[[gnu::always_inline]] inline void JoinChunks(float factor, float* out, RowSums<V>* sums) {
  for (int i = 0; i < 64; i += V::kLanes) {
    typename V::F x[kChunks];
    Unroll<kChunks>([&](auto c)
                        __attribute__((always_inline)) { x[c] = V::Load(out + 64 * c + i); });
    VectorButterflies<V, kChunks>(x);
    Unroll<kChunks>([&](auto c) __attribute__((always_inline)) {
      const typename V::F y = V::Mul(x[c], V::Set(factor));
      sums->AddRotated(y);
      V::Store(out + 64 * c + i, y);
    });
  }
}

template <typename V, bool kBf16>
[[gnu::always_inline]] inline void RotateRow(const uint16_t* words, int dim, int u,
                                             RotatedRows<V>* rows) {
  RowSums<V> sums;
  for (int begin = 0; begin < dim;) {
    int n = 16;
    while (2 * n <= dim - begin) n *= 2;
    const auto factor = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(n)));
    float* out = rows->row[u] + begin;
    if (n == 16) {
      RotateChunk<V, kBf16, 2, true>(words + begin, factor, out, &sums);
    } else if (n == 32) {
      RotateChunk<V, kBf16, 4, true>(words + begin, factor, out, &sums);
    } else if (n == 64) {
      RotateChunk<V, kBf16, 8, true>(words + begin, factor, out, &sums);
    } else {
      for (int i = 0; i < n; i += 64) {
        RotateChunk<V, kBf16, 8, false>(words + begin + i, factor, out + i, &sums);
      }
      if (n == 128) JoinChunks<V, 2>(factor, out, &sums);
      if (n == 256) JoinChunks<V, 4>(factor, out, &sums);
    }
    begin += n;
  }
  rows->min[u] = -V::ReduceMax(V::Sub(V::Zero(), sums.min));
  rows->max[u] = V::ReduceMax(sums.max);
  rows->original[u] = kBf16 ? __builtin_bit_cast(float, ReduceMaxUnsigned<V>(sums.original)) : 0.0f;
  rows->square[u] = V::ReduceAdd(sums.square);
}

// What two neighbouring tokens, rows u and u + 1, are encoded with, and their squared errors.
template <typename V>
struct PairCoding {
  typename V::F scale[2];
  typename V::F inverse[2];
  typename V::F offset[2];
  typename V::F error[2] = {V::Zero(), V::Zero()};

  // Dwords of kZoneVectors vectors of channels from `channel`.
  template <int kBits, int kZoneVectors>
  [[gnu::always_inline]] typename V::I Encode(const RotatedRows<V>& rows, int u, int channel) {
    typename V::I packed = V::ZeroI();
    Unroll<kZoneVectors>([&](auto n) __attribute__((always_inline)) {
      Unroll<2>([&](auto odd) __attribute__((always_inline)) {
        const typename V::F y = V::Load(rows.row[u + odd] + channel + n * V::kLanes);
        const typename V::I code = V::ToInt(V::Add(V::Mul(y, inverse[odd]), offset[odd]));
        constexpr int kBit = 16 * decltype(odd)::value + kBits * decltype(n)::value;
        packed = V::OrI(packed, V::template ShiftLeft32<kBit>(code));
        const typename V::F level = V::Sub(V::ToFloat(code), offset[odd]);
        const typename V::F left = V::NegMulAdd(level, scale[odd], y);
        error[odd] = V::MulAdd(left, left, error[odd]);
      });
    });
    return packed;
  }
};

// Codes of rows u and u + 1 as dwords; and their squared errors.
template <typename V, int kBits>
[[gnu::always_inline]] inline void EncodePair(const RotatedRows<V>& rows, const float* scale,
                                              const float* inverse, const float* offset, int u,
                                              int dim, uint8_t* out, float* error) {
  constexpr int kCodes = 16 / kBits;
  constexpr int kZoneChannels = V::kLanes * kCodes;
  PairCoding<V> pair;
  for (int odd = 0; odd < 2; ++odd) {
    pair.scale[odd] = V::Set(scale[u + odd]);
    pair.inverse[odd] = V::Set(inverse[u + odd]);
    pair.offset[odd] = V::Set(offset[u + odd]);
  }
  int channel = 0;
  for (; channel + kZoneChannels <= dim; channel += kZoneChannels, out += 4 * V::kLanes) {
    V::StoreI(out, pair.template Encode<kBits, kCodes>(rows, u, channel));
  }
  // Dims are multiples of 16.
  if (channel < dim) V::StoreI(out, pair.template Encode<kBits, kCodes / 2>(rows, u, channel));
  error[u] = V::ReduceAdd(pair.error[0]);
  error[u + 1] = V::ReduceAdd(pair.error[1]);
}

template <typename V, int kBits, bool kBf16>
bool EncodeValueRows(QuantizeState& s) {
  const QuantizeTileArgs& args = *s.args;
  const TileLayout& layout = *args.layout;
  const int dim = layout.value_dim;
  const int64_t pair_bytes = layout.value_bytes / (kSubBlockTokens / 2);
  RotatedRows<V> rows;
  typename V::I magnitude = V::ZeroI();
  for (int t = 0; t < kTileTokens; t += kRowTokens) {
    for (int u = 0; u < kRowTokens; ++u) {
      RotateRow<V, kBf16>(args.values + (t + u) * args.value_stride, dim, u, &rows);
    }
    uint8_t* block = args.detail + t / kSubBlockTokens * layout.sub_block_bytes;
    V::Store(s.value_norm + t, V::Load(rows.square));  // the root is taken by the caller
    magnitude = V::MaxUnsigned(magnitude, V::AsInt(V::Load(kBf16 ? rows.original : rows.square)));
    const RowCoding<V> coding =
        ChooseRowCoding<V>(s, t, (1 << kBits) - 1, V::Load(rows.min), V::Load(rows.max),
                           V::Load(rows.original), [&](int u) {
                             for (float& y : rows.row[u]) y = 0;
                           });
    float scale[kRowTokens];
    float inverse[kRowTokens];
    float offset[kRowTokens];
    V::Store(scale, coding.scale);
    V::Store(inverse, coding.inverse);
    V::Store(offset, coding.offset);
    for (int u = 0; u < kRowTokens; u += 2) {
      uint8_t* out = block + layout.value_offset + (t % kSubBlockTokens + u) / 2 * pair_bytes;
      EncodePair<V, kBits>(rows, scale, inverse, offset, u, dim, out, s.value_error + t);
    }
  }
  return ReduceMaxUnsigned<V>(magnitude) < kInfinityBits;
}

template <typename V>
bool EncodeRotatedRows(QuantizeState* state) {
  const bool v4 = state->args->layout->value_format == ValueFormat::kV4;
  if (v4 && state->bf16) return EncodeValueRows<V, 4, true>(*state);
  if (v4) return EncodeValueRows<V, 4, false>(*state);
  if (state->bf16) return EncodeValueRows<V, 8, true>(*state);
  return EncodeValueRows<V, 8, false>(*state);
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_QUANTIZE_VALUES_H_
