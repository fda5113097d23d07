// Against the processor's own directed rounding.
#include "kernels/cuda/on_cpu/directed_rounding.h"

#include <bit>
#include <cfenv>
#include <cstdint>
#include <random>

#include "gtest/gtest.h"

namespace certkv::cuda_on_cpu {
namespace {

// An operation on volatile operands, so that it happens under the mode that is set.
template <typename Operation>
float UnderMode(int mode, Operation operation, float a, float b, float c) {
  const volatile float x = a;
  const volatile float y = b;
  const volatile float z = c;
  std::fesetround(mode);
  const volatile float result = operation(x, y, z);
  std::fesetround(FE_TONEAREST);
  return result;
}

template <typename Operation>
float UnderUpward(Operation operation, float a, float b, float c) {
  return UnderMode(FE_UPWARD, operation, a, b, c);
}
template <typename Operation>
float UnderDownward(Operation operation, float a, float b, float c) {
  return UnderMode(FE_DOWNWARD, operation, a, b, c);
}

void ExpectSame(float seen, float expected, const char* what, float a, float b, float c) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(seen)) << what << " of " << a << ", " << b << ", " << c;
    return;
  }
  EXPECT_EQ(seen, expected) << what << " of " << a << ", " << b << ", " << c;
}

void Compare(float a, float b, float c) {
  ExpectSame(__fadd_ru(a, b), UnderUpward([](float x, float y, float) { return x + y; }, a, b, c),
             "sum", a, b, c);
  ExpectSame(__fmul_ru(a, b), UnderUpward([](float x, float y, float) { return x * y; }, a, b, c),
             "product", a, b, c);
  ExpectSame(__fdiv_ru(a, b), UnderUpward([](float x, float y, float) { return x / y; }, a, b, c),
             "quotient", a, b, c);
  ExpectSame(__fsqrt_ru(a),
             UnderUpward([](float x, float, float) { return std::sqrt(x); }, a, b, c), "root", a, b,
             c);
  ExpectSame(__fmaf_ru(a, b, c),
             UnderUpward([](float x, float y, float z) { return std::fma(x, y, z); }, a, b, c),
             "fused", a, b, c);
  ExpectSame(__fadd_rd(a, b), UnderDownward([](float x, float y, float) { return x + y; }, a, b, c),
             "sum downward", a, b, c);
  ExpectSame(__fmul_rd(a, b), UnderDownward([](float x, float y, float) { return x * y; }, a, b, c),
             "product downward", a, b, c);
}

constexpr float kSpecial[] = {0.0f,       -0.0f,        1.0f,     -1.0f,           0x1p-149f,
                              -0x1p-149f, 0x1p-126f,    0x1p127f, 0x1.fffffep127f, -0x1.fffffep127f,
                              0x1p-75f,   -3.0f,        1.0f / 3, INFINITY,        -INFINITY,
                              NAN,        0x1.000002p0f};

TEST(DirectedRoundingTest, IsTheProcessorsOnSpecialNumbers) {
  for (const float a : kSpecial) {
    for (const float b : kSpecial) {
      for (const float c : kSpecial) Compare(a, b, c);
    }
  }
}

TEST(DirectedRoundingTest, IsTheProcessorsOnAnyBits) {
  std::mt19937 random(31);
  const auto any = [&random] { return std::bit_cast<float>(static_cast<uint32_t>(random())); };
  const auto near_one = [&random] { return std::ldexp(static_cast<float>(random()), -32); };
  for (int n = 0; n < 100000; ++n) {
    Compare(any(), any(), any());
    Compare(near_one(), near_one(), -near_one());
  }
}

TEST(DirectedRoundingTest, DoublesGoToTheFloatAboveOrBelow) {
  std::mt19937_64 random(32);
  for (int n = 0; n < 100000; ++n) {
    const auto value = std::bit_cast<double>(random());
    if (std::isnan(value)) continue;
    const float seen = __double2float_ru(value);
    EXPECT_GE(seen, value);
    const float below = std::nextafterf(seen, -INFINITY);
    if (seen > -INFINITY) {
      EXPECT_LT(below, value);
    }
    EXPECT_EQ(__double2float_rd(-value), -seen);
  }
}

}  // namespace
}  // namespace certkv::cuda_on_cpu
