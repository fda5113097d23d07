// Weighted sums of one tile's values.
//
// Quantized values: the 15-bit weights of a token pair lie in one dword and meet the codes of both
// tokens in one multiply-add of words. 64 weights * 32767 * 255 < 2^31. The sums are added to
// `rotated` in the order in which the loops make them (RotatedIndex undoes it once per read).
// 16-bit values: float weights, rows of d_v words; added to `plain`.
#ifndef CERTKV_KERNELS_CPU_ATTEND_VALUES_H_
#define CERTKV_KERNELS_CPU_ATTEND_VALUES_H_

#include <cstdint>

#include "kernels/core/value_code.h"
#include "kernels/cpu/attend_keys.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/prefetch.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

// A zone is 8 dwords: 32 channels of V4 or 16 of V8, for a token pair. A slice is one vector of
// dwords, kLanes / 8 zones; the last slice may be half empty.
template <int kBits>
inline constexpr int kCodesPerWord = 16 / kBits;

template <typename V, int kBits>
[[gnu::always_inline]] inline int RotatedIndex(int channel) {
  constexpr int kZonesPerSlice = V::kLanes / 8;
  constexpr int kZoneChannels = 8 * kCodesPerWord<kBits>;
  const int zone = channel / kZoneChannels;
  const int code = channel % kZoneChannels / 8;
  const int lane = zone % kZonesPerSlice * 8 + channel % 8;
  return (zone / kZonesPerSlice * kCodesPerWord<kBits> + code) * V::kLanes + lane;
}

// Scales of kLanes tokens from their codes (value_code.h).
template <typename V>
[[gnu::always_inline]] inline typename V::F ValueScales(const uint8_t* codes) {
  const typename V::I bits = V::template ShiftLeft32<code::kValueScaleShift>(V::LoadBytes(codes));
  return V::Mul(V::AsFloat(bits), V::Set(code::kValueScaleUnit));
}

// Minus their offsets, for codes 0 .. `levels` - 1.
template <typename V>
[[gnu::always_inline]] inline typename V::F ValueShifts(const uint8_t* codes, float levels) {
  const typename V::F zeros = V::ToFloat(V::LoadBytes(codes));
  return V::NegMulAdd(zeros, V::Set(levels / 256), V::Set(0.5f));  // exact
}

// The largest of a unit's value scales, and of its zeros' magnitudes, in lanes.
template <typename V>
struct ValueReach {
  typename V::F scale = V::Zero();
  typename V::F zero = V::Zero();
};

// Decodes kLanes tokens, with the zeros' codes a plane after the scales', for codes 0 .. `levels`
// - 1.
template <typename V>
[[gnu::always_inline]] inline void DecodeValueCodings(const uint8_t* codes, float levels,
                                                      float* scales, float* zeros,
                                                      ValueReach<V>* reach) {
  const typename V::F scale = ValueScales<V>(codes);
  const typename V::F zero = V::Mul(ValueShifts<V>(codes + kTileTokens, levels), scale);  // exact
  V::Store(scales, scale);
  V::Store(zeros, zero);
  reach->scale = V::Max(reach->scale, scale);
  reach->zero = V::Max(reach->zero, V::Abs(zero));
}

// Bound on the magnitudes of what is summed of rotated values, for a weight of 1.
template <typename V>
[[gnu::always_inline]] inline float RotatedReach(float level_max, const ValueReach<V>& reach) {
  float maxima[4];
  V::ReduceMax4(reach.scale, reach.zero, reach.scale, reach.zero, maxima);
  return level_max * maxima[0] + maxima[1];
}

struct ValuePlane {
  const uint8_t* sub_block[kSubBlocksPerTile];  // values of each sub-block
  int64_t pair_bytes;                           // of one token pair
};

// Codes kFirst .. kFirst + kCount - 1 of the words of x. Odd V4 codes stay times 16.
template <typename V, int kBits, int kFirst, int kCount>
[[gnu::always_inline]] inline void UnpackCodes(typename V::I x, typename V::I* codes) {
  if constexpr (kBits == 8) {
    codes[0] = V::AndI(x, V::SetI(0x00ff00ff));
    codes[1] = V::template ShiftRight16<8>(x);
  } else {
    const typename V::I even = V::SetI(0x000f000f);
    const typename V::I odd = V::SetI(0x00f000f0);
    if constexpr (kFirst == 0) {
      codes[0] = V::AndI(x, even);
      codes[1] = V::AndI(x, odd);
    }
    if constexpr (kFirst + kCount == 4) {
      const typename V::I upper = V::template ShiftRight16<8>(x);
      codes[2 - kFirst] = V::AndI(upper, even);
      codes[3 - kFirst] = V::AndI(upper, odd);
    }
  }
}

