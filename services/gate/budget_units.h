// The integer units in which budgets are kept: 2^-40 of a total variation (or, in RiskMode::kUnion,
// of a probability), as in the certifier and the client. A spent amount is rounded up, a limit and
// a slice down, so that sums are exact and their order does not matter.
#ifndef CERTKV_SERVICES_GATE_BUDGET_UNITS_H_
#define CERTKV_SERVICES_GATE_BUDGET_UNITS_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace certkv::gate {

inline constexpr double kUnitsPerOne = 0x1p40;
inline constexpr int64_t kUnitsMax = std::numeric_limits<int64_t>::max();

// a + b for a, b >= 0; stays at the largest number.
inline int64_t AddUnits(int64_t a, int64_t b) { return a > kUnitsMax - b ? kUnitsMax : a + b; }

// Units of a read's amount, rounded up; of 1 for a value that is not known to be in [0, 1].
inline int64_t SpentUnits(double amount) {
  const double counted = amount >= 0 && amount <= 1 ? amount : 1;
  return static_cast<int64_t>(std::ceil(counted * kUnitsPerOne));
}

// Units of a limit in [0, 2^22], rounded down.
inline int64_t LimitUnits(double limit) {
  return static_cast<int64_t>(std::floor(limit * kUnitsPerOne));
}

// The largest number of units <= `units` that a double holds exactly: a lease carries a double, and
// its holder must not read more from it than was counted here.
inline int64_t RepresentableUnits(int64_t units) {
  const int excess = static_cast<int>(std::bit_width(static_cast<uint64_t>(units))) - 53;
  return excess > 0 ? (units >> excess) << excess : units;
}

inline double ToAmount(int64_t units) { return static_cast<double>(units) / kUnitsPerOne; }

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_BUDGET_UNITS_H_
