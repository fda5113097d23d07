// QuantizeTile of the CPU backend: turns the originals, runs one instruction set's encoders, and
// measures what their bounds can't cover. The stored codes, scales and zeros are bit for bit those
// of the reference backend, which defines them.
#include "kernels/ops/quantize_tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "absl/types/span.h"
#include "kernels/bounds/dither.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/core/value_code.h"
#include "kernels/core/witness.h"
#include "kernels/core/witness_code.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/quantize_state.h"
#include "kernels/cpu/quantize_turn.h"

namespace certkv::cpu {
namespace {

// Relative error of a norm summed in double: under 4 roundings for each of at most 256 squares.
constexpr double kNormInflation = 1 + 0x1p-42;

float RoundUp(double bound) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (!(bound <= std::numeric_limits<float>::max())) return kInfinity;
  const auto rounded = static_cast<float>(bound);
  return rounded >= bound ? rounded : std::nextafter(rounded, kInfinity);
}

DitherPlace PlaceOf(const QuantizeTileArgs& args, int t) {
  return {.secret = args.layout->dither_secret, .identity_tag = args.identity_tag, .token = t};
}

float Original(const QuantizeTileArgs& args, const uint16_t* rows, int64_t stride, int t, int i) {
  return OriginalToFloat(args.spec->original_dtype, rows[t * stride + i]);
}

// The code of channel i of token t into the planes of 8-bit codes: its upper nibble in the coarse
// plane, its lower one in the fine plane, each as nibble i % 8 of a dword.
void WriteCode(const QuantizeTileArgs& args, int t, int i, uint8_t code) {
  const TileLayout& layout = *args.layout;
  const int b = t / kSubBlockTokens;
  const int64_t byte = int64_t{64} * (i / 8) + 4 * (t % kSubBlockTokens) + i % 8 / 2;
  const int shift = 4 * (i % 2);
  const auto put = [shift](uint8_t* at, int nibble) {
    *at = static_cast<uint8_t>((*at & ~(15 << shift)) | nibble << shift);
  };
  put(args.scan + layout.coarse_offset + b * layout.coarse_bytes + byte, code >> 4);
  put(args.detail + b * layout.sub_block_bytes + byte, code & 15);
}

// K8D, after K8's scales and zeros: codes with their dither, as the reference defines them.
void EncodeDitheredCodes(const QuantizeState& state) {
  const QuantizeTileArgs& args = *state.args;
  const TileLayout& layout = *args.layout;
  float zeros[kHeadDimMax];
  float scales[kHeadDimMax];
  for (int i = 0; i < layout.head_dim; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, args.scan + layout.zero_offset + int64_t{2} * i, sizeof(bits));
    zeros[i] = F16ToFloat(bits);
    std::memcpy(&bits, args.scan + layout.scale_offset + int64_t{2} * i, sizeof(bits));
    scales[i] = F16ToFloat(bits);
  }
  float u[kHeadDimMax];
  for (int t = 0; t < kTileTokens; ++t) {
    DitherOf(PlaceOf(args, t), absl::MakeSpan(u, layout.head_dim));
    for (int i = 0; i < layout.head_dim; ++i) {
      const double offset = double{Original(args, args.keys, args.key_stride, t, i)} - zeros[i];
      const double code = scales[i] == 0 ? 0 : std::nearbyint(offset / scales[i] + u[i]);
      WriteCode(args, t, i, static_cast<uint8_t>(code));
    }
  }
}

// FP8 codes of all keys into state->codes and the planes.
void EncodeFp8Keys(QuantizeState* state) {
  const QuantizeTileArgs& args = *state->args;
  const TileLayout& layout = *args.layout;
  const float key_scale = args.spec->layers[args.layer].fp8_key_scale;
  for (int t = 0; t < kTileTokens; ++t) {
    for (int i = 0; i < layout.head_dim; ++i) {
      const float key = Original(args, args.keys, args.key_stride, t, i);
      const uint8_t code = FloatToE4m3(key / key_scale);
      state->codes[i][t] = code;
      WriteCode(args, t, i, code);
    }
  }
}

