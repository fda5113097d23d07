// The vector operations of the CPU kernels for AVX-512 (F, BW, DQ, VL, VNNI): 16 lanes of 32 bits.
// See simd_avx2.h for what each one does.
//
// `Native` supplies the operations that the emulation of these intrinsics in tests lacks; see
// simd_avx512_native.h.
#ifndef CERTKV_KERNELS_CPU_SIMD_AVX512_H_
#define CERTKV_KERNELS_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/certificate_parts.h"
#include "kernels/cpu/simd_words.h"

namespace certkv::cpu {

template <typename Native>
struct Avx512Simd : Avx2Words {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  static constexpr uint32_t kCertificateParts = kWholeCertificate;
  static constexpr int kChunkHeads = 4;
  // Heads that share it over affine keys, one vector of tokens at a time, where there are so many.
  static constexpr int kWideHeads = 8;
  static constexpr int kAccumulators = 16;
  static constexpr int kDotAccumulators = 16;
  static constexpr int kDotRegisters = 2;

  [[gnu::always_inline]] static F Zero() { return _mm512_setzero_ps(); }
  [[gnu::always_inline]] static F Set(float x) { return _mm512_set1_ps(x); }
  [[gnu::always_inline]] static F Load(const float* p) { return _mm512_loadu_ps(p); }
  [[gnu::always_inline]] static void Store(float* p, F x) { _mm512_storeu_ps(p, x); }
  [[gnu::always_inline]] static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  [[gnu::always_inline]] static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  [[gnu::always_inline]] static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  [[gnu::always_inline]] static F Div(F a, F b) { return _mm512_div_ps(a, b); }
  [[gnu::always_inline]] static F MulAdd(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static F NegMulAdd(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
  [[gnu::always_inline]] static F Min(F a, F b) { return _mm512_min_ps(a, b); }
  [[gnu::always_inline]] static F Max(F a, F b) { return _mm512_max_ps(a, b); }
  // Not _mm512_abs_ps, whose emulation leaves -0 as it is: magnitudes are compared as bits.
  [[gnu::always_inline]] static F Abs(F x) { return AsFloat(AndI(AsInt(x), SetI(0x7fffffff))); }
  [[gnu::always_inline]] static F WhereAtLeast(F test, F limit, F x) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(test, limit, _CMP_GE_OQ), x);
  }
  [[gnu::always_inline]] static F LoadF16(const uint16_t* p) {
    return Native::WidenF16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  [[gnu::always_inline]] static F LoadBf16(const uint16_t* p) {
    const I words = Native::WidenWords(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
  [[gnu::always_inline]] static F SetPair(const float* p) {
    int64_t pair;
    __builtin_memcpy(&pair, p, sizeof(pair));
    return _mm512_castsi512_ps(_mm512_set1_epi64(pair));
  }

  [[gnu::always_inline]] static float ReduceAdd(F x) {
    const __m256 halves = _mm256_add_ps(Low(x), High(x));
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
  }
  [[gnu::always_inline]] static float ReduceMax(F x) {
    const __m256 halves = _mm256_max_ps(Low(x), High(x));
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
  }
  [[gnu::always_inline]] static void ReduceAdd4(F a, F b, F c, F d, float* out) {
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const F t = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 halves = _mm256_add_ps(Low(t), High(t));
    _mm_storeu_ps(out,
                  _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }
  [[gnu::always_inline]] static void ReduceMax4(F a, F b, F c, F d, float* out) {
    const F ab = _mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_max_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const F t = _mm512_max_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 halves = _mm256_max_ps(Low(t), High(t));
    _mm_storeu_ps(out,
                  _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
  }

  [[gnu::always_inline]] static I ZeroI() { return _mm512_setzero_si512(); }
  [[gnu::always_inline]] static I SetI(int32_t x) { return _mm512_set1_epi32(x); }
  [[gnu::always_inline]] static I LoadI(const void* p) { return _mm512_loadu_si512(p); }
  [[gnu::always_inline]] static I LoadI8(const void* p) {
    const __m256i low = _mm256_loadu_si256(static_cast<const __m256i*>(p));
    return _mm512_inserti64x4(_mm512_setzero_si512(), low, 0);
  }
  [[gnu::always_inline]] static I LoadBytes(const uint8_t* p) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return Native::WidenWords(_mm256_cvtepu8_epi16(bytes));
  }
  [[gnu::always_inline]] static void StoreI(void* p, I x) { _mm512_storeu_si512(p, x); }
  [[gnu::always_inline]] static void StoreI8(void* p, I x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_castsi512_si256(x));
  }
  [[gnu::always_inline]] static I AddI(I a, I b) { return _mm512_add_epi32(a, b); }
  [[gnu::always_inline]] static I AndI(I a, I b) { return _mm512_and_si512(a, b); }
  [[gnu::always_inline]] static I MaxUnsigned(I a, I b) { return _mm512_max_epu32(a, b); }
  [[gnu::always_inline]] static I OrI(I a, I b) { return _mm512_or_si512(a, b); }
  [[gnu::always_inline]] static I Select(I mask, I a, I b) {
    return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftLeft16(I x) {
    if constexpr (kBits == 0) return x;
    return _mm512_slli_epi16(x, kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftRight16(I x) {
    if constexpr (kBits == 0) return x;
    return _mm512_srli_epi16(x, kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftLeft32(I x) {
    if constexpr (kBits == 0) return x;
    return _mm512_slli_epi32(x, kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftRight32(I x) {
    return _mm512_srli_epi32(x, kBits);
  }
  [[gnu::always_inline]] static I MulAddWords(I acc, I a, I b) {
    return _mm512_dpwssd_epi32(acc, a, b);
  }
  [[gnu::always_inline]] static F ToFloat(I x) { return Native::ToFloat(x); }
  [[gnu::always_inline]] static I ToInt(F x) { return Native::ToInt(x); }
  [[gnu::always_inline]] static F AsFloat(I x) { return _mm512_castsi512_ps(x); }
  [[gnu::always_inline]] static I AsInt(F x) { return _mm512_castps_si512(x); }
  [[gnu::always_inline]] static int32_t ReduceAddI(I x) {
    const __m256i halves =
        _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
  }
  [[gnu::always_inline]] static void ReduceAddI4(I a, I b, I c, I d, int32_t* out) {
    const auto halves = [](I x) __attribute__((always_inline)) {
      return _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    };
    const __m256i t = _mm256_hadd_epi32(_mm256_hadd_epi32(halves(a), halves(b)),
                                        _mm256_hadd_epi32(halves(c), halves(d)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1)));
  }
  [[gnu::always_inline]] static F WidenF16Low(I x) {
    return Native::WidenF16(_mm512_castsi512_si256(x));
  }
  [[gnu::always_inline]] static F WidenF16High(I x) {
    return Native::WidenF16(_mm512_extracti64x4_epi64(x, 1));
  }
  [[gnu::always_inline]] static F AddNeighbours(F low, F high) {
    const I even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const I odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    return _mm512_add_ps(_mm512_permutex2var_ps(low, even, high),
                         _mm512_permutex2var_ps(low, odd, high));
  }
  [[gnu::always_inline]] static void StoreWeights(int16_t* p, const I* x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), Native::NarrowToWords(x[0]));
  }
  [[gnu::always_inline]] static void StoreF16Up(uint16_t* p, F x) { Native::StoreF16Up(p, x); }
  [[gnu::always_inline]] static void StoreF16Down(uint16_t* p, F x) { Native::StoreF16Down(p, x); }

  // VPDPBUSD multiplies signed bytes, so a query term t is split as 256 h + l, both in
  // [-128, 127]; 32639 = 127 * 256 + 127. The 2 dwords of a quad are its h bytes and its l bytes,
  // channels in order.
  static constexpr float kQueryTermMax = 32639.0f;
  static constexpr int kQuadParts = 1;
  struct Dot {
    I high;
    I low;
  };
  [[gnu::always_inline]] static Dot ZeroDot() {
    return {_mm512_setzero_si512(), _mm512_setzero_si512()};
  }
  template <int kPart>
  [[gnu::always_inline]] static I QuadPart(I x) {
    return x;
  }
  template <int kPart>
  [[gnu::always_inline]] static void Accumulate(Dot& dot, I part, const int32_t* terms) {
    dot.high = _mm512_dpbusd_epi32(dot.high, part, _mm512_set1_epi32(terms[0]));
    dot.low = _mm512_dpbusd_epi32(dot.low, part, _mm512_set1_epi32(terms[1]));
  }
  [[gnu::always_inline]] static I Total(const Dot& dot) {
    return _mm512_add_epi32(_mm512_slli_epi32(dot.high, 8), dot.low);
  }
  [[gnu::always_inline]] static void StoreTerms(int32_t* p, const I* x) {
    // l = x as a signed byte, h = (x - l) / 256: adding 128 before the shift rounds it.
    const I high = _mm512_add_epi32(x[0], _mm512_set1_epi32(128));  // h is its second byte
    const I pairs =
        _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(high, 8), _mm512_set1_epi32(0x00ff)),
                        _mm512_and_si512(_mm512_slli_epi32(x[0], 8), _mm512_set1_epi32(0xff00)));
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0,
                                           4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_shuffle_epi8(Native::NarrowToWords(pairs), order));
  }

  [[gnu::always_inline]] static I AddNibbles(I acc, I nibbles, int32_t terms) {
    return _mm512_dpbusd_epi32(acc, nibbles, _mm512_set1_epi32(terms));
  }
  [[gnu::always_inline]] static I WidenNibbleSums(I sums) { return sums; }
  [[gnu::always_inline]] static void StoreByteTerms(int32_t* p, const I* x) {
    const __m256i words = Native::NarrowToWords(x[0]);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(bytes, order));
  }

  [[gnu::always_inline]] static void Prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }

 private:
  [[gnu::always_inline]] static __m256 Low(F x) { return _mm512_castps512_ps256(x); }
  [[gnu::always_inline]] static __m256 High(F x) {
    return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  }
};

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_SIMD_AVX512_H_
