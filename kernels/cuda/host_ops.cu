// The operations of kernels/ops over host memory: everything goes to the device and back.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/seal.h"

namespace certkv::cuda {
namespace {

// Elements from the first row's begin to the last one's end.
int64_t StridedCount(int64_t rows, int64_t stride, int64_t width) {
  return rows == 0 ? 0 : (rows - 1) * stride + width;
}

// Tiles that the range touches, in device memory: records in two slabs, later tiles first, because
// nothing may depend on their order.
absl::StatusOr<const AttendTile*> CopyTiles(const AttendArgs& args, DeviceMemory* memory) {
  const TileLayout& layout = *args.layout;
  const auto begin =
      static_cast<int32_t>(std::min<int64_t>(args.token_begin / kTileTokens, args.tile_count));
  const auto end = static_cast<int32_t>(
      std::min<int64_t>((args.token_end + kTileTokens - 1) / kTileTokens, args.tile_count));
  const int64_t count = end - begin;
  CERTKV_ASSIGN_OR_RETURN(uint8_t* const scans,
                          memory->Allocate<uint8_t>(count * layout.scan_bytes));
  CERTKV_ASSIGN_OR_RETURN(uint8_t* const details,
                          memory->Allocate<uint8_t>(count * layout.detail_bytes));
  std::vector<AttendTile> tiles(args.tile_count, AttendTile{});
  for (int32_t t = begin; t < end; ++t) {
    const AttendTile& from = args.tiles[t];
    uint8_t* const scan = scans + (end - 1 - t) * layout.scan_bytes;
    uint8_t* const detail = details + (end - 1 - t) * layout.detail_bytes;
    CERTKV_RETURN_IF_ERROR(memory->CopyInto(scan, from.scan, layout.scan_bytes));
    CERTKV_RETURN_IF_ERROR(memory->CopyInto(detail, from.detail, layout.detail_bytes));
    tiles[t].scan = scan;
    tiles[t].detail = detail;
    if (args.tile_sources == nullptr) continue;
    CERTKV_ASSIGN_OR_RETURN(
        tiles[t].original_keys,
        memory->Copy(from.original_keys, int64_t{kTileTokens} * layout.head_dim));
    CERTKV_ASSIGN_OR_RETURN(
        tiles[t].original_values,
        memory->Copy(from.original_values, int64_t{kTileTokens} * layout.value_dim));
  }
  return memory->Copy(tiles.data(), args.tile_count);
}

absl::StatusOr<AttendArgs> CopyArgs(const AttendArgs& args, DeviceMemory* memory) {
  const int64_t heads = args.group_size;
  AttendArgs copy = args;  // layout stays a host address, for PlanRead
  CERTKV_ASSIGN_OR_RETURN(copy.queries, memory->Copy(args.queries, heads * args.layout->head_dim));
  CERTKV_ASSIGN_OR_RETURN(copy.witness_weights,
                          memory->Copy(args.witness_weights, args.layout->head_dim));
  CERTKV_ASSIGN_OR_RETURN(copy.sink_logits, memory->Copy(args.sink_logits, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.tiles, CopyTiles(args, memory));
  CERTKV_ASSIGN_OR_RETURN(copy.tile_sources,
                          memory->Copy(args.tile_sources, heads * args.tile_count));
  CERTKV_ASSIGN_OR_RETURN(
      copy.tail_keys,
      memory->Copy(args.tail_keys,
                   StridedCount(args.tail_count, args.tail_key_stride, args.layout->head_dim)));
  CERTKV_ASSIGN_OR_RETURN(
      copy.tail_values,
      memory->Copy(args.tail_values,
                   StridedCount(args.tail_count, args.tail_value_stride, args.layout->value_dim)));
  return copy;
}

absl::StatusOr<AttendResult> AllocateResults(const AttendArgs& args, const AttendResult& result,
                                             DeviceMemory* memory) {
  const int64_t heads = args.group_size;
  const int64_t atoms = heads * AttendAtomCount(args);
  AttendResult copy{};
  CERTKV_ASSIGN_OR_RETURN(copy.outputs,
                          memory->AllocateResult(result.outputs, heads * args.layout->value_dim));
  CERTKV_ASSIGN_OR_RETURN(copy.lse_nat, memory->AllocateResult(result.lse_nat, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.block_lse, memory->AllocateResult(result.block_lse, atoms));
  CERTKV_ASSIGN_OR_RETURN(copy.block_max_logit,
                          memory->AllocateResult(result.block_max_logit, atoms));
  CERTKV_ASSIGN_OR_RETURN(copy.logit_half_width,
                          memory->AllocateResult(result.logit_half_width, atoms));
  if (result.top_half_width != nullptr) {
    CERTKV_ASSIGN_OR_RETURN(copy.top_half_width,
                            memory->AllocateResult(result.top_half_width, atoms));
  }
  CERTKV_ASSIGN_OR_RETURN(copy.tile_value_error,
                          memory->AllocateResult(result.tile_value_error, heads * args.tile_count));
  CERTKV_ASSIGN_OR_RETURN(copy.value_term, memory->AllocateResult(result.value_term, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.rounding_term, memory->AllocateResult(result.rounding_term, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.value_radius, memory->AllocateResult(result.value_radius, 1));
  return copy;
}

// Splits for two blocks on every multiprocessor.
absl::StatusOr<int32_t> BlockTarget() {
  int device = 0;
  int multiprocessors = 0;
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(cudaGetDevice(&device), "asking for the device"));
  CERTKV_RETURN_IF_ERROR(
      StatusOfCuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
                   "asking for the device's multiprocessors"));
  return 2 * multiprocessors;
}

absl::Status Attend(const AttendArgs& args, const AttendResult& result) {
  DeviceMemory memory;
  CERTKV_ASSIGN_OR_RETURN(const AttendArgs device_args, CopyArgs(args, &memory));
  CERTKV_ASSIGN_OR_RETURN(const AttendResult device_result, AllocateResults(args, result, &memory));
  CERTKV_ASSIGN_OR_RETURN(const int32_t block_target, BlockTarget());
  CERTKV_ASSIGN_OR_RETURN(uint8_t* const scratch,
                          memory.Allocate<uint8_t>(ScratchBytes(args, block_target)));
  const AttendRead read = PlanRead(device_args, device_result, block_target, scratch);
  CERTKV_ASSIGN_OR_RETURN(const AttendRead* const reads, memory.Copy(&read, 1));
  const int error = LaunchAttend(PlanLaunch(&read, 1), reads, nullptr);
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(static_cast<cudaError_t>(error), "attention"));
  return memory.ReadBack();
}

absl::Status QuantizeTile(const QuantizeTileArgs& args) {
  const TileLayout& layout = *args.layout;
  DeviceMemory memory;
  SealTile tile{};
  CERTKV_ASSIGN_OR_RETURN(
      tile.keys,
      memory.Copy(args.keys, StridedCount(kTileTokens, args.key_stride, layout.head_dim)));
  CERTKV_ASSIGN_OR_RETURN(
      tile.values,
      memory.Copy(args.values, StridedCount(kTileTokens, args.value_stride, layout.value_dim)));
  CERTKV_ASSIGN_OR_RETURN(tile.witness_weights, memory.Copy(args.witness_weights, layout.head_dim));
  CERTKV_ASSIGN_OR_RETURN(tile.scan, memory.AllocateResult(args.scan, layout.scan_bytes));
  CERTKV_ASSIGN_OR_RETURN(tile.detail, memory.AllocateResult(args.detail, layout.detail_bytes));
  tile.key_stride = args.key_stride;
  tile.value_stride = args.value_stride;
  tile.identity_tag = args.identity_tag;
  CERTKV_ASSIGN_OR_RETURN(const SealTile* const tiles, memory.Copy(&tile, 1));
  const SealFormat format{layout, args.spec->original_dtype,
                          args.spec->layers[args.layer].fp8_key_scale};
  const int error = LaunchSeal(format, tiles, 1, nullptr);
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(static_cast<cudaError_t>(error), "sealing"));
  return memory.ReadBack();
}

}  // namespace

absl::Status CheckDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "DEVICE_MISSING",
                   absl::StrCat("this machine has no GPU that CUDA can use (",
                                cudaGetErrorString(error), "); use backend cpu"));
}

const DeviceOps& HostMemoryOps() {
  static constexpr DeviceOps kOps{&Attend, &QuantizeTile};
  return kOps;
}

}  // namespace certkv::cuda
