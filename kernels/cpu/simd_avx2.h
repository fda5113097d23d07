// The vector operations of the CPU kernels for AVX2, FMA and F16C: 8 lanes of 32 bits.
//
// simd_portable.h, simd_avx2.h and simd_avx512.h have the same members; the algorithms are
// templates over them. F is a vector of floats, I a vector of 32-bit integers that is also seen as
// 16-bit words or bytes. Pointers need no alignment. Only for translation units that are compiled
// for the instruction set.
#ifndef CERTKV_KERNELS_CPU_SIMD_AVX2_H_
#define CERTKV_KERNELS_CPU_SIMD_AVX2_H_

#include <immintrin.h>

#include <cstdint>

#include "kernels/cpu/certificate_parts.h"
#include "kernels/cpu/simd_words.h"

namespace certkv::cpu {

struct Avx2Simd : Avx2Words {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  static constexpr uint32_t kCertificateParts = kWholeCertificate;
  // Heads that share one unpacking of the codes.
  static constexpr int kChunkHeads = 4;
  // Heads that share it over affine keys, one vector of tokens at a time, where there are so many.
  static constexpr int kWideHeads = 8;
  // Registers that a loop may keep accumulators in; in loops over key codes, which need more
  // temporaries, and how many of them a Dot takes there.
  static constexpr int kAccumulators = 8;
  static constexpr int kDotAccumulators = 4;
  static constexpr int kDotRegisters = 1;

