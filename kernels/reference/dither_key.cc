#include "kernels/reference/dither_key.h"

#include <cmath>
#include <vector>

namespace certkv::reference {

bool QuantizeDitheredKey(absl::Span<const float> key, absl::Span<const float> zero,
                         absl::Span<const float> scale, const DitherPlace& place,
                         absl::Span<int8_t> codes) {
  std::vector<float> u(key.size());
  DitherOf(place, absl::MakeSpan(u));
  for (size_t i = 0; i < key.size(); ++i) {
    if (!(scale[i] > 0) || !(std::fabs(zero[i]) <= kDitherZeroStepsMax * scale[i])) return false;
    const double code = std::rint((double{key[i]} - double{zero[i]}) / double{scale[i]} + u[i]);
    if (!(std::fabs(code) <= kDitherCodeMax)) return false;
    codes[i] = static_cast<int8_t>(code);
  }
  return true;
}

void DecodeDitheredKey(absl::Span<const int8_t> codes, absl::Span<const float> zero,
                       absl::Span<const float> scale, const DitherPlace& place,
                       absl::Span<double> key) {
  std::vector<float> u(key.size());
  DitherOf(place, absl::MakeSpan(u));
  for (size_t i = 0; i < key.size(); ++i) {
    key[i] = zero[i] + (codes[i] - double{u[i]}) * scale[i];
  }
}

}  // namespace certkv::reference
