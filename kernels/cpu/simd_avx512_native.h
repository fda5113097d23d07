// The operations of Avx512Simd that its emulation in tests has to supply itself.
#ifndef CERTKV_KERNELS_CPU_SIMD_AVX512_NATIVE_H_
#define CERTKV_KERNELS_CPU_SIMD_AVX512_NATIVE_H_

#include <immintrin.h>

#include <cstdint>

namespace certkv::cpu {

struct Avx512Native {
  [[gnu::always_inline]] static __m512 WidenF16(__m256i words) { return _mm512_cvtph_ps(words); }
  [[gnu::always_inline]] static __m512i WidenWords(__m256i words) {
    return _mm512_cvtepu16_epi32(words);
  }
  // The low 16 bits of every lane.
  [[gnu::always_inline]] static __m256i NarrowToWords(__m512i x) {
    return _mm512_cvtepi32_epi16(x);
  }
  [[gnu::always_inline]] static __m512 ToFloat(__m512i x) { return _mm512_cvtepi32_ps(x); }
  [[gnu::always_inline]] static __m512i ToInt(__m512 x) { return _mm512_cvtps_epi32(x); }
  [[gnu::always_inline]] static void StoreF16Up(uint16_t* p, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC));
  }
  [[gnu::always_inline]] static void StoreF16Down(uint16_t* p, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  }
};

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_SIMD_AVX512_NATIVE_H_
