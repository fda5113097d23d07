#include <algorithm>

#include "kernels/core/check.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/attend_combine.cuh"
#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/attend_split.cuh"

namespace certkv::cuda {
namespace {

// Grid: (splits, reads). kHeads query heads share a decoded key.
template <int kHeads>
__global__ void __launch_bounds__(kBlockThreads) AttendSplit(ReadArray reads) {
  CERTKV_DYNAMIC_SHARED(bytes);
  const AttendRead& read = reads.At(blockIdx.y);
  const int split = static_cast<int>(blockIdx.x);
  if (split >= read.split_count) return;
  const BlockMemory memory(reinterpret_cast<float*>(bytes), read.args.group_size, read.layout);
  BeginBlock(read, memory);
  const int unit_count = read.tile_end - read.tile_begin + read.chunk_end - read.chunk_begin;
  const int first = split * read.units_per_split;
  for (int index = first; index < first + read.units_per_split && index < unit_count; ++index) {
    const Unit unit = UnitOf(read, index);
    if (unit.sub_blocks != 0) ReadUnit<kHeads>(read, memory, unit);
  }
  __syncthreads();
  WriteSplit(read, memory, split);
}

// Grid: (heads, reads).
__global__ void __launch_bounds__(kBlockThreads) AttendCombine(ReadArray reads) {
  CERTKV_SHARED(float[kBlockThreads], scratch);
  CERTKV_SHARED(float[kHeadDimMax], rotated);
  CombineHead(reads.At(blockIdx.y), static_cast<int>(blockIdx.x), scratch, rotated);
}

int32_t UnitCount(const AttendRead& read) {
  return read.tile_end - read.tile_begin + read.chunk_end - read.chunk_begin;
}

void PlanUnits(const AttendArgs& args, int32_t block_target, AttendRead* read) {
  const auto tile_of = [](int64_t token) {
    return static_cast<int32_t>((token + kTileTokens - 1) / kTileTokens);
  };
  const auto begin = static_cast<int32_t>(args.token_begin / kTileTokens);
  const int32_t end = tile_of(args.token_end);
  read->tile_begin = std::min(begin, args.tile_count);
  read->tile_end = std::min(end, args.tile_count);
  read->chunk_begin = std::max(begin, args.tile_count) - args.tile_count;
  read->chunk_end = std::max(end, args.tile_count) - args.tile_count;
  PlanSplits(block_target, read);
}

// Takes arrays of floats, one after the other; a null base only counts.
class FloatArena {
 public:
  explicit FloatArena(void* base) : base_(static_cast<float*>(base)) {}
  float* Take(int64_t count) {
    float* const first = base_ == nullptr ? nullptr : base_ + used_;
    used_ += count;
    return first;
  }
  int64_t used_bytes() const { return used_ * static_cast<int64_t>(sizeof(float)); }

 private:
  float* base_;
  int64_t used_ = 0;
};

template <int kHeads>
cudaError_t LaunchSplit(const AttendPlan& plan, ReadArray reads, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(AttendSplit<kHeads>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(plan.shared_bytes));
  if (error != cudaSuccess) return error;
  return LaunchKernel(AttendSplit<kHeads>, dim3(plan.split_count, plan.read_count),
                      dim3(kBlockThreads), plan.shared_bytes, stream, reads);
}

}  // namespace

void PlanSplits(int32_t block_target, AttendRead* read) {
  const int32_t units = UnitCount(*read);
  read->units_per_split =
      std::clamp((units + block_target - 1) / block_target, 1, kUnitsPerSplitMax);
  read->split_count = (units + read->units_per_split - 1) / read->units_per_split;
  read->radius_count = read->split_count;
}

int64_t PlaceScratch(void* scratch, AttendRead* read) {
  FloatArena arena(scratch);
  const int64_t heads = int64_t{read->split_count} * read->args.group_size;
  read->split_ref = arena.Take(heads);
  read->split_mass = arena.Take(heads);
  read->split_eta = arena.Take(heads);
  read->split_reach = arena.Take(heads);
  read->split_radius = arena.Take(read->radius_count);
  read->split_norm = arena.Take(read->split_count);
  const bool has_rotated = HasRotatedValues(read->layout);
  read->split_rotated = arena.Take(has_rotated ? heads * read->layout.value_dim : 0);
  read->split_plain = arena.Take(heads * read->layout.value_dim);
  read->tile_ref = arena.Take(
      read->first_tile_atom != 0 ? 0 : int64_t{read->args.group_size} * read->args.tile_count);
  return arena.used_bytes();
}

AttendRead PlanRead(const AttendArgs& args, const AttendResult& result, int32_t block_target,
                    void* scratch, const QueryRows& queries) {
  CERTKV_CHECK(args.layout->key_format != KeyFormat::kK8D, "no dither is taken off here");
  AttendRead read{};
  read.args = args;
  read.args.layout = nullptr;
  read.result = result;
  read.queries = queries;
  read.layout = *args.layout;
  if (HasAffineKeys(read.layout)) read.depth = AffineDepthOf(read.layout.key_format);
  read.atom_count = AttendAtomCount(args);
  read.first_tail_atom = args.tile_count * read.layout.atoms_per_tile();
  read.has_sub_block_atoms = read.layout.witness_bands != 0;
  PlanUnits(args, block_target, &read);
  PlaceScratch(scratch, &read);
  return read;
}

int64_t ScratchBytes(const AttendArgs& args, int32_t block_target) {
  AttendRead read = PlanRead(args, AttendResult{}, block_target, nullptr);
  return PlaceScratch(nullptr, &read);
}

AttendPlan PlanLaunch(const AttendRead* reads, int32_t read_count) {
  AttendPlan plan{};
  plan.read_count = read_count;
  plan.group_size = reads[0].args.group_size;
  for (int32_t r = 0; r < read_count; ++r) {
    plan.split_count = std::max(plan.split_count, reads[r].split_count);
    const BlockMemory memory(nullptr, plan.group_size, reads[r].layout);
    plan.shared_bytes = std::max<int64_t>(plan.shared_bytes, memory.float_count * sizeof(float));
  }
  return plan;
}

cudaError_t LaunchSplits(const AttendPlan& plan, ReadArray reads, cudaStream_t stream) {
  return plan.group_size == 1   ? LaunchSplit<1>(plan, reads, stream)
         : plan.group_size <= 4 ? LaunchSplit<4>(plan, reads, stream)
                                : LaunchSplit<8>(plan, reads, stream);
}

cudaError_t LaunchCombine(const AttendPlan& plan, ReadArray reads, cudaStream_t stream) {
  return LaunchKernel(AttendCombine, dim3(plan.group_size, plan.read_count), dim3(kBlockThreads), 0,
                      stream, reads);
}

int LaunchAttend(const AttendPlan& plan, const AttendRead* reads, CUstream_st* stream) {
  const ReadArray array{reads, sizeof(AttendRead)};
  const cudaError_t error = LaunchSplits(plan, array, stream);
  return error != cudaSuccess ? error : LaunchCombine(plan, array, stream);
}

}  // namespace certkv::cuda
