#include <algorithm>

#include "kernels/core/check.h"
#include "kernels/cuda/attend.h"
#include "kernels/cuda/attend_combine.cuh"
#include "kernels/cuda/attend_values.cuh"
#include "kernels/cuda/attend_weights.cuh"

namespace certkv::cuda {
namespace {

// A bound on logit_scale times the norm of what all lanes have summed.
__device__ float QueryNorm(double square, float logit_scale) {
  for (int bits = 16; bits > 0; bits /= 2) square += __shfl_xor_sync(~0u, square, bits);
  return __fmul_ru(NormRoundedUp(square), logit_scale);
}

// A warp does one head.
__device__ void BeginHead(const AttendRead& read, const BlockMemory& memory, int g) {
  const TileLayout& layout = read.layout;
  const int bands = layout.witness_bands;
  const int lane = ThreadIndex() % 32;
  double square = 0;
  double band_square[kWitnessBandsMax] = {};
  for (int i = lane; i < layout.head_dim; i += 32) {
    const double q = QueryAt(read, g * layout.head_dim + i);
    square += q * q;
    if (bands == 0) continue;
    const int own =
        code::WitnessBandOf(layout.head_dim, layout.rope_pairing, layout.rotary_dim, bands, i);
    const double entry = q / (layout.has_witness_weights ? read.args.witness_weights[i] : 1.0);
    for (int b = 0; b < kWitnessBandsMax; ++b) band_square[b] += b == own ? entry * entry : 0;
  }
  const float norm = QueryNorm(square, read.args.logit_scale);
  for (int b = 0; b < bands; ++b) {
    const float band_norm = QueryNorm(band_square[b], read.args.logit_scale);
    if (lane == 0) memory.band_norm[g * kWitnessBandsMax + b] = band_norm;
  }
  if (lane != 0) return;
  memory.query_norm[g] = norm;
  memory.ref[g] = kRefNone;
  memory.mass[g] = memory.unknown[g] = memory.eta[g] = memory.reach[g] = 0;
}

// The first work of a block: scaled queries, their norms, and sums of nothing.
__device__ void BeginBlock(const AttendRead& read, const BlockMemory& memory) {
  const AttendArgs& args = read.args;
  const TileLayout& layout = read.layout;
  const int heads = args.group_size;
  for (int n = ThreadIndex(); n < heads * layout.head_dim; n += kBlockThreads) {
    memory.queries[n] = QueryAt(read, n) * args.logit_scale;
  }
  const int rotated_count = HasRotatedValues(layout) ? kWarps * heads * layout.value_dim : 0;
  for (int n = ThreadIndex(); n < rotated_count; n += kBlockThreads) memory.rotated[n] = 0;
  for (int n = ThreadIndex(); n < heads * layout.value_dim; n += kBlockThreads) memory.plain[n] = 0;
  for (int g = ThreadIndex() / 32; g < heads; g += kWarps) BeginHead(read, memory, g);
  if (ThreadIndex() == 0) memory.radius[0] = memory.norm[0] = 0;
}

__device__ void LoadKeyScales(const AttendRead& read, const BlockMemory& memory, const Unit& unit) {
  const TileLayout& layout = read.layout;
  if (unit.tile < 0 || !HasAffineKeys(layout)) return;
  for (int i = ThreadIndex(); i < layout.head_dim; i += kBlockThreads) {
    memory.key_scale[i] = code::F16ToFloat(LoadWord(unit.scan + layout.scale_offset + 2 * i));
    memory.key_zero[i] = code::F16ToFloat(LoadWord(unit.scan + layout.zero_offset + 2 * i));
  }
}

__device__ void LoadValueScales(const AttendRead& read, const BlockMemory& memory,
                                const Unit& unit) {
  const TileLayout& layout = read.layout;
  if (unit.tile < 0 || !HasRotatedValues(layout) || ThreadIndex() >= kTileTokens) return;
  const uint8_t* const scales = unit.detail +
                                ThreadIndex() / kSubBlockTokens * layout.sub_block_bytes +
                                layout.value_scale_offset + 2 * (ThreadIndex() % kSubBlockTokens);
  memory.value_scale[ThreadIndex()] = code::F16ToFloat(LoadWord(scales));
  memory.value_zero[ThreadIndex()] = code::F16ToFloat(LoadWord(scales + 2 * kSubBlockTokens));
}

// Between two units no barrier is needed: key scales are last read before the third, and what the
// sums of values read (weights, value scales) is written again after the next unit's first or
// second.
template <int kHeads>
__device__ void ReadUnit(const AttendRead& read, const BlockMemory& memory, const Unit& unit) {
  LoadKeyScales(read, memory, unit);
  __syncthreads();
  LoadValueScales(read, memory, unit);
  ScoreUnit<kHeads>(read, memory, unit);
  __syncthreads();
  for (int g = ThreadIndex() / 32; g < read.args.group_size; g += kWarps) {
    WeighUnit(read, memory, unit, g);
  }
  __syncthreads();
  SumValues(read, memory, unit);
}

__device__ void WriteSplit(const AttendRead& read, const BlockMemory& memory, int split) {
  const int heads = read.args.group_size;
  const int64_t first = int64_t{split} * heads;
  for (int g = ThreadIndex(); g < heads; g += kBlockThreads) {
    read.split_ref[first + g] = memory.ref[g];
    read.split_mass[first + g] = memory.unknown[g] != 0 ? kInfinity : memory.mass[g];
    read.split_eta[first + g] = memory.eta[g];
    read.split_reach[first + g] = memory.reach[g];
  }
  if (ThreadIndex() == 0) {
    read.split_radius[split] = memory.radius[0];
    read.split_norm[split] = memory.norm[0];
  }
  const int width = heads * read.layout.value_dim;
  for (int n = ThreadIndex(); n < width; n += kBlockThreads) {
    read.split_plain[int64_t{split} * width + n] = memory.plain[n];
    if (!HasRotatedValues(read.layout)) continue;
    const float* const sums = memory.rotated + n;
    static_assert(kWarps == 4);
    read.split_rotated[int64_t{split} * width + n] =
        (sums[0] + sums[width]) + (sums[2 * width] + sums[3 * width]);
  }
}

// Grid: (splits, reads). kHeads query heads share a decoded key.
template <int kHeads>
__global__ void __launch_bounds__(kBlockThreads) AttendSplit(const AttendRead* reads) {
  CERTKV_DYNAMIC_SHARED(bytes);
  const AttendRead& read = reads[blockIdx.y];
  const int split = static_cast<int>(blockIdx.x);
  if (split >= read.split_count) return;
  const BlockMemory memory(reinterpret_cast<float*>(bytes), read.args.group_size, read.layout);
  BeginBlock(read, memory);
  const int unit_count = read.tile_end - read.tile_begin + read.chunk_end - read.chunk_begin;
  const int first = split * read.units_per_split;
  for (int index = first; index < first + read.units_per_split && index < unit_count; ++index) {
    ReadUnit<kHeads>(read, memory, UnitOf(read, index));
  }
  __syncthreads();
  WriteSplit(read, memory, split);
}

// Grid: (heads, reads).
__global__ void __launch_bounds__(kBlockThreads) AttendCombine(const AttendRead* reads) {
  CERTKV_SHARED(float[kBlockThreads], scratch);
  CERTKV_SHARED(float[kHeadDimMax], rotated);
  CombineHead(reads[blockIdx.y], static_cast<int>(blockIdx.x), scratch, rotated);
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
  const int32_t units = UnitCount(*read);
  read->units_per_split =
      std::clamp((units + block_target - 1) / block_target, 1, kUnitsPerSplitMax);
  read->split_count = (units + read->units_per_split - 1) / read->units_per_split;
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

int64_t LayOutScratch(void* scratch, AttendRead* read) {
  FloatArena arena(scratch);
  const int64_t heads = int64_t{read->split_count} * read->args.group_size;
  read->split_ref = arena.Take(heads);
  read->split_mass = arena.Take(heads);
  read->split_eta = arena.Take(heads);
  read->split_reach = arena.Take(heads);
  read->split_radius = arena.Take(read->split_count);
  read->split_norm = arena.Take(read->split_count);
  const bool has_rotated = HasRotatedValues(read->layout);
  read->split_rotated = arena.Take(has_rotated ? heads * read->layout.value_dim : 0);
  read->split_plain = arena.Take(heads * read->layout.value_dim);
  read->tile_ref = arena.Take(int64_t{read->args.group_size} * read->args.tile_count);
  return arena.used_bytes();
}

template <int kHeads>
cudaError_t LaunchSplit(const AttendPlan& plan, const AttendRead* reads, cudaStream_t stream) {
  const cudaError_t error =
      cudaFuncSetAttribute(AttendSplit<kHeads>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(plan.shared_bytes));
  if (error != cudaSuccess) return error;
  return LaunchKernel(AttendSplit<kHeads>, dim3(plan.split_count, plan.read_count),
                      dim3(kBlockThreads), plan.shared_bytes, stream, reads);
}

}  // namespace

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
  PlanUnits(args, block_target, &read);
  LayOutScratch(scratch, &read);
  return read;
}

int64_t ScratchBytes(const AttendArgs& args, int32_t block_target) {
  AttendRead read = PlanRead(args, AttendResult{}, block_target, nullptr);
  return LayOutScratch(nullptr, &read);
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

int LaunchAttend(const AttendPlan& plan, const AttendRead* reads, CUstream_st* stream) {
  const cudaError_t error = plan.group_size == 1   ? LaunchSplit<1>(plan, reads, stream)
                            : plan.group_size <= 4 ? LaunchSplit<4>(plan, reads, stream)
                                                   : LaunchSplit<8>(plan, reads, stream);
  if (error != cudaSuccess) return error;
  return LaunchKernel(AttendCombine, dim3(plan.group_size, plan.read_count), dim3(kBlockThreads), 0,
                      stream, reads);
}

}  // namespace certkv::cuda
