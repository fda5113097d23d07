#include "kernels/core/tile_layout.h"

#include <bit>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gtest/gtest.h"

namespace certkv {
namespace {

CacheSpec SpecOf(KeyFormat key_format, ValueFormat value_format, int32_t head_dim,
                 int32_t value_dim, int32_t witness_bands) {
  CacheSpec spec;
  spec.model = "layout";
  spec.kv_head_count = 1;
  spec.group_size = 1;
  spec.head_dim = head_dim;
  spec.value_dim = value_dim;
  spec.rotary_dim = head_dim;
  spec.logit_scale = 0.125f;
  if (key_format == KeyFormat::kBf16) spec.original_dtype = OriginalDtype::kBf16;
  spec.layers = {
      {.key_format = key_format, .value_format = value_format, .witness_bands = witness_bands}};
  return spec;
}

TileLayout LayoutOf(KeyFormat key_format, ValueFormat value_format, int32_t dim,
                    int32_t witness_bands = 0) {
  return MakeTileLayout(SpecOf(key_format, value_format, dim, dim, witness_bands), 0);
}

double BytesPerToken(const TileLayout& layout) {
  return static_cast<double>(layout.tile_bytes()) / kTileTokens;
}

// Calls `check` with the layout and the golden row of every format, dimension and witness.
template <typename Check>
void ForEachLayout(Check check) {
  std::ifstream file("tests/golden/core_tile_layout.json");
  ASSERT_TRUE(file.good()) << "run from the repository root";
  const nlohmann::json golden = nlohmann::json::parse(file);
  ASSERT_GE(golden.size(), 130u);
  for (const auto& row : golden) {
    SCOPED_TRACE(row.dump());
    const CacheSpec spec = SpecOf(static_cast<KeyFormat>(row["key_format"].get<int>()),
                                  static_cast<ValueFormat>(row["value_format"].get<int>()),
                                  row["head_dim"], row["value_dim"], row["witness_bands"]);
    ASSERT_TRUE(ValidateCacheSpec(spec).ok()) << ValidateCacheSpec(spec);
    check(MakeTileLayout(spec, 0), row);
  }
}

TEST(TileLayoutTest, OffsetsAndSizesAreTheGoldenOnes) {
  ForEachLayout([](const TileLayout& layout, const nlohmann::json& row) {
    EXPECT_EQ(static_cast<int>(layout.key_format), row["key_format"]);
    EXPECT_EQ(static_cast<int>(layout.value_format), row["value_format"]);
    EXPECT_EQ(layout.head_dim, row["head_dim"]);
    EXPECT_EQ(layout.value_dim, row["value_dim"]);
    EXPECT_EQ(layout.witness_bands, row["witness_bands"]);
    EXPECT_EQ(layout.scale_offset, row["scale_offset"]);
    EXPECT_EQ(layout.zero_offset, row["zero_offset"]);
    EXPECT_EQ(layout.scale_bytes, row["scale_bytes"]);
    EXPECT_EQ(layout.witness_offset, row["witness_offset"]);
    EXPECT_EQ(layout.coarse_offset, row["coarse_offset"]);
    EXPECT_EQ(layout.coarse_bytes, row["coarse_bytes"]);
    EXPECT_EQ(layout.scan_bytes, row["scan_bytes"]);
    EXPECT_EQ(layout.fine_bytes, row["fine_bytes"]);
    EXPECT_EQ(layout.value_offset, row["value_offset"]);
    EXPECT_EQ(layout.value_bytes, row["value_bytes"]);
    EXPECT_EQ(layout.value_scale_offset, row["value_scale_offset"]);
    EXPECT_EQ(layout.sub_block_bytes, row["sub_block_bytes"]);
    EXPECT_EQ(layout.detail_bytes, row["detail_bytes"]);
  });
}

TEST(TileLayoutTest, EveryPlaneIsAligned) {
  ForEachLayout([](const TileLayout& layout, const nlohmann::json&) {
    for (const int64_t offset :
         {layout.scale_offset, layout.zero_offset, layout.witness_offset, layout.coarse_offset,
          layout.coarse_bytes, layout.scan_bytes, layout.fine_bytes, layout.value_offset,
          layout.value_scale_offset, layout.sub_block_bytes, layout.detail_bytes}) {
      EXPECT_EQ(offset % kPlaneAlignment, 0) << offset;
    }
  });
}

TEST(TileLayoutTest, PlanesFollowEachOtherWithoutOverlap) {
  ForEachLayout([](const TileLayout& layout, const nlohmann::json&) {
    EXPECT_GE(layout.scale_offset, static_cast<int64_t>(sizeof(TileHeader)));
    EXPECT_GE(layout.zero_offset, layout.scale_offset + layout.scale_bytes);
    EXPECT_GE(layout.witness_offset, layout.zero_offset + layout.scale_bytes);
    EXPECT_GE(layout.coarse_offset, layout.witness_offset + kTileTokens * layout.witness_bands);
    EXPECT_EQ(layout.scan_bytes, layout.coarse_offset + 4 * layout.coarse_bytes);
    EXPECT_GE(layout.value_offset, layout.fine_bytes);
    EXPECT_GE(layout.sub_block_bytes, layout.value_offset + layout.value_bytes);
    EXPECT_EQ(layout.value_scale_offset, 4 * layout.sub_block_bytes);
    const bool has_scale =
        layout.value_format == ValueFormat::kV4 || layout.value_format == ValueFormat::kV8;
    EXPECT_EQ(layout.detail_bytes - layout.value_scale_offset, has_scale ? 128 : 0);
    EXPECT_EQ(layout.tile_bytes(), layout.scan_bytes + layout.detail_bytes);
  });
}

// The header is one byte per token; the rest is the figure of the format alone.
TEST(TileLayoutTest, BytesPerTokenAreTheDocumentedOnes) {
  EXPECT_EQ(BytesPerToken(LayoutOf(KeyFormat::kK8, ValueFormat::kV4, 64)), 102 + 1);
  EXPECT_EQ(BytesPerToken(LayoutOf(KeyFormat::kK8, ValueFormat::kV4, 128)), 202 + 1);
  EXPECT_EQ(BytesPerToken(LayoutOf(KeyFormat::kK8, ValueFormat::kV8, 128)), 266 + 1);
  EXPECT_EQ(BytesPerToken(LayoutOf(KeyFormat::kK6, ValueFormat::kV4, 128, 1)), 171 + 1);
  EXPECT_EQ(BytesPerToken(LayoutOf(KeyFormat::kF16, ValueFormat::kF16, 128)), 512 + 1);
}

TEST(TileLayoutTest, DefaultFormatHoldsMoreThanTwiceAndAHalfAsManyTokens) {
  const double original_bytes = 2 * 2 * 64;
  const double capacity =
      original_bytes / BytesPerToken(LayoutOf(KeyFormat::kK8, ValueFormat::kV4, 64));
  EXPECT_GE(capacity, 2.4);
  EXPECT_LT(capacity, 2.5);
}

TEST(TileLayoutTest, OriginalRecordsAreSixteenBitsPerElement) {
  const CacheSpec spec = SpecOf(KeyFormat::kK8, ValueFormat::kV4, 80, 256, 0);
  EXPECT_EQ(OriginalKeyBytes(spec), 64 * 80 * 2);
  EXPECT_EQ(OriginalValueBytes(spec), 64 * 256 * 2);
}

TEST(TileLayoutTest, LayerChoosesItsOwnFormat) {
  CacheSpec spec = SpecOf(KeyFormat::kK8, ValueFormat::kV4, 64, 64, 0);
  spec.layers.push_back(
      {.key_format = KeyFormat::kK6, .value_format = ValueFormat::kV8, .witness_bands = 4});
  EXPECT_EQ(MakeTileLayout(spec, 1).key_format, KeyFormat::kK6);
  EXPECT_EQ(MakeTileLayout(spec, 1).value_bytes, 16 * 64);
  EXPECT_DEATH(MakeTileLayout(spec, 2), "layer is inside the spec");
}

TEST(TileLayoutTest, AtomIsTheSubBlockWhenTokensHaveWitnesses) {
  EXPECT_EQ(LayoutOf(KeyFormat::kK8, ValueFormat::kV4, 64).atoms_per_tile(), 1);
  EXPECT_EQ(LayoutOf(KeyFormat::kK8, ValueFormat::kV4, 64, 1).atoms_per_tile(), 4);
  EXPECT_EQ(LayoutOf(KeyFormat::kFp8E4m3, ValueFormat::kV4, 64, 4).atom_tokens(), 16);
}

// Each field's bytes, spelled out: a header written by one build is read by another.
TEST(TileLayoutTest, HeaderBytesAreFixed) {
  TileHeader header = {};
  header.magic = kTileMagic;
  header.format_version = kTileFormatVersion;
  header.key_format = static_cast<uint8_t>(KeyFormat::kFp8E4m3);
  header.value_format = static_cast<uint8_t>(ValueFormat::kV8);
  header.witness_bands = 4;
  header.witness_exponent = -2;
  header.value_error_bound[0] = 0x1110;
  header.value_error_bound[3] = 0x1413;
  header.value_radius = 1.0f;
  header.key_norm = 2.0f;
  header.key_scale = -0.0f;
  header.identity_tag = 0x2726252423222120;
  header.scan_checksum = 0x2f2e2d2c2b2a2928;
  header.detail_checksum = 0x3736353433323130;
  header.original_checksum = 0x3f3e3d3c3b3a3938;
  const std::array<uint8_t, 64> expected = {
      0x7b, 0xc4, 3,    4,    2,    4,    0xfe, 0xff,   // magic, version, formats, bands, exponent
      0x10, 0x11, 0,    0,    0,    0,    0x13, 0x14,   // value error bounds
      0,    0,    0x80, 0x3f, 0,    0,    0,    0x40,   // value radius, key norm
      0,    0,    0,    0x80, 0,    0,    0,    0,      // key scale, reserved
      0x20, 0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27,   // identity tag
      0x28, 0x29, 0x2a, 0x2b, 0x2c, 0x2d, 0x2e, 0x2f,   // scan checksum
      0x30, 0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37,   // detail checksum
      0x38, 0x39, 0x3a, 0x3b, 0x3c, 0x3d, 0x3e, 0x3f};  // original checksum
  EXPECT_EQ((std::bit_cast<std::array<uint8_t, 64>>(header)), expected);
}

// For quotients x of [0, 255] and the chosen code rint(x'), |x' - x| <= 2^-14: the residual stays
// in the half range, and reaches it where x lies as far behind a tie as the slack allows.
TEST(TileLayoutTest, HalfRangeCoversEveryQuotientAndIsTight) {
  constexpr double kSlip = 0x1p-14 - 0x1p-30;
  for (const KeyFormat format : {KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4}) {
    const AffineDepth depth = AffineDepthOf(format);
    double worst = 0;
    for (int step = 0; step <= 255 * 64; ++step) {
      for (const double offset : {-kSlip, 0.0, kSlip}) {
        const double x = std::fmin(255, std::fmax(0, step / 64.0 + offset));
        for (const double slip : {-kSlip, 0.0, kSlip}) {
          const double rounded = std::fmin(255, std::fmax(0, std::rint(x + slip)));
          const auto code = static_cast<uint32_t>(rounded);
          worst = std::fmax(worst, std::fabs((code & depth.mask) + double{depth.centre} - x));
        }
      }
    }
    EXPECT_LE(worst, depth.half_range) << KeyFormatName(format);
    EXPECT_GT(worst, depth.half_range - 0x1p-20) << KeyFormatName(format);
  }
}

TEST(TileLayoutDeathTest, OnlyNestedFormatsHaveAnAffineDepth) {
  EXPECT_DEATH(AffineDepthOf(KeyFormat::kFp8E4m3), "only K8, K8D, K6 and K4 are affine");
  EXPECT_DEATH(AffineDepthOf(KeyFormat::kF16), "only K8, K8D, K6 and K4 are affine");
}

}  // namespace
}  // namespace certkv
