// Avx512Simd over SIMDe, which computes AVX-512 intrinsics with AVX2, so that the AVX-512 kernels'
// logic is tested on machines without AVX-512. The compiler's command line turns SIMDe's native
// names on; SIMDe must be included before anything that includes <immintrin.h>.
#ifndef CERTKV_TESTS_CONFORMANCE_AVX512_EMULATED_EMULATED_SIMD_H_
#define CERTKV_TESTS_CONFORMANCE_AVX512_EMULATED_EMULATED_SIMD_H_

// clang-format off: the order matters
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include "kernels/cpu/simd_avx512.h"
// clang-format on

#include <cstdint>

namespace certkv::cpu {

// What SIMDe 0.7.4 lacks, by halves.
struct EmulatedNative {
  static __m512i Join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
  static __m256i Low(__m512i x) { return _mm512_castsi512_si256(x); }
  static __m256i High(__m512i x) { return _mm512_extracti64x4_epi64(x, 1); }
  static __m512 JoinFloats(__m256 low, __m256 high) {
    return _mm512_castsi512_ps(Join(_mm256_castps_si256(low), _mm256_castps_si256(high)));
  }
  static __m256 LowFloats(__m512 x) { return _mm256_castsi256_ps(Low(_mm512_castps_si512(x))); }
  static __m256 HighFloats(__m512 x) { return _mm256_castsi256_ps(High(_mm512_castps_si512(x))); }

  static __m512 WidenF16(__m256i words) {
    return JoinFloats(_mm256_cvtph_ps(_mm256_castsi256_si128(words)),
                      _mm256_cvtph_ps(_mm256_extracti128_si256(words, 1)));
  }
  static __m512i WidenWords(__m256i words) {
    return Join(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(words)),
                _mm256_cvtepu16_epi32(_mm256_extracti128_si256(words, 1)));
  }
  static __m256i NarrowToWords(__m512i x) {
    alignas(64) int32_t wide[16];
    alignas(32) int16_t words[16];
    _mm512_storeu_si512(wide, x);
    for (int i = 0; i < 16; ++i) words[i] = static_cast<int16_t>(wide[i]);
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  }
  static __m512 ToFloat(__m512i x) {
    return JoinFloats(_mm256_cvtepi32_ps(Low(x)), _mm256_cvtepi32_ps(High(x)));
  }
  static __m512i ToInt(__m512 x) {
    return Join(_mm256_cvtps_epi32(LowFloats(x)), _mm256_cvtps_epi32(HighFloats(x)));
  }
  static void StoreF16Up(uint16_t* p, __m512 x) {
    StoreF16(p, _mm256_cvtps_ph(LowFloats(x), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC),
             _mm256_cvtps_ph(HighFloats(x), _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
  }
  static void StoreF16Down(uint16_t* p, __m512 x) {
    StoreF16(p, _mm256_cvtps_ph(LowFloats(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC),
             _mm256_cvtps_ph(HighFloats(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  }

 private:
  static void StoreF16(uint16_t* p, __m128i low, __m128i high) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), high);
  }
};

struct EmulatedSimd : Avx512Simd<EmulatedNative> {
  static constexpr int kChunkHeads = 1;  // chunks of 4 would take minutes to compile
};

}  // namespace certkv::cpu

#endif  // CERTKV_TESTS_CONFORMANCE_AVX512_EMULATED_EMULATED_SIMD_H_
