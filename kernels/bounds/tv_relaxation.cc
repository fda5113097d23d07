#include "kernels/bounds/tv_relaxation.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace certkv::bounds_internal {
namespace {

// More cells than any input of the tests needs by a factor of 8; reaching it costs tightness only.
constexpr int32_t kCellsMax = 1024;

double Ratio(double share) {
  return share < 1 ? share / (1 - share) : std::numeric_limits<double>::infinity();
}

struct Cell {
  double low = 0;  // r
  double high = 0;
  double bound = 1;  // of r - P_min(r) on [low, high]
};

struct CellBound {
  double bound = 1;
  double share = 1;      // where the concave part is largest
  bool one_set = false;  // no point changes sign on the cell
};

// The point that is partly filled at some r: with all better points in S, r = share_without when it
// is left out and share_with when it is in.
struct Pivot {
  int32_t index = 0;
  double share_without = 0;
  double share_with = 1;
};

class Relaxation {
 public:
  Relaxation(const TvPoints& points, const TvFixedPart& fixed) : points_(points), fixed_(fixed) {}

  TvRelaxationResult Solve(double gap, double floor);

 private:
  int32_t FirstAbove(double y) const {
    const double* begin = points_.y.data();
    return static_cast<int32_t>(std::upper_bound(begin, begin + points_.count, y) - begin);
  }
  int32_t FirstAtLeast(double y) const {
    const double* begin = points_.y.data();
    return static_cast<int32_t>(std::lower_bound(begin, begin + points_.count, y) - begin);
  }
  // sum W h_r over the points below `below` and from `from`.
  double Gain(double share, int32_t below, int32_t from) const {
    return (1 - share) * (points_.grown_below[below] + points_.grown_from[from]) +
           share * (points_.shrunk_below[below] + points_.shrunk_from[from]);
  }
  double ShareOf(int32_t below, int32_t from) const;
  Pivot FindPivot(double share) const;
  Pivot FindLowPivot(double share, double need, int32_t first, int32_t last, int32_t from) const;
  CellBound BoundCell(double low, double high, int32_t pivot) const;
  double Rounding(double low, double high, double y0, double grown, double mass) const;
  void Attain(double share, int32_t pivot);
  void Push(double low, double high, double bound, double target);
  void Expand(const Cell& cell, double gap, double floor);

