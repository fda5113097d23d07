// Defines the stored bytes. Steps marked "float" are single IEEE binary32 operations, rounded to
// nearest, without contraction, in the order written: every backend makes the same codes, scales
// and zeros from the same originals. Subnormals are kept (no flush to zero).
//
// Affine keys, per channel over the 64 tokens (x = original, widened exactly):
//   zero  = the largest fp16 <= min x (so exact for fp16 originals); -0 is stored as +0
//   range = max x - zero                                                    (float)
//   scale = the smallest fp16 >= range * kLevelInverse(255); 0 when range is 0     (float)
//   inverse = 1 / scale, or 0 when scale is 0                               (float)
//   code  = rint((x - zero) * inverse), ties to even                        (2 floats)
//   kLevelInverse(n) = (1 + 2^-22) / n, rounded to float. Its excess keeps range * inverse <= 255
//   in spite of four roundings, so a code never clips. K6 and K4 store the upper 6 and 4 bits.
// K6 and K4 are read at the middle of 4 or 16 codes: centre c = 1.5 or 7.5, and levels up to
//   n = 252 or 240. So that min x and max x are read as they are, which are the keys of sinks:
//   step   = range * kLevelInverse(n)                                              (float)
//   zero'  = the largest fp16 <= min x - c * step                               (2 floats)
//   range' = max x - zero'                                                         (float)
//   and zero', range' in the place of zero, range with kLevelInverse(n + c), where
//   range' * kLevelInverse(n + c) <= range * kLevelInverse(n - c)                 (2 floats)
//   (not where fp16 is too coarse for a zero of its own).
// K8D keys: scale and zero of K8; code = rint((x - zero) / scale + u), 3 doubles, u the dither
//   (DitherAt), or 0 when scale is 0. As 0 <= (x - zero) / scale <= 255 and |u| < 1/2, a code never
//   clips here either.
// FP8_E4M3 keys: code = e4m3(x / key_scale), the quotient one float division, saturating.
// V4 and V8 values, per token: y = RotateHadamard<float>(x), then ChooseValueCoding and ValueLevel
//   of value_code.h. When some |x| > 2^100, or no scale is large enough, the token is unencodable:
//   it is encoded as zeros and its error is its norm.
// 16-bit formats: the original bits.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/bounds/dither.h"
#include "kernels/bounds/rounding.h"
#include "kernels/core/affine_code.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/core/value_code.h"
#include "kernels/core/witness.h"
#include "kernels/reference/hadamard.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::reference {
namespace {

// Relative error of a norm computed in double: under 4 roundings for each of at most 256 squares,
// and the root: 770 * 2^-53 < 2^-43. Squares of subnormal floats are normal doubles.
constexpr double kNormInflation = 1 + 0x1p-42;
// Above this a float butterfly of 8 stages could overflow later on; see the top of the file.
constexpr float kRotationInputMax = 0x1p100f;

using code::AffineCoding;
using code::ChooseKeyCoding;

uint32_t ChooseCode(const AffineCoding& coding, float x) {
  const float quotient = (x - coding.zero_value) * coding.inverse;
  const float code = std::nearbyint(quotient);
  CERTKV_CHECK(code >= 0 && code <= 255, "a code never clips");
  return static_cast<uint32_t>(code);
}

uint32_t ChooseDitheredCode(const AffineCoding& coding, float x, float u) {
  if (coding.scale == 0) return 0;
  const double quotient = (double{x} - coding.zero_value) / F16ToFloat(coding.scale);
  const double code = std::nearbyint(quotient + u);
  CERTKV_CHECK(code >= 0 && code <= 255, "a dithered code never clips");
  return static_cast<uint32_t>(code);
}

float Original(const QuantizeTileArgs& args, const uint16_t* rows, int64_t stride, int t, int i) {
  return OriginalToFloat(args.spec->original_dtype, rows[t * stride + i]);
}

float Key(const QuantizeTileArgs& args, int t, int i) {
  return Original(args, args.keys, args.key_stride, t, i);
}

float Value(const QuantizeTileArgs& args, int t, int i) {
  return Original(args, args.values, args.value_stride, t, i);
}

DitherPlace PlaceOf(const QuantizeTileArgs& args, int t) {
  return {.secret = args.layout->dither_secret, .identity_tag = args.identity_tag, .token = t};
}

void EncodeAffineKeys(const QuantizeTileArgs& args) {
  for (int i = 0; i < args.layout->head_dim; ++i) {
    float min = Key(args, 0, i);
    float max = min;
    for (int t = 1; t < kTileTokens; ++t) {
      min = std::min(min, Key(args, t, i));
      max = std::max(max, Key(args, t, i));
    }
    const AffineCoding coding = ChooseKeyCoding(min, max, AffineDepthOf(args.layout->key_format));
    WriteKeyScaleAndZero(*args.layout, args.scan, i, coding.scale, coding.zero);
    for (int t = 0; t < kTileTokens; ++t) {
      const uint32_t code =
          args.layout->key_format == KeyFormat::kK8D
              ? ChooseDitheredCode(coding, Key(args, t, i), DitherAt(PlaceOf(args, t), i))
              : ChooseCode(coding, Key(args, t, i));
      WriteKeyCode(*args.layout, args.scan, args.detail, t, i, code);
    }
  }
}

void EncodeKeys(const QuantizeTileArgs& args) {
  const TileLayout& layout = *args.layout;
  if (IsAffine(layout.key_format)) {
    EncodeAffineKeys(args);
    return;
  }
  const float key_scale = args.spec->layers[args.layer].fp8_key_scale;
  for (int t = 0; t < kTileTokens; ++t) {
    for (int i = 0; i < layout.head_dim; ++i) {
      const uint32_t code = layout.key_format == KeyFormat::kFp8E4m3
                                ? FloatToE4m3(Key(args, t, i) / key_scale)
                                : args.keys[t * args.key_stride + i];
      WriteKeyCode(layout, args.scan, args.detail, t, i, code);
    }
  }
}

// Largest ||k^_t||_2 over the tokens and over the depths at which the stored codes can be read,
// those of a repacked tile (K8 -> K6 -> K4) included.
float KeyNormMax(const QuantizeTileArgs& args) {
  const TileLayout& layout = *args.layout;
  const KeyFormat depths[] = {KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4};
  const bool has_depths = IsAffine(layout.key_format) && layout.key_format != KeyFormat::kK8D;
  double norm_max = 0;
  for (int t = 0; t < kTileTokens; ++t) {
    for (const KeyFormat depth : depths) {
      if (has_depths && depth < layout.key_format) continue;  // finer than stored
      double sum = 0;
      for (int i = 0; i < layout.head_dim; ++i) {
        const double key = has_depths
                               ? DecodeAffineKey(AffineDepthOf(depth),
                                                 ReadKeyCode(layout, args.scan, args.detail, t, i),
                                                 ReadKeyScale(layout, args.scan, i),
                                                 ReadKeyZero(layout, args.scan, i))
                               : DecodeKey(layout, args.scan, args.detail, t, i);
        sum += key * key;
      }
      norm_max = std::max(norm_max, std::sqrt(sum));
    }
  }
  return ToFloatRoundedUp(norm_max * kNormInflation);
}

// Norms of each token's and band's weighted residuals, at the depth of a full read. Returns the
// exponent.
int16_t EncodeWitnesses(const QuantizeTileArgs& args) {
  const TileLayout& layout = *args.layout;
  const int bands = layout.witness_bands;
  std::array<std::array<float, kWitnessBandsMax>, kTileTokens> norms{};
  float norm_max = 0;
  for (int t = 0; t < kTileTokens; ++t) {
    std::array<double, kWitnessBandsMax> sums{};
    for (int i = 0; i < layout.head_dim; ++i) {
      const double weight = layout.has_witness_weights ? args.witness_weights[i] : 1.0f;
      const double residual =
          weight * (Key(args, t, i) - DecodeKey(layout, args.scan, args.detail, t, i));
      sums[WitnessBandOf(layout, i)] += residual * residual;
    }
    for (int b = 0; b < bands; ++b) {
      norms[t][b] = ToFloatRoundedUp(std::sqrt(sums[b]) * kNormInflation);
      norm_max = std::max(norm_max, norms[t][b]);
    }
  }
  const int16_t exponent = WitnessExponentFor(norm_max);
  for (int t = 0; t < kTileTokens; ++t) {
    for (int b = 0; b < bands; ++b) {
      WriteWitness(layout, args.scan, t, b, EncodeWitness(norms[t][b], exponent));
    }
  }
  return exponent;
}

void EncodeRotatedToken(const QuantizeTileArgs& args, int t) {
  const TileLayout& layout = *args.layout;
  const float level_max = layout.value_format == ValueFormat::kV4 ? 15 : 255;
  std::array<float, kHeadDimMax> rotated;
  float largest = 0;
  for (int i = 0; i < layout.value_dim; ++i) {
    rotated[i] = Value(args, t, i);
    largest = std::max(largest, std::fabs(rotated[i]));
  }
  const bool fits = largest <= kRotationInputMax;
  float min = 0;
  float max = fits ? 0 : std::numeric_limits<float>::infinity();
  if (fits) {
    RotateHadamard(rotated.data(), layout.value_dim);
    for (int i = 0; i < layout.value_dim; ++i) {
      min = std::min(min, rotated[i]);
      max = std::max(max, rotated[i]);
    }
  }
  const code::ValueCoding coding = code::ChooseValueCoding(min, max, level_max);
  WriteValueScaleAndZero(layout, args.detail, t, coding.scale_code, coding.zero_code);
  for (int i = 0; i < layout.value_dim; ++i) {
    const float y = coding.is_encodable ? rotated[i] : 0.0f;
    const float level = std::nearbyint(code::ValueLevel(coding, y));
    CERTKV_CHECK(level >= 0 && level <= level_max, "a code never clips");
    WriteValueCode(layout, args.detail, t, i, static_cast<uint32_t>(level));
  }
}

void EncodeValues(const QuantizeTileArgs& args) {
  for (int t = 0; t < kTileTokens; ++t) {
    if (ValuesAreRotated(*args.layout)) {
      EncodeRotatedToken(args, t);
      continue;
    }
    for (int i = 0; i < args.layout->value_dim; ++i) {
      WriteValueCode(*args.layout, args.detail, t, i, args.values[t * args.value_stride + i]);
    }
  }
}

struct ValueNorms {
  double norm;   // >= ||v_t||_2
  double error;  // >= ||v_t - v^_t||_2
};

// v^ is the exact inverse rotation of the stored values. The exact rotation R keeps norms, so
// ||v - v^|| = ||R v - stored||. R v is computed in double: at most 8 stages, one product and its
// rounded factor, each off by at most 2^-53 ||v|| in norm, together under 2^-48 ||v||.
ValueNorms MeasureValue(const QuantizeTileArgs& args, int t) {
  const TileLayout& layout = *args.layout;
  std::array<double, kHeadDimMax> rotated;
  double norm_square = 0;
  for (int i = 0; i < layout.value_dim; ++i) {
    rotated[i] = Value(args, t, i);
    norm_square += rotated[i] * rotated[i];
  }
  const double norm = std::sqrt(norm_square) * kNormInflation;
  if (!ValuesAreRotated(layout)) return {norm, 0};
  RotateHadamard(rotated.data(), layout.value_dim);
  double error_square = 0;
  for (int i = 0; i < layout.value_dim; ++i) {
    const double error = rotated[i] - DecodeStoredValue(layout, args.detail, t, i);
    error_square += error * error;
  }
  return {norm, std::sqrt(error_square) * kNormInflation + norm * 0x1p-48};
}

}  // namespace

