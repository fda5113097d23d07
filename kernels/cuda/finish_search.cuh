// TV* of points and heavy tokens from above, by a block: the relaxation of docs/bounds.md, section
// 3, searched by branch and bound.
//
// With points of mass W at half-width c, of total mass M with the heavy tokens, some of which are
// in S (N_A, P_A) and the others out of it (D_A), for every share r and every multiplier l >= 0
//   M (r - P_min(r)) <= F(l, r) = r M - P_A - l (r (D_A + Z) - (1 - r) N_A)
//                                 + sum W (l h_r - 1)^+,   h_r = (1 - r) e^c + r e^-c,  Z = sum W
//                                 e^-c.
// For a fixed l every term is convex in r, so on a cell low <= r <= high
//   max F(l, .) = max(F(l, low), F(l, high)),
// whatever l is: a poor one costs tightness only. Every thread bounds one cell, with the multiplier
// that is best at its middle. The cells with the largest bounds are cut into 32, until the largest
// is near a value that was seen. All heavy tokens' places are in one search: a cell has its own.
//
// Rounding: W are floats that are what they are (finish_masses.cuh); everything computed from them
// here is rounded in the direction that makes F larger, by intrinsics.
#ifndef CERTKV_KERNELS_CUDA_FINISH_SEARCH_CUH_
#define CERTKV_KERNELS_CUDA_FINISH_SEARCH_CUH_

#include "kernels/bounds/worst_case_tv.h"
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/float_math.cuh"

