// The half-width of one atom of a read, docs/bounds.md section 2.
#ifndef CERTKV_KERNELS_REFERENCE_ATTEND_HALF_WIDTH_H_
#define CERTKV_KERNELS_REFERENCE_ATTEND_HALF_WIDTH_H_

#include <cstdint>

#include "kernels/ops/attend.h"

namespace certkv::reference {

// c of the atom's tokens for head g, nats, rounded up; 0 for an atom without tokens in the range;
// +infinity when unknown or above kLogitHalfWidthMaxNat. `lse` is the head's log-sum-exp.
float AtomHalfWidth(const AttendArgs& args, int g, int32_t atom, double lse);

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_ATTEND_HALF_WIDTH_H_
