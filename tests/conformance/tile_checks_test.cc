// What the door refuses: originals that can't be stored, tiles that aren't what they should be.
#include <cstring>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/tile_checksum.h"
#include "kernels/reference/tile_codec.h"
#include "tests/conformance/sequence_case.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSeed = 5;

// One sealed tile and its originals.
struct SealedTile {
  explicit SealedTile(SequenceShape shape = {}) : sequence(OneTile(shape), kSeed, Backend::kCpu) {}

  static SequenceShape OneTile(SequenceShape shape) {
    shape.tile_count = 1;
    shape.tail_count = 0;
    return shape;
  }
  absl::Status Verify() {
    const AttendTile& tile = sequence.args().tiles[0];
    return VerifyTile(sequence.layout(), tile.scan, tile.detail, tile.original_keys,
                      tile.original_values);
  }
  // Seals the originals again after a change to them.
  absl::Status SealAgain(Backend backend, const uint16_t* keys, const uint16_t* values) {
    QuantizeTileArgs args{};
    args.spec = &sequence.spec();
    args.layout = &sequence.layout();
    args.keys = keys;
    args.values = values;
    args.witness_weights = WitnessWeightsOf(sequence.spec(), 0, 0);
    args.key_stride = sequence.spec().head_dim;
    args.value_stride = sequence.spec().value_dim;
    args.scan = sequence.scan(0);
    args.detail = sequence.detail(0);
    return QuantizeTile(backend, args);
  }

  SequenceCase sequence;
};

struct BadOriginal {
  const char* name;
  OriginalDtype dtype;
  bool in_key;
  uint16_t bits;
  const char* reason;
};

class BadOriginalTest : public ::testing::TestWithParam<BadOriginal> {};

TEST_P(BadOriginalTest, IsRefusedWithItsPlace) {
  const BadOriginal& bad = GetParam();
  SequenceShape shape;
  shape.dtype = bad.dtype;
  shape.head_dim = 80;
  SealedTile tile(shape);
  std::vector<uint16_t> keys(kTileTokens * 80, 0);
  std::vector<uint16_t> values(kTileTokens * 64, 0);
  if (bad.in_key) {
    keys[37 * 80 + 79] = bad.bits;
  } else {
    values[37 * 64 + 5] = bad.bits;
  }
  for (const Backend backend : {Backend::kReference, Backend::kCpu}) {
    const absl::Status status = tile.SealAgain(backend, keys.data(), values.data());
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(status), bad.reason);
    EXPECT_THAT(std::string(status.message()), HasSubstr("token 37"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.in_key ? "channel 79" : "channel 5"));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Originals, BadOriginalTest,
    ::testing::Values(
        BadOriginal{"key_infinity", OriginalDtype::kF16, true, 0x7c00, "NON_FINITE_KEY"},
        BadOriginal{"key_minus_infinity", OriginalDtype::kF16, true, 0xfc00, "NON_FINITE_KEY"},
        BadOriginal{"key_nan", OriginalDtype::kF16, true, 0xfe01, "NON_FINITE_KEY"},
        BadOriginal{"value_infinity", OriginalDtype::kF16, false, 0x7c00, "NON_FINITE_VALUE"},
        BadOriginal{"value_nan", OriginalDtype::kF16, false, 0x7e00, "NON_FINITE_VALUE"},
        BadOriginal{"bf16_key_nan", OriginalDtype::kBf16, true, 0x7fc0, "NON_FINITE_KEY"},
        BadOriginal{"bf16_value_infinity", OriginalDtype::kBf16, false, 0xff80, "NON_FINITE_VALUE"},
        BadOriginal{"bf16_key_of_65536", OriginalDtype::kBf16, true, 0xc780, "KEY_OUT_OF_RANGE"}),
    [](const auto& info) { return info.param.name; });

TEST(VerifyTileTest, AcceptsWhatWasSealed) {
  for (const KeyFormat format : {KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4, KeyFormat::kF16}) {
    SequenceShape shape;
    shape.key_format = format;
    if (format == KeyFormat::kF16) shape.value_format = ValueFormat::kF16;
    SealedTile tile(shape);
    EXPECT_TRUE(tile.Verify().ok()) << tile.Verify();
  }
}

TEST(VerifyTileTest, FindsEveryFlippedBitOfTheScanRecord) {
  SealedTile tile;
  uint8_t* scan = tile.sequence.scan(0);
  for (int64_t byte = 0; byte < tile.sequence.layout().scan_bytes; ++byte) {
    const auto bit = static_cast<uint8_t>(1 << byte % 8);
    scan[byte] ^= bit;
    EXPECT_EQ(tile.Verify().code(), absl::StatusCode::kDataLoss) << "byte " << byte;
    scan[byte] ^= bit;
  }
  EXPECT_TRUE(tile.Verify().ok());
}

TEST(VerifyTileTest, FindsEveryFlippedBitOfTheDetailRecord) {
  SealedTile tile;
  uint8_t* detail = tile.sequence.detail(0);
  for (int64_t byte = 0; byte < tile.sequence.layout().detail_bytes; ++byte) {
    const auto bit = static_cast<uint8_t>(1 << byte % 8);
    detail[byte] ^= bit;
    EXPECT_EQ(ReasonOf(tile.Verify()), "DETAIL_CHECKSUM") << "byte " << byte;
    detail[byte] ^= bit;
  }
}