namespace certkv::cuda {

inline constexpr int kCellsMax = 1024;
inline constexpr int kCellsCut = 4;
inline constexpr int kCellParts = kBlockThreads / kCellsCut;
inline constexpr int kSearchRoundsMax = 7;
static_assert(kBlockThreads + (kSearchRoundsMax - 1) * (kBlockThreads - kCellsCut) <= kCellsMax);
// How far a bound may stay above what was seen, in shares of the mass; as on the CPU.
inline constexpr float kSearchGap = 2.5e-4f;
// Halvings of the multiplier's range: to 2^-14 of its logarithm.
inline constexpr int kMultiplierSteps = 14;
// Terms that are summed before they are added to others, so that rounding up costs 2^-23 of 64
// terms and not of all.
inline constexpr int kSumRun = 64;

// A token that is set apart.
struct HeavyToken {
  float mass;
  float grown;   // mass * e^c, rounded up
  float shrunk;  // mass * e^-c, rounded down
};

// What is searched; arrays in shared memory.
struct TvProblem {
  float* weight;  // [point_count] W
  float* grown;   // [point_count] e^c, rounded up
  float* shrunk;  // [point_count] e^-c, rounded up
  int point_count;
  HeavyToken* heavy;  // [heavy_count]
  int heavy_count;
  float grown_total;   // sum of W e^c, rounded up
  float shrunk_total;  // Z, rounded down
  float mass_up;       // M, rounded up
  float mass_down;     // M, rounded down
};

// Cells of the search; in shared memory.
struct TvCells {
  float low[kCellsMax];
  float high[kCellsMax];
  float bound[kCellsMax];
  uint8_t in_set[kCellsMax];  // bit k: heavy token k is in S
  int cut[kCellsCut];
  float seen[kWarps];
  float result;
  bool is_done;
};

struct TvFixed {
  float grown;    // N_A, rounded up
  float outside;  // D_A, rounded down
  float shrunk;   // D_A + Z, rounded down
  float mass;     // P_A, rounded down
};

__device__ inline TvFixed FixTokens(const TvProblem& problem, uint32_t in_set) {
  TvFixed fixed{0, 0, 0, 0};
  for (int k = 0; k < problem.heavy_count; ++k) {
    const HeavyToken& token = problem.heavy[k];
    if ((in_set >> k & 1) != 0) {
      fixed.grown = __fadd_ru(fixed.grown, token.grown);
      fixed.mass = __fadd_rd(fixed.mass, token.mass);
    } else {
      fixed.outside = __fadd_rd(fixed.outside, token.shrunk);
    }
  }
  fixed.shrunk = __fadd_rd(fixed.outside, problem.shrunk_total);
  return fixed;
}

// The share that S has with every point in it, rounded up: none above it is reached.
__device__ inline float LargestShare(const TvProblem& problem, const TvFixed& fixed) {
  const float grown = __fadd_ru(fixed.grown, problem.grown_total);
  if (!(grown > 0)) return 0;
  return fminf(__fdiv_ru(grown, __fadd_rd(grown, fixed.outside)), 1);
}

// F(multiplier, share), rounded up.
__device__ inline float TvValue(const TvProblem& problem, const TvFixed& fixed, float multiplier,
                                float share) {
  const float rest = __fadd_ru(1, -share);
  float sum = 0;
  for (int first = 0; first < problem.point_count; first += kSumRun) {
    const int end = first + kSumRun < problem.point_count ? first + kSumRun : problem.point_count;
    float run = 0;
    for (int j = first; j < end; ++j) {
      const float height = __fmaf_ru(rest, problem.grown[j], __fmul_ru(share, problem.shrunk[j]));
      const float gain = __fmaf_ru(multiplier, height, -1);
      if (gain > 0) run = __fmaf_ru(problem.weight[j], gain, run);
    }
    sum = __fadd_ru(sum, run);
  }
  // A lower bound on what the multiplier takes off.
  const float needed = __fadd_rd(__fmul_rd(share, fixed.shrunk), -__fmul_ru(rest, fixed.grown));
  const float value = __fadd_ru(__fmul_ru(share, problem.mass_up), -fixed.mass);
  return __fadd_ru(__fadd_ru(value, __fmul_ru(multiplier, -needed)), sum);
}

// The multiplier at which F(., share) is about smallest: 1 / h of the point at which the points
// above it no longer suffice. Its precision is nobody's promise, so it is ordinary arithmetic.
__device__ inline float BestMultiplier(const TvProblem& problem, const TvFixed& fixed,
                                       float share) {
  const float rest = 1 - share;
  const float needed = share * fixed.shrunk - rest * fixed.grown;
  if (!(needed > 0) || problem.point_count == 0) return 0;
  const auto height = [&](int j) {
    return fmaf(rest, problem.grown[j], share * problem.shrunk[j]);
  };
  float low = kInfinity;
  float high = 0;
  for (int j = 0; j < problem.point_count; ++j) {
    low = fminf(low, height(j));
    high = fmaxf(high, height(j));
  }
  // So that all of them are above it: where all don't suffice the share can't be reached.
  low *= 1 - 0x1p-20f;
  for (int step = 0; step < kMultiplierSteps; ++step) {
    const float middle = sqrtf(low * high);
    float sum = 0;
    for (int j = 0; j < problem.point_count; ++j) {
      const float own = height(j);
      sum = own > middle ? fmaf(problem.weight[j], own, sum) : sum;
    }
    if (sum >= needed) {
      low = middle;
    } else {
      high = middle;
    }
  }
  float own = low;
  for (int j = 0; j < problem.point_count; ++j) {
    if (height(j) <= high) own = fmaxf(own, height(j));
  }
  return 1 / own;
}

// Bounds F on a cell of the thread's own; raises `seen` to a value inside it.
__device__ inline float BoundCell(const TvProblem& problem, uint32_t in_set, float low, float high,
                                  float* seen) {
  const TvFixed fixed = FixTokens(problem, in_set);
  const float middle = low + (high - low) / 2;
  const float multiplier = BestMultiplier(problem, fixed, middle);
  *seen = fmaxf(*seen, TvValue(problem, fixed, multiplier, middle));
  const float bound =
      fmaxf(TvValue(problem, fixed, multiplier, low), TvValue(problem, fixed, multiplier, high));
  // Multiplier 0.
  const float trivial = __fadd_ru(__fmul_ru(high, problem.mass_up), -fixed.mass);
  return bound < trivial ? bound : trivial;
}

// The cells with the largest bounds, and whether the largest is small enough. By one warp.
__device__ inline void ChooseCells(const TvProblem& problem, float enough, bool is_last,
                                   int cell_count, TvCells* cells) {
  const int lane = ThreadIndex() % 32;
  float seen = 0;
  for (int warp = 0; warp < kWarps; ++warp) seen = fmaxf(seen, cells->seen[warp]);
  for (int k = 0; k < kCellsCut; ++k) {
    // The bound's bits above the cell's number; bounds below 0 count as 0.
    uint64_t best = 0;
    for (int n = lane; n < cell_count; n += 32) {
      bool is_chosen = false;
      for (int other = 0; other < k; ++other) is_chosen = is_chosen || cells->cut[other] == n;
      // A NaN would be above everything, and make the answer 1.
      const float bound = cells->bound[n] < 0 ? 0.0f : cells->bound[n];
      const uint64_t key =
          uint64_t{__float_as_uint(bound)} << 32 | static_cast<uint32_t>(kCellsMax - n);
      if (!is_chosen && key > best) best = key;
    }
    for (int bits = 16; bits > 0; bits /= 2) {
      const uint64_t other = __shfl_xor_sync(~0u, best, bits);
      if (other > best) best = other;
    }
    const float bound = __uint_as_float(static_cast<uint32_t>(best >> 32));
    if (lane == 0) cells->cut[k] = kCellsMax - static_cast<int>(best & 0xffffffffu);
    if (k == 0 && lane == 0) {
      cells->result = bound;
      cells->is_done = is_last || bound <= fmaxf(fmaf(kSearchGap, problem.mass_down, seen), enough);
    }
    __syncwarp();
  }
}

// An upper bound on TV* times the mass. All threads of the block call it and get the result.
// `enough`: a bound, times the mass, below which none is asked for.
__device__ inline float SearchTv(const TvProblem& problem, float enough, TvCells* cells) {
  const int thread = ThreadIndex();
  const int sets = 1 << problem.heavy_count;
  int cell_count = kBlockThreads;
  float seen = 0;
  {
    const int parts = kBlockThreads / sets;
    const float last = LargestShare(problem, FixTokens(problem, thread % sets));
    const auto edge = [&](int n) {
      return n == parts ? last : last * (static_cast<float>(n) / static_cast<float>(parts));
    };
    const int part = thread / sets;
    cells->in_set[thread] = static_cast<uint8_t>(thread % sets);
    cells->low[thread] = edge(part);
    cells->high[thread] = edge(part + 1);
    cells->bound[thread] =
        BoundCell(problem, thread % sets, cells->low[thread], cells->high[thread], &seen);
  }
  for (int round = 1;; ++round) {
    const float warp_seen = WarpMax(seen, 32);
    if (thread % 32 == 0) cells->seen[thread / 32] = warp_seen;
    __syncthreads();
    if (thread < 32) {
      ChooseCells(problem, enough, round == kSearchRoundsMax, cell_count, cells);
    }
    __syncthreads();
    if (cells->is_done) break;
    const int parent = cells->cut[thread / kCellParts];
    const int part = thread % kCellParts;
    const float begin = cells->low[parent];
    const float width = cells->high[parent] - begin;
    const float parent_bound = cells->bound[parent];
    const uint8_t in_set = cells->in_set[parent];
    const auto edge = [&](int n) {
      return n == kCellParts ? begin + width : begin + width * (static_cast<float>(n) / kCellParts);
    };
    const float parent_high = cells->high[parent];
    const float low = edge(part);
    const float high = part + 1 == kCellParts ? parent_high : edge(part + 1);
    const float bound = fminf(BoundCell(problem, in_set, low, high, &seen), parent_bound);
    __syncthreads();  // everybody has read the parents
    const int own =
        part == 0 ? parent : cell_count + thread / kCellParts * (kCellParts - 1) + part - 1;
    cells->low[own] = low;
    cells->high[own] = high;
    cells->bound[own] = bound;
    cells->in_set[own] = in_set;
    cell_count += kBlockThreads - kCellsCut;
  }
  const float result = cells->result;
  __syncthreads();  // before the memory is used again
  return result;
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_FINISH_SEARCH_CUH_
