// QuantizeTile on every path: the bytes are the format's, the bounds cover and are tight.
#include "kernels/ops/quantize_tile.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "kernels/core/witness.h"
#include "kernels/reference/hadamard.h"
#include "kernels/reference/tile_codec.h"
#include "tests/conformance/path.h"
#include "tests/conformance/shapes.h"

namespace certkv::conformance {
namespace {

constexpr uint64_t kSeed = 20260727;
// Rounding of the truths computed here: sums of 256 squares in double.
constexpr double kTruthRounding = 0x1p-40;

class QuantizeTileTest : public ::testing::TestWithParam<Path> {
 protected:
  void SetUp() override {
    const std::string missing = SelectPath(GetParam());
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

// Shapes with a tile in them.
std::vector<NamedShape> TileShapes() {
  std::vector<NamedShape> shapes = FormatShapes();
  for (const auto& more : {DimensionShapes(), ContentShapes()}) {
    shapes.insert(shapes.end(), more.begin(), more.end());
  }
  return shapes;
}

void ExpectEqualBytes(const uint8_t* seen, const uint8_t* expected, int64_t begin, int64_t end,
                      const char* what) {
  for (int64_t n = begin; n < end; ++n) {
    ASSERT_EQ(int{seen[n]}, int{expected[n]}) << what << " byte " << n;
  }
}

TEST_P(QuantizeTileTest, WritesTheBytesOfTheReference) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, TileShapes())) {
    SCOPED_TRACE(named.name);
    SequenceCase seen(named.shape, kSeed, GetParam().backend);
    SequenceCase expected(named.shape, kSeed, Backend::kReference);
    const TileLayout& layout = seen.layout();
    for (int tile = 0; tile < named.shape.tile_count; ++tile) {
      ExpectEqualBytes(seen.scan(tile), expected.scan(tile), layout.scale_offset,
                       layout.witness_offset, "scales and zeros");
      ExpectEqualBytes(seen.scan(tile), expected.scan(tile), layout.coarse_offset,
                       layout.scan_bytes, "coarse planes");
      ExpectEqualBytes(seen.detail(tile), expected.detail(tile), 0, layout.detail_bytes,
                       "detail record");
      const TileHeader seen_header = reference::ReadHeader(seen.scan(tile));
      const TileHeader expected_header = reference::ReadHeader(expected.scan(tile));
      EXPECT_EQ(seen_header.identity_tag, expected_header.identity_tag);
      EXPECT_EQ(seen_header.original_checksum, expected_header.original_checksum);
      EXPECT_EQ(seen_header.detail_checksum, expected_header.detail_checksum);
    }
  }
}

TEST_P(QuantizeTileTest, KeyResidualsFillTheBoxOfTheScales) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, TileShapes())) {
    if (!IsAffine(named.shape.key_format)) continue;
    SCOPED_TRACE(named.name);
    SequenceCase sequence(named.shape, kSeed, GetParam().backend);
    const TileLayout& layout = sequence.layout();
    double share_max = 0;
    for (int64_t t = 0; t < int64_t{kTileTokens} * named.shape.tile_count; ++t) {
      const int tile = static_cast<int>(t / kTileTokens);
      const int row = static_cast<int>(t % kTileTokens);
      for (int i = 0; i < layout.head_dim; ++i) {
        const double box =
            AffineDepthOf(layout.key_format).half_range *
            double{F16ToFloat(reference::ReadKeyScale(layout, sequence.scan(tile), i))};
        const double residual = std::fabs(
            sequence.OriginalKey(t, i) -
            reference::DecodeKey(layout, sequence.scan(tile), sequence.detail(tile), row, i));
        ASSERT_LE(residual, box) << "token " << t << " channel " << i;
        if (box > 0) share_max = std::max(share_max, residual / box);
      }
    }
    if (named.shape.content == Content::kNormal) {
      EXPECT_GT(share_max, 0.95);
    }
  }
}

// Norms of v - v^ and v of one token, in double.
struct ValueTruth {
  double error;
  double norm;
};

ValueTruth TruthOfValue(SequenceCase* sequence, int64_t t) {
  const TileLayout& layout = sequence->layout();
  const int tile = static_cast<int>(t / kTileTokens);
  std::array<double, kHeadDimMax> decoded;
  for (int i = 0; i < layout.value_dim; ++i) {
    decoded[i] = reference::DecodeStoredValue(layout, sequence->detail(tile),
                                              static_cast<int>(t % kTileTokens), i);
  }
  if (reference::ValuesAreRotated(layout)) {
    reference::RotateHadamard(decoded.data(), layout.value_dim);
  }
  double error = 0;
  double norm = 0;
  for (int i = 0; i < layout.value_dim; ++i) {
    const double value = sequence->OriginalValue(t, i);
    error += (value - decoded[i]) * (value - decoded[i]);
    norm += value * value;
  }
  return {std::sqrt(error), std::sqrt(norm)};
}

