// TV*: the largest total variation between the served and the exact attention distribution that the
// boxes of the logits allow (docs/bounds.md, section 3).
//
//   TV*(m, c) = max over sets S of  N / (N + D) - P
//     N = sum_{j in S} m_j e^{c_j},   D = sum_{j not in S} m_j e^{-c_j},   P = sum_{j in S} m_j
//
// m_j: served mass of atom j (normalised here), c_j: half-width of its logits, nats. An atom is a
// token, or several tokens that share one c. The corner of the box at S is a legal error, so no
// sound certificate that sees only m and c is smaller.
//
// How it is computed
//   Relaxation. A set may take a fraction of an atom: never smaller than TV*, exact when no atom
//     matters alone, at most tanh(c_max / 2). With r = N / (N + D) it is max_r (r - P_min(r)), and
//     weak duality gives P_min(r) from below for ANY multiplier. tv_relaxation.h closes the gap
//     between bound and attained value to `gap`.
//   Bins. Up to 128 atoms are used as they are. More are not sorted: they go into bins of c, 64 per
//     octave, as mass and mean, which is spread to the two edges of the bin. The integrands are
//     convex in c, so that is an upper bound. A bin in which the threshold falls is split again
//     when it costs more than the gap (tv_points.h).
//   Heavy tokens. Splitting is loose when one token holds much of the mass. The up to 6 heaviest
//     tokens of mass >= 1/64 are put wholly into S or out of it, in all 2^H ways, only when the
//     relaxation alone misses the tolerance, one token more at a time until it is met. A token that
//     is set apart may have a half-width of its own, smaller than that of its atom.
//
// Rounding: up. A sum of n doubles of one sign loses n 2^-53 of itself, exp 2^-52, and every bound
//   is raised by (n + 64) 2^-51 of the terms it was summed from, times 1 + c_max with bins. So the
//   result is never below the exact maximum over sets; it is never above 1. It exceeds the
//   relaxation by at most `gap`, and by about half of it more with bins.
// Bad input is the worst case, never less:
//   NaN anywhere, a negative or infinite mass, masses that sum to 0, no atom, or spans of different
//   lengths -> 1;  a top_half_width that is NaN, negative or above its atom's -> the atom's;  a
//   negative half-width -> +infinity;  +infinity or anything from
//   kTvHalfWidthMax = 256 nats on -> its limit, an atom that can take all the probability. An atom
//   of mass 0 is absent. A mass that underflowed is not 0: pass doubles when logits differ by 80
//   nats.
// Inexact masses: when each is within a factor e^rho of p^, add rho to every half-width. The bound
//   is then on the total variation between p and the masses as given, normalised.
// Errors: none. Threads: a workspace serves one call at a time. Does not block.
#ifndef CERTKV_KERNELS_BOUNDS_WORST_CASE_TV_H_
#define CERTKV_KERNELS_BOUNDS_WORST_CASE_TV_H_

#include <cstdint>
#include <memory>

#include "absl/types/span.h"

namespace certkv {

inline constexpr double kTvHalfWidthMax = 256;
inline constexpr int32_t kTvHeavyTokensMax = 6;
inline constexpr int32_t kTvChunkAtoms = 64;  // atoms that are looked at together

// Borrowed until the call returns. Mass and HalfWidth are (double, double), (double, float) or
// (float, float).
template <typename Mass, typename HalfWidth>
struct TvAtoms {
  absl::Span<const Mass> mass;             // m, >= 0, any common scale
  absl::Span<const HalfWidth> half_width;  // c, nats, >= 0
  // Mass of the heaviest single token inside each atom, in [0, mass], clamped to mass. Only a token
  // may be heavy: an atom of several tokens can be split between S and its complement.
  // Empty = every atom is one token.
  absl::Span<const Mass> top_token_mass;
  // Half-width of that token where it is less than its atom's; used while the token is set apart.
  // Empty = the atom's.
  absl::Span<const HalfWidth> top_half_width = {};
  // Smallest and largest half-width of each full chunk of kTvChunkAtoms, the largest infinite where
  // a chunk has a top token of mass > 0: from callers that know them, that every mass is valid and
  // that they sum to 1 to 2^32. Float masses alone; both or none. Empty = looked for.
  absl::Span<const float> chunk_half_width_min = {};
  absl::Span<const float> chunk_half_width_max = {};
};

struct WorstCaseTvOptions {
  // Heavy tokens are enumerated only while the bound is above this. 0 = as tight as possible.
  double tolerance = 0;
  // Stop as soon as it is known whether the bound can be within the tolerance: worst_case_tv is
  // then any bound on its side of it. For searches that ask only met_tolerance.
  bool decide_only = false;
  // How far the bound may stay above the relaxation's own maximum.
  double gap = 1e-4;
  int32_t heavy_tokens_max = kTvHeavyTokensMax;  // H, [0, 6]; 0 = the relaxation alone
  double heavy_mass_min = 1.0 / 64;              // of the total mass
};

struct WorstCaseTvResult {
  double worst_case_tv = 1;    // [0, 1], rounded up
  bool met_tolerance = false;  // worst_case_tv <= tolerance; false when tolerance is 0
  int32_t heavy_tokens_used = 0;
  // The worst case found: the exact probability r that it gives to S, and the multiplier at which
  // the bound was taken, about 1 / (N + D). Atom j is in S when multiplier * h_r(c_j) > 1, with
  // h_r(c) = (1 - r) e^c + r e^{-c}. repair_order.h ranks blocks with them.
  double adversary_share = 1;
  double multiplier = 0;
};

// Scratch of one thread, about 0.3 MB, allocated once; calls allocate nothing.
class WorstCaseTvWorkspace {
 public:
  WorstCaseTvWorkspace();
  ~WorstCaseTvWorkspace();
  WorstCaseTvWorkspace(WorstCaseTvWorkspace&&) noexcept;
  WorstCaseTvWorkspace& operator=(WorstCaseTvWorkspace&&) noexcept;

  struct State;
  State* state() { return state_.get(); }

 private:
  std::unique_ptr<State> state_;
};

template <typename Mass, typename HalfWidth>
WorstCaseTvResult WorstCaseTv(const TvAtoms<Mass, HalfWidth>& atoms,
                              const WorstCaseTvOptions& options, WorstCaseTvWorkspace* workspace);

// The same with a workspace of its own, for callers that do this rarely.
template <typename Mass, typename HalfWidth>
WorstCaseTvResult WorstCaseTv(const TvAtoms<Mass, HalfWidth>& atoms,
                              const WorstCaseTvOptions& options = {}) {
  WorstCaseTvWorkspace workspace;
  return WorstCaseTv(atoms, options, &workspace);
}

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_WORST_CASE_TV_H_
