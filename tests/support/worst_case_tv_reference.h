// Slow definitions of TV* and of its relaxation, for tests. Written from the formulas, sharing
// nothing with kernels/bounds.
#ifndef CERTKV_TESTS_SUPPORT_WORST_CASE_TV_REFERENCE_H_
#define CERTKV_TESTS_SUPPORT_WORST_CASE_TV_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace certkv {

// max over all 2^n sets S of N / (N + D) - P, in long double. Masses are normalised; half-widths
// may be infinite (limits). Each atom is one token. Requires n <= 20 and a positive total mass.
inline double WorstCaseTvByEnumeration(const std::vector<double>& mass,
                                       const std::vector<double>& half_width) {
  const size_t n = mass.size();
  const long double total = std::accumulate(mass.begin(), mass.end(), 0.0L);
  std::vector<long double> grown(n);
  std::vector<long double> shrunk(n);
  for (size_t i = 0; i < n; ++i) {
    const long double m = mass[i] / total;
    grown[i] = m == 0 ? 0 : m * std::exp(static_cast<long double>(half_width[i]));
    shrunk[i] = m * std::exp(-static_cast<long double>(half_width[i]));
  }
  long double best = 0;
  for (uint32_t set = 1; set < 1u << n; ++set) {
    long double in = 0;
    long double out = 0;
    long double served = 0;
    for (size_t i = 0; i < n; ++i) {
      if ((set >> i & 1) != 0) {
        in += grown[i];
        served += mass[i] / total;
      } else {
        out += shrunk[i];
      }
    }
    if (in == 0) continue;
    const long double share = std::isinf(in) ? 1 : in / (in + out);
    best = std::max(best, share - served);
  }
  return static_cast<double>(best);
}

// r - P_min(r) of the relaxation: atoms sorted by h_r, filled until the constraint holds.
inline double RelaxedTvAtShare(const std::vector<double>& mass,
                               const std::vector<double>& half_width, double share) {
  const double total = std::accumulate(mass.begin(), mass.end(), 0.0);
  std::vector<std::pair<double, double>> height_and_mass(mass.size());
  double need = 0;
  for (size_t i = 0; i < mass.size(); ++i) {
    const double m = mass[i] / total;
    const double y = std::exp(half_width[i]);
    height_and_mass[i] = {(1 - share) * y + share / y, m};
    need += share * m / y;
  }
  std::sort(height_and_mass.rbegin(), height_and_mass.rend());
  double served = 0;
  for (const auto& [height, m] : height_and_mass) {
    if (m * height >= need) return share - served - need / height;
    need -= m * height;
    served += m;
  }
  return share - 1;
}

// A value that the relaxation attains, near its maximum:
// a grid in r, refined around its best point.
inline double RelaxedTvByScan(const std::vector<double>& mass,
                              const std::vector<double>& half_width) {
  constexpr int kPoints = 200;
  constexpr int kRounds = 4;
  double low = 0;
  double high = 1;
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    double best_share = low;
    const double step = (high - low) / kPoints;
    for (int k = 0; k <= kPoints; ++k) {
      const double share = low + k * step;
      const double value = RelaxedTvAtShare(mass, half_width, share);
      if (value > best) {
        best = value;
        best_share = share;
      }
    }
    low = std::max(0.0, best_share - 2 * step);
    high = std::min(1.0, best_share + 2 * step);
  }
  return best;
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_WORST_CASE_TV_REFERENCE_H_
