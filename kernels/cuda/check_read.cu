#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "kernels/cuda/check_read.h"
#include "kernels/ops/attend_checks.h"

namespace certkv::cuda {
namespace {

absl::Status CheckAddress(absl::string_view what, const void* address, uintptr_t alignment) {
  const auto bits = reinterpret_cast<uintptr_t>(address);
  if (address != nullptr && bits % alignment == 0) return absl::OkStatus();
  return AttendArgsInvalid(what, " is at 0x", absl::Hex(bits),
                           ", must not be null and be a multiple of ",
                           static_cast<int64_t>(alignment), " bytes");
}

absl::Status CheckDimension(absl::string_view what, int32_t dim) {
  CERTKV_RETURN_IF_ERROR(CheckAttendRange(what, dim, 16, kHeadDimMax));
  if (dim % 16 == 0) return absl::OkStatus();
  return AttendArgsInvalid(what, " is ", dim, ", no kernel has it: must be a multiple of 16");
}

absl::Status CheckShape(const AttendArgs& args) {
  if (args.layout == nullptr)
    return AttendArgsInvalid("AttendArgs.layout is null; pass the layer's");
  CERTKV_RETURN_IF_ERROR(CheckDimension("layout.head_dim", args.layout->head_dim));
  CERTKV_RETURN_IF_ERROR(CheckDimension("layout.value_dim", args.layout->value_dim));
  if (args.layout->key_format == KeyFormat::kK8D) {
    return MakeError(absl::StatusCode::kUnimplemented, "DEVICE_LACKS_OPERATION",
                     "backend cuda doesn't have K8D keys yet; use backend cpu");
  }
  CERTKV_RETURN_IF_ERROR(CheckAttendCounts(args));
  return CheckAttendScales(args);
}

absl::Status CheckArrays(const AttendArgs& args, const QueryRows& queries) {
  CERTKV_RETURN_IF_ERROR(queries.bits != nullptr
                             ? CheckAddress("QueryRows.bits", queries.bits, sizeof(uint16_t))
                             : CheckAddress("AttendArgs.queries", args.queries, sizeof(float)));
  if (args.layout->has_witness_weights) {
    CERTKV_RETURN_IF_ERROR(
        CheckAddress("AttendArgs.witness_weights", args.witness_weights, sizeof(float)));
  }
  if (args.tile_count > 0) {
    CERTKV_RETURN_IF_ERROR(CheckAddress("AttendArgs.tiles", args.tiles, alignof(AttendTile)));
  }
  if (args.tail_count == 0) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(CheckAddress("tail_keys", args.tail_keys, sizeof(uint16_t)));
  CERTKV_RETURN_IF_ERROR(CheckAddress("tail_values", args.tail_values, sizeof(uint16_t)));
  return CheckAttendTailStrides(args);
}

absl::Status CheckTile(const AttendTile& tile, int64_t n, bool needs_originals) {
  const std::string name = absl::StrCat("tile ", n, "'s ");
  CERTKV_RETURN_IF_ERROR(CheckAddress(name + "scan record", tile.scan, kPlaneAlignment));
  CERTKV_RETURN_IF_ERROR(CheckAddress(name + "detail record", tile.detail, kPlaneAlignment));
  if (!needs_originals) return absl::OkStatus();
  if (tile.original_keys == nullptr || tile.original_values == nullptr) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "ORIGINAL_MISSING",
                     absl::StrCat(name, "originals are not there; the read can't be repaired"));
  }
  CERTKV_RETURN_IF_ERROR(
      CheckAddress(name + "original keys", tile.original_keys, sizeof(uint16_t)));
  return CheckAddress(name + "original values", tile.original_values, sizeof(uint16_t));
}

}  // namespace

absl::Status CheckDeviceRead(const AttendArgs& args, const QueryRows& queries,
                             absl::Span<const AttendTile> tiles, bool needs_originals) {
  CERTKV_RETURN_IF_ERROR(CheckShape(args));
  CERTKV_RETURN_IF_ERROR(CheckArrays(args, queries));
  if (static_cast<int64_t>(tiles.size()) != args.tile_count) {
    return AttendArgsInvalid(tiles.size(), " tiles were given, AttendArgs.tile_count is ",
                             args.tile_count, "; pass the records that it points to");
  }
  const int64_t end =
      std::min<int64_t>(args.tile_count, (args.token_end + kTileTokens - 1) / kTileTokens);
  for (int64_t n = args.token_begin / kTileTokens; n < end; ++n) {
    CERTKV_RETURN_IF_ERROR(CheckTile(tiles[n], n, needs_originals));
  }
  return absl::OkStatus();
}

absl::Status CheckLaunch(absl::Span<const AttendRead> reads) {
  if (reads.empty()) return AttendArgsInvalid("a launch has no read; pass at least one");
  const AttendRead& first = reads[0];
  for (size_t n = 1; n < reads.size(); ++n) {
    const AttendRead& read = reads[n];
    const bool is_same = read.args.group_size == first.args.group_size &&
                         read.layout.head_dim == first.layout.head_dim &&
                         read.layout.value_dim == first.layout.value_dim;
    if (is_same) continue;
    return AttendArgsInvalid("read ", n, " of a launch has ", read.args.group_size, " heads, d ",
                             read.layout.head_dim, ", d_v ", read.layout.value_dim, ", read 0 has ",
                             first.args.group_size, ", ", first.layout.head_dim, ", ",
                             first.layout.value_dim, "; launch them apart");
  }
  return absl::OkStatus();
}

}  // namespace certkv::cuda
