// The rotation of the value formats: an orthonormal Hadamard matrix, block-diagonal where the
// dimension isn't a power of two (80 = 64 + 16, 96 = 64 + 32). It is its own inverse.
#ifndef CERTKV_KERNELS_REFERENCE_HADAMARD_H_
#define CERTKV_KERNELS_REFERENCE_HADAMARD_H_

#include <bit>
#include <cmath>
#include <cstdint>

namespace certkv::reference {

// Rotates values[0 .. dim) in place. With T = float this is, operation by operation, the rotation
// that the value formats are defined by: for h = 1, 2, 4, ... each pair (j, j + h) becomes
// (a + b, a - b); after the last stage every element is multiplied by the T nearest to 1/sqrt(n).
template <typename T>
void RotateHadamard(T* values, int32_t dim) {
  for (int32_t begin = 0; begin < dim;) {
    const auto n = static_cast<int32_t>(std::bit_floor(static_cast<uint32_t>(dim - begin)));
    T* block = values + begin;
    for (int32_t h = 1; h < n; h *= 2) {
      for (int32_t i = 0; i < n; ++i) {
        if ((i & h) != 0) continue;
        const T a = block[i];
        const T b = block[i + h];
        block[i] = a + b;
        block[i + h] = a - b;
      }
    }
    const T factor = static_cast<T>(1.0 / std::sqrt(static_cast<double>(n)));
    for (int32_t i = 0; i < n; ++i) block[i] *= factor;
    begin += n;
  }
}

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_HADAMARD_H_