TEST_P(QuantizeTileTest, ValueBoundsCoverAndAreTight) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, TileShapes())) {
    SCOPED_TRACE(named.name);
    SequenceCase sequence(named.shape, kSeed, GetParam().backend);
    for (int tile = 0; tile < named.shape.tile_count; ++tile) {
      const TileHeader header = reference::ReadHeader(sequence.scan(tile));
      double radius = 0;
      for (int s = 0; s < kSubBlocksPerTile; ++s) {
        double error = 0;
        for (int u = 0; u < kSubBlockTokens; ++u) {
          const ValueTruth truth =
              TruthOfValue(&sequence, int64_t{tile} * kTileTokens + s * kSubBlockTokens + u);
          error = std::max(error, truth.error);
          radius = std::max(radius, truth.norm);
        }
        const double eta = F16ToFloat(header.value_error_bound[s]);
        EXPECT_GE(eta, error - kTruthRounding * radius);
        // 2^-8 of the value, and the rotation's slack against values that are stored exactly; fp16
        // has steps of 2^-24 near 0 and none above 65504.
        if (error < 65000) {
          EXPECT_LE(eta, error * (1 + 0x1p-8) + 0x1p-20 * radius + 0x1p-23);
        }
      }
      EXPECT_GE(header.value_radius, radius * (1 - kTruthRounding));
      EXPECT_LE(header.value_radius, radius * (1 + 0x1p-8));
    }
  }
}

TEST_P(QuantizeTileTest, KeyNormCoversEveryReadingDepth) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, TileShapes())) {
    SCOPED_TRACE(named.name);
    SequenceCase sequence(named.shape, kSeed, GetParam().backend);
    SequenceCase expected(named.shape, kSeed, Backend::kReference);
    const TileLayout& layout = sequence.layout();
    for (int tile = 0; tile < named.shape.tile_count; ++tile) {
      const TileHeader header = reference::ReadHeader(sequence.scan(tile));
      for (int t = 0; t < kTileTokens; ++t) {
        double full = 0;
        double coarse = 0;
        for (int i = 0; i < layout.head_dim; ++i) {
          const double key =
              reference::DecodeKey(layout, sequence.scan(tile), sequence.detail(tile), t, i);
          full += key * key;
          const bool has_depths =
              IsAffine(layout.key_format) && layout.key_format != KeyFormat::kK8D;
          if (!has_depths) continue;
          const double coarse_key = reference::DecodeAffineKey(
              AffineDepthOf(KeyFormat::kK4),
              reference::ReadKeyCode(layout, sequence.scan(tile), sequence.detail(tile), t, i),
              reference::ReadKeyScale(layout, sequence.scan(tile), i),
              reference::ReadKeyZero(layout, sequence.scan(tile), i));
          coarse += coarse_key * coarse_key;
        }
        ASSERT_GE(header.key_norm, std::sqrt(std::max(full, coarse)) * (1 - kTruthRounding));
      }
      EXPECT_LE(header.key_norm,
                reference::ReadHeader(expected.scan(tile)).key_norm * (1 + 0x1p-8f));
    }
  }
}

TEST_P(QuantizeTileTest, WitnessCoversResidualsWithinItsStep) {
  for (const NamedShape& named : ShapesOf(GetParam().backend, TileShapes())) {
    if (named.shape.witness_bands == 0) continue;
    SCOPED_TRACE(named.name);
    SequenceCase sequence(named.shape, kSeed, GetParam().backend);
    const TileLayout& layout = sequence.layout();
    const float* const weights = WitnessWeightsOf(sequence.spec(), 0, 0);
    for (int64_t n = 0; n < int64_t{kTileTokens} * named.shape.tile_count; ++n) {
      const int tile = static_cast<int>(n / kTileTokens);
      const int t = static_cast<int>(n % kTileTokens);
      std::array<double, kWitnessBandsMax> squares{};
      for (int i = 0; i < layout.head_dim; ++i) {
        const double weight = weights == nullptr ? 1.0 : weights[i];
        const double residual = weight * (sequence.OriginalKey(n, i) -
                                          reference::DecodeKey(layout, sequence.scan(tile),
                                                               sequence.detail(tile), t, i));
        squares[WitnessBandOf(layout, i)] += residual * residual;
      }
      const int16_t exponent = reference::ReadHeader(sequence.scan(tile)).witness_exponent;
      const double step_min = DecodeWitness(1, exponent);
      for (int b = 0; b < layout.witness_bands; ++b) {
        const double norm = std::sqrt(squares[b]);
        const double witness =
            DecodeWitness(reference::ReadWitness(layout, sequence.scan(tile), t, b), exponent);
        ASSERT_GE(witness, norm * (1 - kTruthRounding)) << "token " << n << " band " << b;
        // One step of 1/32 octave by the code, one more for a backend's own rounding.
        ASSERT_LE(witness, std::max(norm * std::exp2(2.0 / 32) * (1 + 0x1p-8), step_min * 1.1))
            << "token " << n << " band " << b;
      }
    }
  }
}

