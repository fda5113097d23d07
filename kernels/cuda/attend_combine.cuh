// The splits of one head put together: sums to one reference, the sink, the rotation back, and the
// bounds of the whole read. One block does one head.
//
// Rounding term, u = 2^-24, U units in a split and S splits. An element of the output is off by
// under N u of sum p^ ||v^|| in norm, N = 5 U + 2 S + 64: what attend_values.cuh counts (20 + 4 U),
// S additions here, 10 of the rotation (8 stages, its factor twice), the sum of both kinds of
// values, the quotient, and the mass's own U + S + 20. With N u <= 2^-10 its higher powers are
// below 2^-10 of it. Values that weighed too little (kAbsentExponent): 2^24 * 2^-100 of a mass of
// at least 1/2, times ||v^||. What became subnormal: 2^-150 an operation, under 2^-120 in all.
#ifndef CERTKV_KERNELS_CUDA_ATTEND_COMBINE_CUH_
#define CERTKV_KERNELS_CUDA_ATTEND_COMBINE_CUH_

#include "kernels/cuda/attend_block.cuh"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/float_math.cuh"

namespace certkv::cuda {

// What the splits' sums are scaled by: 1 / 2^ref, and the sink's weight.
struct HeadSums {
  float ref;
  float mass;
  float eta;
  float reach;
  bool is_known;
};

__device__ inline HeadSums SumSplits(const AttendRead& read, int g, float sink, float* scratch) {
  const int group_size = read.args.group_size;
  const auto larger = [](float a, float b) { return fmaxf(a, b); };
  const auto sum = [](float a, float b) { return a + b; };
  const auto sum_up = [](float a, float b) { return __fadd_ru(a, b); };
  float ref = kRefNone;
  for (int s = ThreadIndex(); s < read.split_count; s += kBlockThreads) {
    ref = fmaxf(ref, read.split_ref[s * group_size + g]);
  }
  const float sink_ref = sink == -kInfinity ? kRefNone : ceilf(sink * kLog2E);
  HeadSums head{};
  head.ref = fmaxf(BlockReduce(scratch, ref, larger), sink_ref);
  float mass = 0;
  float eta = 0;
  float reach = 0;
  float unknown = 0;
  for (int s = ThreadIndex(); s < read.split_count; s += kBlockThreads) {
    const int64_t place = int64_t{s} * group_size + g;
    const float split_mass = read.split_mass[place];
    if (!(split_mass < kInfinity)) unknown = 1;
    const float factor = PowerOfTwo(read.split_ref[place] - head.ref);
    mass += split_mass < kInfinity ? split_mass * factor : 0.0f;
    eta = __fadd_ru(eta, ScaleBound(read.split_eta[place], factor));
    reach = __fadd_ru(reach, ScaleBound(read.split_reach[place], factor));
  }
  head.mass = BlockReduce(scratch, mass, sum);
  head.eta = BlockReduce(scratch, eta, sum_up);
  head.reach = BlockReduce(scratch, reach, sum_up);
  head.is_known = BlockReduce(scratch, unknown, larger) == 0;
  if (sink_ref > kRefNone) {
    // In double: the sink's atom has no half-width that could hold a rounding.
    constexpr double kLog2EDouble = 0x1.71547652b82fep+0;
    const double exponent = static_cast<double>(sink) * kLog2EDouble - head.ref;
    if (exponent > -200) head.mass += static_cast<float>(exp2(exponent));
  }
  head.is_known = head.is_known && head.mass > 0;
  return head;
}

// The format's rotation in place, its own inverse: orthonormal Hadamard matrices on blocks of
// powers of two.
__device__ inline void RotateBack(float* values, int dim) {
  for (int begin = 0; begin < dim;) {
    int n = 16;
    while (2 * n <= dim - begin) n *= 2;
    float* const block = values + begin;
    for (int h = 1; h < n; h *= 2) {
      for (int pair = ThreadIndex(); pair < n / 2; pair += kBlockThreads) {
        const int i = pair / h * 2 * h + pair % h;
        const float a = block[i];
        const float b = block[i + h];
        block[i] = a + b;
        block[i + h] = a - b;
      }
      __syncthreads();
    }
    const float factor = static_cast<float>(1.0 / sqrt(static_cast<double>(n)));
    for (int i = ThreadIndex(); i < n; i += kBlockThreads) block[i] *= factor;
    begin += n;
  }
  __syncthreads();
}

__device__ inline void WriteOutput(const AttendRead& read, int g, const HeadSums& head,
                                   float* rotated) {
  const int value_dim = read.layout.value_dim;
  const int64_t heads = read.args.group_size;
  const bool has_rotated = HasRotatedValues(read.layout);
  float plain[kHeadDimMax / kBlockThreads] = {};
  for (int k = 0; k * kBlockThreads + ThreadIndex() < value_dim; ++k) {
    const int channel = k * kBlockThreads + ThreadIndex();
    float rotated_sum = 0;
    for (int s = 0; s < read.split_count; ++s) {
      const int64_t row = (s * heads + g) * value_dim + channel;
      const float factor = PowerOfTwo(read.split_ref[s * heads + g] - head.ref);
      plain[k] = fmaf(read.split_plain[row], factor, plain[k]);
      if (has_rotated) rotated_sum = fmaf(read.split_rotated[row], factor, rotated_sum);
    }
    rotated[channel] = rotated_sum;
  }
  __syncthreads();
  if (has_rotated) RotateBack(rotated, value_dim);
  for (int k = 0; k * kBlockThreads + ThreadIndex() < value_dim; ++k) {
    const int channel = k * kBlockThreads + ThreadIndex();
    read.result.outputs[g * value_dim + channel] =
        head.is_known ? (rotated[channel] + plain[k]) / head.mass : 0.0f;
  }
}

__device__ inline float RoundingTerm(const AttendRead& read, const HeadSums& head, float norm) {
  const int count = 5 * read.units_per_split + 2 * read.split_count + 64;
  const float relative = __fmul_ru(static_cast<float>(count), 0x1p-24f * (1 + 0x1p-9f));
  const float absent = __fmaf_ru(norm, 0x1p-75f, 0x1p-120f);
  return __fmul_ru(__fdiv_ru(__fmaf_ru(relative, head.reach, absent), head.mass), 1 + 0x1p-10f);
}

// A bound of the weights divided by their mass; 2^-10 pays for the roundings of both.
__device__ inline float DivideBound(float bound, float mass) {
  return bound < kInfinity ? __fmul_ru(__fdiv_ru(bound, mass), 1 + 0x1p-10f) : kInfinity;
}

// Atoms and tiles that no unit has written: those outside the range, and the sink.
__device__ inline void WriteUntouched(const AttendRead& read, int g, float sink) {
  const AttendResult& result = read.result;
  const int atoms_per_tile = read.has_sub_block_atoms ? kSubBlocksPerTile : 1;
  for (int atom = ThreadIndex(); atom < read.atom_count; atom += kBlockThreads) {
    const bool is_sink = atom == read.atom_count - 1;
    const int tile = atom / atoms_per_tile;
    const int chunk = atom - read.first_tail_atom;
    const bool is_touched = chunk < 0 ? tile >= read.tile_begin && tile < read.tile_end
                                      : chunk >= read.chunk_begin && chunk < read.chunk_end;
    if (is_touched && !is_sink) continue;
    const int64_t place = int64_t{g} * read.atom_count + atom;
    result.block_lse[place] = is_sink ? sink : -kInfinity;
    result.block_max_logit[place] = is_sink ? sink : -kInfinity;
    result.logit_half_width[place] = 0;
    if (result.top_half_width != nullptr) result.top_half_width[place] = 0;
  }
}

__device__ inline void FinishTiles(const AttendRead& read, int g, const HeadSums& head) {
  for (int tile = ThreadIndex(); tile < read.args.tile_count; tile += kBlockThreads) {
    const int64_t place = int64_t{g} * read.args.tile_count + tile;
    float* const error = read.result.tile_value_error + place;
    if (tile < read.tile_begin || tile >= read.tile_end) {
      *error = 0;
    } else if (!head.is_known) {
      *error = kInfinity;
    } else {
      *error =
          DivideBound(ScaleBound(*error, PowerOfTwo(read.tile_ref[place] - head.ref)), head.mass);
    }
  }
}

__device__ inline void CombineHead(const AttendRead& read, int g, float* scratch, float* rotated) {
  const float sink = read.args.sink_logits == nullptr ? -kInfinity : read.args.sink_logits[g];
  const auto larger = [](float a, float b) { return fmaxf(a, b); };
  const HeadSums head = SumSplits(read, g, sink, scratch);
  float radius = 0;
  float norm = 0;
  for (int s = ThreadIndex(); s < read.radius_count; s += kBlockThreads) {
    radius = fmaxf(radius, read.split_radius[s]);
  }
  for (int s = ThreadIndex(); s < read.split_count; s += kBlockThreads) {
    norm = fmaxf(norm, read.split_norm[s]);
  }
  radius = BlockReduce(scratch, radius, larger);
  norm = BlockReduce(scratch, norm, larger);
  if (ThreadIndex() == 0) {
    const AttendResult& result = read.result;
    result.lse_nat[g] = head.is_known ? fmaf(head.ref, kLn2, LogNat(head.mass)) : kInfinity;
    result.value_term[g] = head.is_known ? DivideBound(head.eta, head.mass) : kInfinity;
    result.rounding_term[g] = head.is_known ? RoundingTerm(read, head, norm) : kInfinity;
    if (g == 0) result.value_radius[0] = radius;
  }
  // What a progressive read doesn't touch is written by its choices.
  if (read.first_tile_atom == 0) {
    WriteUntouched(read, g, sink);
    FinishTiles(read, g, head);
  }
  if (read.result.outputs != nullptr) WriteOutput(read, g, head, rotated);
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_ATTEND_COMBINE_CUH_
