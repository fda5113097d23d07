// The encoders of one instruction set. Codes, scales and zeros are defined by single IEEE float
// operations in a fixed order (docs/formats.md): no multiply-add here may be fused, so products and
// sums of codes are written apart, and only bounds use MulAdd.
#ifndef CERTKV_KERNELS_CPU_QUANTIZE_RUN_H_
#define CERTKV_KERNELS_CPU_QUANTIZE_RUN_H_

#include <cstdint>

#include "kernels/cpu/attend_keys.h"
#include "kernels/cpu/quantize_coding.h"
#include "kernels/cpu/quantize_state.h"
#include "kernels/cpu/quantize_values.h"
#include "kernels/cpu/unroll.h"

namespace certkv::cpu {

// Ranges of 16 kVectors channels, and of all of them into `low` and `high`, in order (OrderWords).
template <typename V, int kVectors>
void FindRanges(const uint16_t* rows, int64_t stride, uint16_t* min, uint16_t* max,
                typename V::W* low, typename V::W* high) {
  typename V::W smallest[kVectors];
  typename V::W largest[kVectors];
  Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
    smallest[v] = largest[v] = V::OrderWords(V::LoadWords(rows + 16 * v));
  });
  for (int t = 1; t < kTileTokens; ++t) {
    const uint16_t* const row = rows + t * stride;
    Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
      const typename V::W x = V::OrderWords(V::LoadWords(row + 16 * v));
      smallest[v] = V::MinWords(smallest[v], x);
      largest[v] = V::MaxWords(largest[v], x);
    });
  }
  Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
    V::StoreWords(min + 16 * v, V::OrderWords(smallest[v]));
    V::StoreWords(max + 16 * v, V::OrderWords(largest[v]));
    *low = V::MinWords(*low, smallest[v]);
    *high = V::MaxWords(*high, largest[v]);
  });
}

// Infinities and NaN are beyond every finite number in the order of words.
template <typename V>
bool FindKeyRanges(QuantizeState* state) {
  QuantizeState& s = *state;
  const QuantizeTileArgs& args = *s.args;
  const int dim = args.layout->head_dim;
  typename V::W low = V::OrderWords(V::LoadWords(args.keys));
  typename V::W high = low;
  int i = 0;
  for (; i + 64 <= dim; i += 64) {
    FindRanges<V, 4>(args.keys + i, args.key_stride, s.key_min + i, s.key_max + i, &low, &high);
  }
  for (; i < dim; i += 16) {
    FindRanges<V, 1>(args.keys + i, args.key_stride, s.key_min + i, s.key_max + i, &low, &high);
  }
  uint16_t lows[16];
  uint16_t highs[16];
  V::StoreWords(lows, low);
  V::StoreWords(highs, high);
  bool valid = true;
  for (int k = 0; k < 16; ++k) {
    valid &= static_cast<int16_t>(highs[k]) <= static_cast<int16_t>(s.key_limit);
    valid &= static_cast<int16_t>(lows[k]) >= -1 - static_cast<int16_t>(s.key_limit);
  }
  return valid;
}

// Scales and zeros of all key channels, to the scan record.
template <typename V>
void ChooseKeyCodings(QuantizeState& s) {
  const TileLayout& layout = *s.args->layout;
  auto* scale_bits = reinterpret_cast<uint16_t*>(s.args->scan + layout.scale_offset);
  auto* zero_bits = reinterpret_cast<uint16_t*>(s.args->scan + layout.zero_offset);
  for (int i = 0; i < layout.head_dim; i += V::kLanes) {
    const typename V::F min = LoadOriginal<V>(s, s.key_min + i);
    const typename V::F max = LoadOriginal<V>(s, s.key_max + i);
    Coding<V> coding;
    if (s.code_centre == 0) {
      coding.Choose(min, max, 255, scale_bits + i, zero_bits + i);
    } else {
      coding.ChooseCentred(min, max, s.code_level_max, s.code_centre, scale_bits + i,
                           zero_bits + i);
    }
  }
}

// Squared norms of k^ at the depths K8, K6, K4, for one vector of tokens. `middles` are zero +
// centre * scale of the channel at those depths, rounded.
template <typename V>
struct DepthNorms {
  typename V::F square[3];

