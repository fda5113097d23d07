// Narrowing of bounds: up, never to nearest, and never NaN.
#ifndef CERTKV_KERNELS_REFERENCE_ROUND_UP_H_
#define CERTKV_KERNELS_REFERENCE_ROUND_UP_H_

#include <cmath>
#include <limits>

namespace certkv::reference {

// The smallest float >= bound; +infinity for NaN, because an unknown bound is infinite.
inline float RoundUpToFloat(double bound) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  if (!(bound <= std::numeric_limits<float>::max())) return kInfinity;
  const auto rounded = static_cast<float>(bound);
  return rounded >= bound ? rounded : std::nextafter(rounded, kInfinity);
}

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_ROUND_UP_H_
