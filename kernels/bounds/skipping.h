// Certified skipping: the rule by which a read may look at a part of its tokens only coarsely
// (docs/bounds.md, section 9). Everything that a progressive read claims rests on these functions.
//
//   R, S   tokens read in full, and skipped; every token of the read is in one of them
//   U      >= sum_S e^l, from coarse logits: sum_S e^{l^ + c} with the coarse half-width c
//   L      <= sum_R e^l, sink included: sum_R e^{l^ - c}
//   u      U / (U + L) >= p(S), the exact probability of what was skipped
//   TV(p, p^_R) <= u + (1 - u) TV*(p^_R, c_R), where p^_R is the softmax served over R alone
//
// Units: logarithms in nats, shares in [0, 1]. Rounding: in the direction that is sound, as each
// function says. Errors: none; NaN and what is out of range counts as the worst. Threads: pure
// functions. Nothing is allocated.
#ifndef CERTKV_KERNELS_BOUNDS_SKIPPING_H_
#define CERTKV_KERNELS_BOUNDS_SKIPPING_H_

namespace certkv {

// u from log U and log L. Rounded up; 0 when U is 0, 1 when one is NaN, U is infinite or L is 0.
double SkippedShare(double skipped_lse_nat, double kept_lse_nat);

// u + (1 - u) TV*. Both in [0, 1]; anything else, and NaN, counts as 1. Rounded up.
double MixWithSkipped(double skipped_share, double worst_case_tv);

// The largest TV*(p^_R, c_R) whose mixture with `skipped_share` is within `tv_tolerance`, rounded
// down; 0 when there is none. It only says when a bound may stop being tightened.
double TvLeftBySkipping(double tv_tolerance, double skipped_share);

// The part of tv_tolerance that a read spends on skipping: skip_tolerance, but at most half of
// tv_tolerance, because what is left has to hold the rounding of what is read. 0 (read everything)
// when one of them is 0 or NaN.
float UsableSkipTolerance(float skip_tolerance, float tv_tolerance);

// u <= skip_tolerance is U <= SkipRatio(skip_tolerance) * L: t / (1 - t), for t in [0, 1), rounded
// down; 0 elsewhere.
double SkipRatio(double skip_tolerance);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_SKIPPING_H_
