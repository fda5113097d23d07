// The vector operations of the CPU kernels in plain C++ (gcc and clang vector types): 8 lanes of 32
// bits on any little-endian machine. See simd_avx2.h for what each one does.
//
// There is no FMA here: MulAdd rounds twice. The kernels' error constants allow for it.
// Short operations are always inlined; for longer ones the compiler decides, and where this file is
// compiled for speed of compiling (CMakeLists.txt) it rather doesn't.
#ifndef CERTKV_KERNELS_CPU_SIMD_PORTABLE_H_
#define CERTKV_KERNELS_CPU_SIMD_PORTABLE_H_

#include <cstdint>

#include "kernels/core/half.h"
#include "kernels/cpu/certificate_parts.h"

namespace certkv::cpu {

struct PortableSimd {
  typedef float F __attribute__((vector_size(32)));
  typedef int32_t I __attribute__((vector_size(32)));
  typedef uint32_t U __attribute__((vector_size(32)));
  typedef uint16_t Words __attribute__((vector_size(32)));
  typedef uint16_t HalfWords __attribute__((vector_size(16)));
  static constexpr int kLanes = 8;
  static constexpr uint32_t kCertificateParts = kWholeCertificate;
#if defined(__x86_64__)
  static constexpr int kChunkHeads = 1;  // only for processors before 2013, and a third to compile
#else
  static constexpr int kChunkHeads = 4;
#endif
  // Heads that share it over affine keys, one vector of tokens at a time, where there are so many.
  static constexpr int kWideHeads = 8;
  static constexpr int kAccumulators = 4;
  static constexpr int kDotAccumulators = 4;
  static constexpr int kDotRegisters = 1;

