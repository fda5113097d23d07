#include <algorithm>

#include "kernels/cuda/attend_launch.h"
#include "kernels/cuda/attend_split.cuh"
#include "kernels/cuda/progressive.h"
#include "kernels/cuda/skip_choice.cuh"

namespace certkv::cuda {
namespace {

// Head g's bounds of the unit's sub-blocks: the coarse logits and half-widths are those of keys at
// depth K4, which is what the part's layout and depth say.
__device__ void BoundSubBlocks(const AttendRead& read, const SkipState& skip,
                               const BlockMemory& memory, const Unit& unit, int g) {
  const float key_norm = unit.header().key_norm;
  const bool is_known = __fmul_ru(memory.query_norm[g], key_norm) <= kReachMax;
  const TokenWeights w = WeighTokens(read, memory, unit, g);
  float own[kSlots];
  float half_width[kSlots];
  HalfWidths(read, memory, unit, g, key_norm, false, own, half_width);
  const int lane = ThreadIndex() % 32;
  if (lane % kSubBlockTokens != 0) return;
  for (int k = 0; k < kSlots; ++k) {
    const int sub_block = 2 * k + lane / kSubBlockTokens;
    const int64_t place =
        (int64_t{g} * read.args.tile_count + unit.tile) * kSubBlocksPerTile + sub_block;
    if (!HasTokens(unit, sub_block)) {
      skip.upper_lse[place] = skip.coarse_lse[place] = -kInfinity;
      continue;
    }
    const float lse = fmaf(w.atom_ref[k], kLn2, LogNat(w.atom_mass[k]));
    // As BlockLseSlackNat, which also covers weights that were clamped to 0.
    const float slack = __fmaf_ru(fabsf(lse), 0x1p-22f, 0x1p-14f);
    const float upper = __fadd_ru(lse, __fadd_ru(slack, half_width[k]));
    const bool is_bounded = is_known && upper < kInfinity;
    skip.upper_lse[place] = is_bounded ? upper : kInfinity;
    skip.coarse_lse[place] = is_bounded ? lse : -kInfinity;
  }
}

// Grid: (splits, reads).
template <int kHeads>
__global__ void __launch_bounds__(kBlockThreads) Scan(const ProgressiveRead* reads) {
  CERTKV_DYNAMIC_SHARED(bytes);
  const AttendRead& read = reads[blockIdx.y].parts[kPartScan];
  const int split = static_cast<int>(blockIdx.x);
  if (split >= read.split_count) return;
  const BlockMemory memory(reinterpret_cast<float*>(bytes), read.args.group_size, read.layout);
  BeginBlock(read, memory);
  const int unit_count = read.tile_end - read.tile_begin;
  const int first = split * read.units_per_split;
  float radius = 0;
  for (int index = first; index < first + read.units_per_split && index < unit_count; ++index) {
    const Unit unit = UnitOf(read, index);
    LoadKeyScales(read, memory, unit);
    __syncthreads();
    ScoreUnit<kHeads>(read, memory, unit);
    __syncthreads();
    for (int g = ThreadIndex() / 32; g < read.args.group_size; g += kWarps) {
      BoundSubBlocks(read, reads[blockIdx.y].skip, memory, unit, g);
    }
    radius = fmaxf(radius, unit.header().value_radius);
    __syncthreads();  // scales and scores are read
  }
  if (ThreadIndex() == 0) read.split_radius[split] = radius;
}

// Grid: (heads, reads).
__global__ void __launch_bounds__(kBlockThreads)
    Choose(const ProgressiveRead* reads, bool is_first) {
  CERTKV_SHARED(ChoiceMemory, memory);
  const ProgressiveRead& read = reads[blockIdx.y];
  ChooseHead(read.parts[kPartAll], read.skip, static_cast<int>(blockIdx.x), is_first, &memory);
}

template <int kHeads>
cudaError_t LaunchScan(const ProgressivePlan& plan, const ProgressiveRead* reads,
                       cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(Scan<kHeads>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(plan.shared_bytes));
  if (error != cudaSuccess) return error;
  return LaunchKernel(Scan<kHeads>, dim3(plan.part_splits[kPartScan], plan.read_count),
                      dim3(kBlockThreads), plan.shared_bytes, stream, reads);
}

cudaError_t LaunchChoice(const ProgressivePlan& plan, const ProgressiveRead* reads, bool is_first,
                         cudaStream_t stream) {
  return LaunchKernel(Choose, dim3(plan.group_size, plan.read_count), dim3(kBlockThreads), 0,
                      stream, reads, is_first);
}

cudaError_t LaunchPart(const ProgressivePlan& plan, const ProgressiveRead* reads, int part,
                       cudaStream_t stream) {
  if (plan.part_splits[part] == 0) return cudaSuccess;
  const AttendPlan attend{plan.read_count, plan.part_splits[part], plan.group_size,
                          plan.shared_bytes};
  return LaunchSplits(attend, {reads->parts + part, sizeof(ProgressiveRead)}, stream);
}

// The whole read as parts: which units each has, and where its splits lie among all of them.
struct Parts {
  AttendRead tail;
  AttendRead tiles;
};

template <typename T>
T* TakeBytes(void* base, int64_t count, int64_t* used) {
  *used = (*used + 7) / 8 * 8;
  T* const first =
      base == nullptr ? nullptr : reinterpret_cast<T*>(static_cast<unsigned char*>(base) + *used);
  *used += count * static_cast<int64_t>(sizeof(T));
  return first;
}

// Pointers to the splits from `first` on.
void ShiftSplits(const AttendRead& all, int64_t first, AttendRead* part) {
  const int64_t heads = first * all.args.group_size;
  const int64_t values = heads * all.layout.value_dim;
  part->split_ref = all.split_ref + heads;
  part->split_mass = all.split_mass + heads;
  part->split_eta = all.split_eta + heads;
  part->split_reach = all.split_reach + heads;
  part->split_radius = all.split_radius + first;
  part->split_norm = all.split_norm + first;
  part->split_rotated = all.split_rotated + (HasRotatedValues(all.layout) ? values : 0);
  part->split_plain = all.split_plain + values;
}

int64_t LayOut(const ProgressiveArgs& args, const ProgressiveResult& result, int32_t block_target,
               void* scratch, const QueryRows& queries, ProgressiveRead* read) {
  AttendRead all = PlanRead(args.read, AttendedPart(result), block_target, nullptr, queries);
  all.has_sub_block_atoms = true;
  all.atom_count = ProgressiveAtomsMax(args.read);
  all.first_tail_atom = 0;
  all.first_tile_atom = ProgressiveSinkAtom(args.read) + 1;
  AttendRead tail = all;
  tail.tile_begin = tail.tile_end = 0;
  PlanSplits(block_target, &tail);
  AttendRead tiles = all;
  tiles.chunk_begin = tiles.chunk_end = 0;
  PlanSplits(block_target, &tiles);
  all.units_per_split = std::max(tail.units_per_split, tiles.units_per_split);
  all.split_count = tail.split_count + 2 * tiles.split_count;
  all.radius_count = all.split_count + tiles.split_count;  // the scan's after the others

  int64_t used = 0;
  const int64_t float_count = PlaceScratch(nullptr, &all) / int64_t{sizeof(float)};
  PlaceScratch(TakeBytes<float>(scratch, float_count, &used), &all);
  const int64_t heads = args.read.group_size;
  const int64_t stored = heads * args.read.tile_count;
  SkipState& skip = read->skip;
  skip.skip_tolerance = args.skip_tolerance;
  skip.upper_lse = TakeBytes<float>(scratch, kSubBlocksPerTile * stored, &used);
  skip.coarse_lse = TakeBytes<float>(scratch, kSubBlocksPerTile * stored, &used);
  skip.top = TakeBytes<float>(scratch, heads, &used);
  skip.cut = TakeBytes<int32_t>(scratch, heads, &used);
  skip.reading = TakeBytes<uint8_t>(scratch, stored, &used);
  skip.sub_blocks_read = result.sub_blocks_read;
  skip.skipped_lse_nat = result.skipped_lse_nat;
  skip.atom_count = result.atom_count;
  if (scratch == nullptr) return used;

  ShiftSplits(all, 0, &tail);
  read->parts[kPartTail] = tail;
  tiles.sub_blocks = skip.reading;
  ShiftSplits(all, tail.split_count, &tiles);
  read->parts[kPartFirst] = tiles;
  ShiftSplits(all, tail.split_count + tiles.split_count, &tiles);
  read->parts[kPartSecond] = tiles;
  // Only the radius is kept of the scan's splits.
  tiles.split_radius = all.split_radius + all.split_count;
  tiles.sub_blocks = nullptr;
  tiles.layout.key_format = KeyFormat::kK4;
  tiles.layout.witness_bands = 0;
  tiles.layout.has_witness_weights = false;
  tiles.depth = AffineDepthOf(KeyFormat::kK4);
  read->parts[kPartScan] = tiles;
  read->parts[kPartAll] = all;
  return used;
}

}  // namespace

ProgressiveRead PlanProgressive(const ProgressiveArgs& args, const ProgressiveResult& result,
                                int32_t block_target, void* scratch, const QueryRows& queries) {
  ProgressiveRead read{};
  LayOut(args, result, block_target, scratch, queries, &read);
  return read;
}

int64_t ProgressiveScratchBytes(const AttendArgs& args, int32_t block_target) {
  ProgressiveRead read{};
  return LayOut({args, nullptr}, ProgressiveResult{}, block_target, nullptr, {}, &read);
}

ProgressivePlan PlanProgressiveLaunch(const ProgressiveRead* reads, int32_t read_count) {
  ProgressivePlan plan{};
  plan.read_count = read_count;
  plan.group_size = reads[0].parts[kPartAll].args.group_size;
  for (int32_t r = 0; r < read_count; ++r) {
    for (int part = 0; part < kProgressiveParts; ++part) {
      plan.part_splits[part] = std::max(plan.part_splits[part], reads[r].parts[part].split_count);
    }
    const BlockMemory memory(nullptr, plan.group_size, reads[r].parts[kPartAll].layout);
    plan.shared_bytes = std::max<int64_t>(plan.shared_bytes, memory.float_count * sizeof(float));
  }
  return plan;
}

int LaunchProgressive(const ProgressivePlan& plan, const ProgressiveRead* reads,
                      CUstream_st* stream) {
  cudaError_t error = LaunchPart(plan, reads, kPartTail, stream);
  if (error == cudaSuccess && plan.part_splits[kPartScan] > 0) {
    error = plan.group_size <= 4 ? LaunchScan<4>(plan, reads, stream)
                                 : LaunchScan<8>(plan, reads, stream);
  }
  for (const int part : {kPartFirst, kPartSecond}) {
    if (error == cudaSuccess) error = LaunchChoice(plan, reads, part == kPartFirst, stream);
    if (error == cudaSuccess) error = LaunchPart(plan, reads, part, stream);
  }
  if (error != cudaSuccess) return error;
  const AttendPlan all{plan.read_count, 0, plan.group_size, plan.shared_bytes};
  return LaunchCombine(all, {reads->parts + kPartAll, sizeof(ProgressiveRead)}, stream);
}

FinishRead PlanProgressiveFinish(const ProgressiveRead& read, const float* tv_tolerance,
                                 Certificate* certificates) {
  const AttendRead& all = read.parts[kPartAll];
  FinishRead finish = PlanFinish(all, tv_tolerance, certificates);
  finish.skipped_lse_nat = read.skip.skipped_lse_nat;
  finish.atom_counts = read.skip.atom_count;
  finish.sink_index = all.args.sink_logits != nullptr ? all.first_tile_atom - 1 : -1;
  return finish;
}

}  // namespace certkv::cuda