// [d][16 tokens] words per sub-block.
void CopyKeys(const QuantizeState& state) {
  const QuantizeTileArgs& args = *state.args;
  const TileLayout& layout = *args.layout;
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    uint8_t* plane = args.scan + layout.coarse_offset + b * layout.coarse_bytes;
    for (int i = 0; i < layout.head_dim; ++i) {
      std::memcpy(plane + int64_t{32} * i, state.words[i] + b * kSubBlockTokens, 32);
    }
  }
}

// The affine code of a key, from the planes.
uint32_t DecodeCode(const QuantizeState& state, int t, int i) {
  const QuantizeTileArgs& args = *state.args;
  const TileLayout& layout = *args.layout;
  const int b = t / kSubBlockTokens;
  const int u = t % kSubBlockTokens;
  const uint8_t* coarse = args.scan + layout.coarse_offset + b * layout.coarse_bytes;
  const uint8_t* fine = args.detail + b * layout.sub_block_bytes;
  const int64_t byte = int64_t{64} * (i / 8) + 4 * u + i % 8 / 2;
  const int shift = 4 * (i % 2);
  uint32_t code = (coarse[byte] >> shift & 15u) << 4;
  if (layout.key_format == KeyFormat::kK8 || layout.key_format == KeyFormat::kK8D) {
    code |= fine[byte] >> shift & 15u;
  }
  if (layout.key_format == KeyFormat::kK6) {
    const int bit = 2 * (2 * (i % 2) + i % 16 / 8);
    code |= (fine[int64_t{64} * (i / 16) + 4 * u + i % 8 / 2] >> bit & 3u) << 2;
  }
  return code;
}

// k^ of one token in double, exactly (K8D: as the reference does).
void DecodeKey(const QuantizeState& state, int t, double* key) {
  const QuantizeTileArgs& args = *state.args;
  const TileLayout& layout = *args.layout;
  if (layout.key_format == KeyFormat::kFp8E4m3) {
    const double scale = args.spec->layers[args.layer].fp8_key_scale;
    for (int i = 0; i < layout.head_dim; ++i) key[i] = scale * E4m3ToFloat(state.codes[i][t]);
    return;
  }
  if (!IsAffine(layout.key_format)) {
    for (int i = 0; i < layout.head_dim; ++i) {
      key[i] = Original(args, args.keys, args.key_stride, t, i);
    }
    return;
  }
  const AffineDepth depth = AffineDepthOf(layout.key_format);
  float u[kHeadDimMax] = {};
  if (layout.key_format == KeyFormat::kK8D) {
    DitherOf(PlaceOf(args, t), absl::MakeSpan(u, layout.head_dim));
  }
  for (int i = 0; i < layout.head_dim; ++i) {
    uint16_t scale = 0;
    uint16_t zero = 0;
    std::memcpy(&scale, args.scan + layout.scale_offset + int64_t{2} * i, sizeof(scale));
    std::memcpy(&zero, args.scan + layout.zero_offset + int64_t{2} * i, sizeof(zero));
    const double level = (DecodeCode(state, t, i) & depth.mask) + double{depth.centre} - u[i];
    key[i] = level * F16ToFloat(scale) + F16ToFloat(zero);
  }
}

// Largest ||k^|| of a format that has no depths: 16-bit, FP8 and K8D.
float KeyNormMax(const QuantizeState& state) {
  double norm_max = 0;
  double key[kHeadDimMax];
  for (int t = 0; t < kTileTokens; ++t) {
    DecodeKey(state, t, key);
    double sum = 0;
    for (int i = 0; i < state.args->layout->head_dim; ++i) sum += key[i] * key[i];
    norm_max = std::max(norm_max, std::sqrt(sum));
  }
  return RoundUp(norm_max * kNormInflation);
}

// ||w (k - k^)|| of one token by band, in double.
void MeasureResiduals(const QuantizeState& state, int t, float* norms) {
  const QuantizeTileArgs& args = *state.args;
  double key[kHeadDimMax];
  double sums[kWitnessBandsMax] = {};
  DecodeKey(state, t, key);
  for (int i = 0; i < args.layout->head_dim; ++i) {
    const double residual = double{state.witness_weight[i]} *
                            (Original(args, args.keys, args.key_stride, t, i) - key[i]);
    sums[state.band_of[i]] += residual * residual;
  }
  for (int b = 0; b < args.layout->witness_bands; ++b) {
    norms[b] = RoundUp(std::sqrt(sums[b]) * kNormInflation);
  }
}

