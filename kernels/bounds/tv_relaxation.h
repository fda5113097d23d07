// The relaxation of TV* in which a set may take a fraction of an atom, bounded from above by weak
// duality. Internal to worst_case_tv.
//
// Fixed part: heavy tokens already put into S (N_A, P_A) or out of it (D_A). Free part: points of
// mass W at y = e^c. With r = N / (N + D) and h_r(y) = (1 - r) y + r / y, for every r and every
// multiplier lambda >= 0
//
//   r - P_min(r) <= F(lambda, r) = r - P_A - lambda (r (D_A + Z) - (1 - r) N_A)
//                                  + sum W (lambda h_r(y) - 1)^+,        Z = sum W / y.
//
// Cells. [r_min, r_max] is covered by cells, and on each cell lambda = 1 / h_r(y0) for one point
// y0, the one that is partly filled at a probe inside the cell. Then a term is
//   (y - y0) ((1 - r) - r / (y y0)) / h_r(y0),
// monotone in r, so that every point is positive on the whole cell (it belongs to S), negative on
// the whole cell, or changes sign inside it, and then it is bounded by its larger end. What
// remains, with N, D, P of the points in S, is
//   psi(r) = r - P + ((1 - r) N - r D) / h_r(y0),    psi' = 1 - K / h_r(y0)^2,  K = D y0 + N / y0,
// concave for K > 0 (convex otherwise). Both ends of the order of h_r are covered: for r > 1/2 the
// function h_r falls before it rises, so S may hold the smallest c as well as the largest.
//
// The bound of a cell is exact where y0 is the partly filled point. A cell that is too loose is cut
// where y0 starts and stops to be that point, and in the middle.
#ifndef CERTKV_KERNELS_BOUNDS_TV_RELAXATION_H_
#define CERTKV_KERNELS_BOUNDS_TV_RELAXATION_H_

#include <array>
#include <cstdint>

namespace certkv::bounds_internal {

inline constexpr int32_t kTvPointsMax = 2304;

// Points with strictly increasing y, and sums over the points below and from an index, each summed
// on its own side so that no difference of large numbers is taken.
struct TvPoints {
  template <typename T>
  using Array = std::array<T, kTvPointsMax + 1>;

  int32_t count = 0;
  Array<double> y;        // e^c
  Array<double> inverse;  // e^-c
  Array<double> weight;   // W, share of the total mass
  // [k]: over points 0 .. k-1.
  Array<double> mass_below;    // sum W
  Array<double> grown_below;   // sum W y
  Array<double> shrunk_below;  // sum W / y
  // [k]: over points k .. count-1.
  Array<double> mass_from;
  Array<double> grown_from;
  Array<double> shrunk_from;
  // Z: a lower bound on the sum of m e^-c over the atoms that the points stand for. Equal to
  // shrunk_from[0] when the points are the atoms.
  double shrunk_total = 0;
  // Mass of half-width above kTvHalfWidthMax.
  double unbounded_mass = 0;
  // Rounding of every sum here, relative.
  double rounding = 0;

  // Fills the sums from y, inverse and weight.
  void Sum();
};

// Heavy tokens with their place chosen.
struct TvFixedPart {
  double grown = 0;        // N_A = sum_{in S} m e^c
  double shrunk = 0;       // D_A = sum_{out of S} m e^-c
  double mass = 0;         // P_A = sum_{in S} m
  bool unbounded = false;  // a token in S has no finite half-width
};

struct TvRelaxationResult {
  double upper = 1;     // >= the maximum of the relaxation
  double attained = 0;  // a value of the relaxation, for the choice of what to do next only
  double share = 1;     // r and lambda at `attained`
  double multiplier = 0;
};

// Returns once upper <= max(attained + gap, floor); sooner, with the bound it has, when that takes
// more than a fixed number of cells.
TvRelaxationResult BoundRelaxation(const TvPoints& points, const TvFixedPart& fixed, double gap,
                                   double floor);

}  // namespace certkv::bounds_internal

#endif  // CERTKV_KERNELS_BOUNDS_TV_RELAXATION_H_