  const TvPoints& points_;
  const TvFixedPart& fixed_;
  std::array<Cell, kCellsMax> cells_;  // a heap by bound
  int32_t cell_count_ = 0;
  double closed_ = 0;  // largest bound of a cell that needs no more work
  TvRelaxationResult result_;
};

// r when S holds the points below `below` and from `from`. For choosing cuts only, so its rounding
// does not matter.
double Relaxation::ShareOf(int32_t below, int32_t from) const {
  const double grown = fixed_.grown + points_.grown_below[below] + points_.grown_from[from];
  const double inside = points_.shrunk_below[below] + points_.shrunk_from[from];
  const double shrunk = fixed_.shrunk + std::max(0.0, points_.shrunk_total - inside);
  return grown > 0 ? grown / (grown + shrunk) : 0;
}

// First point in [first, last) that fills the need when all before it are in S as well; `last` in
// index when none does.
Pivot Relaxation::FindLowPivot(double share, double need, int32_t first, int32_t last,
                               int32_t from) const {
  int32_t low = first;
  int32_t high = last;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (Gain(share, middle + 1, from) >= need) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  if (low == last) return {last, 0, 1};
  return {low, ShareOf(low, from), ShareOf(low + 1, from)};
}

// The fractional knapsack at r: points by descending h_r until sum W h_r reaches
// r (D_A + Z) - (1 - r) N_A. The order is held at both ends: y >= sqrt(R) from above and y <
// sqrt(R) from below, R = r / (1 - r), and h_r(y) = h_r(R / y).
Pivot Relaxation::FindPivot(double share) const {
  const double ratio = Ratio(share);
  const double need = share * (fixed_.shrunk + points_.shrunk_total) - (1 - share) * fixed_.grown;
  const int32_t middle = FirstAtLeast(std::sqrt(ratio));
  // Number of low points that are at least as good as high point `index`.
  const auto partners = [&](int32_t index) {
    if (index == points_.count) return 0;
    const double partner = ratio / points_.y[index];
    return partner < points_.y[0] ? 0 : std::min(middle, FirstAbove(partner));
  };
  int32_t low = middle;
  int32_t high = points_.count;  // the largest index in [middle, high) that fills the need
  while (low < high) {
    const int32_t index = (low + high) / 2;
    if (Gain(share, partners(index), index) >= need) {
      low = index + 1;
    } else {
      high = index;
    }
  }
  const int32_t from = low;  // points from here are in S
  const int32_t better = partners(from);
  const int32_t reached = from > middle ? partners(from - 1) : middle;
  const Pivot low_pivot = FindLowPivot(share, need, better, reached, from);
  if (low_pivot.index < reached) return low_pivot;
  if (from == middle) {  // r cannot be reached, by rounding: everything is in S
    const int32_t last = std::clamp(middle - 1, 0, points_.count - 1);
    return {last, share, share};
  }
  return {from - 1, ShareOf(reached, from), ShareOf(reached, from - 1)};
}

// Every sum is off by points_.rounding of the terms in it, relative; psi is a quotient of them and
// monotone in r, so the larger end bounds the error on the whole cell.
double Relaxation::Rounding(double low, double high, double y0, double grown, double mass) const {
  const double shrunk = fixed_.shrunk + 2 * points_.shrunk_from[0] + points_.shrunk_total;
  const auto at = [&](double share) {
    return ((1 - share) * grown + share * shrunk) / ((1 - share) * y0 + share / y0);
  };
  return points_.rounding * (2 + mass + std::max(at(low), at(high)));
}

CellBound Relaxation::BoundCell(double low, double high, int32_t pivot) const {
  const double y0 = points_.y[pivot];
  const auto height = [&](double share) { return (1 - share) * y0 + share / y0; };
  // R / y0 at both ends: a point changes sign where r / (1 - r) = y y0.
  const double ratio_low = Ratio(low) / y0;
  const double ratio_high = Ratio(high) / y0;
  const int32_t first_low = FirstAbove(ratio_low);       // y > p
  const int32_t first_high = FirstAtLeast(ratio_high);   // y >= q
  const int32_t from = std::max(pivot + 1, first_high);  // high points, in S on the whole cell
  const int32_t below = std::min(pivot, first_low);      // low points, in S on the whole cell

  // Points whose sign changes: high ones are best at the low end, low ones at the high end.
  // The sum between two indices is a difference, which loses a part of the larger sum.
  const auto positive_part = [&](double share, double mass, double grown, double shrunk) {
    return ((1 - share) * grown + share * shrunk) / height(share) - mass;
  };
  double changing = 0;
  const int32_t high_begin = std::max(pivot + 1, first_low);
  if (high_begin < from) {
    const double gain = positive_part(low, points_.mass_from[high_begin] - points_.mass_from[from],
                                      points_.grown_from[high_begin] - points_.grown_from[from],
                                      points_.shrunk_from[high_begin] - points_.shrunk_from[from]);
    changing +=
        std::max(0.0, gain) + points_.rounding * positive_part(low, -points_.mass_from[high_begin],
                                                               points_.grown_from[high_begin],
                                                               points_.shrunk_from[high_begin]);
  }
  const int32_t low_end = std::min(pivot, first_high);
  if (below < low_end) {
    const double gain = positive_part(high, points_.mass_below[low_end] - points_.mass_below[below],
                                      points_.grown_below[low_end] - points_.grown_below[below],
                                      points_.shrunk_below[low_end] - points_.shrunk_below[below]);
    changing +=
        std::max(0.0, gain) + points_.rounding * positive_part(high, -points_.mass_below[low_end],
                                                               points_.grown_below[low_end],
                                                               points_.shrunk_below[low_end]);
  }

  const double grown = fixed_.grown + points_.grown_below[below] + points_.grown_from[from];
  const double inside = points_.shrunk_below[below] + points_.shrunk_from[from];
  const double shrunk = fixed_.shrunk + points_.shrunk_total - inside;
  const double mass = fixed_.mass + points_.mass_below[below] + points_.mass_from[from];
  const auto psi = [&](double share) {
    return share - mass + ((1 - share) * grown - share * shrunk) / height(share);
  };
  const double curvature = shrunk * y0 + grown / y0;  // K
  CellBound result;
  result.one_set = high_begin >= from && below >= low_end;
  double largest = 0;
  if (curvature > 0) {
    const double slope_of_height = y0 - 1 / y0;
    const double top = slope_of_height > 0 ? (y0 - std::sqrt(curvature)) / slope_of_height : low;
    result.share = std::clamp(top, low, high);
    // Concave, so the tangent is above it: this covers a rounded argument.
    const double level = height(result.share);
    const double slope = 1 - curvature / (level * level);
    largest = psi(result.share) +
              (slope > 0 ? slope * (high - result.share) : slope * (low - result.share));
  } else {
    result.share = psi(low) > psi(high) ? low : high;
    largest = psi(result.share);
  }
  // lambda = 0 gives r - P_A, which also replaces a NaN from infinite sums.
  const double trivial = high - fixed_.mass;
  const double bound = largest + changing + Rounding(low, high, y0, grown, mass);
  result.bound = bound < trivial ? bound : trivial;
  return result;
}

void Relaxation::Attain(double share, int32_t pivot) {
  const double value = BoundCell(share, share, pivot).bound;
  if (!(value > result_.attained)) return;
  const double y0 = points_.y[pivot];
  result_.attained = value;
  result_.share = share;
  result_.multiplier = 1 / ((1 - share) * y0 + share / y0);
}

void Relaxation::Push(double low, double high, double bound, double target) {
  if (!(low < high)) return;
  if (bound <= target) {
    closed_ = std::max(closed_, bound);
    return;
  }
  cells_[cell_count_++] = {low, high, bound};
  std::push_heap(cells_.begin(), cells_.begin() + cell_count_,
                 [](const Cell& a, const Cell& b) { return a.bound < b.bound; });
}

void Relaxation::Expand(const Cell& cell, double gap, double floor) {
  const double middle = cell.low + (cell.high - cell.low) / 2;
  const Pivot pivot = FindPivot(middle);
  Attain(middle, pivot.index);
  const double bound = std::min(cell.bound, BoundCell(cell.low, cell.high, pivot.index).bound);
  const double target = std::max(result_.attained + gap, floor);
  if (bound <= target || !(cell.low < middle && middle < cell.high)) {
    closed_ = std::max(closed_, bound);
    return;
  }
  const double start = std::clamp(pivot.share_without, cell.low, middle);
  const double stop = std::clamp(pivot.share_with, middle, cell.high);
  if (start == cell.low && stop == cell.high) {
    Push(cell.low, middle, bound, target);
    Push(middle, cell.high, bound, target);
    return;
  }
  if (start < stop) {
    const CellBound exact = BoundCell(start, stop, pivot.index);
    // With one set on the whole cell the pivot is partly filled at each of its r.
    Attain(exact.share, exact.one_set ? pivot.index : FindPivot(exact.share).index);
    Push(start, stop, std::min(bound, exact.bound), std::max(result_.attained + gap, floor));
  }
  Push(cell.low, start, bound, target);
  Push(stop, cell.high, bound, target);
}

TvRelaxationResult Relaxation::Solve(double gap, double floor) {
  // S = A alone. Below its share, r - P_min(r) <= r - P_A is smaller still.
  const double shrunk = fixed_.shrunk + points_.shrunk_total;
  const double start = fixed_.grown > 0 ? fixed_.grown / (fixed_.grown + shrunk) : 0;
  closed_ = std::max(0.0, start - fixed_.mass + 4 * points_.rounding);
  result_.attained = std::max(0.0, start - fixed_.mass);
  result_.share = start;
  result_.multiplier = 1 / (fixed_.grown + shrunk);
  const double grown = fixed_.grown + points_.grown_from[0];
  const double stop = std::min(1.0, grown / (grown + fixed_.shrunk) + 4 * points_.rounding);
  if (points_.count > 0) {
    Push(std::max(0.0, start - 4 * points_.rounding), stop, stop - fixed_.mass, closed_);
  }
  const auto by_bound = [](const Cell& a, const Cell& b) { return a.bound < b.bound; };
  double open = 0;
  while (cell_count_ > 0) {
    open = cells_[0].bound;
    if (open <= std::max(result_.attained + gap, floor) || cell_count_ + 3 > kCellsMax) break;
    std::pop_heap(cells_.begin(), cells_.begin() + cell_count_, by_bound);
    const Cell cell = cells_[--cell_count_];
    Expand(cell, gap, floor);
    open = 0;
  }
  result_.upper = std::max(closed_, open);
  return result_;
}

}  // namespace

