// Checks of AttendArgs that need none of the memory they point to: for host and device addresses.
#ifndef CERTKV_KERNELS_OPS_ATTEND_CHECKS_H_
#define CERTKV_KERNELS_OPS_ATTEND_CHECKS_H_

#include <cmath>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/core/status.h"
#include "kernels/ops/attend.h"

namespace certkv {

// InvalidArgument [ATTEND_ARGS_INVALID].
template <typename... Parts>
absl::Status AttendArgsInvalid(const Parts&... parts) {
  return MakeError(absl::StatusCode::kInvalidArgument, "ATTEND_ARGS_INVALID",
                   absl::StrCat(parts...));
}

inline absl::Status CheckAttendRange(absl::string_view field, int64_t value, int64_t low,
                                     int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return AttendArgsInvalid("AttendArgs.", field, " is ", value, ", must be in [", low, ", ", high,
                           "]");
}

// Counts, and the range of tokens.
inline absl::Status CheckAttendCounts(const AttendArgs& args) {
  CERTKV_RETURN_IF_ERROR(CheckAttendRange("group_size", args.group_size, 1, kGroupSizeMax));
  CERTKV_RETURN_IF_ERROR(CheckAttendRange("tile_count", args.tile_count, 0, kTilesPerReadMax));
  CERTKV_RETURN_IF_ERROR(CheckAttendRange("tail_count", args.tail_count, 0, kBlockTokensMax));
  const int64_t token_count = int64_t{args.tile_count} * kTileTokens + args.tail_count;
  CERTKV_RETURN_IF_ERROR(CheckAttendRange("token_end", args.token_end, 1, token_count));
  return CheckAttendRange("token_begin", args.token_begin, 0, args.token_end - 1);
}

// Of a tail that isn't empty.
inline absl::Status CheckAttendTailStrides(const AttendArgs& args) {
  constexpr int64_t kStrideMax = int64_t{1} << 32;
  CERTKV_RETURN_IF_ERROR(
      CheckAttendRange("tail_key_stride", args.tail_key_stride, args.layout->head_dim, kStrideMax));
  return CheckAttendRange("tail_value_stride", args.tail_value_stride, args.layout->value_dim,
                          kStrideMax);
}

// What logits are multiplied by and capped at.
inline absl::Status CheckAttendScales(const AttendArgs& args) {
  if (!(args.logit_scale > 0 && std::isfinite(args.logit_scale))) {
    return AttendArgsInvalid("AttendArgs.logit_scale is ", args.logit_scale,
                             ", must be finite and > 0");
  }
  if (!(args.soft_cap >= 0 && std::isfinite(args.soft_cap))) {
    return AttendArgsInvalid("AttendArgs.soft_cap is ", args.soft_cap,
                             " nats, must be finite and >= 0 (0: none)");
  }
  return absl::OkStatus();
}

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_ATTEND_CHECKS_H_
