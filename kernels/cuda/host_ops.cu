// The operations of kernels/ops over host memory: everything goes to the device and back.
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/copied_read.h"
#include "kernels/cuda/cuda.h"
#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/finish.h"
#include "kernels/cuda/paged_rows.h"
#include "kernels/cuda/progressive.h"
#include "kernels/cuda/seal.h"
#include "kernels/cuda/seal_ops.h"

namespace certkv::cuda {
namespace {

absl::Status Attend(const AttendArgs& args, const AttendResult& result) {
  CERTKV_ASSIGN_OR_RETURN(CopiedRead copied, CopiedRead::Make(args, result, {}));
  const int error = LaunchAttend(PlanLaunch(&copied.read(), 1), copied.device_read(), nullptr);
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(static_cast<cudaError_t>(error), "attention"));
  return copied.ReadBack();
}

absl::StatusOr<ProgressiveResult> AllocateResults(const AttendArgs& args,
                                                  const ProgressiveResult& result,
                                                  DeviceMemory* memory) {
  const int64_t heads = args.group_size;
  const int64_t atoms = heads * ProgressiveAtomsMax(args);
  const int64_t values = heads * args.layout->value_dim;
  ProgressiveResult copy{};
  const std::pair<float * ProgressiveResult::*, int64_t> floats[] = {
      {&ProgressiveResult::outputs, values},         {&ProgressiveResult::lse_nat, heads},
      {&ProgressiveResult::block_lse, atoms},        {&ProgressiveResult::block_max_logit, atoms},
      {&ProgressiveResult::logit_half_width, atoms}, {&ProgressiveResult::value_term, heads},
      {&ProgressiveResult::rounding_term, heads},    {&ProgressiveResult::value_radius, 1},
      {&ProgressiveResult::skipped_lse_nat, heads}};
  for (const auto& [field, count] : floats) {
    CERTKV_ASSIGN_OR_RETURN(copy.*field, memory->AllocateResult(result.*field, count));
  }
  CERTKV_ASSIGN_OR_RETURN(copy.atom_count, memory->AllocateResult(result.atom_count, heads));
  CERTKV_ASSIGN_OR_RETURN(copy.sub_blocks_read,
                          memory->AllocateResult(result.sub_blocks_read, heads * args.tile_count));
  return copy;
}

absl::Status AttendProgressive(const ProgressiveArgs& args, const ProgressiveResult& result) {
  DeviceMemory memory;
  ProgressiveArgs device_args{};
  CERTKV_ASSIGN_OR_RETURN(device_args.read, CopyAttendArgs(args.read, true, &memory));
  CERTKV_ASSIGN_OR_RETURN(device_args.skip_tolerance,
                          memory.Copy(args.skip_tolerance, args.read.group_size));
  CERTKV_ASSIGN_OR_RETURN(const ProgressiveResult device_result,
                          AllocateResults(args.read, result, &memory));
  CERTKV_ASSIGN_OR_RETURN(const int32_t block_target, DefaultBlockTarget());
  CERTKV_ASSIGN_OR_RETURN(uint8_t* const scratch, memory.Allocate<uint8_t>(ProgressiveScratchBytes(
                                                      args.read, block_target)));
  const ProgressiveRead read = PlanProgressive(device_args, device_result, block_target, scratch);
  CERTKV_ASSIGN_OR_RETURN(const ProgressiveRead* const reads, memory.Copy(&read, 1));
  const int error = LaunchProgressive(PlanProgressiveLaunch(&read, 1), reads, nullptr);
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(static_cast<cudaError_t>(error), "a progressive read"));
  return memory.ReadBack();
}

// The device's pointers of one head.
absl::StatusOr<FinishRead> CopyHead(const FinishArgs& args, Certificate* certificate,
                                    DeviceMemory* memory) {
  const int64_t atoms = args.atom_count;
  FinishRead read{};
  CERTKV_ASSIGN_OR_RETURN(read.block_lse, memory->Copy(args.block_lse, atoms));
  CERTKV_ASSIGN_OR_RETURN(read.block_max_logit, memory->Copy(args.block_max_logit, atoms));
  CERTKV_ASSIGN_OR_RETURN(read.logit_half_width, memory->Copy(args.logit_half_width, atoms));
  CERTKV_ASSIGN_OR_RETURN(read.top_half_width, memory->Copy(args.top_half_width, atoms));
  const float numbers[] = {args.value_term, args.rounding_term, args.value_radius,
                           args.skipped_lse_nat, args.tv_tolerance};
  CERTKV_ASSIGN_OR_RETURN(const float* const on_device, memory->Copy(numbers, 5));
  read.value_term = on_device;
  read.rounding_term = on_device + 1;
  read.value_radius = on_device + 2;
  read.skipped_lse_nat = on_device + 3;
  read.tv_tolerance = on_device + 4;
  CERTKV_ASSIGN_OR_RETURN(read.certificates, memory->AllocateResult(certificate, 1));
  read.group_size = 1;
  read.atom_stride = args.atom_count;
  read.sink_index = args.sink_index;
  return read;
}

absl::Status Finish(const FinishArgs& args, Certificate* certificate) {
  DeviceMemory memory;
  Certificate finished;
  CERTKV_ASSIGN_OR_RETURN(const FinishRead read, CopyHead(args, &finished, &memory));
  CERTKV_ASSIGN_OR_RETURN(const FinishRead* const reads, memory.Copy(&read, 1));
  const int error = LaunchFinish(PlanFinishLaunch(&read, 1), reads, nullptr);
  CERTKV_RETURN_IF_ERROR(StatusOfCuda(static_cast<cudaError_t>(error), "finishing"));
  CERTKV_RETURN_IF_ERROR(memory.ReadBack());
  *certificate = finished;
  return absl::OkStatus();
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
  static constexpr DeviceOps kOps{&Attend,        &AttendProgressive, &QuantizeTile, &Finish,
                                  &CopyPagedRows, &SealTiles,         &CopyRuns};
  return kOps;
}

}  // namespace certkv::cuda
