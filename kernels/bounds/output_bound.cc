#include "kernels/bounds/output_bound.h"

#include "kernels/bounds/rounding.h"

namespace certkv {

double ValueTerm(absl::Span<const double> block_mass, absl::Span<const double> value_error_bound) {
  if (block_mass.size() != value_error_bound.size()) return kUnknownBound;
  double mass = 0;
  double weighted = 0;
  for (size_t j = 0; j < block_mass.size(); ++j) {
    // NaN for a negative mass, which must not cancel another.
    const double m = KnownOrInfinity(block_mass[j]);
    mass += m;
    weighted += m * KnownOrInfinity(value_error_bound[j]);
  }
  // n additions in each sum lose n 2^-53 relative; RoundUp gives back 2^-18.
  return RoundUp(weighted / mass);
}

double OutputErrorBound(const OutputBoundTerms& terms) {
  const double key_term =
      MultiplyRoundedUp(2 * KnownOrInfinity(terms.worst_case_tv), terms.value_radius);
  return AddRoundedUp(AddRoundedUp(terms.value_term, key_term), terms.rounding_term);
}

double OutputRoundingTerm(int64_t rounding_count, double decoded_radius) {
  return MultiplyRoundedUp(FloatRoundingFactor(rounding_count), decoded_radius);
}

}  // namespace certkv