// The same of all tokens from the encoder's float sums; `known` is false where those aren't
// accurate. In units u = 2^-24, a residual (x - zero) - level * scale is off by 256 u scale from
// its difference, 256 u scale from its product and u of itself; its weight and the squares of 256
// channels, under 400 u of a norm. Root, product and sum here, under 2^-21.
void BoundResiduals(const QuantizeState& state, int band, float* norms, bool* known) {
  constexpr float kSquareMin = 0x1p-60f;
  constexpr float kSquareMax = 0x1p100f;
  constexpr float kInflation = 1 + 0x1p-14f + 0x1p-21f;
  const float slack = RoundUp(state.scale_norm[band] * (0x1p-15 * (1 + 0x1p-10)));
  for (int t = 0; t < kTileTokens; ++t) {
    const float square = state.residual_square[band][t];
    const float norm = __builtin_sqrtf(square) * kInflation;
    norms[t] = norm + slack;
    known[t] = square >= kSquareMin && square <= kSquareMax && slack <= 0x1p-8f * norm;
  }
}

// Witness bytes from residual norms. Returns their exponent.
int16_t EncodeWitnesses(const QuantizeState& state) {
  const QuantizeTileArgs& args = *state.args;
  const TileLayout& layout = *args.layout;
  const int bands = layout.witness_bands;
  float norms[kWitnessBandsMax][kTileTokens] = {};
  bool known[kWitnessBandsMax][kTileTokens] = {};
  if (IsAffine(layout.key_format)) {
    for (int b = 0; b < bands; ++b) BoundResiduals(state, b, norms[b], known[b]);
  }
  float norm_max = 0;
  for (int t = 0; t < kTileTokens; ++t) {
    bool all = true;
    for (int b = 0; b < bands; ++b) all = all && known[b][t];
    if (!all) {
      float measured[kWitnessBandsMax];
      MeasureResiduals(state, t, measured);
      for (int b = 0; b < bands; ++b) norms[b][t] = measured[b];
    }
    for (int b = 0; b < bands; ++b) norm_max = std::max(norm_max, norms[b][t]);
  }
  const int16_t exponent = WitnessExponentFor(norm_max);
  for (int b = 0; b < bands; ++b) {
    for (int t = 0; t < kTileTokens; ++t) {
      const int64_t row = t / kSubBlockTokens * bands + b;
      args.scan[layout.witness_offset + row * kSubBlockTokens + t % kSubBlockTokens] =
          code::EncodeWitness(norms[b][t], exponent);
    }
  }
  return exponent;
}

// False when a key can't be encoded.
bool EncodeKeys(const QuantizeKernels& kernels, QuantizeState* state, TileHeader* header) {
  const QuantizeTileArgs& args = *state->args;
  const TileLayout& layout = *args.layout;
  const bool is_dithered = layout.key_format == KeyFormat::kK8D;
  if (is_dithered) header->key_check = DitherCheck(layout.dither_secret, args.identity_tag);
  state->code_centre = 0;
  state->code_level_max = 255;
  if (IsAffine(layout.key_format)) {
    const AffineDepth depth = AffineDepthOf(layout.key_format);
    state->code_centre = depth.centre;
    state->code_level_max = static_cast<float>(depth.mask);
  }
  for (int i = 0; layout.witness_bands > 0 && i < layout.head_dim; ++i) {
    state->band_of[i] = static_cast<uint8_t>(WitnessBandOf(layout, i));
    state->witness_weight[i] = layout.has_witness_weights ? args.witness_weights[i] : 1.0f;
  }
  if (layout.key_format == KeyFormat::kFp8E4m3) {
    header->key_scale = args.spec->layers[args.layer].fp8_key_scale;
    EncodeFp8Keys(state);
  } else {
    if (IsAffine(layout.key_format) && !kernels.find_key_ranges(state)) return false;
    Turn(args.keys, args.key_stride, layout.head_dim, state->words);
    if (IsAffine(layout.key_format)) {
      kernels.encode_affine_keys(state);
      if (is_dithered) EncodeDitheredCodes(*state);
    } else {
      CopyKeys(*state);
    }
  }
  // Norms of affine keys: squares of at most 256 channels, each with 4 roundings, lose at most
  // 2^-15; where products cancel against the zero, an absolute error of 2u ||range|| stays, and as
  // a channel reaches half its range in some of 64 tokens, ||range|| <= 16 times the largest norm.
  header->key_norm = IsAffine(layout.key_format) && !is_dithered
                         ? RoundUp(double{state->key_norm} * (1 + 0x1p-13))
                         : KeyNormMax(*state);
  if (layout.witness_bands > 0) header->witness_exponent = EncodeWitnesses(*state);
  return true;
}

