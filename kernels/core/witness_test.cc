#include "kernels/core/witness.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace certkv {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kFloatMax = std::numeric_limits<float>::max();
constexpr int16_t kExponentMin = -149;  // of the smallest subnormal
constexpr int16_t kExponentMax = 128;   // of the largest float

// w(code) before rounding; long double has the range and 11 bits to spare.
long double Defined(int code, int exponent) {
  return code == 0 ? 0 : std::exp2(exponent + (code - 255) / 32.0L);
}

TEST(WitnessTest, DecodesToTheSmallestFloatNotUnderTheDefinition) {
  for (int exponent = kExponentMin; exponent <= kExponentMax; ++exponent) {
    for (int code = 1; code < 256; ++code) {
      const float value = DecodeWitness(static_cast<uint8_t>(code), static_cast<int16_t>(exponent));
      const long double exact = Defined(code, exponent);
      // Long double's exp2 is off by 2^-60 at most of the value, no float lies so near but itself.
      ASSERT_GE(value, exact * (1 - 0x1p-60L)) << code << " at " << exponent;
      ASSERT_LT(std::nextafter(value, 0.0f), exact) << code << " at " << exponent;
    }
  }
}

TEST(WitnessTest, DecodingGrowsWithTheCode) {
  for (int exponent = kExponentMin; exponent <= kExponentMax; ++exponent) {
    for (int code = 1; code < 256; ++code) {
      const auto e = static_cast<int16_t>(exponent);
      const float below = DecodeWitness(static_cast<uint8_t>(code - 1), e);
      const float here = DecodeWitness(static_cast<uint8_t>(code), e);
      ASSERT_GE(here, below);
      if (exponent > -126 + 8) {
        ASSERT_GT(here, below);
      }
    }
  }
}

TEST(WitnessTest, CoversEveryNormAndIsTightToItsStep) {
  constexpr uint32_t kSeed = 20240611;
  SCOPED_TRACE(testing::Message() << "seed " << kSeed);
  std::mt19937 random(kSeed);
  std::uniform_real_distribution<float> octaves(-140, 126.9f);
  std::uniform_real_distribution<float> below(0, 9);
  for (int i = 0; i < 300000; ++i) {
    const float norm_max = std::exp2(octaves(random));
    const int16_t exponent = WitnessExponentFor(norm_max);
    const float top = DecodeWitness(255, exponent);
    ASSERT_GE(top, norm_max);
    ASSERT_LT(top / 2, norm_max) << "exponent " << exponent << " isn't the smallest";
    const float norm = i % 3 == 0 ? norm_max : norm_max * std::exp2(-below(random));
    const uint8_t code = EncodeWitness(norm, exponent);
    const float witness = DecodeWitness(code, exponent);
    ASSERT_GE(witness, norm);
    if (norm == 0) continue;
    ASSERT_LT(DecodeWitness(static_cast<uint8_t>(code - 1), exponent), norm) << "smaller code";
    // One step, and the rounding of a subnormal by at most one unit of it.
    if (code > 1) {
      ASSERT_LE(witness, norm * std::exp2(1 / 32.0) * (1 + 0x1p-22) + 0x1p-149);
    }
  }
}

TEST(WitnessTest, EncodesEachDecodedValueToItsOwnCode) {
  for (const int16_t exponent : {-100, 0, 7, 127}) {
    for (int code = 0; code < 256; ++code) {
      const auto byte = static_cast<uint8_t>(code);
      const float norm = DecodeWitness(byte, exponent);
      EXPECT_EQ(EncodeWitness(norm, exponent), byte) << exponent;
      if (code > 1 && code < 255) {
        EXPECT_EQ(EncodeWitness(std::nextafter(norm, kInf), exponent), byte + 1) << exponent;
      }
    }
  }
}

TEST(WitnessTest, ExponentIsTheSmallestForPowersAndTheirNeighbours) {
  for (int power = -148; power < 128; ++power) {
    const float value = std::ldexp(1.0f, power);
    EXPECT_EQ(WitnessExponentFor(value), power);
    EXPECT_EQ(WitnessExponentFor(std::nextafter(value, kInf)), power + 1);
  }
  EXPECT_EQ(WitnessExponentFor(0.0f), 0);
  EXPECT_EQ(WitnessExponentFor(0x1p-149f), -149);
  EXPECT_EQ(WitnessExponentFor(kFloatMax), 128);
}