TEST_P(QuantizeTileTest, ReadsRowsAtTheirStrideOnly) {
  for (const KeyFormat format :
       {KeyFormat::kK8, KeyFormat::kK6, KeyFormat::kK4, KeyFormat::kFp8E4m3, KeyFormat::kF16}) {
    SequenceShape shape;
    shape.key_format = format;
    shape.value_format = format == KeyFormat::kK6    ? ValueFormat::kV8
                         : format == KeyFormat::kF16 ? ValueFormat::kF16
                                                     : ValueFormat::kV4;
    shape.witness_bands = format == KeyFormat::kFp8E4m3 ? 4 : format == KeyFormat::kK4 ? 1 : 0;
    shape.head_dim = 80;
    shape.value_dim = 96;
    shape.tile_count = 1;
    shape.tail_count = 0;
    SequenceCase sequence(shape, kSeed, GetParam().backend);
    const TileLayout& layout = sequence.layout();
    // Rows 13 elements further apart, with NaN between them, and not even 4-byte aligned.
    std::vector<uint16_t> keys(1 + kTileTokens * 93, 0x7fff);
    std::vector<uint16_t> values(1 + kTileTokens * 109, 0x7fff);
    const AttendTile& tile = sequence.args().tiles[0];
    for (int t = 0; t < kTileTokens; ++t) {
      std::copy_n(tile.original_keys + t * 80, 80, &keys[1 + t * 93]);
      std::copy_n(tile.original_values + t * 96, 96, &values[1 + t * 109]);
    }
    const AlignedBytes copy = AllocateAligned(layout.tile_bytes());
    std::memset(copy.get(), 0xff, layout.tile_bytes());
    QuantizeTileArgs args{};
    args.spec = &sequence.spec();
    args.layout = &layout;
    args.keys = keys.data() + 1;
    args.values = values.data() + 1;
    args.key_stride = 93;
    args.value_stride = 109;
    args.identity_tag = 1000;
    args.scan = copy.get();
    args.detail = copy.get() + layout.scan_bytes;
    ASSERT_TRUE(QuantizeTile(GetParam().backend, args).ok());
    ExpectEqualBytes(copy.get(), sequence.scan(0), 0, layout.tile_bytes(), KeyFormatName(format));
  }
}