struct ValueNorms {
  double norm;   // >= ||v||
  double error;  // >= ||v - v^||
};

void RotateDouble(double* values, int32_t dim) {
  for (int32_t begin = 0; begin < dim;) {
    int32_t n = 16;
    while (2 * n <= dim - begin) n *= 2;
    double* block = values + begin;
    for (int32_t h = 1; h < n; h *= 2) {
      for (int32_t i = 0; i < n; i += 2 * h) {
        for (int32_t j = i; j < i + h; ++j) {
          const double a = block[j];
          const double b = block[j + h];
          block[j] = a + b;
          block[j + h] = a - b;
        }
      }
    }
    const double factor = 1.0 / std::sqrt(static_cast<double>(n));
    for (int32_t i = 0; i < n; ++i) block[i] *= factor;
    begin += n;
  }
}

// Rotated element i of v^ of a token, exactly.
double DecodeRotated(const TileLayout& layout, const uint8_t* detail, int t, int i) {
  const uint8_t* block = detail + t / kSubBlockTokens * layout.sub_block_bytes;
  const int token = t % kSubBlockTokens;
  const bool v4 = layout.value_format == ValueFormat::kV4;
  const int zone_channels = v4 ? 32 : 16;
  const int64_t zone_count = layout.value_bytes / 256;
  const int64_t dword = (token / 2 * zone_count + i / zone_channels) * 8 + i % 8;
  const int element = i % zone_channels / 8;
  const int bit = 16 * (token % 2) + (v4 ? 4 : 8) * element;
  uint32_t bits = 0;
  std::memcpy(&bits, block + layout.value_offset + 4 * dword, sizeof(bits));
  const uint32_t code = bits >> bit & (v4 ? 15u : 255u);
  const float scale = code::DecodeValueScale(detail[layout.value_scale_offset + t]);
  const uint8_t zero = detail[layout.value_scale_offset + kTileTokens + t];
  return (code - double{code::DecodeValueOffset(zero, v4 ? 15 : 255)}) * scale;
}

// In double: R v loses at most 8 stages, a product and its factor, under 2^-48 ||v||.
ValueNorms MeasureValue(const QuantizeTileArgs& args, int t) {
  const TileLayout& layout = *args.layout;
  double rotated[kHeadDimMax];
  double square = 0;
  for (int i = 0; i < layout.value_dim; ++i) {
    rotated[i] = Original(args, args.values, args.value_stride, t, i);
    square += rotated[i] * rotated[i];
  }
  const double norm = std::sqrt(square) * kNormInflation;
  if (!IsRotated(layout.value_format)) return {norm, 0};
  RotateDouble(rotated, layout.value_dim);
  double error_square = 0;
  for (int i = 0; i < layout.value_dim; ++i) {
    const double error = rotated[i] - DecodeRotated(layout, args.detail, t, i);
    error_square += error * error;
  }
  return {norm, std::sqrt(error_square) * kNormInflation + norm * 0x1p-48};
}

ValueNorms MeasureValues(const QuantizeTileArgs& args, int sub_block) {
  ValueNorms largest{};
  for (int u = 0; u < kSubBlockTokens; ++u) {
    const ValueNorms norms = MeasureValue(args, sub_block * kSubBlockTokens + u);
    largest.norm = std::max(largest.norm, norms.norm);
    largest.error = std::max(largest.error, norms.error);
  }
  return largest;
}

