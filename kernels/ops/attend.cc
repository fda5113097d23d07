#include "kernels/ops/attend.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ops/attend_checks.h"
#include "kernels/ops/attend_progressive.h"
#include "kernels/ops/device.h"
#include "kernels/ops/quantize_tile.h"
#include "kernels/ops/tile_checksum.h"
#include "kernels/reference/reference.h"

namespace certkv {
namespace {

absl::Status CheckShape(const AttendArgs& args) {
  CERTKV_RETURN_IF_ERROR(CheckAttendCounts(args));
  if (args.tail_count == 0) return absl::OkStatus();
  if (args.tail_keys == nullptr || args.tail_values == nullptr) {
    return AttendArgsInvalid("AttendArgs.tail_keys or tail_values is null with tail_count ",
                             args.tail_count, "; pass the rows of the tail");
  }
  return CheckAttendTailStrides(args);
}

absl::Status CheckNumbers(const AttendArgs& args) {
  CERTKV_RETURN_IF_ERROR(CheckAttendScales(args));
  if ((args.witness_weights != nullptr) != args.layout->has_witness_weights) {
    return AttendArgsInvalid(
        "AttendArgs.witness_weights is ", args.witness_weights == nullptr ? "" : "not ",
        "null and the layout has ", args.layout->has_witness_weights ? "" : "no ",
        "witness weights; pass those of the KV head exactly where there are some");
  }
  if (args.original_dtype != OriginalDtype::kF16 && args.original_dtype != OriginalDtype::kBf16) {
    return AttendArgsInvalid("AttendArgs.original_dtype is ", static_cast<int>(args.original_dtype),
                             ", must be F16 or BF16");
  }
  for (int g = 0; g < args.group_size; ++g) {
    for (int i = 0; i < args.layout->head_dim; ++i) {
      const float value = args.queries[int64_t{g} * args.layout->head_dim + i];
      if (std::isfinite(value)) continue;
      return AttendArgsInvalid("query of head ", g, " of the group, channel ", i, " is ", value,
                               ", must be finite");
    }
    const float failure = args.failure_probability == nullptr ? 0.0f : args.failure_probability[g];
    const bool may_fail = args.layout->key_format == KeyFormat::kK8D;
    if (!(failure == 0 || (may_fail && failure > 0 && failure < 1))) {
      return AttendArgsInvalid("failure_probability[", g, "] is ", failure, ", must be ",
                               may_fail ? "in [0, 1)" : "0: only reads of K8D keys may fail");
    }
    if (args.sink_logits == nullptr) continue;
    const float sink = args.sink_logits[g];
    if (!(sink <= std::numeric_limits<float>::max())) {
      return AttendArgsInvalid("sink_logits[", g, "] is ", sink,
                               " nats, must be finite, or -infinity for no sink");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSources(const AttendArgs& args, int64_t tile) {
  if (args.tile_sources == nullptr) return absl::OkStatus();
  const AttendTile& data = args.tiles[tile];
  for (int g = 0; g < args.group_size; ++g) {
    const uint8_t source = args.tile_sources[int64_t{g} * args.tile_count + tile];
    if (source > (kSourceOriginalKeys | kSourceOriginalValues)) {
      return AttendArgsInvalid("tile_sources of head ", g, ", tile ", tile, " is ",
                               static_cast<int>(source), ", must be in [0, 3]");
    }
    const bool lacks_keys = (source & kSourceOriginalKeys) != 0 && data.original_keys == nullptr;
    const bool lacks_values =
        (source & kSourceOriginalValues) != 0 && data.original_values == nullptr;
    if (!lacks_keys && !lacks_values) continue;
    return MakeError(
        absl::StatusCode::kFailedPrecondition, "ORIGINAL_MISSING",
        absl::StrCat("head ", g, " is to read the original ", lacks_keys ? "keys" : "values",
                     " of tile ", tile, ", which are not there; the read can't be repaired"));
  }
  return absl::OkStatus();
}

absl::Status CheckTiles(const AttendArgs& args) {
  const uint32_t weights_check =
      args.layout->has_witness_weights
          ? WitnessWeightsCheck(args.witness_weights, args.layout->head_dim)
          : 0;
  const int64_t first = args.token_begin / kTileTokens;
  const int64_t end =
      std::min<int64_t>(args.tile_count, (args.token_end + kTileTokens - 1) / kTileTokens);
  constexpr int64_t kHeadersAhead = 16;  // each is a cache miss
  for (int64_t tile = first; tile < end; ++tile) {
    if (tile + kHeadersAhead < end) __builtin_prefetch(args.tiles[tile + kHeadersAhead].scan);
    const AttendTile& data = args.tiles[tile];
    for (const uint8_t* record : {data.scan, data.detail}) {
      if (record == nullptr || reinterpret_cast<uintptr_t>(record) % kPlaneAlignment != 0) {
        return AttendArgsInvalid("a record of tile ", tile, " is null or not aligned to ",
                                 kPlaneAlignment, " bytes");
      }
    }
    absl::Status status = CheckTile(*args.layout, data.scan);
    if (status.ok() && args.layout->has_witness_weights) {
      status = CheckTileWeights(data.scan, weights_check);
    }
    if (!status.ok()) return WithContext(status, absl::StrCat("tile ", tile));
    CERTKV_RETURN_IF_ERROR(CheckSources(args, tile));
  }
  return absl::OkStatus();
}

absl::Status CheckProgressive(const ProgressiveArgs& args) {
  if (!CanSkip(*args.read.layout)) {
    return AttendArgsInvalid(
        "keys of format ", KeyFormatName(args.read.layout->key_format),
        " can't be skipped: their coarse plane bounds nothing; read them with Attend");
  }
  if (args.read.tile_sources != nullptr) {
    return AttendArgsInvalid(
        "AttendArgs.tile_sources is set in a read that skips; repair with Attend");
  }
  for (int g = 0; g < args.read.group_size; ++g) {
    const float tolerance = args.skip_tolerance[g];
    if (tolerance > 0 && tolerance < 1) continue;
    return AttendArgsInvalid("skip_tolerance[", g, "] is ", tolerance,
                             ", must be in (0, 1); a head that reads everything is read by Attend");
  }
  return absl::OkStatus();
}

}  // namespace

int64_t AttendWorkspaceBytes(const AttendArgs& args) {
  return std::max(reference::AttendWorkspaceBytes(args), cpu::AttendWorkspaceBytes(args));
}

absl::Status Attend(Backend backend, const AttendArgs& args, const AttendResult& result,
                    void* workspace) {
  CERTKV_RETURN_IF_ERROR(CheckShape(args));
  CERTKV_RETURN_IF_ERROR(CheckNumbers(args));
  CERTKV_RETURN_IF_ERROR(CheckTiles(args));
  switch (backend) {
    case Backend::kReference:
      reference::Attend(args, result, workspace);
      break;
    case Backend::kCpu: {
      CERTKV_ASSIGN_OR_RETURN(const CpuIsa isa, SelectedCpuIsa());
      cpu::Attend(isa, args, result, workspace);
      break;
    }
    case Backend::kCuda: {
      if (args.layout->key_format == KeyFormat::kK8D) return LacksOperation("K8D keys");
      CERTKV_ASSIGN_OR_RETURN(const DeviceOps* const device, RegisteredDevice());
      return device->attend(args, result);
    }
  }
  return absl::OkStatus();
}

int64_t ProgressiveWorkspaceBytes(const AttendArgs& args) {
  return cpu::ProgressiveWorkspaceBytes(args);
}

absl::Status AttendProgressive(Backend backend, const ProgressiveArgs& args,
                               const ProgressiveResult& result, void* workspace) {
  CERTKV_RETURN_IF_ERROR(CheckShape(args.read));
  CERTKV_RETURN_IF_ERROR(CheckNumbers(args.read));
  CERTKV_RETURN_IF_ERROR(CheckProgressive(args));
  CERTKV_RETURN_IF_ERROR(CheckTiles(args.read));
  switch (backend) {
    case Backend::kReference:
      reference::AttendProgressive(args, result);
      break;
    case Backend::kCpu: {
      CERTKV_ASSIGN_OR_RETURN(const CpuIsa isa, SelectedCpuIsa());
      cpu::AttendProgressive(isa, args, result, workspace);
      break;
    }
    case Backend::kCuda: {
      CERTKV_ASSIGN_OR_RETURN(const DeviceOps* const device, RegisteredDevice());
      return device->attend_progressive(args, result);
    }
  }
  return absl::OkStatus();
}

}  // namespace certkv