// Slices slice .. slice + kSlices - 1, codes kFirst .. kFirst + kCount - 1 of each word.
template <typename V, int kBits, int kHeads, int kSlices, int kFirst, int kCount, bool kPartial>
[[gnu::always_inline]] inline void AddSlices(AttendState& s, const ValuePlane& plane, int head,
                                             int slice, Prefetcher<V>& prefetch) {
  constexpr int kSums = kHeads * kSlices * kCount;
  typename V::I sums[kSums];
  Unroll<kSums>([&](auto k) __attribute__((always_inline)) { sums[k] = V::ZeroI(); });
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    const uint8_t* dwords = plane.sub_block[b] + int64_t{4} * V::kLanes * slice;
    const int16_t* weights = s.weights + head * kTileTokens + b * kSubBlockTokens;
    for (int pair = 0; pair < kSubBlockTokens / 2; pair += 2) {
      prefetch.ValueStep();
      Unroll<2>([&](auto u) __attribute__((always_inline)) {
        const uint8_t* at = dwords + (pair + u) * plane.pair_bytes;
        Unroll<kSlices>([&](auto z) __attribute__((always_inline)) {
          const void* p = at + 4 * V::kLanes * z;
          const typename V::I x = kPartial ? V::LoadI8(p) : V::LoadI(p);
          typename V::I codes[kCount];
          UnpackCodes<V, kBits, kFirst, kCount>(x, codes);
          Unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
            int32_t two_weights;
            __builtin_memcpy(&two_weights, weights + h * kTileTokens + 2 * (pair + u), 4);
            const typename V::I w = V::SetI(two_weights);
            Unroll<kCount>([&](auto n) __attribute__((always_inline)) {
              typename V::I& sum = sums[(h * kSlices + z) * kCount + n];
              sum = V::MulAddWords(sum, codes[n], w);
            });
          });
        });
      });
    }
  }
  Unroll<kSums>([&](auto k) __attribute__((always_inline)) {
    constexpr int kCode = kFirst + decltype(k)::value % kCount;
    const int h = k / (kSlices * kCount);
    const int z = k / kCount % kSlices;
    float* out =
        s.rotated + (head + h) * kRow + ((slice + z) * kCodesPerWord<kBits> + kCode) * V::kLanes;
    constexpr float kFactor = kBits == 4 && kCode % 2 == 1 ? 1.0f / 16 : 1.0f;
    const typename V::F unit = V::Set(s.weight_unit[head + h] * kFactor);
    V::Store(out, V::MulAdd(V::ToFloat(sums[k]), unit, V::Load(out)));
  });
}