// Largest norms of a sub-block's tokens from the encoder's float sums where those are accurate to
// 2^-10 or so, in double elsewhere (tiny, huge and exactly representable values). In units u =
// 2^-24: squares of 256 channels, under 400 u of a norm, 2^-15, with the rounding of each y -
// (code - offset) * scale, whose product is exact; the float rotation, 10 u ||v||.
ValueNorms BoundValues(const QuantizeState& state, int sub_block) {
  constexpr double u = 0x1p-24;
  constexpr float kSquareMin = 0x1p-60f;  // squares of smaller sums may have underflowed
  constexpr float kSquareMax = 0x1p100f;
  const int begin = sub_block * kSubBlockTokens;
  float norm_square = 0;
  float error_square = 0;
  float error_square_min = kSquareMax;
  bool known = true;
  for (int t = begin; t < begin + kSubBlockTokens; ++t) {
    known &= state.value_error[t] >= kSquareMin && state.value_norm[t] <= kSquareMax;
    norm_square = std::max(norm_square, state.value_norm[t]);
    error_square = std::max(error_square, state.value_error[t]);
    error_square_min = std::min(error_square_min, state.value_error[t]);
  }
  if (known) {
    const double norm = std::sqrt(double{norm_square}) * (1 + 0x1p-14);
    const double slack = u * 10 * norm;
    if (slack <= 0x1p-10 * std::sqrt(double{error_square_min})) {
      return {norm, std::sqrt(double{error_square}) * (1 + 0x1p-14) + slack};
    }
  }
  return MeasureValues(*state.args, sub_block);
}

void CopyValues(const QuantizeTileArgs& args) {
  const TileLayout& layout = *args.layout;
  for (int t = 0; t < kTileTokens; ++t) {
    uint8_t* block = args.detail + t / kSubBlockTokens * layout.sub_block_bytes;
    std::memcpy(block + layout.value_offset + int64_t{2} * (t % kSubBlockTokens) * layout.value_dim,
                args.values + t * args.value_stride, int64_t{2} * layout.value_dim);
  }
}

// False when a value can't be encoded.
bool EncodeValues(const QuantizeKernels& kernels, QuantizeState* state, TileHeader* header) {
  const QuantizeTileArgs& args = *state->args;
  const TileLayout& layout = *args.layout;
  const bool rotated = IsRotated(layout.value_format);
  if (rotated) {
    if (!kernels.values_by_rows) {
      Turn(args.values, args.value_stride, layout.value_dim, state->words);
    }
    if (!kernels.encode_rotated_values(state)) return false;
  } else {
    CopyValues(args);
  }
  double radius = 0;
  for (int b = 0; b < kSubBlocksPerTile; ++b) {
    const ValueNorms norms = rotated ? BoundValues(*state, b) : MeasureValues(args, b);
    radius = std::max(radius, norms.norm);
    header->value_error_bound[b] = FloatToF16RoundedUp(RoundUp(norms.error));
  }
  header->value_radius = RoundUp(radius);
  return true;
}

const QuantizeKernels& KernelsOf(CpuIsa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case CpuIsa::kAvx2:
      return kQuantizeAvx2;
    case CpuIsa::kAvx512Vnni:
      return kQuantizeAvx512;
#else
    case CpuIsa::kAvx2:
    case CpuIsa::kAvx512Vnni:
      break;
#endif
    case CpuIsa::kPortable:
      return kQuantizePortable;
  }
  CERTKV_CHECK(false, "isa is one of SupportedIsas()");
  return kQuantizePortable;
}

}  // namespace

bool QuantizeTileWith(const QuantizeKernels& kernels, const QuantizeTileArgs& args) {
  const TileLayout& layout = *args.layout;
  // Planes of scales are padded; encoders write all that comes after them.
  std::memset(args.scan, 0, layout.witness_offset);
  TileHeader header{};
  header.magic = kTileMagic;
  header.format_version = kTileFormatVersion;
  header.key_format = static_cast<uint8_t>(layout.key_format);
  header.value_format = static_cast<uint8_t>(layout.value_format);
  header.witness_bands = static_cast<uint8_t>(layout.witness_bands);
  header.identity_tag = args.identity_tag;

  QuantizeState state;
  state.args = &args;
  state.bf16 = args.spec->original_dtype == OriginalDtype::kBf16;
  state.key_limit = AffineKeyLimit(args.spec->original_dtype);
  if (!EncodeKeys(kernels, &state, &header) || !EncodeValues(kernels, &state, &header))
    return false;
  std::memcpy(args.scan, &header, sizeof(header));
  return true;
}

bool QuantizeTile(CpuIsa isa, const QuantizeTileArgs& args) {
  return QuantizeTileWith(KernelsOf(isa), args);
}

}  // namespace certkv::cpu