void QuantizeTile(const QuantizeTileArgs& args) {
  const TileLayout& layout = *args.layout;
  std::memset(args.scan, 0, layout.scan_bytes);
  std::memset(args.detail, 0, layout.detail_bytes);
  EncodeKeys(args);
  EncodeValues(args);

  TileHeader header{};
  header.magic = kTileMagic;
  header.format_version = kTileFormatVersion;
  header.key_format = static_cast<uint8_t>(layout.key_format);
  header.value_format = static_cast<uint8_t>(layout.value_format);
  header.witness_bands = static_cast<uint8_t>(layout.witness_bands);
  header.identity_tag = args.identity_tag;
  if (layout.key_format == KeyFormat::kFp8E4m3) {
    header.key_scale = args.spec->layers[args.layer].fp8_key_scale;
  }
  if (layout.key_format == KeyFormat::kK8D) {
    header.key_check = DitherCheck(layout.dither_secret, args.identity_tag);
  }
  std::memcpy(args.scan, &header, sizeof(header));  // DecodeKey reads key_scale

  if (layout.witness_bands > 0) header.witness_exponent = EncodeWitnesses(args);
  header.key_norm = KeyNormMax(args);
  double radius = 0;
  for (int s = 0; s < kSubBlocksPerTile; ++s) {
    double error_max = 0;
    for (int u = 0; u < kSubBlockTokens; ++u) {
      const ValueNorms norms = MeasureValue(args, s * kSubBlockTokens + u);
      radius = std::max(radius, norms.norm);
      error_max = std::max(error_max, norms.error);
    }
    header.value_error_bound[s] = FloatToF16RoundedUp(ToFloatRoundedUp(error_max));
  }
  header.value_radius = ToFloatRoundedUp(radius);
  std::memcpy(args.scan, &header, sizeof(header));
}

}  // namespace certkv::reference