// Whether the codes of a word are taken in two passes, for want of accumulators, and how many
// slices a pass takes.
template <typename V, int kBits>
constexpr bool TwoPasses(int heads) {
  return kBits == 4 && heads * kCodesPerWord<kBits> > V::kAccumulators;
}
template <typename V, int kBits>
constexpr int SlicesAtOnce(int heads) {
  const int fit = V::kAccumulators / (heads * kCodesPerWord<kBits>);
  return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

template <typename V, int kBits, int kHeads, int kSlices, bool kPartial>
[[gnu::always_inline]] inline void AddAllCodes(AttendState& s, const ValuePlane& plane, int head,
                                               int slice, Prefetcher<V>& prefetch) {
  constexpr int kCodes = kCodesPerWord<kBits>;
  if constexpr (!TwoPasses<V, kBits>(kHeads)) {
    AddSlices<V, kBits, kHeads, kSlices, 0, kCodes, kPartial>(s, plane, head, slice, prefetch);
  } else {
    AddSlices<V, kBits, kHeads, kSlices, 0, 2, kPartial>(s, plane, head, slice, prefetch);
    AddSlices<V, kBits, kHeads, kSlices, 2, 2, kPartial>(s, plane, head, slice, prefetch);
  }
}

template <typename V, int kBits, int kHeads>
void AddQuantizedValues(AttendState& s, const ValuePlane& plane, int head, Prefetcher<V>& cursor) {
  constexpr int kSlices = SlicesAtOnce<V, kBits>(kHeads);
  Prefetcher<V> prefetch = cursor;  // in registers
  const int slice_bytes = 4 * V::kLanes;
  const int whole = static_cast<int>(plane.pair_bytes) / slice_bytes;
  int slice = 0;
  for (; slice + kSlices <= whole; slice += kSlices) {
    AddAllCodes<V, kBits, kHeads, kSlices, false>(s, plane, head, slice, prefetch);
  }
  if constexpr (kSlices > 1) {
    for (; slice < whole; ++slice) {
      AddAllCodes<V, kBits, kHeads, 1, false>(s, plane, head, slice, prefetch);
    }
  }
  if constexpr (V::kLanes > 8) {
    if (plane.pair_bytes % slice_bytes != 0) {
      AddAllCodes<V, kBits, kHeads, 1, true>(s, plane, head, slice, prefetch);
    }
  }
  cursor = prefetch;
}

// Rows of 16-bit values: token t at sub_block[t / 16] + (t % 16) * stride.
struct ValueRows {
  const uint16_t* sub_block[kSubBlocksPerTile];
  int64_t stride;
  int count;  // tokens; the rows of others are not read
};

// Channels kVectors * kLanes from `channel`.
template <typename V, bool kBf16, int kHeads, int kVectors>
[[gnu::always_inline]] inline void AddRowChannels(AttendState& s, const ValueRows& rows, int head,
                                                  int channel, Prefetcher<V>& prefetch) {
  constexpr int kSums = kHeads * kVectors;
  const float* weights = s.scores + head * kTileTokens;
  typename V::F sums[kSums];
  Unroll<kSums>([&](auto k) __attribute__((always_inline)) { sums[k] = V::Zero(); });
  for (int begin = 0; begin < rows.count; begin += kSubBlockTokens) {
    const uint16_t* row = rows.sub_block[begin / kSubBlockTokens] + channel;
    const int left = rows.count - begin;
    const int tokens = left < kSubBlockTokens ? left : kSubBlockTokens;
    for (int t = 0; t < tokens; ++t, row += rows.stride) {
      if (t % 2 == 0) prefetch.ValueStep();
      typename V::F values[kVectors];
      Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        values[v] = Load16<V, kBf16>(row + v * V::kLanes);
      });
      Unroll<kHeads>([&](auto h) __attribute__((always_inline)) {
        const typename V::F w = V::Set(weights[h * kTileTokens + begin + t]);
        Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          typename V::F& sum = sums[h * kVectors + v];
          sum = V::MulAdd(values[v], w, sum);
        });
      });
    }
  }
  Unroll<kSums>([&](auto k) __attribute__((always_inline)) {
    float* out = s.plain + (head + k / kVectors) * kRow + channel + k % kVectors * V::kLanes;
    V::Store(out, V::Add(V::Load(out), sums[k]));
  });
}

template <typename V, bool kBf16, int kHeads, int kVectors>
[[gnu::always_inline]] inline void AddRowsFrom(AttendState& s, const ValueRows& rows, int head,
                                               int channel, Prefetcher<V>& prefetch) {
  for (; channel + kVectors * V::kLanes <= s.value_dim; channel += kVectors * V::kLanes) {
    AddRowChannels<V, kBf16, kHeads, kVectors>(s, rows, head, channel, prefetch);
  }
  if constexpr (kVectors > 1) {
    AddRowsFrom<V, kBf16, kHeads, kVectors / 2>(s, rows, head, channel, prefetch);
  }
}

// Vectors of a row that the loop over `heads` heads takes at once.
template <typename V>
constexpr int RowVectors(int heads) {
  const int fit = V::kAccumulators / heads;
  return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

template <typename V, bool kBf16, int kHeads>
void AddRowValues(AttendState& s, const ValueRows& rows, int head, Prefetcher<V>& cursor) {
  constexpr int kVectors = RowVectors<V>(kHeads);
  Prefetcher<V> prefetch = cursor;  // in registers
  AddRowsFrom<V, kBf16, kHeads, kVectors>(s, rows, head, 0, prefetch);
  cursor = prefetch;
}

// Largest ||v|| of the rows, up to rounding; +infinity when one isn't finite.
template <typename V, bool kBf16>
float RowNormMax(const AttendState& s, const uint16_t* rows, int64_t stride, int count) {
  float norm_max = 0;
  float norm_sum = 0;
  for (int t = 0; t < count; ++t) {
    typename V::F sum = V::Zero();
    for (int i = 0; i < s.value_dim; i += V::kLanes) {
      const typename V::F value = Load16<V, kBf16>(rows + t * stride + i);
      sum = V::MulAdd(value, value, sum);
    }
    const float norm = V::ReduceAdd(sum);
    norm_sum += norm;
    if (norm > norm_max) norm_max = norm;
  }
  return norm_sum <= kSquareMax ? __builtin_sqrtf(norm_max) : __builtin_inff();
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_ATTEND_VALUES_H_
