#include "kernels/bounds/closed_forms.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace certkv {
namespace {

struct Moments {
  double mass = 0;
  double grown = 0;   // sum m e^c
  double shrunk = 0;  // sum m e^-c
};

Moments MomentsOf(absl::Span<const double> mass, absl::Span<const double> half_width) {
  Moments sums;
  for (size_t i = 0; i < mass.size(); ++i) {
    sums.mass += mass[i];
    sums.grown += mass[i] * std::exp(half_width[i]);
    sums.shrunk += mass[i] * std::exp(-half_width[i]);
  }
  return sums;
}

}  // namespace

double EFormTv(absl::Span<const double> mass, absl::Span<const double> half_width) {
  if (mass.size() != half_width.size()) return std::numeric_limits<double>::infinity();
  const Moments sums = MomentsOf(mass, half_width);
  const double growth = sums.grown / sums.mass;
  return (growth * growth - 1) / 2;
}

double TwoSidedTv(absl::Span<const double> mass, absl::Span<const double> half_width) {
  if (mass.size() != half_width.size()) return 1;
  const Moments sums = MomentsOf(mass, half_width);
  return 1 - sums.shrunk / sums.grown;
}

double TanhTv(absl::Span<const double> half_width) {
  double largest = 0;
  for (const double c : half_width) largest = std::max(largest, c);
  return std::tanh(largest / 2);
}

}  // namespace certkv
