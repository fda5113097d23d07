// The door of the launches: what kernels/ops checks of host memory, for arguments that hold device
// addresses. Called where a read is made, not in every step.
#ifndef CERTKV_KERNELS_CUDA_CHECK_READ_H_
#define CERTKV_KERNELS_CUDA_CHECK_READ_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/cuda/attend.h"

namespace certkv::cuda {

// `args` as for PlanRead. `tiles`: the records that args.tiles points to, at a host address, of the
// tiles in the range and any others; null records outside the range are fine.
// Errors: InvalidArgument [ATTEND_ARGS_INVALID]: a dimension or group that no kernel has an
//         instance for, a range that isn't there, an address that is null or not aligned (records
//         to 64 bytes, floats to 4, 16-bit rows to 2), `tiles` of another length than
//         args.tile_count; Unimplemented [DEVICE_LACKS_OPERATION]: K8D keys;
//         FailedPrecondition [ORIGINAL_MISSING]: `needs_originals` and a tile in the range has
//         none.
// The numbers of device arrays (queries, sources, headers of tiles) are not looked at: a query that
// isn't finite makes its head unknown, and who maps a slab has checked its tiles.
absl::Status CheckDeviceRead(const AttendArgs& args, const QueryRows& queries,
                             absl::Span<const AttendTile> tiles, bool needs_originals);

// Of reads for one launch: as many as are given, at least one, of the same group size and layout.
// Errors: InvalidArgument [ATTEND_ARGS_INVALID].
absl::Status CheckLaunch(absl::Span<const AttendRead> reads);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_CHECK_READ_H_