// Encoders that look at originals while they encode them look at all of them.
TEST_P(QuantizeTileTest, RefusesWhatCannotBeEncodedWhereverItIs) {
  struct Bits {
    OriginalDtype dtype;
    std::vector<uint16_t> bad_keys, bad_values, good_keys, good_values;
  };
  const Bits kBits[] = {{OriginalDtype::kF16,
                         {0x7c00, 0xfc00, 0x7c01, 0xffff},
                         {0x7c00, 0xfc00, 0x7c01, 0xffff},
                         {0x7bff, 0xfbff, 0x0001},
                         {0x7bff, 0xfbff, 0x8001}},
                        {OriginalDtype::kBf16,
                         {0x7f80, 0xff80, 0x7fc0, 0xffff, 0x4780, 0xc780},
                         {0x7f80, 0xff80, 0x7f81, 0xffff},
                         {0x477f, 0xc77f, 0x0001},
                         {0x7f7f, 0xff7f, 0x8001}}};
  for (const Bits& bits : kBits) {
    for (const bool is_coarse : {false, true}) {
      SequenceShape shape;
      shape.dtype = bits.dtype;
      shape.key_format = is_coarse ? KeyFormat::kK6 : KeyFormat::kK8;
      shape.value_format = is_coarse ? ValueFormat::kV8 : ValueFormat::kV4;
      shape.head_dim = is_coarse ? 96 : 80;
      shape.value_dim = is_coarse ? 80 : 128;
      shape.tile_count = 1;
      shape.tail_count = 0;
      SequenceCase sequence(shape, kSeed, GetParam().backend);
      QuantizeTileArgs args{};
      args.spec = &sequence.spec();
      args.layout = &sequence.layout();
      args.key_stride = shape.head_dim;
      args.value_stride = shape.value_dim;
      args.scan = sequence.scan(0);
      args.detail = sequence.detail(0);
      std::vector<uint16_t> keys(kTileTokens * shape.head_dim, 0x3c00);
      std::vector<uint16_t> values(kTileTokens * shape.value_dim, 0x3c00);
      args.keys = keys.data();
      args.values = values.data();
      const auto expect = [&](std::vector<uint16_t>* originals, int width, uint16_t word, int n,
                              bool is_good) {
        const int place = (n * 7 + n / width) % kTileTokens * width + n % width;
        const uint16_t before = std::exchange((*originals)[place], word);
        EXPECT_EQ(QuantizeTile(GetParam().backend, args).ok(), is_good)
            << (originals == &keys ? "key " : "value ") << word << " in channel " << n % width;
        (*originals)[place] = before;
      };
      for (int n = 0; n < shape.head_dim; ++n) {
        expect(&keys, shape.head_dim, bits.bad_keys[n % bits.bad_keys.size()], n, false);
      }
      for (int n = 0; n < shape.value_dim; ++n) {
        expect(&values, shape.value_dim, bits.bad_values[n % bits.bad_values.size()], n, false);
      }
      for (int n = 0; n < 12; ++n) {
        expect(&keys, shape.head_dim, bits.good_keys[n % 3], n, true);
        expect(&values, shape.value_dim, bits.good_values[n % 3], n, true);
      }
    }
  }
}

// The keys of sinks are the extremes of many channels, and sinks hold much of a read's mass.
TEST_P(QuantizeTileTest, CoarserFormatsReadTheExtremesOfAChannelAsTheyAre) {
  SequenceShape shape;
  for (const KeyFormat format : {KeyFormat::kK6, KeyFormat::kK4}) {
    shape.key_format = format;
    SequenceCase sequence(shape, kSeed, GetParam().backend);
    const TileLayout& layout = sequence.layout();
    const double half_range = AffineDepthOf(format).half_range;
    double extreme_sum = 0;
    double inner_max = 0;
    for (int i = 0; i < shape.head_dim; ++i) {
      const double scale = F16ToFloat(reference::ReadKeyScale(layout, sequence.scan(0), i));
      const auto key = [&](int t) { return sequence.OriginalKey(t, i); };
      int low = 0;
      int high = 0;
      for (int t = 0; t < kTileTokens; ++t) {
        if (key(t) < key(low)) low = t;
        if (key(t) > key(high)) high = t;
        const double error = std::abs(key(t) - reference::DecodeKey(layout, sequence.scan(0),
                                                                    sequence.detail(0), t, i)) /
                             scale;
        ASSERT_LE(error, half_range);
        inner_max = std::max(inner_max, error);
      }
      for (const int t : {low, high}) {
        extreme_sum += std::abs(key(t) - reference::DecodeKey(layout, sequence.scan(0),
                                                              sequence.detail(0), t, i)) /
                       scale;
      }
    }
    // What is left of it is fp16's rounding of zero and scale. The lowest bits of a K8 code dropped
    // would be 1.5 or 7.5 off at every extreme.
    EXPECT_LT(extreme_sum / (2 * shape.head_dim), 0.2 * half_range) << KeyFormatName(format);
    EXPECT_GT(inner_max, 0.9 * half_range) << "not vacuous";
  }
}

TEST_P(QuantizeTileTest, StoresTheSameZeroForBothSignsOfZero) {
  SequenceShape shape;
  shape.content = Content::kZero;
  SequenceCase sequence(shape, kSeed, GetParam().backend);
  const TileLayout& layout = sequence.layout();
  for (int i = 0; i < layout.head_dim; ++i) {
    EXPECT_EQ(reference::ReadKeyZero(layout, sequence.scan(0), i), 0);
    EXPECT_EQ(reference::ReadKeyScale(layout, sequence.scan(0), i), 0);
  }
  for (int t = 0; t < kTileTokens; ++t) {
    EXPECT_EQ(reference::ReadValueScale(layout, sequence.detail(0), t), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Paths, QuantizeTileTest, ::testing::ValuesIn(AllPaths()),
                         [](const auto& info) { return PathName(info.param); });

}  // namespace
}  // namespace certkv::conformance
