// From one head's atoms as reported to the points of finish_search.cuh.
//
// delta of an atom: what its reported mass may be off by (BlockLseSlackNat), and 2^-21 for the
// weight W that stands for it: exp in double, one rounding to float, and one of its bin's sum. The
// steps of kernels/reference/finish_certificate.cc then hold for the distribution of W with boxes
// c + delta: sum W (e^delta - 1) / sum W is added, and e^delta - 1 <= delta + delta^2 for delta <=
// 1.
//
// More than kFinishExactAtomsMax atoms go into bins of c + delta, each at its upper edge, which
// only widens its box; 128 bins an octave cost under 0.8 % of it. A bin's mass is an integer in
// units of u = 2^-42 of the largest atom's, so that the order of its atoms doesn't matter. An
// atom's mass is rounded up to it. With masses m, largest 1, and e <= u more for each of A atoms,
// for every set S
//   N / (N + D) - P / M <= N' / (N' + D') - P' / M' + A u (1 + e^cL),
// cL the box of the atom of mass 1: N' >= N, D' <= D + A u, N + D >= e^-cL, and P' / M' <= P / M +
// A u. kUnitPrice of it is added.
#ifndef CERTKV_KERNELS_CUDA_FINISH_MASSES_CUH_
#define CERTKV_KERNELS_CUDA_FINISH_MASSES_CUH_

#include "kernels/cuda/finish.h"
#include "kernels/cuda/finish_search.cuh"
#include "kernels/ops/attend.h"

