#include "kernels/reference/tile_codec.h"

#include <cstring>

#include "kernels/bounds/dither.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/core/value_code.h"

namespace certkv::reference {
namespace {

// Place of up to 8 bits in a record.
struct BitPlace {
  int64_t byte;
  int shift;
};

uint32_t ReadBits(const uint8_t* record, BitPlace place, uint32_t mask) {
  return (record[place.byte] >> place.shift) & mask;
}

void WriteBits(uint8_t* record, BitPlace place, uint32_t mask, uint32_t bits) {
  const uint32_t cleared = record[place.byte] & ~(mask << place.shift);
  record[place.byte] = static_cast<uint8_t>(cleared | (bits & mask) << place.shift);
}

uint16_t ReadWord(const uint8_t* record, int64_t byte) {
  return static_cast<uint16_t>(record[byte] | record[byte + 1] << 8);
}

void WriteWord(uint8_t* record, int64_t byte, uint32_t word) {
  record[byte] = static_cast<uint8_t>(word);
  record[byte + 1] = static_cast<uint8_t>(word >> 8);
}

// [d/8][16 tokens] dwords, nibble n of a dword is channel 8j + n; inside one sub-block's plane.
BitPlace NibblePlace(int t, int i) {
  const int dword = i / 8 * kSubBlockTokens + t % kSubBlockTokens;
  const int nibble = i % 8;
  return {int64_t{4} * dword + nibble / 2, 4 * (nibble % 2)};
}

// K6's fine plane, [d/16][16 tokens] dwords of 2-bit codes.
BitPlace PairPlace(int t, int i) {
  const int dword = i / 16 * kSubBlockTokens + t % kSubBlockTokens;
  const int channel = i % 16;  // 8 * upper + 2 * b + odd
  const int upper = channel / 8;
  const int b = channel % 8 / 2;
  const int odd = channel % 2;
  return {int64_t{4} * dword + b, 2 * (2 * odd + upper)};
}

BitPlace CoarsePlace(const TileLayout& layout, int t, int i) {
  BitPlace place = NibblePlace(t, i);
  place.byte += layout.coarse_offset + t / kSubBlockTokens * layout.coarse_bytes;
  return place;
}

int64_t SubBlockBegin(const TileLayout& layout, int t) {
  return t / kSubBlockTokens * layout.sub_block_bytes;
}

BitPlace FinePlace(const TileLayout& layout, int t, int i) {
  BitPlace place = layout.key_format == KeyFormat::kK6 ? PairPlace(t, i) : NibblePlace(t, i);
  place.byte += SubBlockBegin(layout, t);
  return place;
}

// [d][16 tokens] words in the place of the coarse plane.
int64_t OriginalKeyByte(const TileLayout& layout, int t, int i) {
  return layout.coarse_offset + t / kSubBlockTokens * layout.coarse_bytes +
         int64_t{2} * (i * kSubBlockTokens + t % kSubBlockTokens);
}

int64_t OriginalValueByte(const TileLayout& layout, int t, int i) {
  return SubBlockBegin(layout, t) + layout.value_offset +
         int64_t{2} * (t % kSubBlockTokens * layout.value_dim + i);
}

// V4: [8 pairs][ceil(dv/32)][8 lanes] dwords, nibble n of a word is channel 32z + 8n + lane.
// V8: [8 pairs][dv/16][8 lanes] dwords, byte b of a word is channel 16z + 8b + lane.
// The low word is the pair's even token.
BitPlace ValuePlace(const TileLayout& layout, int t, int i) {
  const bool is_v4 = layout.value_format == ValueFormat::kV4;
  const int zone_channels = is_v4 ? 32 : 16;
  const int zone_count = (layout.value_dim + zone_channels - 1) / zone_channels;
  const int token = t % kSubBlockTokens;
  const int dword = (token / 2 * zone_count + i / zone_channels) * 8 + i % 8;
  const int element = i % zone_channels / 8;  // n or b
  const int64_t word_byte = SubBlockBegin(layout, t) + layout.value_offset + int64_t{4} * dword +
                            int64_t{2} * (token % 2);
  return is_v4 ? BitPlace{word_byte + element / 2, 4 * (element % 2)}
               : BitPlace{word_byte + element, 0};
}

int64_t WitnessByte(const TileLayout& layout, int t, int band) {
  return layout.witness_offset +
         (t / kSubBlockTokens * layout.witness_bands + band) * kSubBlockTokens +
         t % kSubBlockTokens;
}

}  // namespace

bool IsOriginal(KeyFormat format) {
  return format == KeyFormat::kF16 || format == KeyFormat::kBf16;
}

TileHeader ReadHeader(const uint8_t* scan) {
  TileHeader header;
  std::memcpy(&header, scan, sizeof(header));
  return header;
}

uint32_t ReadKeyCode(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail, int t,
                     int i) {
  if (IsOriginal(layout.key_format)) return ReadWord(scan, OriginalKeyByte(layout, t, i));
  const uint32_t coarse = ReadBits(scan, CoarsePlace(layout, t, i), 15) << 4;
  switch (layout.key_format) {
    case KeyFormat::kK8:
    case KeyFormat::kK8D:
    case KeyFormat::kFp8E4m3:
      return coarse | ReadBits(detail, FinePlace(layout, t, i), 15);
    case KeyFormat::kK6:
      return coarse | ReadBits(detail, FinePlace(layout, t, i), 3) << 2;
    default:
      return coarse;
  }
}

void WriteKeyCode(const TileLayout& layout, uint8_t* scan, uint8_t* detail, int t, int i,
                  uint32_t code) {
  if (IsOriginal(layout.key_format)) {
    WriteWord(scan, OriginalKeyByte(layout, t, i), code);
    return;
  }
  CERTKV_CHECK(code <= 255, "a key code has 8 bits");
  WriteBits(scan, CoarsePlace(layout, t, i), 15, code >> 4);
  switch (layout.key_format) {
    case KeyFormat::kK8:
    case KeyFormat::kK8D:
    case KeyFormat::kFp8E4m3:
      WriteBits(detail, FinePlace(layout, t, i), 15, code);
      break;
    case KeyFormat::kK6:
      WriteBits(detail, FinePlace(layout, t, i), 3, code >> 2);
      break;
    default:
      break;
  }
}

uint32_t ReadValueCode(const TileLayout& layout, const uint8_t* detail, int t, int i) {
  if (!ValuesAreRotated(layout)) return ReadWord(detail, OriginalValueByte(layout, t, i));
  const uint32_t mask = layout.value_format == ValueFormat::kV4 ? 15 : 255;
  return ReadBits(detail, ValuePlace(layout, t, i), mask);
}

void WriteValueCode(const TileLayout& layout, uint8_t* detail, int t, int i, uint32_t code) {
  if (!ValuesAreRotated(layout)) {
    WriteWord(detail, OriginalValueByte(layout, t, i), code);
    return;
  }
  const uint32_t mask = layout.value_format == ValueFormat::kV4 ? 15 : 255;
  CERTKV_CHECK(code <= mask, "a value code has the format's bits");
  WriteBits(detail, ValuePlace(layout, t, i), mask, code);
}

uint16_t ReadKeyScale(const TileLayout& layout, const uint8_t* scan, int i) {
  return ReadWord(scan, layout.scale_offset + int64_t{2} * i);
}

uint16_t ReadKeyZero(const TileLayout& layout, const uint8_t* scan, int i) {
  return ReadWord(scan, layout.zero_offset + int64_t{2} * i);
}

void WriteKeyScaleAndZero(const TileLayout& layout, uint8_t* scan, int i, uint16_t scale,
                          uint16_t zero) {
  WriteWord(scan, layout.scale_offset + int64_t{2} * i, scale);
  WriteWord(scan, layout.zero_offset + int64_t{2} * i, zero);
}

uint8_t ReadValueScale(const TileLayout& layout, const uint8_t* detail, int t) {
  return detail[layout.value_scale_offset + t];
}

uint8_t ReadValueZero(const TileLayout& layout, const uint8_t* detail, int t) {
  return detail[layout.value_scale_offset + kTileTokens + t];
}

void WriteValueScaleAndZero(const TileLayout& layout, uint8_t* detail, int t, uint8_t scale,
                            uint8_t zero) {
  detail[layout.value_scale_offset + t] = scale;
  detail[layout.value_scale_offset + kTileTokens + t] = zero;
}

uint8_t ReadWitness(const TileLayout& layout, const uint8_t* scan, int t, int band) {
  return scan[WitnessByte(layout, t, band)];
}

void WriteWitness(const TileLayout& layout, uint8_t* scan, int t, int band, uint8_t code) {
  scan[WitnessByte(layout, t, band)] = code;
}

double ReadDither(const TileLayout& layout, const uint8_t* scan, int t, int i) {
  return DitherAt(
      {.secret = layout.dither_secret, .identity_tag = ReadHeader(scan).identity_tag, .token = t},
      i);
}

double DecodeAffineKey(const AffineDepth& depth, uint32_t code, uint16_t scale, uint16_t zero) {
  const double level = static_cast<double>(code & depth.mask) + depth.centre;
  return level * F16ToFloat(scale) + F16ToFloat(zero);
}

double DecodeKey(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail, int t,
                 int i) {
  const uint32_t code = ReadKeyCode(layout, scan, detail, t, i);
  switch (layout.key_format) {
    case KeyFormat::kK8:
    case KeyFormat::kK6:
    case KeyFormat::kK4:
      return DecodeAffineKey(AffineDepthOf(layout.key_format), code, ReadKeyScale(layout, scan, i),
                             ReadKeyZero(layout, scan, i));
    case KeyFormat::kK8D: {
      const double level = static_cast<double>(code) - ReadDither(layout, scan, t, i);
      return level * F16ToFloat(ReadKeyScale(layout, scan, i)) +
             F16ToFloat(ReadKeyZero(layout, scan, i));
    }
    case KeyFormat::kFp8E4m3:
      return double{ReadHeader(scan).key_scale} * E4m3ToFloat(static_cast<uint8_t>(code));
    case KeyFormat::kF16:
      return F16ToFloat(static_cast<uint16_t>(code));
    case KeyFormat::kBf16:
      return Bf16ToFloat(static_cast<uint16_t>(code));
  }
  CERTKV_CHECK(false, "a layout has a known key format");
  return 0;
}

double DecodeStoredValue(const TileLayout& layout, const uint8_t* detail, int t, int i) {
  const uint32_t code = ReadValueCode(layout, detail, t, i);
  switch (layout.value_format) {
    case ValueFormat::kV4:
    case ValueFormat::kV8: {
      const float level_max = layout.value_format == ValueFormat::kV4 ? 15 : 255;
      const double offset = code::DecodeValueOffset(ReadValueZero(layout, detail, t), level_max);
      return (code - offset) * code::DecodeValueScale(ReadValueScale(layout, detail, t));
    }
    case ValueFormat::kF16:
      return F16ToFloat(static_cast<uint16_t>(code));
    case ValueFormat::kBf16:
      return Bf16ToFloat(static_cast<uint16_t>(code));
  }
  CERTKV_CHECK(false, "a layout has a known value format");
  return 0;
}

}  // namespace certkv::reference
