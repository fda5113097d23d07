// Random masses and half-widths that reach the corners of TV*: one token with nearly all the mass,
// equal and zero half-widths, widths of ten decades.
#ifndef CERTKV_TESTS_SUPPORT_RANDOM_ATOMS_H_
#define CERTKV_TESTS_SUPPORT_RANDOM_ATOMS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace certkv {

struct RandomAtoms {
  std::vector<double> mass;  // not normalised
  std::vector<double> half_width;
};

inline RandomAtoms MakeRandomAtoms(int32_t count, std::mt19937_64* random) {
  const auto uniform = [&](double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(*random);
  };
  std::normal_distribution<double> normal;
  RandomAtoms atoms;
  const double mass_spread = uniform(0, 6);
  const double width_scale = std::pow(10, uniform(-4, 1));
  const double width_spread = uniform(0, 2);
  const int shape = std::uniform_int_distribution<int>(0, 5)(*random);
  for (int32_t i = 0; i < count; ++i) {
    atoms.mass.push_back(std::exp(mass_spread * normal(*random)));
    double half_width = width_scale * std::exp(width_spread * normal(*random));
    if (shape == 1) half_width = width_scale;
    if (shape == 2 && uniform(0, 1) < 0.5) half_width = 0;
    if (shape == 3 && i == 0) half_width = 0;  // an exact sink
    atoms.half_width.push_back(std::min(half_width, 30.0));
  }
  if (shape == 3 || shape == 4) {  // one token that holds most of the mass
    double rest = 0;
    for (const double m : atoms.mass) rest += m;
    atoms.mass[0] = rest * std::pow(10, uniform(-0.5, 4));
  }
  return atoms;
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_RANDOM_ATOMS_H_
