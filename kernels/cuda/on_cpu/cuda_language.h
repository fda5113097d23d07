// The part of CUDA C++ that kernels/cuda may use, for a C++ compiler without CUDA: words of the
// language, built-in variables and device functions. A kernel that uses anything else doesn't
// compile here. docs/gpu.md lists what there is; block_runner.h says how it runs.
//
// Stricter than a GPU: a warp function whose mask names a lane that has exited, or at which lanes
// meet in different functions, ends the launch with an error, and so does waiting for ever.
// Not covered: inline PTX, asynchronous copies, tensor cores, clusters, fences and the memory order
// between blocks, textures, timing.
#ifndef CERTKV_KERNELS_CUDA_ON_CPU_CUDA_LANGUAGE_H_
#define CERTKV_KERNELS_CUDA_ON_CPU_CUDA_LANGUAGE_H_

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cuda/on_cpu/block_runner.h"
#include "kernels/cuda/on_cpu/directed_rounding.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
  uint32_t x, y, z;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
  constexpr dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// Of the thread that runs, set when its turn begins. Never written by a kernel.
inline constinit thread_local uint3 threadIdx{};
inline constinit thread_local uint3 blockIdx{};
inline constinit thread_local dim3 blockDim{};
inline constinit thread_local dim3 gridDim{};
inline constexpr int warpSize = 32;

namespace certkv::cuda_on_cpu {

template <typename T>
uint64_t BitsOf(T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(value));
  return bits;
}

// Each lane brings `value` and takes that of the lane `source_of` its own; its own when that lane
// isn't in the mask (a GPU gives an undefined value).
template <typename T, typename SourceOf>
T Shuffle(uint32_t mask, T value, SourceOf source_of) {
  const WarpValues& values = ArriveInWarp(Collective::kShuffle, mask, BitsOf(value));
  const auto source = static_cast<uint32_t>(source_of(static_cast<int>(LaneIndex())));
  T taken = value;
  if (source < kWarpLanes && (values.arrived >> source & 1) != 0) {
    std::memcpy(&taken, &values.value[source], sizeof(taken));
  }
  LeaveWarp();
  return taken;
}

template <typename T, typename Change>
T ReadModifyWrite(T* address, Change change) {
  const std::atomic_ref<T> word(*address);
  T seen = word.load(std::memory_order_relaxed);
  while (!word.compare_exchange_weak(seen, change(seen), std::memory_order_relaxed)) {
  }
  return seen;
}

}  // namespace certkv::cuda_on_cpu

// ---- Synchronization.
inline void __syncthreads() { certkv::cuda_on_cpu::SyncThreads(); }
inline void __syncwarp(unsigned mask = ~0u) {
  certkv::cuda_on_cpu::ArriveInWarp(certkv::cuda_on_cpu::Collective::kSyncWarp, mask, 0);
  certkv::cuda_on_cpu::LeaveWarp();
}

// ---- Warp shuffles. `width` is a power of two; lanes exchange within groups of it.
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize) {
  return certkv::cuda_on_cpu::Shuffle(
      mask, value, [=](int own) { return (own & ~(width - 1)) | (lane & (width - 1)); });
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = warpSize) {
  return certkv::cuda_on_cpu::Shuffle(mask, value, [=](int own) {
    const int other = own ^ bits;
    return (other & ~(width - 1)) <= (own & ~(width - 1)) ? other : own;
  });
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = warpSize) {
  return certkv::cuda_on_cpu::Shuffle(mask, value, [=](int own) {
    const int within = (own & (width - 1)) + static_cast<int>(distance);
    return within < width ? own + static_cast<int>(distance) : own;
  });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = warpSize) {
  return certkv::cuda_on_cpu::Shuffle(mask, value, [=](int own) {
    const int within = (own & (width - 1)) - static_cast<int>(distance);
    return within >= 0 ? own - static_cast<int>(distance) : own;
  });
}

// ---- Warp votes.
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  namespace on_cpu = certkv::cuda_on_cpu;
  const on_cpu::WarpValues& values =
      on_cpu::ArriveInWarp(on_cpu::Collective::kVote, mask, predicate != 0 ? 1 : 0);
  unsigned votes = 0;
  for (unsigned lane = 0; lane < on_cpu::kWarpLanes; ++lane) {
    if ((values.arrived >> lane & 1) != 0 && values.value[lane] != 0) votes |= 1u << lane;
  }
  on_cpu::LeaveWarp();
  return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate == 0 ? 1 : 0) == 0;
}

// ---- Atomics, relaxed as CUDA's are.
template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return certkv::cuda_on_cpu::ReadModifyWrite(address, [=](T seen) { return seen + value; });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return certkv::cuda_on_cpu::ReadModifyWrite(address,
                                              [=](T seen) { return seen < value ? value : seen; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>);
  return certkv::cuda_on_cpu::ReadModifyWrite(address,
                                              [=](T seen) { return value < seen ? value : seen; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return certkv::cuda_on_cpu::ReadModifyWrite(address, [=](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::type_identity_t<T> expected, std::type_identity_t<T> value) {
  return certkv::cuda_on_cpu::ReadModifyWrite(
      address, [=](T seen) { return seen == expected ? value : seen; });
}

// ---- Bits.
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline int __popc(unsigned bits) { return std::popcount(bits); }

#endif  // CERTKV_KERNELS_CUDA_ON_CPU_CUDA_LANGUAGE_H_
