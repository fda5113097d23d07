#include "kernels/core/half.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace certkv {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint32_t kSampleStride = 977;  // a prime; 4.4 million of the 2^32 floats

// The formats' definitions, from their fields.
double DefinedF16(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}
double DefinedE4m3(uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

// Checks that `narrow` rounds to nearest, ties to even, between each two neighbouring magnitudes
// low, low + 1 in [0, last), for both signs. `widen` is exact.
template <typename Code, typename Widen, typename Narrow>
void ExpectNearestEven(int last, Code sign_bit, Widen widen, Narrow narrow) {
  for (int low = 0; low < last; ++low) {
    for (const int sign : {0, int{sign_bit}}) {
      const auto code = static_cast<Code>(low | sign);
      const auto next = static_cast<Code>(code + 1);
      const float a = widen(code);
      const float b = widen(next);
      const float middle = a + (b - a) / 2;  // exact: one bit more than the narrow format
      ASSERT_EQ(narrow(middle), low % 2 == 0 ? code : next) << "tie after code " << int{code};
      ASSERT_EQ(narrow(std::nextafter(middle, a)), code) << "under the tie after " << int{code};
      ASSERT_EQ(narrow(std::nextafter(middle, b)), next) << "over the tie after " << int{code};
      ASSERT_EQ(narrow(std::nextafter(b, a)), next) << "just under " << int{next};
    }
  }
}

TEST(HalfTest, F16WidensToItsDefinition) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    const float value = F16ToFloat(code);
    if ((bits & 0x7c00) == 0x7c00) {
      ASSERT_EQ(std::bit_cast<uint32_t>(value),
                (bits & 0x8000u) << 16 | 0x7f800000u | (bits & 0x3ffu) << 13);
    } else {
      ASSERT_EQ(value, DefinedF16(code)) << bits;
      ASSERT_EQ(std::signbit(value), bits >= 0x8000) << bits;
    }
  }
}

TEST(HalfTest, EveryF16AndBf16CodeSurvivesARoundTrip) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    for (const OriginalDtype dtype : {OriginalDtype::kF16, OriginalDtype::kBf16}) {
      const float value = OriginalToFloat(dtype, code);
      const uint16_t back = FloatToOriginal(dtype, value);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(OriginalToFloat(dtype, back))) << bits;
        ASSERT_EQ(back & 0x8000, code & 0x8000) << bits;
      } else {
        ASSERT_EQ(back, code);
      }
      ASSERT_EQ(IsFiniteOriginal(dtype, code), std::isfinite(value)) << bits;
    }
  }
}

TEST(HalfTest, F16RoundsToNearestEvenBetweenAllNeighbours) {
  ExpectNearestEven<uint16_t>(0x7bff, 0x8000, F16ToFloat, FloatToF16);
}

TEST(HalfTest, Bf16RoundsToNearestEvenBetweenAllNeighbours) {
  ExpectNearestEven<uint16_t>(0x7f7f, 0x8000, Bf16ToFloat, FloatToBf16);
}

TEST(HalfTest, OverflowRoundsToInfinity) {
  EXPECT_EQ(FloatToF16(65519.996f), 0x7bff);
  EXPECT_EQ(FloatToF16(65520.0f), 0x7c00);
  EXPECT_EQ(FloatToF16(-65520.0f), 0xfc00);
  EXPECT_EQ(FloatToF16(std::numeric_limits<float>::max()), 0x7c00);
  EXPECT_EQ(FloatToF16(kInf), 0x7c00);
  EXPECT_EQ(FloatToBf16(0x1.fefffep127f), 0x7f7f);
  EXPECT_EQ(FloatToBf16(0x1.ffp127f), 0x7f80);
  EXPECT_EQ(FloatToBf16(-std::numeric_limits<float>::max()), 0xff80);
}

TEST(HalfTest, NanWithOnlyLowPayloadBitsStaysNan) {
  const float low_payload = std::bit_cast<float>(0xff800001u);
  EXPECT_TRUE(std::isnan(F16ToFloat(FloatToF16(low_payload))));
  EXPECT_TRUE(std::isnan(Bf16ToFloat(FloatToBf16(low_payload))));
  EXPECT_TRUE(std::isnan(E4m3ToFloat(FloatToE4m3(low_payload))));
}

