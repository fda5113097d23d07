#include <algorithm>

#include "kernels/cuda/finish.h"
#include "kernels/cuda/finish_masses.cuh"

namespace certkv::cuda {
namespace {

// Above this a heavy token stays inside its atom, as on the CPU.
constexpr float kHeavyPriceMax = 0x1p-8f;
// Beside delta, where a heavy token is taken out of a bin: the difference is rounded by 2^-24 of
// the bin's mass, which is at most 65 times the token's, six times.
constexpr float kHeavySlackNat = 0x1p-15f;

// What a heavy token costs when it is set apart (kernels/reference/finish_certificate.cc, step 2).
__device__ float HeavyPrice(const HeadAtoms& atoms, int j, const Atom& atom) {
  if (j == atoms.sink) return 0;
  const float growth = GrowthOf(__fadd_ru(atom.delta, kHeavySlackNat));
  return __fmul_ru(__fmul_ru(2, growth), __fadd_ru(1, ExpUp(2 * atom.box)));
}

// Mass of the atom's top token where it is heavy and may be set apart; else 0.
__device__ float HeavyMass(const HeadAtoms& atoms, int j, float largest_lse, float mass_min) {
  if (IsEmpty(atoms, j)) return 0;
  const Atom atom = AtomAt(atoms, j, largest_lse);
  const auto whole = static_cast<float>(atom.mass);
  const double distance = static_cast<double>(atoms.max_logit[j]) - largest_lse;
  const float top = j == atoms.sink ? whole : fminf(static_cast<float>(exp(distance)), whole);
  // False for a maximum that is NaN.
  const bool is_heavy = top >= mass_min && HeavyPrice(atoms, j, atom) <= kHeavyPriceMax;
  return is_heavy ? top : 0.0f;
}

// The heaviest token whose key is below `last`; the key has its mass above its atom's number.
__device__ uint64_t NextHeavy(const HeadAtoms& atoms, float largest_lse, float mass_min,
                              uint64_t last, FinishScratch* scratch) {
  uint64_t best = 0;
  for (int j = ThreadIndex(); j < atoms.count; j += kBlockThreads) {
    const float mass = HeavyMass(atoms, j, largest_lse, mass_min);
    if (mass == 0) continue;
    const uint64_t key =
        uint64_t{__float_as_uint(mass)} << 32 | static_cast<uint32_t>(kFinishAtomsMax - j);
    if (key < last && key > best) best = key;
  }
  for (int bits = 16; bits > 0; bits /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, best, bits);
    if (other > best) best = other;
  }
  if (ThreadIndex() % 32 == 0) scratch->keys[ThreadIndex() / 32] = best;
  __syncthreads();
  for (int warp = 0; warp < kWarps; ++warp) {
    if (scratch->keys[warp] > best) best = scratch->keys[warp];
  }
  __syncthreads();
  return best;
}

// Sets the heaviest tokens apart, at most six. Returns the largest price of one.
__device__ float SetHeavyApart(const HeadAtoms& atoms, float largest_lse, bool has_bins,
                               TvProblem* problem, FinishScratch* scratch) {
  const float mass_min = problem->mass_down * (0.99f / 64);
  float price = 0;
  uint64_t last = ~uint64_t{0};
  while (problem->heavy_count < kTvHeavyTokensMax) {
    last = NextHeavy(atoms, largest_lse, mass_min, last, scratch);
    if (last == 0) break;
    const int j = kFinishAtomsMax - static_cast<int>(last & 0xffffffffu);
    const float mass = __uint_as_float(static_cast<uint32_t>(last >> 32));
    const Atom atom = AtomAt(atoms, j, largest_lse);
    price = fmaxf(price, HeavyPrice(atoms, j, atom));
    float box = atom.box;
    if (atoms.top_half_width != nullptr) {
      box = fminf(box, __fadd_ru(KnownBound(atoms.top_half_width[j]), atom.delta));
    }
    if (ThreadIndex() == 0) {
      scratch->heavy[problem->heavy_count] = {mass, __fmul_ru(mass, ExpUp(box)),
                                              __fmul_rd(mass, ExpDown(-box))};
    }
    const float grown = ExpUp(has_bins ? EdgeOfBin(BinOf(atom.box)) : atom.box);
    for (int n = ThreadIndex(); n < problem->point_count; n += kBlockThreads) {
      // Edges differ by more than the rounding of e^c.
      const bool is_own = has_bins ? problem->grown[n] == grown : n == j;
      if (is_own) problem->weight[n] = fmaxf(problem->weight[n] - mass, 0);
    }
    ++problem->heavy_count;
  }
  __syncthreads();
  return price;
}

// u of kernels/bounds/skipping.h, rounded up.
__device__ float SkippedShareOf(float skipped_lse_nat, const HeadMasses& masses) {
  if (skipped_lse_nat == -kInfinity) return 0;
  // An unbounded atom adds nothing to what was kept.
  if (!masses.is_known || !(masses.kept > 0) || !(skipped_lse_nat < kInfinity)) return 1;
  const double kept = masses.largest_lse + log(masses.kept * (1 - 0x1p-20));
  const double share = 1 / (1 + exp(kept - skipped_lse_nat));
  const float rounded = __double2float_ru(share * (1 + 0x1p-18));
  return rounded <= 1 ? fmaxf(rounded, 0x1p-126f) : 1.0f;
}

// The largest bound whose mixture with what was skipped is within the tolerance; about, because it
// only says when to stop.
__device__ float TvLeft(float tv_tolerance, float skipped_share) {
  if (!(tv_tolerance <= 1) || !(skipped_share < tv_tolerance)) return 0;
  return (tv_tolerance - skipped_share) / (1 - skipped_share) * (1 - 0x1p-20f);
}

// A bound on TV(p, p^) of what was read.
__device__ float BoundHead(const HeadAtoms& atoms, const HeadMasses& masses, uint64_t* bins,
                           float tv_tolerance, TvProblem* problem, TvCells* cells,
                           FinishScratch* scratch) {
  if (!masses.is_known || masses.is_unbounded) return 1;
  problem->point_count = bins == nullptr ? atoms.count : PointsOfBins(bins, *problem, scratch);
  __syncthreads();
  SumPoints(problem, scratch);
  float rounding = __fadd_ru(kClampedShare, __fdiv_ru(masses.loss, problem->mass_down));
  if (bins != nullptr) {
    const float units = __fmul_ru(static_cast<float>(atoms.count), kMassUnit);
    rounding = __fmaf_ru(units, __fadd_ru(1, ExpUp(masses.leading_box)), rounding);
  }
  const float mass = problem->mass_down;
  const float enough = tv_tolerance - rounding;
  float bound = __fdiv_ru(SearchTv(*problem, enough * mass, cells), mass);
  if (!(bound <= enough)) {
    const float price = SetHeavyApart(atoms, masses.largest_lse, bins != nullptr, problem, scratch);
    if (problem->heavy_count > 0) {
      SumPoints(problem, scratch);
      const float apart = SearchTv(*problem, (enough - price) * problem->mass_down, cells);
      bound = fminf(bound, __fadd_ru(__fdiv_ru(apart, problem->mass_down), price));
    }
  }
  return fminf(__fadd_ru(bound, rounding), 1);
}

__device__ void WriteCertificate(const FinishRead& read, int g, bool is_known, float skipped_share,
                                 float tv) {
  Certificate certificate;
  // u + (1 - u) tv; 1 - u is rounded to nearest, which 2^-50 pays for.
  const double mixed = skipped_share + (1.0 - skipped_share) * tv;
  certificate.worst_case_tv =
      skipped_share > 0 ? fminf(__double2float_ru(mixed * (1 + 0x1p-50)), 1) : tv;
  certificate.skipped_share = skipped_share;
  certificate.value_term = KnownBound(read.value_term[g]);
  certificate.value_radius = KnownBound(read.value_radius[0]);
  const float key_term =
      certificate.value_radius < kInfinity
          ? __fmul_ru(__fmul_ru(2, certificate.worst_case_tv), certificate.value_radius)
          : kInfinity;
  const float terms =
      __fadd_ru(__fadd_ru(certificate.value_term, key_term), KnownBound(read.rounding_term[g]));
  certificate.output_error_bound = is_known ? terms : kInfinity;
  read.certificates[g] = certificate;
}

// Grid: (heads, reads).
__global__ void __launch_bounds__(kBlockThreads) Finish(const FinishRead* reads, int point_max) {
  CERTKV_DYNAMIC_SHARED(bytes);
  CERTKV_SHARED(FinishScratch, scratch);
  const FinishRead& read = reads[blockIdx.y];
  const int g = static_cast<int>(blockIdx.x);
  if (g >= read.group_size) return;
  const int64_t row = int64_t{g} * read.atom_stride;
  HeadAtoms atoms{};
  atoms.lse = read.block_lse + row;
  atoms.max_logit = read.block_max_logit + row;
  atoms.half_width = read.logit_half_width + row;
  if (read.top_half_width != nullptr) atoms.top_half_width = read.top_half_width + row;
  atoms.count = read.atom_counts == nullptr ? read.atom_stride : read.atom_counts[g];
  atoms.sink = read.sink_index;

  TvProblem problem{};
  problem.weight = reinterpret_cast<float*>(bytes);
  problem.grown = problem.weight + point_max;
  problem.shrunk = problem.grown + point_max;
  problem.heavy = scratch.heavy;
  // The bins are done with before the cells are used.
  unsigned char* const rest = bytes + 3 * sizeof(float) * point_max;
  auto* const cells = reinterpret_cast<TvCells*>(rest);
  uint64_t* bins = nullptr;
  if (atoms.count > kFinishExactAtomsMax) {
    bins = reinterpret_cast<uint64_t*>(rest);
    for (int n = ThreadIndex(); n < kBins; n += kBlockThreads) bins[n] = 0;
    __syncthreads();
  }
  const float skipped_lse_nat =
      read.skipped_lse_nat == nullptr ? -kInfinity : read.skipped_lse_nat[g];
  HeadMasses masses{};
  if (atoms.count >= 1 && atoms.count <= kFinishAtomsMax) {
    masses = LoadAtoms(atoms, skipped_lse_nat != -kInfinity, problem, bins, &scratch);
  }
  const float share = SkippedShareOf(skipped_lse_nat, masses);
  const float tolerance = TvLeft(read.tv_tolerance[g], share);
  const float tv = BoundHead(atoms, masses, bins, tolerance, &problem, cells, &scratch);
  if (ThreadIndex() == 0) WriteCertificate(read, g, masses.is_known, share, tv);
}

}  // namespace