  typedef int16_t W __attribute__((vector_size(32)));
  [[gnu::always_inline]] static W LoadWords(const uint16_t* p) {
    W x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  [[gnu::always_inline]] static void StoreWords(uint16_t* p, W x) {
    __builtin_memcpy(p, &x, sizeof(x));
  }
  [[gnu::always_inline]] static W MinWords(W a, W b) { return a < b ? a : b; }
  [[gnu::always_inline]] static W MaxWords(W a, W b) { return a > b ? a : b; }
  [[gnu::always_inline]] static W OrderWords(W x) { return x ^ (x >> 15 & 0x7fff); }

  [[gnu::always_inline]] static F Zero() { return F{}; }
  [[gnu::always_inline]] static F Set(float x) { return F{x, x, x, x, x, x, x, x}; }
  [[gnu::always_inline]] static F Load(const float* p) {
    F x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  [[gnu::always_inline]] static void Store(float* p, F x) { __builtin_memcpy(p, &x, sizeof(x)); }
  [[gnu::always_inline]] static F Add(F a, F b) { return a + b; }
  [[gnu::always_inline]] static F Sub(F a, F b) { return a - b; }
  [[gnu::always_inline]] static F Mul(F a, F b) { return a * b; }
  [[gnu::always_inline]] static F Div(F a, F b) { return a / b; }
  [[gnu::always_inline]] static F MulAdd(F a, F b, F c) { return a * b + c; }
  [[gnu::always_inline]] static F NegMulAdd(F a, F b, F c) { return c - a * b; }
  [[gnu::always_inline]] static F Min(F a, F b) { return Blend(a < b, a, b); }
  [[gnu::always_inline]] static F Max(F a, F b) { return Blend(a > b, a, b); }
  [[gnu::always_inline]] static F Abs(F x) { return AsFloat(AsInt(x) & 0x7fffffff); }
  [[gnu::always_inline]] static F WhereAtLeast(F test, F limit, F x) {
    return AsFloat((test >= limit) & AsInt(x));
  }
  static F LoadF16(const uint16_t* p) { return WidenF16Bits(LoadHalfWords(p)); }
  [[gnu::always_inline]] static F LoadBf16(const uint16_t* p) {
    return AsFloat(LoadHalfWords(p) << 16);
  }
  [[gnu::always_inline]] static F SetPair(const float* p) {
    return F{p[0], p[1], p[0], p[1], p[0], p[1], p[0], p[1]};
  }

  static float ReduceAdd(F x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
  }
  static float ReduceMax(F x) {
    float max = x[0];
    for (int i = 1; i < kLanes; ++i) max = x[i] > max ? x[i] : max;
    return max;
  }
  static void ReduceAdd4(F a, F b, F c, F d, float* out) {
    out[0] = ReduceAdd(a);
    out[1] = ReduceAdd(b);
    out[2] = ReduceAdd(c);
    out[3] = ReduceAdd(d);
  }
  static void ReduceMax4(F a, F b, F c, F d, float* out) {
    out[0] = ReduceMax(a);
    out[1] = ReduceMax(b);
    out[2] = ReduceMax(c);
    out[3] = ReduceMax(d);
  }

  [[gnu::always_inline]] static I ZeroI() { return I{}; }
  [[gnu::always_inline]] static I SetI(int32_t x) { return I{x, x, x, x, x, x, x, x}; }
  [[gnu::always_inline]] static I LoadI(const void* p) {
    I x;
    __builtin_memcpy(&x, p, sizeof(x));
    return x;
  }
  [[gnu::always_inline]] static I LoadI8(const void* p) { return LoadI(p); }
  [[gnu::always_inline]] static I LoadBytes(const uint8_t* p) {
    typedef uint8_t Bytes __attribute__((vector_size(8)));
    Bytes x;
    __builtin_memcpy(&x, p, sizeof(x));
    return __builtin_convertvector(x, I);
  }
  [[gnu::always_inline]] static void StoreI(void* p, I x) { __builtin_memcpy(p, &x, sizeof(x)); }
  [[gnu::always_inline]] static void StoreI8(void* p, I x) { StoreI(p, x); }
  // Integer sums wrap, as the other instruction sets' do: from logits that overflow they are
  // garbage.
  [[gnu::always_inline]] static I AddI(I a, I b) {
    return reinterpret_cast<I>(reinterpret_cast<U>(a) + reinterpret_cast<U>(b));
  }
  [[gnu::always_inline]] static I AndI(I a, I b) { return a & b; }
  [[gnu::always_inline]] static I MaxUnsigned(I a, I b) {
    return Select(reinterpret_cast<U>(a) > reinterpret_cast<U>(b), a, b);
  }
  [[gnu::always_inline]] static I OrI(I a, I b) { return a | b; }
  [[gnu::always_inline]] static I Select(I mask, I a, I b) { return (mask & a) | (~mask & b); }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftLeft16(I x) {
    return reinterpret_cast<I>(reinterpret_cast<Words>(x) << kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftRight16(I x) {
    return reinterpret_cast<I>(reinterpret_cast<Words>(x) >> kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftLeft32(I x) {
    return reinterpret_cast<I>(reinterpret_cast<U>(x) << kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftRight32(I x) {
    return reinterpret_cast<I>(reinterpret_cast<U>(x) >> kBits);
  }
  static I MulAddWords(I acc, I a, I b) {
    const I low_a = ShiftLeft32<16>(a) >> 16;  // arithmetic shifts: the words are signed
    const I low_b = ShiftLeft32<16>(b) >> 16;
    return AddI(AddI(acc, low_a * low_b), (a >> 16) * (b >> 16));
  }
  [[gnu::always_inline]] static F ToFloat(I x) { return __builtin_convertvector(x, F); }
  // By adding 1.5 * 2^23, whose float neighbours are 1 apart: exact for |x| < 2^22. Larger numbers
  // and NaN give garbage, as the conversions of other instruction sets do.
  [[gnu::always_inline]] static I ToInt(F x) {
    const F magic = Set(0x1.8p23f);
    return reinterpret_cast<I>(reinterpret_cast<U>(x + magic) - reinterpret_cast<U>(magic));
  }
  [[gnu::always_inline]] static F AsFloat(I x) { return reinterpret_cast<F>(x); }
  [[gnu::always_inline]] static I AsInt(F x) { return reinterpret_cast<I>(x); }
  static int32_t ReduceAddI(I x) {
    const U sums = reinterpret_cast<U>(x);  // wraps
    uint32_t sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += sums[i];
    return static_cast<int32_t>(sum);
  }
  static void ReduceAddI4(I a, I b, I c, I d, int32_t* out) {
    out[0] = ReduceAddI(a);
    out[1] = ReduceAddI(b);
    out[2] = ReduceAddI(c);
    out[3] = ReduceAddI(d);
  }
  static F WidenF16Low(I x) {
    uint16_t words[16];
    StoreI(words, x);
    return LoadF16(words);
  }
  static F WidenF16High(I x) {
    uint16_t words[16];
    StoreI(words, x);
    return LoadF16(words + 8);
  }
  static F LaneButterflies(F x) {
    x = __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6) + x * F{1, -1, 1, -1, 1, -1, 1, -1};
    x = __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5) + x * F{1, 1, -1, -1, 1, 1, -1, -1};
    return __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3) +
           x * F{1, 1, 1, 1, -1, -1, -1, -1};
  }
  static F AddNeighbours(F low, F high) {
    return F{low[0] + low[1],   low[2] + low[3],   low[4] + low[5],   low[6] + low[7],
             high[0] + high[1], high[2] + high[3], high[4] + high[5], high[6] + high[7]};
  }
  static void StoreWeights(int16_t* p, const I* x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int16_t>(x[i / kLanes][i % kLanes]);
  }
  static void StoreF16Up(uint16_t* p, F x) {
    for (int i = 0; i < kLanes; ++i) p[i] = FloatToF16RoundedUp(x[i]);
  }
  static void StoreF16Down(uint16_t* p, F x) {
    for (int i = 0; i < kLanes; ++i) p[i] = FloatToF16RoundedDown(x[i]);
  }

  static constexpr float kQueryTermMax = 32767.0f;
  static constexpr int kQuadParts = 2;
  struct Dot {
    I sum;
  };
  [[gnu::always_inline]] static Dot ZeroDot() { return {I{}}; }
  template <int kPart>
  [[gnu::always_inline]] static I QuadPart(I x) {
    return kPart == 0 ? x & 0x00ff00ff : ShiftRight16<8>(x);
  }
  template <int kPart>
  [[gnu::always_inline]] static void Accumulate(Dot& dot, I part, const int32_t* terms) {
    dot.sum = MulAddWords(dot.sum, part, SetI(terms[kPart]));
  }
  [[gnu::always_inline]] static I Total(const Dot& dot) { return dot.sum; }
  static void StoreTerms(int32_t* p, const I* x) {
    constexpr int kOrder[8] = {0, 4, 2, 6, 1, 5, 3, 7};
    int16_t words[16];
    for (int i = 0; i < 16; ++i) {
      const int channel = i / 8 * 8 + kOrder[i % 8];
      words[i] = static_cast<int16_t>(x[channel / kLanes][channel % kLanes]);
    }
    __builtin_memcpy(p, words, sizeof(words));
  }

  static I AddNibbles(I acc, I nibbles, int32_t terms) {
    const auto bits = static_cast<uint32_t>(terms);
    for (int k = 0; k < 4; ++k) {
      const auto term = static_cast<int8_t>(static_cast<uint8_t>(bits >> (8 * k)));
      acc = AddI(acc, ((nibbles >> (8 * k)) & 0xff) * SetI(term));
    }
    return acc;
  }
  [[gnu::always_inline]] static I WidenNibbleSums(I sums) { return sums; }
  static void StoreByteTerms(int32_t* p, const I* x) {
    constexpr int kOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    int8_t bytes[16];
    for (int i = 0; i < 16; ++i) {
      const int channel = i / 8 * 8 + kOrder[i % 8];
      bytes[i] = static_cast<int8_t>(x[channel / kLanes][channel % kLanes]);
    }
    __builtin_memcpy(p, bytes, sizeof(bytes));
  }

  [[gnu::always_inline]] static void Prefetch(const void* p) { __builtin_prefetch(p); }

 private:
  [[gnu::always_inline]] static F Blend(I mask, F a, F b) {
    return AsFloat((mask & AsInt(a)) | (~mask & AsInt(b)));
  }
  [[gnu::always_inline]] static I LoadHalfWords(const uint16_t* p) {
    HalfWords words;
    __builtin_memcpy(&words, p, sizeof(words));
    return __builtin_convertvector(words, I);
  }
  // An fp16's magnitude, moved to a float's place, is the number times 2^-112, exactly (subnormals
  // too); infinities and NaN get a float's largest exponent.
  static F WidenF16Bits(I bits) {
    const I magnitude = (bits & 0x7fff) << 13;
    const I special = (magnitude >= 0x7c00 << 13) & 0x7f800000;
    const I sign = reinterpret_cast<I>(reinterpret_cast<U>(bits & 0x8000) << 16);
    const F number = AsFloat(magnitude) * Set(0x1p112f);
    return AsFloat(AsInt(number) | special | sign);
  }
};

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_SIMD_PORTABLE_H_