  template <int kDepth>
  [[gnu::always_inline]] void Add(typename V::I code, typename V::F scale, const float* middles) {
    constexpr int kMask[3] = {0xff, 0xfc, 0xf0};
    const typename V::I bits = kDepth == 0 ? code : V::AndI(code, V::SetI(kMask[kDepth]));
    const typename V::F key = V::MulAdd(V::ToFloat(bits), scale, V::Set(middles[kDepth]));
    square[kDepth] = V::MulAdd(key, key, square[kDepth]);
  }
};

// One channel's codes into the planes. kPlace is its channel modulo 16.
template <typename V, KeyFormat kFormat, int kPlace>
[[gnu::always_inline]] inline void PlaceCode(typename V::I code, typename V::I& coarse,
                                             typename V::I& fine) {
  constexpr int kNibble = kPlace % 8;
  // The upper nibble of the code, at nibble kNibble of the dword.
  const typename V::I upper = V::AndI(code, V::SetI(0xf0));
  if constexpr (kNibble == 0) {
    coarse = V::OrI(coarse, V::template ShiftRight32<4>(upper));
  } else {
    coarse = V::OrI(coarse, V::template ShiftLeft32<4 * kNibble - 4>(upper));
  }
  if constexpr (kFormat == KeyFormat::kK8) {
    fine = V::OrI(fine, V::template ShiftLeft32<4 * kNibble>(V::AndI(code, V::SetI(0x0f))));
  } else if constexpr (kFormat == KeyFormat::kK6) {
    constexpr int kBit = 8 * (kNibble / 2) + 2 * (2 * (kPlace % 2) + kPlace / 8);
    const typename V::I pair = V::AndI(code, V::SetI(0x0c));
    if constexpr (kBit == 0) {
      fine = V::OrI(fine, V::template ShiftRight32<2>(pair));
    } else {
      fine = V::OrI(fine, V::template ShiftLeft32<kBit - 2>(pair));
    }
  }
}

// What the encoder needs of each channel, as floats.
struct ChannelCodings {
  alignas(64) float scale[kHeadDimMax];
  alignas(64) float zero[kHeadDimMax];
  alignas(64) float inverse[kHeadDimMax];
  float middle[kHeadDimMax][4];  // DepthNorms
};

template <typename V>
void LoadCodings(const QuantizeTileArgs& args, ChannelCodings* codings) {
  const TileLayout& layout = *args.layout;
  const auto* scales = reinterpret_cast<const uint16_t*>(args.scan + layout.scale_offset);
  const auto* zeros = reinterpret_cast<const uint16_t*>(args.scan + layout.zero_offset);
  for (int i = 0; i < layout.head_dim; i += V::kLanes) {
    Coding<V> coding;
    coding.Reload(scales + i);
    V::Store(codings->scale + i, coding.scale);
    V::Store(codings->inverse + i, coding.inverse);
    V::Store(codings->zero + i, V::LoadF16(zeros + i));
  }
  constexpr float kCentre[3] = {0.0f, 1.5f, 7.5f};
  for (int i = 0; i < layout.head_dim; ++i) {
    for (int k = 0; k < 3; ++k) {
      codings->middle[i][k] = codings->zero[i] + kCentre[k] * codings->scale[i];
    }
  }
}