FinishRead PlanFinish(const AttendRead& read, const float* tv_tolerance,
                      Certificate* certificates) {
  FinishRead finish{};
  finish.block_lse = read.result.block_lse;
  finish.block_max_logit = read.result.block_max_logit;
  finish.logit_half_width = read.result.logit_half_width;
  finish.top_half_width = read.result.top_half_width;
  finish.value_term = read.result.value_term;
  finish.rounding_term = read.result.rounding_term;
  finish.value_radius = read.result.value_radius;
  finish.tv_tolerance = tv_tolerance;
  finish.certificates = certificates;
  finish.group_size = read.args.group_size;
  finish.atom_stride = read.atom_count;
  finish.sink_index = read.args.sink_logits != nullptr ? read.atom_count - 1 : -1;
  return finish;
}

FinishPlan PlanFinishLaunch(const FinishRead* reads, int32_t read_count) {
  FinishPlan plan{read_count, 0, 0};
  for (int32_t r = 0; r < read_count; ++r) {
    plan.group_size = std::max(plan.group_size, reads[r].group_size);
    plan.atom_count = std::max(plan.atom_count, reads[r].atom_stride);
  }
  return plan;
}

int LaunchFinish(const FinishPlan& plan, const FinishRead* reads, CUstream_st* stream) {
  const bool has_bins = plan.atom_count > kFinishExactAtomsMax;
  const int point_max = has_bins ? kBins : kFinishExactAtomsMax;
  const size_t rest = std::max(sizeof(TvCells), has_bins ? kBins * sizeof(uint64_t) : 0);
  const size_t shared_bytes = 3 * sizeof(float) * point_max + rest;
  const cudaError_t error = cudaFuncSetAttribute(
      Finish, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  return LaunchKernel(Finish, dim3(plan.group_size, plan.read_count), dim3(kBlockThreads),
                      shared_bytes, stream, reads, point_max);
}

}  // namespace certkv::cuda
