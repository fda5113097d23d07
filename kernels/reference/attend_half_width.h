// Half-widths of what a read serves and of what it scans, docs/bounds.md sections 2 and 9.
#ifndef CERTKV_KERNELS_REFERENCE_ATTEND_HALF_WIDTH_H_
#define CERTKV_KERNELS_REFERENCE_ATTEND_HALF_WIDTH_H_

#include <cstdint>

#include "kernels/ops/attend.h"
#include "kernels/reference/sequence.h"

namespace certkv::reference {

// c of the tokens, which lie in one tile or in the tail, for head g; nats, rounded up; 0 when there
// are none; +infinity when unknown or above kLogitHalfWidthMaxNat. `lse` is the head's log-sum-exp.
float HalfWidthOf(const AttendArgs& args, int g, const TokenRange& tokens, double lse);

// c of the coarse logits of a tile's tokens, nats, rounded up. Affine formats.
double CoarseHalfWidth(const AttendArgs& args, int g, int32_t tile);

}  // namespace certkv::reference

#endif  // CERTKV_KERNELS_REFERENCE_ATTEND_HALF_WIDTH_H_