namespace certkv::cuda {

inline constexpr float kMassSlackNat = 0x1p-21f;
// Of masses below 2^-126 of the largest, which are raised to it, and of what kernels clamp.
inline constexpr float kClampedShare = 0x1p-40f;
// Above it nothing is said: e^delta - 1 would be no small number.
inline constexpr float kDeltaMaxNat = 0.25f;
// Wider boxes are unbounded. Attend reports none above kLogitHalfWidthMaxNat, and kClampedShare
// rests on that.
inline constexpr float kBoxMaxNat = kLogitHalfWidthMaxNat + 1;
inline constexpr double kUnitsPerMass = 0x1p42;
inline constexpr float kMassUnit = 0x1p-42f;
inline constexpr uint32_t kFirstEdgeBits = 0x38800000;  // 2^-14, the smallest delta
inline constexpr int kEdgeShift = 16;                   // 128 edges an octave
inline constexpr int kBinsPerThread = 19;
inline constexpr int kBins = kBinsPerThread * kBlockThreads;  // to 2^5 nats

struct HeadAtoms {
  const float* lse;
  const float* max_logit;
  const float* half_width;
  const float* top_half_width;  // or null
  int count;
  int sink;
};

__device__ inline float KnownBound(float bound) { return bound >= 0 ? bound : kInfinity; }
__device__ inline float ExpUp(float x) {
  return __double2float_ru(exp(static_cast<double>(x)) * (1 + 0x1p-40));
}
__device__ inline float ExpDown(float x) {
  return __double2float_rd(exp(static_cast<double>(x)) * (1 - 0x1p-40));
}
// >= e^delta - 1.
__device__ inline float GrowthOf(float delta) { return __fmaf_ru(delta, delta, delta); }

__device__ inline float ReportedSlack(float logit) {
  return logit == -kInfinity ? 0.0f : __fmaf_ru(fabsf(logit), 0x1p-22f, 0x1p-14f);
}

// One atom that isn't empty.
struct Atom {
  double mass;  // relative to the largest, at least 2^-126
  float delta;
  float box;  // c + delta; +infinity: unbounded
};

__device__ inline Atom AtomAt(const HeadAtoms& atoms, int j, float largest_lse) {
  Atom atom;
  const double distance = static_cast<double>(atoms.lse[j]) - largest_lse;
  atom.mass = fmax(exp(distance), 0x1p-126);
  // fmaxf: a maximum that is NaN says nothing.
  atom.delta = __fadd_ru(fmaxf(ReportedSlack(atoms.lse[j]), ReportedSlack(atoms.max_logit[j])),
                         kMassSlackNat);
  const float box = __fadd_ru(KnownBound(atoms.half_width[j]), atom.delta);
  atom.box = box <= kBoxMaxNat ? box : kInfinity;
  return atom;
}

__device__ inline bool IsEmpty(const HeadAtoms& atoms, int j) { return atoms.lse[j] == -kInfinity; }

// The edge that stands for a box in bins.
__device__ inline int BinOf(float box) {
  const uint32_t above = __float_as_uint(box) - kFirstEdgeBits + ((1u << kEdgeShift) - 1);
  return static_cast<int>(above >> kEdgeShift);
}
__device__ inline float EdgeOfBin(int bin) {
  return __uint_as_float(kFirstEdgeBits + (static_cast<uint32_t>(bin) << kEdgeShift));
}

// What all atoms of a head say together.
struct HeadMasses {
  float largest_lse;
  bool is_known;      // no lse is NaN or +infinity, and one atom isn't empty
  bool is_unbounded;  // an atom has no finite box, or a mass is too uncertain
  float loss;         // sum of W (e^delta - 1), rounded up
  float leading_box;  // of an atom of mass 1
  double kept;        // <= sum of mass * e^-box; 0 where nothing is skipped
};

// Scratch of a block, in shared memory.
struct FinishScratch {
  float floats[kBlockThreads];
  double doubles[kBlockThreads];
  uint64_t keys[kWarps];
  HeavyToken heavy[kTvHeavyTokensMax];
};

__device__ inline void SetPoint(const TvProblem& problem, int n, float weight, float box) {
  problem.weight[n] = weight;
  problem.grown[n] = ExpUp(box);
  problem.shrunk[n] = ExpUp(-box);
}

// Reads all atoms; fills the points, or, where `bins` isn't null, the bins, which were zero.
__device__ inline HeadMasses LoadAtoms(const HeadAtoms& atoms, bool has_skipped,
                                       const TvProblem& problem, uint64_t* bins,
                                       FinishScratch* scratch) {
  const auto larger = [](float a, float b) { return fmaxf(a, b); };
  const auto smaller = [](float a, float b) { return fminf(a, b); };
  const auto sum_up = [](float a, float b) { return __fadd_ru(a, b); };
  HeadMasses masses{};
  float largest = -kInfinity;
  float unknown = 0;
  for (int j = ThreadIndex(); j < atoms.count; j += kBlockThreads) {
    if (!(atoms.lse[j] < kInfinity)) unknown = 1;
    largest = fmaxf(largest, atoms.lse[j]);
  }
  masses.largest_lse = BlockReduce(scratch->floats, largest, larger);
  unknown = BlockReduce(scratch->floats, unknown, larger);
  masses.is_known = unknown == 0 && masses.largest_lse > -kInfinity;
  if (!masses.is_known) return masses;
  float unbounded = 0;
  float loss = 0;
  float leading_box = kInfinity;
  double kept = 0;
  for (int j = ThreadIndex(); j < atoms.count; j += kBlockThreads) {
    if (IsEmpty(atoms, j)) {
      if (bins == nullptr) SetPoint(problem, j, 0, 0);
      continue;
    }
    const Atom atom = AtomAt(atoms, j, masses.largest_lse);
    if (!(atom.box < kInfinity) || !(atom.delta <= kDeltaMaxNat)) {
      unbounded = 1;
      if (bins == nullptr) SetPoint(problem, j, 0, 0);
      continue;
    }
    loss = __fmaf_ru(__double2float_ru(atom.mass), GrowthOf(atom.delta), loss);
    if (atoms.lse[j] == masses.largest_lse) leading_box = fminf(leading_box, atom.box);
    if (has_skipped) kept += atom.mass * exp(-static_cast<double>(atom.box));
    if (bins == nullptr) {
      SetPoint(problem, j, static_cast<float>(atom.mass), atom.box);
    } else {
      // unsigned long long is what CUDA's atomics take.
      atomicAdd(reinterpret_cast<unsigned long long*>(bins + BinOf(atom.box)),
                static_cast<unsigned long long>(ceil(atom.mass * kUnitsPerMass)));
    }
  }
  masses.is_unbounded = BlockReduce(scratch->floats, unbounded, larger) != 0;
  masses.loss = BlockReduce(scratch->floats, loss, sum_up);
  masses.leading_box = BlockReduce(scratch->floats, leading_box, smaller);
  if (has_skipped) {
    masses.kept = BlockReduce(scratch->doubles, kept, [](double a, double b) { return a + b; });
  }
  return masses;
}

// Points from the bins that aren't empty, in order. Returns how many there are.
__device__ inline int PointsOfBins(const uint64_t* bins, const TvProblem& problem,
                                   FinishScratch* scratch) {
  const int first = ThreadIndex() * kBinsPerThread;
  int own = 0;
  for (int n = first; n < first + kBinsPerThread; ++n) own += bins[n] != 0 ? 1 : 0;
  scratch->floats[ThreadIndex()] = static_cast<float>(own);  // exact
  __syncthreads();
  int place = 0;
  int count = 0;
  for (int n = 0; n < kBlockThreads; ++n) {
    if (n == ThreadIndex()) place = count;
    count += static_cast<int>(scratch->floats[n]);
  }
  for (int n = first; n < first + kBinsPerThread; ++n) {
    if (bins[n] == 0) continue;
    SetPoint(problem, place++, static_cast<float>(bins[n]) * kMassUnit, EdgeOfBin(n));
  }
  __syncthreads();
  return count;
}

// M, Z and sum of W e^c of the points and the heavy tokens.
__device__ inline void SumPoints(TvProblem* problem, FinishScratch* scratch) {
  const auto sum_up = [](float a, float b) { return __fadd_ru(a, b); };
  const auto sum_down = [](float a, float b) { return __fadd_rd(a, b); };
  float up = 0;
  float down = 0;
  float shrunk = 0;
  float grown = 0;
  for (int n = ThreadIndex(); n < problem->point_count; n += kBlockThreads) {
    up = __fadd_ru(up, problem->weight[n]);
    down = __fadd_rd(down, problem->weight[n]);
    grown = __fmaf_ru(problem->weight[n], problem->grown[n], grown);
    // Stored rounded up, by less than 2^-22 of it.
    const float below = __fmul_rd(problem->shrunk[n], 1 - 0x1p-22f);
    shrunk = __fadd_rd(shrunk, __fmul_rd(problem->weight[n], below));
  }
  problem->mass_up = BlockReduce(scratch->floats, up, sum_up);
  problem->mass_down = BlockReduce(scratch->floats, down, sum_down);
  problem->grown_total = BlockReduce(scratch->floats, grown, sum_up);
  problem->shrunk_total = BlockReduce(scratch->floats, shrunk, sum_down);
  for (int k = 0; k < problem->heavy_count; ++k) {
    problem->mass_up = __fadd_ru(problem->mass_up, problem->heavy[k].mass);
    problem->mass_down = __fadd_rd(problem->mass_down, problem->heavy[k].mass);
  }
}

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_FINISH_MASSES_CUH_