TEST(HalfTest, DirectedRoundingsAreTheNearestCodesOnTheirSide) {
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += kSampleStride) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(value)) continue;
    const uint16_t up = FloatToF16RoundedUp(value);
    const uint16_t down = FloatToF16RoundedDown(value);
    ASSERT_GE(F16ToFloat(up), value);
    ASSERT_LE(F16ToFloat(down), value);
    const bool exact = F16ToFloat(FloatToF16(value)) == value;
    ASSERT_EQ(F16ToFloat(up) == F16ToFloat(down), exact) << value;
    if (exact) continue;
    // Neighbours: nothing lies between. In bits, one is the other's successor in magnitude, or
    // the interval touches zero.
    const uint16_t outer = value > 0 ? up : down;
    const uint16_t inner = value > 0 ? down : up;
    ASSERT_EQ((outer & 0x7fff) - (inner & 0x7fff), 1) << value;
    ASSERT_EQ(outer & 0x8000, value > 0 ? 0 : 0x8000) << value;
  }
}

TEST(HalfTest, DirectedRoundingsKeepEachExactCode) {
  for (int bits = 0; bits < 65536; ++bits) {
    const float value = F16ToFloat(static_cast<uint16_t>(bits));
    if (std::isnan(value)) continue;
    ASSERT_EQ(F16ToFloat(FloatToF16RoundedUp(value)), value);
    ASSERT_EQ(F16ToFloat(FloatToF16RoundedDown(value)), value);
  }
}

TEST(HalfTest, DirectedRoundingsAtTheEdges) {
  EXPECT_EQ(FloatToF16RoundedUp(65504.004f), 0x7c00);
  EXPECT_EQ(FloatToF16RoundedDown(65504.004f), 0x7bff);
  EXPECT_EQ(FloatToF16RoundedDown(std::numeric_limits<float>::max()), 0x7bff);
  EXPECT_EQ(FloatToF16RoundedUp(-std::numeric_limits<float>::max()), 0xfbff);
  EXPECT_EQ(FloatToF16RoundedUp(0x1p-149f), 0x0001);
  EXPECT_EQ(FloatToF16RoundedDown(-0x1p-149f), 0x8001);
  EXPECT_EQ(FloatToF16RoundedUp(-kInf), 0xfc00);
  EXPECT_EQ(FloatToF16RoundedDown(kInf), 0x7c00);
}

TEST(HalfTest, DirectedRoundingsOfNanAreInfinite) {
  for (const float nan : {kNan, -kNan}) {
    EXPECT_EQ(FloatToF16RoundedUp(nan), 0x7c00);
    EXPECT_EQ(FloatToF16RoundedDown(nan), 0xfc00);
  }
}

#ifdef __FLT16_MAX__
TEST(HalfTest, F16AgreesWithTheCompilersType) {
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += kSampleStride) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::isnan(value)) continue;
    const auto theirs = std::bit_cast<uint16_t>(static_cast<_Float16>(value));
    ASSERT_EQ(FloatToF16(value), theirs) << value;
  }
}
#endif

TEST(HalfTest, E4m3WidensToItsDefinition) {
  for (int bits = 0; bits < 256; ++bits) {
    const auto code = static_cast<uint8_t>(bits);
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(E4m3ToFloat(code))) << bits;
      EXPECT_EQ(FloatToE4m3(E4m3ToFloat(code)) & 0x7f, 0x7f) << bits;
    } else {
      EXPECT_EQ(E4m3ToFloat(code), DefinedE4m3(code)) << bits;
      EXPECT_EQ(FloatToE4m3(E4m3ToFloat(code)), code);
    }
  }
  EXPECT_EQ(E4m3ToFloat(0x7e), 448.0f);
  EXPECT_EQ(E4m3ToFloat(0x01), 0x1p-9f);
}

TEST(HalfTest, E4m3RoundsToNearestEvenBetweenAllNeighbours) {
  ExpectNearestEven<uint8_t>(0x7e, 0x80, E4m3ToFloat, FloatToE4m3);
}

TEST(HalfTest, E4m3Saturates) {
  for (const float value : {448.0f, 449.0f, 464.0f, 480.0f, 512.0f, 1000.0f, 1e30f, kInf}) {
    EXPECT_EQ(FloatToE4m3(value), 0x7e) << value;
    EXPECT_EQ(FloatToE4m3(-value), 0xfe) << value;
  }
}

}  // namespace
}  // namespace certkv
