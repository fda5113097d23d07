// Vectors of 16 signed words, the same for AVX2 and AVX-512.
#ifndef CERTKV_KERNELS_CPU_SIMD_WORDS_H_
#define CERTKV_KERNELS_CPU_SIMD_WORDS_H_

#include <immintrin.h>

#include <cstdint>

namespace certkv::cpu {

struct Avx2Words {
  using W = __m256i;

  [[gnu::always_inline]] static W LoadWords(const uint16_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  [[gnu::always_inline]] static void StoreWords(uint16_t* p, W x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
  }
  [[gnu::always_inline]] static W MinWords(W a, W b) { return _mm256_min_epi16(a, b); }
  [[gnu::always_inline]] static W MaxWords(W a, W b) { return _mm256_max_epi16(a, b); }
  // 16-bit floats as words in the same order, -0 below +0; and back.
  [[gnu::always_inline]] static W OrderWords(W x) {
    return _mm256_xor_si256(x, _mm256_srli_epi16(_mm256_srai_epi16(x, 15), 1));
  }
};

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_SIMD_WORDS_H_
