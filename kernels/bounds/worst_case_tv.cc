#include "kernels/bounds/worst_case_tv.h"

#include <algorithm>
#include <cmath>

#include "kernels/bounds/rounding.h"
#include "kernels/bounds/tv_points.h"
#include "kernels/bounds/tv_relaxation.h"

namespace certkv {

struct WorstCaseTvWorkspace::State {
  bounds_internal::TvAtomBins bins;
  bounds_internal::TvPoints points;
};

WorstCaseTvWorkspace::WorstCaseTvWorkspace() : state_(std::make_unique<State>()) {}
WorstCaseTvWorkspace::~WorstCaseTvWorkspace() = default;
WorstCaseTvWorkspace::WorstCaseTvWorkspace(WorstCaseTvWorkspace&&) noexcept = default;
WorstCaseTvWorkspace& WorstCaseTvWorkspace::operator=(WorstCaseTvWorkspace&&) noexcept = default;

namespace {

using bounds_internal::TvAtomBins;
using bounds_internal::TvFixedPart;
using bounds_internal::TvPoints;
using bounds_internal::TvRelaxationResult;
using bounds_internal::TvToken;

// A bin may cost a quarter of the gap, and is split again at most so often.
constexpr double kBinCostShare = 0.25;
constexpr int32_t kRefineRoundsMax = 4;

// The heavy tokens in S are those whose bit is set in `in_set`.
TvFixedPart FixTokens(const TvAtomBins& bins, int32_t heavy_count, uint32_t in_set) {
  TvFixedPart fixed;
  for (int32_t k = 0; k < heavy_count; ++k) {
    const TvToken& token = bins.token(k);
    const double mass = bins.share(token);
    if ((in_set >> k & 1) == 0) {
      if (!token.own_unbounded()) fixed.shrunk += mass * std::exp(-token.own_half_width());
      continue;
    }
    fixed.mass += mass;
    if (token.own_unbounded()) {
      fixed.unbounded = true;
    } else {
      fixed.grown += mass * std::exp(token.own_half_width());
    }
  }
  return fixed;
}

// The maximum over all ways to place the `heavy_count` heaviest tokens. Gives up, with upper 1, as
// soon as a value above `limit` is attained.
TvRelaxationResult EnumerateHeavy(const TvAtomBins& bins, int32_t heavy_count,
                                  const WorstCaseTvOptions& options, double limit,
                                  TvPoints* points) {
  bins.BuildPoints(heavy_count, points);
  TvRelaxationResult best;
  best.upper = 0;
  best.attained = -1;
  for (uint32_t in_set = 0; in_set < 1u << heavy_count; ++in_set) {
    const double floor = std::max(
        {best.upper, best.attained + options.gap, options.decide_only ? options.tolerance : 0.0});
    const TvRelaxationResult result =
        BoundRelaxation(*points, FixTokens(bins, heavy_count, in_set), options.gap, floor);
    best.upper = std::max(best.upper, result.upper);
    if (result.attained > best.attained) {
      best.attained = result.attained;
      best.share = result.share;
      best.multiplier = result.multiplier;
    }
    if (best.attained > limit) {
      best.upper = 1;
      return best;
    }
  }
  return best;
}

// The same, with the bins at its threshold split as long as they cost more than the gap allows.
template <typename Mass, typename HalfWidth>
TvRelaxationResult EnumerateRefined(const TvAtoms<Mass, HalfWidth>& atoms, int32_t heavy_count,
                                    const WorstCaseTvOptions& options, double limit,
                                    WorstCaseTvWorkspace::State* state) {
  for (int32_t round = 0;; ++round) {
    const TvRelaxationResult result =
        EnumerateHeavy(state->bins, heavy_count, options, limit, &state->points);
    if (round == kRefineRoundsMax || result.upper <= options.tolerance || result.attained > limit ||
        !state->bins.Refine(atoms, result.share, result.multiplier, options.gap * kBinCostShare)) {
      return result;
    }
  }
}

void Improve(const TvRelaxationResult& bound, int32_t heavy_count, WorstCaseTvResult* result) {
  if (!(bound.upper < result->worst_case_tv)) return;
  result->worst_case_tv = std::max(0.0, bound.upper);
  result->heavy_tokens_used = heavy_count;
  result->adversary_share = bound.share;
  result->multiplier = bound.multiplier;
}

}  // namespace

template <typename Mass, typename HalfWidth>
WorstCaseTvResult WorstCaseTv(const TvAtoms<Mass, HalfWidth>& atoms,
                              const WorstCaseTvOptions& given, WorstCaseTvWorkspace* workspace) {
  WorstCaseTvOptions options = given;
  if (!(options.tolerance > 0)) options.tolerance = 0;
  if (!(options.gap > 0)) options.gap = 0;
  WorstCaseTvResult result;
  WorstCaseTvWorkspace::State& state = *workspace->state();
  const auto met = [&] {
    return options.tolerance > 0 && result.worst_case_tv <= options.tolerance;
  };
  if (!state.bins.Load(atoms)) {
    result.met_tolerance = met();
    return result;
  }

  // Nothing stops the relaxation alone: its bound is the answer when no enumeration meets the
  // tolerance.
  Improve(EnumerateRefined(atoms, 0, options, kUnknownBound, &state), 0, &result);
  int32_t heavy_max = 0;
  const int32_t allowed = std::clamp(options.heavy_tokens_max, 0, kTvHeavyTokensMax);
  while (heavy_max < std::min(allowed, state.bins.token_count()) &&
         state.bins.share(state.bins.token(heavy_max)) >= options.heavy_mass_min) {
    ++heavy_max;
  }
  const bool as_tight_as_possible = options.tolerance == 0;
  const double limit = as_tight_as_possible ? kUnknownBound : options.tolerance;
  for (int32_t heavy = as_tight_as_possible ? std::max(heavy_max, 1) : 1;
       heavy <= heavy_max && !met(); ++heavy) {
    Improve(EnumerateRefined(atoms, heavy, options, limit, &state), heavy, &result);
  }
  result.met_tolerance = met();
  return result;
}

template WorstCaseTvResult WorstCaseTv(const TvAtoms<double, double>&, const WorstCaseTvOptions&,
                                       WorstCaseTvWorkspace*);
template WorstCaseTvResult WorstCaseTv(const TvAtoms<double, float>&, const WorstCaseTvOptions&,
                                       WorstCaseTvWorkspace*);
template WorstCaseTvResult WorstCaseTv(const TvAtoms<float, float>&, const WorstCaseTvOptions&,
                                       WorstCaseTvWorkspace*);

}  // namespace certkv
