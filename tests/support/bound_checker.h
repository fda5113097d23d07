// The one place where a test decides whether a bound holds. It asserts both sides: the bound covers
// the exact value, and it is not so loose that it says nothing.
//
// A canary (a bound divided by 2) must be caught by the same function that guards the real bound.
#ifndef CERTKV_TESTS_SUPPORT_BOUND_CHECKER_H_
#define CERTKV_TESTS_SUPPORT_BOUND_CHECKER_H_

#include <cstdint>
#include <ostream>

namespace certkv {

enum class BoundViolation : uint8_t {
  kNone,
  kNotComparable,  // bound or exact value is NaN
  kBelowExact,     // unsound
  kVacuous,        // above the ceiling
};

struct BoundCheck {
  double bound = 0;
  double exact = 0;
  // How far `exact` itself may be above the truth, by the rounding of whoever computed it.
  double exact_rounding = 0;
  // Largest bound that still says something; derived by the test from the claim it checks.
  double ceiling = 0;
};

inline BoundViolation CheckBound(const BoundCheck& check) {
  if (check.bound != check.bound || check.exact != check.exact) {
    return BoundViolation::kNotComparable;
  }
  // Written so that a NaN in the allowances fails as well.
  if (!(check.bound >= check.exact - check.exact_rounding)) return BoundViolation::kBelowExact;
  if (!(check.bound <= check.ceiling)) return BoundViolation::kVacuous;
  return BoundViolation::kNone;
}

inline std::ostream& operator<<(std::ostream& out, BoundViolation violation) {
  switch (violation) {
    case BoundViolation::kNone:
      return out << "none";
    case BoundViolation::kNotComparable:
      return out << "not comparable (NaN)";
    case BoundViolation::kBelowExact:
      return out << "below the exact value";
    case BoundViolation::kVacuous:
      return out << "vacuous (above the ceiling)";
  }
  return out << "unknown violation";
}

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_BOUND_CHECKER_H_