// Codes, planes, norms and, with kWitness, residuals of sub-block b: what a channel's coding is, is
// loaded once for all of its tokens.
template <typename V, KeyFormat kFormat, bool kWitness, bool kBf16>
void EncodeKeyTokens(QuantizeState& s, const ChannelCodings& codings, int b, DepthNorms<V>* norms) {
  const QuantizeTileArgs& args = *s.args;
  const TileLayout& layout = *args.layout;
  constexpr int kVectors = kSubBlockTokens / V::kLanes;
  constexpr int kCodeMask = kFormat == KeyFormat::kK8   ? 0xff
                            : kFormat == KeyFormat::kK6 ? 0xfc
                                                        : 0xf0;
  const typename V::F centre = V::Set(s.code_centre);
  const int t = b * kSubBlockTokens;
  uint8_t* coarse_plane = args.scan + layout.coarse_offset + b * layout.coarse_bytes;
  uint8_t* fine_plane = args.detail + b * layout.sub_block_bytes;
  typename V::F residuals[kWitnessBandsMax][kVectors];
  for (int band = 0; band < kWitnessBandsMax; ++band) {
    for (typename V::F& r : residuals[band]) r = V::Zero();
  }
  for (int j = 0; j < layout.head_dim / 16; ++j) {
    typename V::I fine[kVectors] = {};
    Unroll<2>([&](auto group) __attribute__((always_inline)) {
      typename V::I coarse[kVectors] = {};
      constexpr bool kOwnFineWord = kFormat == KeyFormat::kK8 || decltype(group)::value == 0;
      Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        coarse[v] = V::ZeroI();
        if constexpr (kOwnFineWord) fine[v] = V::ZeroI();
      });
      Unroll<8>([&](auto nibble) __attribute__((always_inline)) {
        constexpr int kPlace = 8 * decltype(group)::value + decltype(nibble)::value;
        const int i = 16 * j + kPlace;
        const typename V::F scale = V::Set(codings.scale[i]);
        Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
          const typename V::F x = Load16<V, kBf16>(s.words[i] + t + V::kLanes * v);
          const typename V::F offset = V::Sub(x, V::Set(codings.zero[i]));
          const typename V::I code = V::ToInt(V::Mul(offset, V::Set(codings.inverse[i])));
          PlaceCode<V, kFormat, kPlace>(code, coarse[v], fine[v]);
          if constexpr (kFormat == KeyFormat::kK8) {
            norms[v].template Add<0>(code, scale, codings.middle[i]);
          }
          if constexpr (kFormat != KeyFormat::kK4) {
            norms[v].template Add<1>(code, scale, codings.middle[i]);
          }
          norms[v].template Add<2>(code, scale, codings.middle[i]);
          if constexpr (kWitness) {
            const typename V::F level =
                V::Add(V::ToFloat(V::AndI(code, V::SetI(kCodeMask))), centre);
            const typename V::F left = V::NegMulAdd(level, scale, offset);
            const typename V::F weighted = V::Mul(left, V::Set(s.witness_weight[i]));
            typename V::F& sum = residuals[s.band_of[i]][v];
            sum = V::MulAdd(weighted, weighted, sum);
          }
        });
      });
      Unroll<kVectors>([&](auto v) __attribute__((always_inline)) {
        const int64_t at = 4 * V::kLanes * v;
        V::StoreI(coarse_plane + int64_t{128} * j + 64 * group + at, coarse[v]);
        if constexpr (kFormat == KeyFormat::kK8) {
          V::StoreI(fine_plane + int64_t{128} * j + 64 * group + at, fine[v]);
        } else if constexpr (kFormat == KeyFormat::kK6 && decltype(group)::value == 1) {
          V::StoreI(fine_plane + int64_t{64} * j + at, fine[v]);
        }
      });
    });
  }
  for (int band = 0; kWitness && band < layout.witness_bands; ++band) {
    for (int v = 0; v < kVectors; ++v) {
      V::Store(s.residual_square[band] + t + V::kLanes * v, residuals[band][v]);
    }
  }
}

template <typename V, KeyFormat kFormat>
void EncodeKeyPlanes(QuantizeState& s) {
  const TileLayout& layout = *s.args->layout;
  ChannelCodings codings;
  LoadCodings<V>(*s.args, &codings);
  float scale_squares[kWitnessBandsMax] = {};
  if (layout.witness_bands > 0) {
    for (int i = 0; i < layout.head_dim; ++i) {
      const float scale = s.witness_weight[i] * codings.scale[i];
      scale_squares[s.band_of[i]] += scale * scale;
    }
  }
  for (int band = 0; band < kWitnessBandsMax; ++band) {
    s.scale_norm[band] = __builtin_sqrtf(scale_squares[band]);
  }
  typename V::F norm_max = V::Zero();
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    DepthNorms<V> norms[kSubBlockTokens / V::kLanes];
    for (DepthNorms<V>& of_vector : norms) {
      for (typename V::F& square : of_vector.square) square = V::Zero();
    }
    if (layout.witness_bands > 0) {
      s.bf16 ? EncodeKeyTokens<V, kFormat, true, true>(s, codings, b, norms)
             : EncodeKeyTokens<V, kFormat, true, false>(s, codings, b, norms);
    } else {
      s.bf16 ? EncodeKeyTokens<V, kFormat, false, true>(s, codings, b, norms)
             : EncodeKeyTokens<V, kFormat, false, false>(s, codings, b, norms);
    }
    for (const DepthNorms<V>& of_vector : norms) {
      for (const typename V::F& square : of_vector.square) norm_max = V::Max(norm_max, square);
    }
  }
  s.key_norm = __builtin_sqrtf(V::ReduceMax(norm_max));
}