TEST(WitnessTest, LargestAndSmallestNormsAreCovered) {
  EXPECT_EQ(DecodeWitness(EncodeWitness(kFloatMax, 128), 128), kInf);
  EXPECT_EQ(DecodeWitness(254, 128), 0x1.f50766p127f);
  EXPECT_EQ(EncodeWitness(0x1p-149f, 0), 1) << "no norm but 0 has code 0";
  EXPECT_EQ(DecodeWitness(1, -149), 0x1p-149f);
}

TEST(WitnessTest, ZeroNormIsExact) {
  for (const int16_t exponent : {-149, 0, 128}) {
    EXPECT_EQ(EncodeWitness(0.0f, exponent), 0);
    EXPECT_EQ(EncodeWitness(-0.0f, exponent), 0);
    EXPECT_EQ(DecodeWitness(0, exponent), 0.0f);
  }
}

TEST(WitnessTest, UnknownNormDecodesToInfinity) {
  for (const float unknown : {kNan, -kNan, kInf}) {
    const int16_t exponent = WitnessExponentFor(unknown);
    EXPECT_EQ(exponent, kWitnessExponentUnknown);
    for (const float norm : {unknown, 1.0f, 0x1p-149f, kFloatMax}) {
      EXPECT_EQ(DecodeWitness(EncodeWitness(norm, exponent), exponent), kInf) << norm;
    }
  }
  EXPECT_EQ(EncodeWitness(kNan, 0), 255);
  EXPECT_EQ(EncodeWitness(kInf, 0), 255);
  EXPECT_EQ(DecodeWitness(0, kWitnessExponentUnknown), 0.0f);
}

// Damaged headers decode to something: never to NaN, and to no value under the definition.
TEST(WitnessTest, HostileExponentsStayOnTheSafeSide) {
  for (int code = 1; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    EXPECT_EQ(DecodeWitness(byte, 32766), kInf);
    EXPECT_EQ(DecodeWitness(byte, 144), kInf);
    EXPECT_EQ(DecodeWitness(byte, -32768), 0x1p-149f);
  }
}

CacheSpec SpecWith(RopePairing pairing, int32_t rotary_dim, int32_t head_dim) {
  CacheSpec spec;
  spec.head_dim = head_dim;
  spec.rope_pairing = pairing;
  spec.rotary_dim = rotary_dim;
  return spec;
}

TEST(WitnessTest, BandsAreUnionsOfRotatedPairs) {
  for (const int32_t head_dim : {64, 80, 96, 128, 256}) {
    for (int32_t rotary_dim = 2; rotary_dim <= head_dim; rotary_dim += 2) {
      for (const int32_t bands : {1, 4}) {
        const CacheSpec interleaved = SpecWith(RopePairing::kInterleaved, rotary_dim, head_dim);
        const CacheSpec half_split = SpecWith(RopePairing::kHalfSplit, rotary_dim, head_dim);
        for (int32_t i = 0; i < rotary_dim / 2; ++i) {
          ASSERT_EQ(WitnessBandOf(interleaved, bands, 2 * i),
                    WitnessBandOf(interleaved, bands, 2 * i + 1));
          ASSERT_EQ(WitnessBandOf(half_split, bands, i),
                    WitnessBandOf(half_split, bands, i + rotary_dim / 2));
        }
        for (int32_t i = 0; i < head_dim; ++i) {
          for (const CacheSpec& spec : {interleaved, half_split}) {
            ASSERT_GE(WitnessBandOf(spec, bands, i), 0);
            ASSERT_LT(WitnessBandOf(spec, bands, i), bands);
          }
        }
      }
    }
  }
}

TEST(WitnessTest, FullRotaryBandsHoldEqualShares) {
  for (const RopePairing pairing :
       {RopePairing::kNone, RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
    for (const int32_t dim : {64, 80, 96, 128, 256}) {
      const CacheSpec spec = SpecWith(pairing, pairing == RopePairing::kNone ? 0 : dim, dim);
      std::vector<int> channels(4);
      for (int32_t i = 0; i < dim; ++i) ++channels[WitnessBandOf(spec, 4, i)];
      EXPECT_EQ(channels, std::vector<int>(4, dim / 4)) << dim;
    }
  }
}

}  // namespace
}  // namespace certkv
