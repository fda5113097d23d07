#include "kernels/bounds/skipping.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/bounds/rounding.h"

namespace certkv {

double SkippedShare(double skipped_lse_nat, double kept_lse_nat) {
  constexpr double kMinusInfinity = -kUnknownBound;
  if (std::isnan(skipped_lse_nat) || std::isnan(kept_lse_nat)) return 1;
  if (skipped_lse_nat == kMinusInfinity) return 0;
  if (kept_lse_nat == kMinusInfinity || skipped_lse_nat == kUnknownBound) return 1;
  // The difference of logs is off by 2^-53 of itself, which exp turns into at most |x| 2^-53
  // relative; for |x| above 745 the share is 0 or 1 anyway. RoundUp gives back 2^-18.
  const double share = 1 / (1 + std::exp(kept_lse_nat - skipped_lse_nat));
  return std::min(1.0, share > 0 ? RoundUp(share) : std::numeric_limits<double>::min());
}

double MixWithSkipped(double skipped_share, double worst_case_tv) {
  const auto clamped = [](double x) { return x >= 0 && x <= 1 ? x : 1.0; };
  const double u = clamped(skipped_share);
  const double tv = clamped(worst_case_tv);
  // 1 - u is rounded to nearest, so it goes up by one step as well; it is exact for u in {0, 1}.
  const double rest = u == 0 || u == 1 ? 1 - u : std::nextafter(1 - u, 1.0);
  return std::min(1.0, AddRoundedUp(u, MultiplyRoundedUp(rest, tv)));
}

double TvLeftBySkipping(double tv_tolerance, double skipped_share) {
  if (!(skipped_share >= 0 && skipped_share < tv_tolerance)) return 0;
  return std::max(0.0, (tv_tolerance - skipped_share) / (1 - skipped_share) * (1 - 0x1p-40));
}

float UsableSkipTolerance(float skip_tolerance, float tv_tolerance) {
  if (!(skip_tolerance > 0 && tv_tolerance > 0)) return 0;
  return std::min(skip_tolerance, tv_tolerance / 2);
}

double SkipRatio(double skip_tolerance) {
  if (!(skip_tolerance > 0 && skip_tolerance < 1)) return 0;
  return skip_tolerance / (1 - skip_tolerance) * (1 - 0x1p-40);
}

}  // namespace certkv