void TvPoints::Sum() {
  mass_below[0] = grown_below[0] = shrunk_below[0] = 0;
  for (int32_t k = 0; k < count; ++k) {
    mass_below[k + 1] = mass_below[k] + weight[k];
    grown_below[k + 1] = grown_below[k] + weight[k] * y[k];
    shrunk_below[k + 1] = shrunk_below[k] + weight[k] * inverse[k];
  }
  mass_from[count] = grown_from[count] = shrunk_from[count] = 0;
  for (int32_t k = count - 1; k >= 0; --k) {
    mass_from[k] = mass_from[k + 1] + weight[k];
    grown_from[k] = grown_from[k + 1] + weight[k] * y[k];
    shrunk_from[k] = shrunk_from[k + 1] + weight[k] * inverse[k];
  }
}

TvRelaxationResult BoundRelaxation(const TvPoints& points, const TvFixedPart& fixed, double gap,
                                   double floor) {
  // A whole token, or any small part of an atom, with an unbounded half-width can take all the
  // probability: r = 1 at no further mass.
  if (fixed.unbounded || points.unbounded_mass > 0) {
    const double value = std::max(0.0, 1 - fixed.mass);
    return {std::min(1.0, value + points.rounding), value, 1, 0};
  }
  // With nothing outside S and nothing free, r = 1 when anything is in S.
  if (points.count == 0 && fixed.shrunk == 0) {
    const double value = fixed.grown > 0 ? std::max(0.0, 1 - fixed.mass) : 0;
    return {std::min(1.0, value + points.rounding), value, 1, 0};
  }
  return Relaxation(points, fixed).Solve(gap, floor);
}

}  // namespace certkv::bounds_internal
