// What a tile says about itself, and whether its bytes are the ones that were sealed.
#include <cstddef>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "kernels/bounds/dither.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/tile_checksum.h"

namespace certkv {
namespace {

template <typename Seen, typename Expected>
absl::Status Mismatch(absl::string_view field, const Seen& seen, const Expected& expected) {
  return MakeError(absl::StatusCode::kDataLoss, "TILE_FORMAT_MISMATCH",
                   absl::StrCat("tile header field ", field, " is ", seen, ", must be ", expected,
                                "; the record is not a tile of this layout or was overwritten, "
                                "seal the block again"));
}

bool IsBoundF16(uint16_t bits) { return bits <= 0x7c00; }  // +0 .. +infinity; no sign, no NaN

absl::Status CheckBounds(const TileLayout& layout, const TileHeader& header) {
  for (int s = 0; s < kSubBlocksPerTile; ++s) {
    if (IsBoundF16(header.value_error_bound[s])) continue;
    return Mismatch(absl::StrCat("value_error_bound[", s, "]"),
                    F16ToFloat(header.value_error_bound[s]), "at least 0");
  }
  if (!(header.value_radius >= 0)) {
    return Mismatch("value_radius", header.value_radius, "at least 0");
  }
  if (!(header.key_norm >= 0)) return Mismatch("key_norm", header.key_norm, "at least 0");
  if (layout.key_format == KeyFormat::kFp8E4m3) {
    if (!(header.key_scale > 0 && header.key_scale <= std::numeric_limits<float>::max())) {
      return Mismatch("key_scale", header.key_scale, "finite and above 0");
    }
  } else if (header.key_scale != 0) {
    return Mismatch("key_scale", header.key_scale, "0");
  }
  return absl::OkStatus();
}

absl::Status CheckKeyCheck(const TileLayout& layout, const TileHeader& header) {
  if (layout.has_witness_weights) {
    if (header.key_check != 0) return absl::OkStatus();
    return Mismatch("key_check", 0, "that of the KV head's witness weights");
  }
  const uint32_t expected = layout.key_format == KeyFormat::kK8D
                                ? DitherCheck(layout.dither_secret, header.identity_tag)
                                : 0;
  if (header.key_check == expected) return absl::OkStatus();
  return Mismatch("key_check", header.key_check,
                  expected == 0 ? "0" : "that of the cache's dither_secret");
}

absl::Status ChecksumError(absl::string_view reason, absl::string_view what, uint64_t seen,
                           uint64_t expected) {
  return MakeError(absl::StatusCode::kDataLoss, reason,
                   absl::StrCat("XXH3-64 of ", what, " is ", absl::Hex(seen, absl::kZeroPad16),
                                ", the tile's header says ", absl::Hex(expected, absl::kZeroPad16),
                                "; the bytes changed after sealing, drop the block and seal it "
                                "again from its originals"));
}

}  // namespace

absl::Status CheckTile(const TileLayout& layout, const uint8_t* scan) {
  TileHeader header;
  std::memcpy(&header, scan, sizeof(header));
  if (header.magic != kTileMagic) {
    return Mismatch("magic", absl::StrCat("0x", absl::Hex(header.magic)),
                    absl::StrCat("0x", absl::Hex(kTileMagic)));
  }
  if (header.format_version != kTileFormatVersion) {
    return Mismatch("format_version", static_cast<int>(header.format_version),
                    static_cast<int>(kTileFormatVersion));
  }
  if (header.key_format != static_cast<uint8_t>(layout.key_format)) {
    return Mismatch("key_format", KeyFormatName(static_cast<KeyFormat>(header.key_format)),
                    KeyFormatName(layout.key_format));
  }
  if (header.value_format != static_cast<uint8_t>(layout.value_format)) {
    return Mismatch("value_format", ValueFormatName(static_cast<ValueFormat>(header.value_format)),
                    ValueFormatName(layout.value_format));
  }
  if (header.witness_bands != layout.witness_bands) {
    return Mismatch("witness_bands", static_cast<int>(header.witness_bands), layout.witness_bands);
  }
  CERTKV_RETURN_IF_ERROR(CheckKeyCheck(layout, header));
  return CheckBounds(layout, header);
}

absl::Status CheckTileWeights(const uint8_t* scan, uint32_t weights_check) {
  TileHeader header;
  std::memcpy(&header, scan, sizeof(header));
  if (header.key_check == weights_check) return absl::OkStatus();
  return Mismatch("key_check", header.key_check,
                  absl::StrCat(weights_check, ", that of the KV head's witness weights"));
}

absl::Status VerifyTile(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail,
                        const uint16_t* keys, const uint16_t* values) {
  CERTKV_RETURN_IF_ERROR(CheckTile(layout, scan));
  TileHeader header;
  std::memcpy(&header, scan, sizeof(header));
  const uint64_t scan_checksum = ScanChecksum(layout, scan);
  if (scan_checksum != header.scan_checksum) {
    return ChecksumError("SCAN_CHECKSUM", "a scan record", scan_checksum, header.scan_checksum);
  }
  const uint64_t detail_checksum = DetailChecksum(layout, detail);
  if (detail_checksum != header.detail_checksum) {
    return ChecksumError("DETAIL_CHECKSUM", "a detail record", detail_checksum,
                         header.detail_checksum);
  }
  if (keys == nullptr || values == nullptr) return absl::OkStatus();
  const uint64_t original_checksum =
      OriginalChecksum(layout, keys, layout.head_dim, values, layout.value_dim);
  if (original_checksum != header.original_checksum) {
    return ChecksumError("ORIGINAL_CHECKSUM_MISMATCH", "the original keys and values of a tile",
                         original_checksum, header.original_checksum);
  }
  return absl::OkStatus();
}

}  // namespace certkv