TEST(VerifyTileTest, FindsAChangedOriginal) {
  SealedTile tile;
  const AttendTile& data = tile.sequence.args().tiles[0];
  std::vector<uint16_t> keys(data.original_keys, data.original_keys + kTileTokens * 64);
  std::vector<uint16_t> values(data.original_values, data.original_values + kTileTokens * 64);
  const TileLayout& layout = tile.sequence.layout();
  const auto verify = [&] {
    return ReasonOf(VerifyTile(layout, data.scan, data.detail, keys.data(), values.data()));
  };
  EXPECT_EQ(verify(), "");
  keys.back() ^= 1;
  EXPECT_EQ(verify(), "ORIGINAL_CHECKSUM_MISMATCH");
  keys.back() ^= 1;
  values.front() ^= 0x8000;
  EXPECT_EQ(verify(), "ORIGINAL_CHECKSUM_MISMATCH");
  EXPECT_TRUE(VerifyTile(layout, data.scan, data.detail, nullptr, nullptr).ok());
}

struct BadHeader {
  const char* name;
  void (*change)(TileHeader* header);
};

class CheckTileTest : public ::testing::TestWithParam<BadHeader> {};

TEST_P(CheckTileTest, RefusesTheHeader) {
  SealedTile tile;
  TileHeader header = reference::ReadHeader(tile.sequence.scan(0));
  ASSERT_TRUE(CheckTile(tile.sequence.layout(), tile.sequence.scan(0)).ok());
  GetParam().change(&header);
  std::memcpy(tile.sequence.scan(0), &header, sizeof(header));
  const absl::Status status = CheckTile(tile.sequence.layout(), tile.sequence.scan(0));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(ReasonOf(status), "TILE_FORMAT_MISMATCH");
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().name));
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

INSTANTIATE_TEST_SUITE_P(
    Headers, CheckTileTest,
    ::testing::Values(BadHeader{"magic", [](TileHeader* h) { h->magic = 0; }},
                      BadHeader{"format_version", [](TileHeader* h) { --h->format_version; }},
                      BadHeader{"key_format", [](TileHeader* h) { h->key_format = 2; }},
                      BadHeader{"value_format", [](TileHeader* h) { h->value_format = 0; }},
                      BadHeader{"witness_bands", [](TileHeader* h) { h->witness_bands = 4; }},
                      BadHeader{"key_check", [](TileHeader* h) { h->key_check = 1; }},
                      BadHeader{"value_error_bound",
                                [](TileHeader* h) { h->value_error_bound[3] = 0x7e00; }},
                      BadHeader{"value_radius", [](TileHeader* h) { h->value_radius = kNan; }},
                      BadHeader{"key_norm", [](TileHeader* h) { h->key_norm = -1; }},
                      BadHeader{"key_scale", [](TileHeader* h) { h->key_scale = kNan; }}),
    [](const auto& info) { return info.param.name; });

TEST(TileWeightsTest, WantsACheckOfTheWeightsWhereWitnessesHaveSome) {
  const SequenceCase weighted(ShapeOfFormat("K6V4w1c"), 1, Backend::kCpu);
  TileHeader header = reference::ReadHeader(weighted.args().tiles[0].scan);
  EXPECT_EQ(header.key_check, WitnessWeightsCheck(weighted.args().witness_weights, 64));
  header.key_check = 0;
  const absl::Status status =
      CheckTile(weighted.layout(), reinterpret_cast<const uint8_t*>(&header));
  EXPECT_EQ(ReasonOf(status), "TILE_FORMAT_MISMATCH");
  EXPECT_THAT(std::string(status.message()), HasSubstr("key_check is 0"));
}

TEST(DequantizeTileTest, GivesWhatTheCodesSay) {
  SealedTile tile;
  const TileLayout& layout = tile.sequence.layout();
  std::vector<float> keys(kTileTokens * 64);
  std::vector<float> values(kTileTokens * 64);
  ASSERT_TRUE(DequantizeTile(layout, tile.sequence.scan(0), tile.sequence.detail(0), keys.data(),
                             values.data())
                  .ok());
  const TileHeader header = reference::ReadHeader(tile.sequence.scan(0));
  for (int t = 0; t < kTileTokens; ++t) {
    double error = 0;
    for (int i = 0; i < 64; ++i) {
      const double scale = F16ToFloat(reference::ReadKeyScale(layout, tile.sequence.scan(0), i));
      EXPECT_NEAR(keys[t * 64 + i], tile.sequence.OriginalKey(t, i), 0.5001 * scale);
      const double difference = values[t * 64 + i] - tile.sequence.OriginalValue(t, i);
      error += difference * difference;
    }
    // The floats given are rounded; eta bounds the exact values.
    EXPECT_LE(std::sqrt(error),
              F16ToFloat(header.value_error_bound[t / kSubBlockTokens]) * (1 + 1e-5));
  }
}

TEST(DequantizeTileTest, RefusesAForeignTile) {
  SealedTile tile;
  SequenceShape shape;
  shape.key_format = KeyFormat::kK6;
  SealedTile other(shape);
  std::vector<float> keys(kTileTokens * 64);
  EXPECT_EQ(ReasonOf(DequantizeTile(other.sequence.layout(), tile.sequence.scan(0),
                                    tile.sequence.detail(0), keys.data(), nullptr)),
            "TILE_FORMAT_MISMATCH");
}

}  // namespace
}  // namespace certkv::conformance
