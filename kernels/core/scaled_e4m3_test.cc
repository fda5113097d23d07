#include "kernels/core/scaled_e4m3.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kernels/core/status.h"

namespace certkv {
namespace {

constexpr OriginalDtype kBoth[] = {OriginalDtype::kF16, OriginalDtype::kBf16};

TEST(ScaledE4m3Test, PowersOfTwoAreExactInTheWholeRangeAndNotBeyond) {
  for (const OriginalDtype dtype : kBoth) {
    const int low = dtype == OriginalDtype::kF16 ? -15 : -124;
    const int high = dtype == OriginalDtype::kF16 ? 7 : 119;
    for (int exponent = low; exponent <= high; ++exponent) {
      const float scale = std::ldexp(1.0f, exponent);
      const auto originals = ScaleE4m3(scale, dtype);
      ASSERT_TRUE(originals.ok()) << originals.status();
      for (int code = 0; code < 256; ++code) {
        const float number = E4m3ToFloat(static_cast<uint8_t>(code));
        const float original = OriginalToFloat(dtype, (*originals)[code]);
        if (std::isnan(number)) {
          EXPECT_TRUE(std::isnan(original)) << code;
        } else {
          EXPECT_EQ(original, std::ldexp(number, exponent)) << code << " " << exponent;
          EXPECT_EQ(std::signbit(original), std::signbit(number)) << code;
        }
      }
      EXPECT_EQ(ExactScaleAbove(scale, dtype), scale);
    }
    for (const int beyond : {low - 1, high + 1}) {
      const auto refused = ScaleE4m3(std::ldexp(1.0f, beyond), dtype);
      EXPECT_EQ(ReasonOf(refused.status()), "FP8_SCALE_INEXACT") << beyond;
    }
    EXPECT_EQ(ExactScaleAbove(std::numeric_limits<float>::denorm_min(), dtype),
              std::ldexp(1.0f, low));
    EXPECT_EQ(ExactScaleAbove(std::numeric_limits<float>::max(), dtype), std::ldexp(1.0f, high));
  }
}

TEST(ScaledE4m3Test, ScaleOfFewBitsIsExactAndOneBitMoreIsNot) {
  EXPECT_TRUE(ScaleE4m3(127.0f / 128, OriginalDtype::kF16).ok());   // 7 bits
  EXPECT_FALSE(ScaleE4m3(255.0f / 256, OriginalDtype::kF16).ok());  // 8: 15 * 255 has 12
  EXPECT_TRUE(ScaleE4m3(15.0f / 16, OriginalDtype::kBf16).ok());    // 4 bits
  EXPECT_FALSE(ScaleE4m3(31.0f / 32, OriginalDtype::kBf16).ok());   // 5: 15 * 31 has 9
}

TEST(ScaledE4m3Test, RefusalNamesTheProductAndAScaleThatIsExact) {
  const auto refused = ScaleE4m3(0.01f, OriginalDtype::kF16);
  EXPECT_EQ(ReasonOf(refused.status()), "FP8_SCALE_INEXACT");
  EXPECT_THAT(std::string(refused.status().message()),
              testing::AllOf(testing::HasSubstr("is 0.00999999978"),
                             testing::HasSubstr("a power of two (0.015625)"),
                             testing::HasSubstr("float16")));
}

TEST(ScaledE4m3Test, ScaleThatIsNoPositiveNumberIsRefused) {
  for (const float scale : {0.0f, -1.0f, std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()}) {
    for (const OriginalDtype dtype : kBoth) {
      EXPECT_EQ(ReasonOf(ScaleE4m3(scale, dtype).status()), "FP8_SCALE_INVALID") << scale;
    }
  }
}

}  // namespace
}  // namespace certkv