  // Floats.
  [[gnu::always_inline]] static F Zero() { return _mm256_setzero_ps(); }
  [[gnu::always_inline]] static F Set(float x) { return _mm256_set1_ps(x); }
  [[gnu::always_inline]] static F Load(const float* p) { return _mm256_loadu_ps(p); }
  [[gnu::always_inline]] static void Store(float* p, F x) { _mm256_storeu_ps(p, x); }
  [[gnu::always_inline]] static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  [[gnu::always_inline]] static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  [[gnu::always_inline]] static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  [[gnu::always_inline]] static F Div(F a, F b) { return _mm256_div_ps(a, b); }
  // a * b + c and c - a * b, in one rounding here, in two where there is no FMA.
  [[gnu::always_inline]] static F MulAdd(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  [[gnu::always_inline]] static F NegMulAdd(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
  [[gnu::always_inline]] static F Min(F a, F b) { return _mm256_min_ps(a, b); }
  [[gnu::always_inline]] static F Max(F a, F b) { return _mm256_max_ps(a, b); }
  [[gnu::always_inline]] static F Abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
  // x where test >= limit, and +0 elsewhere and where `test` is NaN.
  [[gnu::always_inline]] static F WhereAtLeast(F test, F limit, F x) {
    return _mm256_and_ps(_mm256_cmp_ps(test, limit, _CMP_GE_OQ), x);
  }
  // kLanes 16-bit floats, widened exactly.
  [[gnu::always_inline]] static F LoadF16(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  [[gnu::always_inline]] static F LoadBf16(const uint16_t* p) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
  }
  // p[0], p[1], p[0], p[1], ...
  [[gnu::always_inline]] static F SetPair(const float* p) {
    return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
  }

  // Sums and maxima over lanes. The order of a sum is fixed: lanes are added in a binary tree.
  [[gnu::always_inline]] static float ReduceAdd(F x) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
  }
  [[gnu::always_inline]] static float ReduceMax(F x) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
  }
  [[gnu::always_inline]] static void ReduceAdd4(F a, F b, F c, F d, float* out) {
    const __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
  }
  [[gnu::always_inline]] static void ReduceMax4(F a, F b, F c, F d, float* out) {
    const __m256 ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256 t =
        _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1)));
  }

  // Integers.
  [[gnu::always_inline]] static I ZeroI() { return _mm256_setzero_si256(); }
  [[gnu::always_inline]] static I SetI(int32_t x) { return _mm256_set1_epi32(x); }
  [[gnu::always_inline]] static I LoadI(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  // The first 8 dwords; the other lanes, where there are any, are 0.
  [[gnu::always_inline]] static I LoadI8(const void* p) { return LoadI(p); }
  // kLanes bytes, widened.
  [[gnu::always_inline]] static I LoadBytes(const uint8_t* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  [[gnu::always_inline]] static void StoreI(void* p, I x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x);
  }
  [[gnu::always_inline]] static void StoreI8(void* p, I x) { StoreI(p, x); }
  [[gnu::always_inline]] static I AddI(I a, I b) { return _mm256_add_epi32(a, b); }
  [[gnu::always_inline]] static I AndI(I a, I b) { return _mm256_and_si256(a, b); }
  // Of unsigned dwords.
  [[gnu::always_inline]] static I MaxUnsigned(I a, I b) { return _mm256_max_epu32(a, b); }
  [[gnu::always_inline]] static I OrI(I a, I b) { return _mm256_or_si256(a, b); }
  // Bits of a where the mask is 1, of b where it is 0.
  [[gnu::always_inline]] static I Select(I mask, I a, I b) {
    return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftLeft16(I x) {
    return kBits == 0 ? x : _mm256_slli_epi16(x, kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftRight16(I x) {
    return kBits == 0 ? x : _mm256_srli_epi16(x, kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftLeft32(I x) {
    return kBits == 0 ? x : _mm256_slli_epi32(x, kBits);
  }
  template <int kBits>
  [[gnu::always_inline]] static I ShiftRight32(I x) {
    return _mm256_srli_epi32(x, kBits);
  }
  // acc + (signed word products, summed in pairs). The empty asm keeps the sum in a register at
  // this point: gcc would otherwise reassociate the additions of an unrolled loop, collect all
  // products first and spill them.
  [[gnu::always_inline]] static I MulAddWords(I acc, I a, I b) {
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(a, b));
    __asm__("" : "+x"(acc));
    return acc;
  }
  [[gnu::always_inline]] static F ToFloat(I x) { return _mm256_cvtepi32_ps(x); }
  // To nearest, ties to even.
  [[gnu::always_inline]] static I ToInt(F x) { return _mm256_cvtps_epi32(x); }
  [[gnu::always_inline]] static F AsFloat(I x) { return _mm256_castsi256_ps(x); }
  [[gnu::always_inline]] static I AsInt(F x) { return _mm256_castps_si256(x); }
  [[gnu::always_inline]] static int32_t ReduceAddI(I x) {
    __m128i a = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
  }
  [[gnu::always_inline]] static void ReduceAddI4(I a, I b, I c, I d, int32_t* out) {
    const I t = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                     _mm_add_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1)));
  }
  // The low and the high half of the words as 16-bit floats, widened.
  [[gnu::always_inline]] static F WidenF16Low(I x) {
    return _mm256_cvtph_ps(_mm256_castsi256_si128(x));
  }
  [[gnu::always_inline]] static F WidenF16High(I x) {
    return _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
  }
  // Butterflies of distances 1, 2 and 4 among the lanes: of lanes (j, j + h), with bit h of j
  // clear, to (a + b, a - b), each in one rounding.
  [[gnu::always_inline]] static F LaneButterflies(F x) {
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), _mm256_permute_ps(x, 0xb1));
    x = _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1), _mm256_permute_ps(x, 0x4e));
    return _mm256_fmadd_ps(x, _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1),
                           _mm256_permute2f128_ps(x, x, 1));
  }
  // Sums of neighbouring lanes: of `low`, then of `high`.
  [[gnu::always_inline]] static F AddNeighbours(F low, F high) {
    const __m256d pairs = _mm256_castps_pd(_mm256_hadd_ps(low, high));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(pairs, 0xd8));
  }
  // 16 integers in 16 / kLanes vectors, each in the range of an int16, as 16 words.
  [[gnu::always_inline]] static void StoreWeights(int16_t* p, const I* x) {
    StoreI(p, _mm256_permute4x64_epi64(_mm256_packs_epi32(x[0], x[1]), 0xd8));
  }
  // kLanes floats to fp16, toward +infinity and toward -infinity; magnitudes past 65504 become the
  // neighbour in that direction, an infinity or +-65504.
  [[gnu::always_inline]] static void StoreF16Up(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
  }
  [[gnu::always_inline]] static void StoreF16Down(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  }

  // Dots of 8-bit key codes with query terms. A quad is 4 codes of one token in a dword: the even
  // or the odd channels of a group of 8. Its terms are 2 dwords: here 16-bit words for the channels
  // (0, 4) and (2, 6) of the quad's half, so that code words need no shuffle.
  static constexpr float kQueryTermMax = 32767.0f;
  // A quad is taken in kQuadParts parts, here its low and its high bytes.
  static constexpr int kQuadParts = 2;
  struct Dot {
    I sum;
  };
  [[gnu::always_inline]] static Dot ZeroDot() { return {_mm256_setzero_si256()}; }
  template <int kPart>
  [[gnu::always_inline]] static I QuadPart(I x) {
    return kPart == 0 ? _mm256_and_si256(x, _mm256_set1_epi16(255)) : _mm256_srli_epi16(x, 8);
  }
  // `terms` are those of the quad.
  template <int kPart>
  [[gnu::always_inline]] static void Accumulate(Dot& dot, I part, const int32_t* terms) {
    dot.sum = MulAddWords(dot.sum, part, _mm256_set1_epi32(terms[kPart]));
  }
  [[gnu::always_inline]] static I Total(const Dot& dot) { return dot.sum; }
  // Terms of 16 channels (two groups of 8, even then odd quads) from their rounded values.
  [[gnu::always_inline]] static void StoreTerms(int32_t* p, const I* x) {
    const I words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x[0], x[1]), 0xd8);
    const I order = _mm256_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15,  //
                                     0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15);
    StoreI(p, _mm256_shuffle_epi8(words, order));
  }

  // Dots of 4-bit codes with byte terms: bytes in [0, 15], 4 of one token in a dword, times the 4
  // signed bytes of `terms` in [-127, 127]. Here pairs add up in words: 8 calls stay within 16 bits
  // (8 * 2 * 15 * 127 < 2^15), then WidenNibbleSums makes dwords of them.
  [[gnu::always_inline]] static I AddNibbles(I acc, I nibbles, int32_t terms) {
    acc = _mm256_add_epi16(acc, _mm256_maddubs_epi16(nibbles, _mm256_set1_epi32(terms)));
    __asm__("" : "+x"(acc));  // as in MulAddWords
    return acc;
  }
  [[gnu::always_inline]] static I WidenNibbleSums(I sums) {
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
  }
  // Byte terms of 16 channels from their rounded values: per group of 8 the even, then the odd.
  [[gnu::always_inline]] static void StoreByteTerms(int32_t* p, const I* x) {
    const I words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x[0], x[1]), 0xd8);
    const __m128i bytes =
        _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(bytes, order));
  }

  [[gnu::always_inline]] static void Prefetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
  }
};

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_SIMD_AVX2_H_