template <typename V>
void EncodeAffineKeys(QuantizeState* state) {
  ChooseKeyCodings<V>(*state);
  switch (state->args->layout->key_format) {
    case KeyFormat::kK8:
    case KeyFormat::kK8D:  // its codes are written over
      return EncodeKeyPlanes<V, KeyFormat::kK8>(*state);
    case KeyFormat::kK6:
      return EncodeKeyPlanes<V, KeyFormat::kK6>(*state);
    default:
      return EncodeKeyPlanes<V, KeyFormat::kK4>(*state);
  }
}

// Butterflies of distances h, 2h, ... 2^(kStages - 1) h in registers, on rows of V::kLanes floats.
template <typename V, int kStages>
[[gnu::always_inline]] inline void Butterflies(float* block, int n, int h) {
  constexpr int kRows = 1 << kStages;
  for (int i = 0; i < n; i += kRows * h) {
    for (int j = i; j < i + h; ++j) {
      typename V::F x[kRows];
      Unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        x[r] = V::Load(block + (j + r * h) * V::kLanes);
      });
      Unroll<kStages>([&](auto stage) __attribute__((always_inline)) {
        constexpr int kDistance = 1 << decltype(stage)::value;
        Unroll<kRows / 2>([&](auto pair) __attribute__((always_inline)) {
          constexpr int kIndex = decltype(pair)::value;
          constexpr int a = kIndex / kDistance * 2 * kDistance + kIndex % kDistance;
          const typename V::F first = x[a];
          const typename V::F second = x[a + kDistance];
          x[a] = V::Add(first, second);
          x[a + kDistance] = V::Sub(first, second);
        });
      });
      Unroll<kRows>([&](auto r) __attribute__((always_inline)) {
        V::Store(block + (j + r * h) * V::kLanes, x[r]);
      });
    }
  }
}

// The format's rotation of rows[dim][kLanes tokens], operation by operation.
template <typename V>
void RotateRows(float* rows, int dim) {
  for (int begin = 0; begin < dim;) {
    int n = 16;
    while (2 * n <= dim - begin) n *= 2;
    float* block = rows + begin * V::kLanes;
    int h = 1;
    for (; 8 * h <= n; h *= 8) Butterflies<V, 3>(block, n, h);
    if (4 * h == n) Butterflies<V, 2>(block, n, h);
    if (2 * h == n) Butterflies<V, 1>(block, n, h);
    const typename V::F factor =
        V::Set(static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(n))));
    for (int i = 0; i < n; ++i) {
      V::Store(block + i * V::kLanes, V::Mul(V::Load(block + i * V::kLanes), factor));
    }
    begin += n;
  }
}

