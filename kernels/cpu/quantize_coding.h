// Choice of scales and zeros, shared by the encoders (see quantize_run.h for the rules).
#ifndef CERTKV_KERNELS_CPU_QUANTIZE_CODING_H_
#define CERTKV_KERNELS_CPU_QUANTIZE_CODING_H_

#include <cstdint>

#include "kernels/core/value_code.h"
#include "kernels/cpu/attend_math.h"
#include "kernels/cpu/attend_values.h"
#include "kernels/cpu/quantize_state.h"

namespace certkv::cpu {

// (1 + 2^-22) / n, rounded to float: its excess keeps every code from clipping.
[[gnu::always_inline]] inline float LevelInverse(float level_max) {
  return static_cast<float>((1 + 0x1p-22) / level_max);
}

// zero = the largest fp16 <= min, +0 for -0; scale = the smallest fp16 >= (max - zero) *
// LevelInverse, 0 for an empty range; inverse = 1 / scale, 0 for 0. Bits of scale and zero go out.
template <typename V>
struct Coding {
  typename V::F scale;
  typename V::F zero;
  typename V::F inverse;

  [[gnu::always_inline]] void Choose(typename V::F min, typename V::F max, float level_max,
                                     uint16_t* scale_bits, uint16_t* zero_bits) {
    V::StoreF16Down(zero_bits, min);
    for (int i = 0; i < V::kLanes; ++i) zero_bits[i] = zero_bits[i] == 0x8000 ? 0 : zero_bits[i];
    zero = V::LoadF16(zero_bits);
    const typename V::F range = V::Sub(max, zero);
    const typename V::F least = V::Set(0x1p-149f);
    const typename V::F product = V::Mul(range, V::Set(LevelInverse(level_max)));
    V::StoreF16Up(scale_bits, V::WhereAtLeast(range, least, product));
    Reload(scale_bits);
  }
  // The same for a channel of keys that are read at the middle of codes: `level_max` is 252 or 240,
  // `centre` half of what it leaves of 255, so that min and max are read as they are.
  [[gnu::always_inline]] void ChooseCentred(typename V::F min, typename V::F max, float level_max,
                                            float centre, uint16_t* scale_bits,
                                            uint16_t* zero_bits) {
    Choose(min, max, 255, scale_bits, zero_bits);
    const typename V::F range = V::Sub(max, zero);
    const typename V::F step = V::Mul(range, V::Set(LevelInverse(level_max)));
    const typename V::F margin = V::Mul(step, V::Set(centre));
    Coding moved;
    uint16_t moved_scale_bits[V::kLanes];
    uint16_t moved_zero_bits[V::kLanes];
    moved.Choose(V::Sub(min, margin), max, level_max + centre, moved_scale_bits, moved_zero_bits);
    float product[V::kLanes];
    float limit[V::kLanes];
    V::Store(product, V::Mul(V::Sub(max, moved.zero), V::Set(LevelInverse(level_max + centre))));
    V::Store(limit, V::Mul(range, V::Set(LevelInverse(level_max - centre))));
    for (int i = 0; i < V::kLanes; ++i) {
      if (!(product[i] <= limit[i])) continue;
      scale_bits[i] = moved_scale_bits[i];
      zero_bits[i] = moved_zero_bits[i];
    }
    Reload(scale_bits);
    zero = V::LoadF16(zero_bits);
  }
  [[gnu::always_inline]] void Reload(const uint16_t* scale_bits) {
    scale = V::LoadF16(scale_bits);
    const typename V::F quotient = V::Div(V::Set(1.0f), scale);
    inverse = V::WhereAtLeast(scale, V::Set(0x1p-24f), quotient);
  }
};

template <typename V>
[[gnu::always_inline]] inline typename V::F LoadOriginal(const QuantizeState& s,
                                                         const uint16_t* p) {
  return s.bf16 ? V::LoadBf16(p) : V::LoadF16(p);
}

// Above this a float butterfly of 8 stages could overflow later on: the token is unencodable.
inline constexpr float kRotationInputMax = 0x1p100f;

// Codings of rows of rotated values, a lane each, as ChooseValueCoding of value_code.h has them.
template <typename V>
struct RowCoding {
  typename V::F scale;
  typename V::F inverse;
  typename V::F offset;
};

// Of tokens t .. t + kLanes - 1: `min` and `max` are those of their rotated rows and 0, `original`
// the largest magnitudes of the originals. Tokens that can't be encoded are encoded as zeros:
// clear(lane).
template <typename V, typename Clear>
[[gnu::always_inline]] inline RowCoding<V> ChooseRowCoding(QuantizeState& s, int t, int level_max,
                                                           typename V::F min, typename V::F max,
                                                           typename V::F original,
                                                           const Clear& clear) {
  const auto levels = static_cast<float>(level_max + 1);
  const float unit = 1 / (levels * code::kValueSpanShare) / code::kValueScaleUnit;
  const typename V::I round_up = V::SetI((1 << code::kValueScaleShift) - 1);
  const typename V::F span = V::Sub(max, min);
  const typename V::I least = V::AsInt(V::Mul(span, V::Set(unit)));
  int32_t codes[V::kLanes];
  V::StoreI(codes, V::template ShiftRight32<code::kValueScaleShift>(V::AddI(least, round_up)));
  float spans[V::kLanes];
  float originals[V::kLanes];
  float middles[V::kLanes];
  V::Store(spans, span);
  V::Store(originals, original);
  V::Store(middles, V::Add(min, max));
  uint8_t* scale_codes = s.args->detail + s.args->layout->value_scale_offset + t;
  uint8_t* zero_codes = scale_codes + kTileTokens;
  for (int u = 0; u < V::kLanes; ++u) {
    const bool is_encodable = codes[u] <= 255 && originals[u] <= kRotationInputMax;
    const bool is_zero = !(spans[u] > code::kValueSpanMin);
    scale_codes[u] = is_encodable && !is_zero ? static_cast<uint8_t>(codes[u]) : uint8_t{0};
    if (__builtin_expect(is_encodable, 1)) continue;
    s.value_norm[t + u] = __builtin_inff();  // measured by the caller
    middles[u] = 0;
    clear(u);
  }
  RowCoding<V> coding;
  coding.scale = ValueScales<V>(scale_codes);
  const typename V::F quotient = V::Div(V::Set(1.0f), coding.scale);
  coding.inverse = V::WhereAtLeast(coding.scale, V::Set(0x1p-21f), quotient);
  const typename V::F twice = V::Sub(V::Set(levels), V::Mul(V::Load(middles), coding.inverse));
  const typename V::F zero = V::Min(V::Mul(twice, V::Set(128 / levels)), V::Set(255.0f));
  V::StoreI(codes, V::ToInt(zero));
  for (int u = 0; u < V::kLanes; ++u) zero_codes[u] = static_cast<uint8_t>(codes[u]);
  coding.offset = V::Sub(V::Zero(), ValueShifts<V>(zero_codes, levels));
  return coding;
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_QUANTIZE_CODING_H_
