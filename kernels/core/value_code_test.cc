#include "kernels/core/value_code.h"

#include <cmath>
#include <limits>
#include <random>

#include "gtest/gtest.h"

namespace certkv::code {
namespace {

constexpr float kLevelMaxima[] = {15, 255};
constexpr float kScaleMin = 0x1p-21f;
constexpr float kScaleMax = 7680;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

int CodeOf(const ValueCoding& coding, float y) {
  return static_cast<int>(std::nearbyint(ValueLevel(coding, y)));
}

float Decoded(const ValueCoding& coding, int value_code) {
  return (static_cast<float>(value_code) - coding.offset) * coding.scale;
}

// Rows' ends, min <= 0 <= max: spans at, just below and just above what every scale is for, and
// random ones, each lying in many ways about 0.
template <typename Check>
void ForEachRow(float level_max, const Check& check) {
  std::mt19937_64 random(20261130);
  const auto check_span = [&](double span) {
    for (const double share : {0.0, 1.0, 0.5, 0.25, 0.501, 1.0 / 3, 0x1p-20,
                               std::uniform_real_distribution(0.0, 1.0)(random)}) {
      check(static_cast<float>(-share * span), static_cast<float>((1 - share) * span));
    }
  };
  const double levels = level_max + 1;
  for (int scale_code = 1; scale_code < 256; ++scale_code) {
    const double span =
        double{DecodeValueScale(static_cast<uint8_t>(scale_code))} * levels * kValueSpanShare;
    check_span(span * (1 - 0x1p-20));
    if (scale_code < 255) check_span(span * (1 + 0x1p-20));
  }
  for (int n = 0; n < 20'000; ++n) {
    check_span(std::exp2(std::uniform_real_distribution(-20.0, 12.9)(random)) * levels);
  }
}

TEST(ValueCodeTest, ScalesAreEightPerOctaveAboveSmallMultiples) {
  EXPECT_EQ(DecodeValueScale(0), 0);
  for (int scale_code = 1; scale_code <= 16; ++scale_code) {
    EXPECT_EQ(DecodeValueScale(static_cast<uint8_t>(scale_code)),
              static_cast<float>(scale_code) * kScaleMin);
  }
  for (int scale_code = 8; scale_code < 256; ++scale_code) {
    const float mantissa = static_cast<float>(8 + scale_code % 8) / 8;
    EXPECT_EQ(DecodeValueScale(static_cast<uint8_t>(scale_code)),
              std::ldexp(mantissa, scale_code / 8 - 19));
  }
  EXPECT_EQ(DecodeValueScale(255), kScaleMax);
}

TEST(ValueCodeTest, OffsetsAreSpreadOverTheCodes) {
  for (const float level_max : kLevelMaxima) {
    EXPECT_EQ(DecodeValueOffset(0, level_max), -0.5f);
    EXPECT_EQ(DecodeValueOffset(128, level_max), 0.5f * level_max);
    EXPECT_EQ(DecodeValueOffset(255, level_max), level_max + 0.5f - (level_max + 1) / 256);
  }
}

TEST(ValueCodeTest, TheScaleIsTheSmallestThatHoldsTheRow) {
  for (const float level_max : kLevelMaxima) {
    const double room = (level_max + 1) * double{kValueSpanShare};
    ForEachRow(level_max, [&](float min, float max) {
      const ValueCoding coding = ChooseValueCoding(min, max, level_max);
      const double span = double{max} - min;
      ASSERT_TRUE(coding.is_encodable) << span;
      ASSERT_GT(coding.scale_code, 0) << span;
      EXPECT_GE(coding.scale * room, span * (1 - 0x1p-19));
      EXPECT_LT(DecodeValueScale(coding.scale_code - 1) * room, span * (1 + 0x1p-19));
      EXPECT_EQ(coding.scale, DecodeValueScale(coding.scale_code));
      EXPECT_EQ(coding.offset, DecodeValueOffset(coding.zero_code, level_max));
    });
  }
}

TEST(ValueCodeTest, NoCodeClipsAndNoElementIsMoreThanHalfAStepOff) {
  for (const float level_max : kLevelMaxima) {
    float largest_share = 0;
    ForEachRow(level_max, [&](float min, float max) {
      const ValueCoding coding = ChooseValueCoding(min, max, level_max);
      for (const float share : {0.0f, 1.0f, 0.37f, 0.5f}) {
        const float y = min + share * (max - min);
        const int value_code = CodeOf(coding, y);
        ASSERT_GE(value_code, 0) << y << " of " << min << " to " << max;
        ASSERT_LE(value_code, level_max) << y << " of " << min << " to " << max;
        const float off = std::fabs(y - Decoded(coding, value_code)) / coding.scale;
        EXPECT_LE(off, 0.5f + 0x1p-11f);
        largest_share = std::fmax(largest_share, off);
      }
    });
    EXPECT_GT(largest_share, 0.49f) << "the ends use the outermost codes to their end";
  }
}

// What readers compute with.
TEST(ValueCodeTest, DecodedValuesAreExactInFloat) {
  for (const float level_max : kLevelMaxima) {
    for (int scale_code = 0; scale_code < 256; ++scale_code) {
      const float scale = DecodeValueScale(static_cast<uint8_t>(scale_code));
      for (int zero_code = 0; zero_code < 256; ++zero_code) {
        const float offset = DecodeValueOffset(static_cast<uint8_t>(zero_code), level_max);
        for (const float value_code : {0.0f, 1.0f, 7.0f, level_max}) {
          const double exact = (double{value_code} - offset) * scale;
          EXPECT_EQ((value_code - offset) * scale, exact);
          EXPECT_EQ(value_code * scale + -offset * scale, exact);
        }
      }
    }
  }
}

TEST(ValueCodeTest, TinyRowsAreZeros) {
  for (const float level_max : kLevelMaxima) {
    for (const float span : {0.0f, 0x1p-149f, 0x1p-30f, kValueSpanMin}) {
      const ValueCoding coding = ChooseValueCoding(0, span, level_max);
      EXPECT_TRUE(coding.is_encodable);
      EXPECT_EQ(coding.scale_code, 0);
      EXPECT_EQ(coding.zero_code, 128);
      EXPECT_EQ(Decoded(coding, CodeOf(coding, span)), 0);
    }
    EXPECT_EQ(ChooseValueCoding(0, std::nextafter(kValueSpanMin, 1.0f), level_max).scale_code, 1);
  }
}

TEST(ValueCodeTest, WhatIsTooLargeOrNoNumberCannotBeEncoded) {
  for (const float level_max : kLevelMaxima) {
    const float largest = kScaleMax * (level_max + 1) * kValueSpanShare;
    EXPECT_TRUE(ChooseValueCoding(0, largest, level_max).is_encodable);
    for (const float max :
         {largest * 1.001f, 0x1p100f, kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
      const ValueCoding coding = ChooseValueCoding(0, max, level_max);
      EXPECT_FALSE(coding.is_encodable) << max;
      EXPECT_EQ(coding.scale_code, 0);
      EXPECT_EQ(coding.zero_code, 128);
      EXPECT_EQ(coding.scale, 0);
      EXPECT_EQ(coding.inverse, 0);
    }
  }
}

}  // namespace
}  // namespace certkv::code
