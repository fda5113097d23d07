// What a read computes for its certificate beside its output, in parts. Kernels that serve compute
// all of them; a benchmark prices a part by leaving it out.
#ifndef CERTKV_KERNELS_CPU_CERTIFICATE_PARTS_H_
#define CERTKV_KERNELS_CPU_CERTIFICATE_PARTS_H_

#include <cstdint>

namespace certkv::cpu {

inline constexpr uint32_t kHalfWidthPart = 1;    // half-widths of logits
inline constexpr uint32_t kAtomPart = 2;         // masses and largest logits of atoms
inline constexpr uint32_t kWeightErrorPart = 4;  // what rounding takes from weights
inline constexpr uint32_t kValueErrorPart = 8;   // eta and reaches of values
inline constexpr uint32_t kWholeCertificate = 15;

// Do kernels over the vectors V compute `part`?
template <typename V>
constexpr bool Computes(uint32_t part) {
  return (V::kCertificateParts & part) != 0;
}

}  // namespace certkv::cpu

#endif  // CERTKV_KERNELS_CPU_CERTIFICATE_PARTS_H_
