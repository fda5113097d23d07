// Bound on TV(p, p^) from one query head's atoms, by the steps of
// kernels/reference/finish_certificate.cc with float masses. delta here is that of
// finish_masses.h, which is larger than the reported rounding by what float masses lose.
//
// Masses raised to e^-86 < 2^-124 of the largest: at most 2^17 atoms, so 2^-107 of the mass in all,
// which a half-width of at most kLogitHalfWidthMaxNat = 20 nats turns into under 2^-107 e^40 <
// 2^-49 of the probability: paid for by kClampedShare. An unbounded atom makes the bound 1 whatever
// its mass.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/bounds/rounding.h"
#include "kernels/bounds/worst_case_tv.h"
#include "kernels/cpu/attend_state.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/finish_state.h"
#include "kernels/ops/finish_state.h"

namespace certkv::cpu {
namespace {

constexpr double kClampedShare = 0x1p-40;
// Above this a heavy token stays inside its atom.
constexpr double kHeavyPriceMax = 0x1p-8;
// How far the bound may stay above the relaxation's own maximum: the finishing step takes
// microseconds, and repair and policy look at tolerances of .01 and more.
constexpr double kGap = 2.5e-4;
// Above this the float sums of 8 lanes or more, off by 2^-24 per atom added, would be off by more
// than the 2^-8 that is given for them.
constexpr int32_t kFloatAtomsMax = 1 << 17;
// Above this slack a float mass says too little.
constexpr float kDeltaMax = 0x1p-6f;

// Sets the heavy tokens apart, with half-widths of their own: at most 1 / heavy_mass_min of them.
// `heavy_atoms` are theirs; their chunks get an infinite half-width (TvAtoms). Returns the largest
// price of one.
double FindHeavyTokens(const FinishArgs& args, const FinishMasses& masses, float* top,
                       float* top_half_width, std::vector<int64_t>* heavy_atoms) {
  const float heavy_mass_min =
      static_cast<float>(WorstCaseTvOptions{}.heavy_mass_min * 0.99) * masses.total;
  double price_max = 0;
  for (int64_t begin = 0; begin < masses.count; begin += kFinishChunk) {
    if (masses.chunk_mass_max[begin / kFinishChunk] < heavy_mass_min) continue;
    const size_t heavy_before = heavy_atoms->size();
    const int64_t end = std::min<int64_t>(begin + kFinishChunk, masses.count);
    for (int64_t j = begin; j < end; ++j) {
      if (masses.mass[j] < heavy_mass_min) continue;
      if (j == args.sink_index) {
        heavy_atoms->push_back(j);
        top[j] = masses.mass[j];
        top_half_width[j] = masses.half_width[j];
        continue;
      }
      const double distance = double{args.block_max_logit[j]} - masses.largest_lse;
      const float mass = std::min(static_cast<float>(std::exp(distance)), masses.mass[j]);
      const double delta = masses.half_width[j] - double{args.logit_half_width[j]};
      const double price = 2 * std::expm1(delta) * (1 + std::exp(2.0 * masses.half_width[j]));
      if (mass < heavy_mass_min || !(price <= kHeavyPriceMax)) continue;
      heavy_atoms->push_back(j);
      top[j] = mass;
      top_half_width[j] = masses.half_width[j];
      if (args.top_half_width != nullptr && args.top_half_width[j] < args.logit_half_width[j]) {
        top_half_width[j] = ToFloatRoundedUp(KnownOrInfinity(args.top_half_width[j]) + delta);
      }
      price_max = std::max(price_max, price);
    }
    if (heavy_atoms->size() > heavy_before) {
      masses.chunk_half_width_max[begin / kFinishChunk] = std::numeric_limits<float>::infinity();
    }
  }
  return RoundUp(price_max);
}

}  // namespace

double BoundTv(CpuIsa isa, const FinishArgs& args, FinishWorkspace* workspace) {
  if (args.atom_count > kFloatAtomsMax) return -1;
  FinishWorkspace::State& state = *workspace->state();
  const int64_t chunks = (int64_t{args.atom_count} + kFinishChunk - 1) / kFinishChunk;
  if (static_cast<int64_t>(state.chunk_mass_max.size()) < chunks) {
    for (std::vector<float>* array : {&state.float_mass, &state.float_top, &state.float_half_width,
                                      &state.float_top_half_width}) {
      array->resize(chunks * kFinishChunk);
    }
    for (std::vector<float>* array :
         {&state.chunk_mass_max, &state.chunk_half_width_min, &state.chunk_half_width_max}) {
      array->resize(chunks);
    }
    state.heavy_atoms.reserve(static_cast<size_t>(1.1 / WorstCaseTvOptions{}.heavy_mass_min));
  }
  FinishMasses masses{};
  masses.count = args.atom_count;
  masses.lse = args.block_lse;
  masses.max_logit = args.block_max_logit;
  masses.reported_half_width = args.logit_half_width;
  masses.mass = state.float_mass.data();
  masses.half_width = state.float_half_width.data();
  masses.chunk_mass_max = state.chunk_mass_max.data();
  masses.chunk_half_width_min = state.chunk_half_width_min.data();
  masses.chunk_half_width_max = state.chunk_half_width_max.data();
  AttendKernelsOf(isa).finish_masses(&masses);
  if (!masses.valid || !(masses.delta_max <= kDeltaMax)) return -1;

  // sum mass (e^delta - 1) / total <= (1 + delta_max) sum mass delta / total; 2^-8 covers the sums.
  const double rounding =
      kClampedShare + (1 + double{masses.delta_max}) * (1 + 0x1p-8) * masses.slack / masses.total;
  const double heavy = FindHeavyTokens(args, masses, state.float_top.data(),
                                       state.float_top_half_width.data(), &state.heavy_atoms);
  WorstCaseTvOptions options;
  options.tolerance = std::max(0.0, double{args.tv_tolerance} - rounding - heavy);
  options.gap = kGap;
  const auto count = static_cast<size_t>(args.atom_count);
  TvAtoms<float, float> atoms;
  atoms.mass = {masses.mass, count};
  atoms.half_width = {masses.half_width, count};
  atoms.top_token_mass = {state.float_top.data(), count};
  atoms.top_half_width = {state.float_top_half_width.data(), count};
  static_assert(kFinishChunk == kTvChunkAtoms);
  atoms.chunk_half_width_min = {masses.chunk_half_width_min, count / kFinishChunk};
  atoms.chunk_half_width_max = {masses.chunk_half_width_max, count / kFinishChunk};
  const WorstCaseTvResult worst = WorstCaseTv(atoms, options, &state.tv);
  for (const int64_t j : state.heavy_atoms) state.float_top[j] = 0;
  state.heavy_atoms.clear();
  const double bound = worst.worst_case_tv + rounding + (worst.heavy_tokens_used > 0 ? heavy : 0);
  return bound <= 1 ? bound : 1;
}

}  // namespace certkv::cpu
