#include "bench/gpu/paged_decode.h"
#include "kernels/core/half_code.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/float_math.cuh"

namespace certkv::bench {
namespace {

using cuda::kInfinity;
using cuda::ThreadIndex;

constexpr int kThreads = 128;
constexpr int kWarpCount = kThreads / 32;

// A lane's run of a row: as many halves as fill 4 or 8 bytes.
template <int kChannels>
__device__ void LoadRow(const uint16_t* row, float* channels) {
  static_assert(kChannels == 2 || kChannels == 4);
  const uint16_t* const own = row + kChannels * (ThreadIndex() % 32);
  if constexpr (kChannels == 4) {
    const uint64_t bits = *reinterpret_cast<const uint64_t*>(own);
    for (int n = 0; n < 4; ++n) {
      channels[n] = code::F16ToFloat(static_cast<uint16_t>(bits >> (16 * n)));
    }
  } else {
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(own);
    for (int n = 0; n < 2; ++n) {
      channels[n] = code::F16ToFloat(static_cast<uint16_t>(bits >> (16 * n)));
    }
  }
}

// One softmax over what a warp, a block or a split has read.
template <int kChannels>
struct Sums {
  float max = -kInfinity;
  float mass = 0;
  float value[kChannels] = {};

  // With another one, of the same channels.
  __device__ void Join(float other_max, float other_mass, const float* other_value) {
    const float joined = fmaxf(max, other_max);
    if (joined == -kInfinity) return;
    const float own = expf(max - joined);
    const float other = expf(other_max - joined);
    mass = mass * own + other_mass * other;
    for (int n = 0; n < kChannels; ++n) value[n] = value[n] * own + other_value[n] * other;
    max = joined;
  }
};

// Grid: (splits, reads). A warp takes every fourth token.
template <int kHeads, int kChannels>
__global__ void __launch_bounds__(kThreads)
    DecodeSplit(const PagedRead* reads, int group_size, float logit_scale) {
  constexpr int kDim = 32 * kChannels;
  CERTKV_SHARED(float[kWarpCount * kHeads * (kDim + 2)], shared);
  const PagedRead& read = reads[blockIdx.y];
  const int split = static_cast<int>(blockIdx.x);
  if (split >= read.split_count) return;
  const int warp = ThreadIndex() / 32;
  const int lane = ThreadIndex() % 32;
  float query[kHeads][kChannels] = {};
  for (int g = 0; g < kHeads && g < group_size; ++g) {
    LoadRow<kChannels>(read.queries + g * kDim, query[g]);
    for (int n = 0; n < kChannels; ++n) query[g][n] *= logit_scale;
  }
  Sums<kChannels> sums[kHeads];
  const int first = split * read.pages_per_split;
  for (int page = first; page < first + read.pages_per_split && page < read.page_count; ++page) {
    for (int token = warp; token < kPageTokens; token += kWarpCount) {
      float key[kChannels];
      float value[kChannels];
      LoadRow<kChannels>(read.keys[page] + token * kDim, key);
      LoadRow<kChannels>(read.values[page] + token * kDim, value);
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        float logit = 0;
        for (int n = 0; n < kChannels; ++n) logit = fmaf(query[g][n], key[n], logit);
        sums[g].Join(cuda::WarpSum(logit, 32), 1, value);
      }
    }
  }
  for (int g = 0; g < kHeads; ++g) {
    float* const own = shared + (warp * kHeads + g) * (kDim + 2);
    for (int n = 0; n < kChannels; ++n) own[kChannels * lane + n] = sums[g].value[n];
    if (lane == 0) {
      own[kDim] = sums[g].max;
      own[kDim + 1] = sums[g].mass;
    }
  }
  __syncthreads();
  for (int g = warp; g < kHeads && g < group_size; g += kWarpCount) {
    Sums<kChannels> joined;
    for (int other = 0; other < kWarpCount; ++other) {
      const float* const from = shared + (other * kHeads + g) * (kDim + 2);
      joined.Join(from[kDim], from[kDim + 1], from + kChannels * lane);
    }
    float* const to = read.partial + (int64_t{split} * group_size + g) * (kDim + 2);
    for (int n = 0; n < kChannels; ++n) to[kChannels * lane + n] = joined.value[n];
    if (lane == 0) {
      to[kDim] = joined.max;
      to[kDim + 1] = joined.mass;
    }
  }
}

// Grid: (heads, reads). One warp.
template <int kChannels>
__global__ void __launch_bounds__(32) DecodeCombine(const PagedRead* reads, int group_size) {
  constexpr int kDim = 32 * kChannels;
  const PagedRead& read = reads[blockIdx.y];
  const auto g = static_cast<int>(blockIdx.x);
  Sums<kChannels> joined;
  for (int split = 0; split < read.split_count; ++split) {
    const float* const from = read.partial + (int64_t{split} * group_size + g) * (kDim + 2);
    joined.Join(from[kDim], from[kDim + 1], from + kChannels * ThreadIndex());
  }
  for (int n = 0; n < kChannels; ++n) {
    read.outputs[g * kDim + kChannels * ThreadIndex() + n] = joined.value[n] / joined.mass;
  }
}

template <int kHeads, int kChannels>
cudaError_t LaunchBoth(const PagedPlan& plan, const PagedRead* reads, cudaStream_t stream) {
  const cudaError_t error =
      cuda::LaunchKernel(DecodeSplit<kHeads, kChannels>, dim3(plan.split_count, plan.read_count),
                         dim3(kThreads), 0, stream, reads, plan.group_size, plan.logit_scale);
  if (error != cudaSuccess) return error;
  return cuda::LaunchKernel(DecodeCombine<kChannels>, dim3(plan.group_size, plan.read_count),
                            dim3(32), 0, stream, reads, plan.group_size);
}

}  // namespace

int LaunchPagedDecode(const PagedPlan& plan, const PagedRead* reads, CUstream_st* stream) {
  if (plan.group_size < 1 || plan.group_size > 8) return cudaErrorInvalidValue;
  const bool is_small = plan.group_size <= 4;
  if (plan.head_dim == 128) {
    return is_small ? LaunchBoth<4, 4>(plan, reads, stream) : LaunchBoth<8, 4>(plan, reads, stream);
  }
  if (plan.head_dim == 64) {
    return is_small ? LaunchBoth<4, 2>(plan, reads, stream) : LaunchBoth<8, 2>(plan, reads, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace certkv::bench
