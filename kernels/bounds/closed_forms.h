// Closed forms that bound the same total variation as TV* and are never smaller. For cross-checks
// in tests and for comparing with other systems; certificates use WorstCaseTv alone.
//
// m: masses, >= 0, normalised inside. c: half-widths, nats, >= 0, finite. Double arithmetic,
// rounded to nearest: these are not bounds that may be served. NaN and infinity go through.
//
// Errors: none; spans of different lengths give 1 or +infinity. Threads: pure functions.
#ifndef CERTKV_KERNELS_BOUNDS_CLOSED_FORMS_H_
#define CERTKV_KERNELS_BOUNDS_CLOSED_FORMS_H_

#include "absl/types/span.h"

namespace certkv {

// (A^2 - 1) / 2 with A = sum m e^c. WitCert, arXiv 2607.28699. Can exceed 1.
double EFormTv(absl::Span<const double> mass, absl::Span<const double> half_width);

// 1 - (sum m e^-c) / (sum m e^c). WitCert's artifact.
double TwoSidedTv(absl::Span<const double> mass, absl::Span<const double> half_width);

// tanh(c_max / 2): arXiv 2605.20868's tanh(Delta) at half the argument, since only the oscillation
// of the logit error matters.
double TanhTv(absl::Span<const double> half_width);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_CLOSED_FORMS_H_