// Rotates kLanes tokens from t and chooses their codings. Tokens that can't be encoded get rows of
// zeros.
template <typename V>
[[gnu::always_inline]] inline RowCoding<V> RotateTokens(QuantizeState& s, int t, int level_max,
                                                        float* rows, typename V::I* magnitude) {
  const int dim = s.args->layout->value_dim;
  typename V::I original = V::ZeroI();
  typename V::F square = V::Zero();
  for (int i = 0; i < dim; ++i) {
    const typename V::F x = LoadOriginal<V>(s, s.words[i] + t);
    V::Store(rows + i * V::kLanes, x);
    original = V::MaxUnsigned(original, V::AsInt(V::Abs(x)));
    square = V::MulAdd(x, x, square);
  }
  *magnitude = V::MaxUnsigned(*magnitude, original);
  V::Store(s.value_norm + t, square);  // the root is taken by the caller
  RotateRows<V>(rows, dim);
  typename V::F min = V::Zero();
  typename V::F max = V::Zero();
  for (int i = 0; i < dim; ++i) {
    const typename V::F y = V::Load(rows + i * V::kLanes);
    min = V::Min(min, y);
    max = V::Max(max, y);
  }
  return ChooseRowCoding<V>(s, t, level_max, min, max, V::AsFloat(original), [&](int u) {
    for (int i = 0; i < dim; ++i) rows[i * V::kLanes + u] = 0;
  });
}

// words[channel % 8 + 8 * zone][token]: the codes of one stored word.
template <typename V, int kBits>
bool EncodeValueWords(QuantizeState& s, uint16_t (*words)[kTileTokens]) {
  constexpr int kCodes = 16 / kBits;
  const int dim = s.args->layout->value_dim;
  const int zones = (dim + 8 * kCodes - 1) / (8 * kCodes);
  alignas(64) float rows[kHeadDimMax * V::kLanes];
  typename V::I magnitude = V::ZeroI();
  for (int t = 0; t < kTileTokens; t += V::kLanes) {
    const RowCoding<V> coding = RotateTokens<V>(s, t, (1 << kBits) - 1, rows, &magnitude);
    typename V::F error = V::Zero();
    for (int word = 0; word < 8 * zones; ++word) {
      typename V::I packed = V::ZeroI();
      Unroll<kCodes>([&](auto n) __attribute__((always_inline)) {
        const int channel = word / 8 * (8 * kCodes) + 8 * n + word % 8;
        if (channel >= dim) return;
        const typename V::F y = V::Load(rows + channel * V::kLanes);
        const typename V::I code = V::ToInt(V::Add(V::Mul(y, coding.inverse), coding.offset));
        packed = V::OrI(packed, V::template ShiftLeft32<kBits* decltype(n)::value>(code));
        const typename V::F level = V::Sub(V::ToFloat(code), coding.offset);
        const typename V::F left = V::NegMulAdd(level, coding.scale, y);
        error = V::MulAdd(left, left, error);
      });
      int32_t wide[V::kLanes];
      V::StoreI(wide, packed);
      for (int u = 0; u < V::kLanes; ++u) words[word][t + u] = static_cast<uint16_t>(wide[u]);
    }
    V::Store(s.value_error + t, error);
  }
  return ReduceMaxUnsigned<V>(magnitude) < kInfinityBits;
}

template <typename V>
bool EncodeRotatedValues(QuantizeState* state) {
  QuantizeState& s = *state;
  const TileLayout& layout = *s.args->layout;
  const bool v4 = layout.value_format == ValueFormat::kV4;
  alignas(64) uint16_t words[kHeadDimMax / 2][kTileTokens];
  const bool is_finite = v4 ? EncodeValueWords<V, 4>(s, words) : EncodeValueWords<V, 8>(s, words);
  const int word_count = static_cast<int>(layout.value_bytes / (2 * kSubBlockTokens));
  for (int pair = 0; pair < kTileTokens / 2; ++pair) {
    const int b = 2 * pair / kSubBlockTokens;
    uint8_t* out = s.args->detail + b * layout.sub_block_bytes + layout.value_offset +
                   int64_t{4} * (pair % (kSubBlockTokens / 2)) * word_count;
    for (int word = 0; word < word_count; ++word) {
      __builtin_memcpy(out + 4 * word, words[word] + 2 * pair, 4);
    }
  }
  return is_finite;
}

template <typename V>
constexpr QuantizeKernels MakeQuantizeKernels() {
  if constexpr (V::kLanes == 8) {
    return {FindKeyRanges<V>, EncodeAffineKeys<V>, EncodeRotatedRows<V>, true};
  } else {
    return {FindKeyRanges<V>, EncodeAffineKeys<V>, EncodeRotatedValues<V>, false};
  }
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_QUANTIZE_RUN_H_
