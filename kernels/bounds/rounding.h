// Directed rounding for bounds: up, never to nearest; an unknown bound is +infinity, never NaN.
//
// "Unknown" is NaN or a negative number: every bound in this folder is >= 0, so a negative one is a
// defect upstream and must not make anything look smaller than it is.
//
// Errors: none. Threads: pure functions.
#ifndef CERTKV_KERNELS_BOUNDS_ROUNDING_H_
#define CERTKV_KERNELS_BOUNDS_ROUNDING_H_

#include <cstdint>
#include <limits>

namespace certkv {

// What an unknown bound is.
inline constexpr double kUnknownBound = std::numeric_limits<double>::infinity();

// The factor of RoundUp. It repays up to 2^34 roundings of a double (2^-53 each, relative), which
// is more additions than any sum of this folder has terms.
inline constexpr double kRoundUpFactor = 1 + 0x1p-18;

// NaN or negative -> +infinity; anything else unchanged. -0.0 is 0.
inline double KnownOrInfinity(double bound) { return bound >= 0 ? bound : kUnknownBound; }

// bound * (1 + 2^-18), at least one representable number above `bound`. 0 stays 0, because a sum of
// non-negative doubles is 0 only when every term is. Unknown -> +infinity.
double RoundUp(double bound);

// The smallest float >= bound. Unknown, or above the largest float -> +infinity.
float ToFloatRoundedUp(double bound);

// The smallest double >= the exact a + b, for a, b >= 0. Unknown -> +infinity.
double AddRoundedUp(double a, double b);

// A double >= the exact a * b, at most two units in the last place above it, for a, b >= 0.
// Unknown -> +infinity, and so is 0 * infinity: the infinite factor is an unknown one.
double MultiplyRoundedUp(double a, double b);

// Largest relative error of `rounding_count` successive float roundings to nearest:
// n u / (1 - n u) with u = 2^-24 (Higham, Accuracy and Stability, lemma 3.1), rounded up.
// 0 for a count <= 0; +infinity when n u >= 1.
double FloatRoundingFactor(int64_t rounding_count);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_ROUNDING_H_
