// From rounded masses and half-widths to a bound on TV(p, p^), for the served p^ and the exact p.
//
// Let m~_j = exp(block_lse_j - L) be the masses as reported, normalised, and m_j the served ones;
// m~_j = m_j e^d, |d| <= delta_j. A heavy token is set apart at a~_j = exp(block_max_logit_j - L),
// a~_j = a_j e^d of the same d's range; the rest of its atom gets m~_j - a~_j.
//
// 1. Rounding. p^~, the distribution with the reported masses, differs from p^ by at most delta_j
// in
//    each logit, so p lies in the box c_j + delta_j round p^~:
//      TV(p, p^) <= TV*(m~, c + delta) + TV(p^~, p^),  TV(p^~, p^) <= sum m~_j (e^delta_j - 1).
// 2. The rest of an atom with a heavy token is a difference, off by at most
//    e_j = (m_j + a_j)(e^delta_j - 1) <= 2 m_j (e^delta_j - 1) and not by a factor. Let p^' be p^
//    with the rests as reported and p' what the exact errors make of it. Step 1 holds for p', p^',
//    and
//      TV(p^, p^') <= sum e_j / sum m_j                         <= 2 (e^delta - 1)
//      TV(p, p')   <= sum e_j e^c_j / sum m_j e^-c_j            <= 2 (e^delta - 1) e^(2 c)
//    with the largest delta and c of the atoms that have a heavy token. Paid only when one was
//    used. A heavy token that is set apart has a box of its own, top_half_width + delta.
// 3. kClampedShare: weights that a kernel clamped (attend.h), and masses raised to kMassMin here.
//
// With skipping, steps 1 to 3 bound TV of the softmax over what was read, and the skipped part is
// mixed in by kernels/bounds/skipping.h, with L = sum_j e^(block_lse_j - delta_j - c_j), sink
// included.
#include "kernels/ops/finish_certificate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/bounds/rounding.h"
#include "kernels/bounds/skipping.h"
#include "kernels/bounds/worst_case_tv.h"
#include "kernels/ops/attend.h"
#include "kernels/ops/finish_state.h"
#include "kernels/reference/reference.h"

namespace certkv {

FinishWorkspace::FinishWorkspace() : state_(std::make_unique<State>()) {}
FinishWorkspace::~FinishWorkspace() = default;

namespace reference {
namespace {

constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();
constexpr double kMassMin = 1e-300;
constexpr double kClampedShare = 0x1p-40;
// Above this a heavy token stays inside its atom: at c > 1.7 or so TV* is large either way.
constexpr double kHeavyPriceMax = 0x1p-8;
// exp and the differences of logarithms here, in double: far below 2^-40.
constexpr double kExpSlack = 0x1p-40;

// Largest block_lse; NaN when one of them is NaN or +infinity, -infinity when all atoms are empty.
double LargestLse(const FinishArgs& args) {
  double largest = -kUnknownBound;
  for (int32_t j = 0; j < args.atom_count; ++j) {
    const float lse = args.block_lse[j];
    if (!(lse < kFloatInfinity)) return std::numeric_limits<double>::quiet_NaN();
    largest = std::max(largest, double{lse});
  }
  return largest;
}

// delta_j of the atom.
double MassSlack(const FinishArgs& args, int32_t j) {
  return std::max(double{BlockLseSlackNat(args.block_lse[j])},
                  double{BlockLseSlackNat(args.block_max_logit[j])}) +
         kExpSlack;
}

// What steps 1 to 3 add to TV*.
struct TvSlack {
  double rounding = 0;  // always
  double heavy = 0;     // when a heavy token was set apart
};

// Fills the workspace with one entry per atom that has a token.
TvSlack FillAtoms(const FinishArgs& args, double largest_lse, FinishWorkspace::State* state) {
  state->mass.clear();
  state->top_token_mass.clear();
  state->half_width.clear();
  state->top_half_width.clear();
  double total = 0;
  for (int32_t j = 0; j < args.atom_count; ++j) {
    total += std::exp(args.block_lse[j] - largest_lse);  // >= 1
  }
  TvSlack slack{kClampedShare, 0};
  const double heavy_mass_min = WorstCaseTvOptions{}.heavy_mass_min * total;
  for (int32_t j = 0; j < args.atom_count; ++j) {
    if (args.block_lse[j] == -kFloatInfinity) continue;
    const double delta = MassSlack(args, j);
    const double mass = std::max(std::exp(args.block_lse[j] - largest_lse), kMassMin);
    const double half_width = AddRoundedUp(KnownOrInfinity(args.logit_half_width[j]), delta);
    double top = j == args.sink_index
                     ? mass
                     : std::min(std::exp(args.block_max_logit[j] - largest_lse), mass);
    const double price =
        j == args.sink_index ? 0 : 2 * std::expm1(delta) * (1 + std::exp(2 * half_width));
    if (!(top >= heavy_mass_min && price <= kHeavyPriceMax)) top = 0;
    if (top > 0) slack.heavy = std::max(slack.heavy, price);
    slack.rounding += mass / total * std::expm1(delta);
    state->mass.push_back(mass);
    state->top_token_mass.push_back(top);
    state->half_width.push_back(half_width);
    const float own =
        args.top_half_width == nullptr ? args.logit_half_width[j] : args.top_half_width[j];
    state->top_half_width.push_back(
        std::min(half_width, AddRoundedUp(KnownOrInfinity(own), delta)));
  }
  slack.rounding = RoundUp(slack.rounding);
  slack.heavy = RoundUp(slack.heavy);
  return slack;
}

}  // namespace

bool MassesAreKnown(const FinishArgs& args) {
  return LargestLse(args) > -kUnknownBound;  // false for NaN
}

double BoundTv(const FinishArgs& args, FinishWorkspace* workspace) {
  FinishWorkspace::State* state = workspace->state();
  const double largest_lse = LargestLse(args);
  if (!(largest_lse > -kUnknownBound)) return 1;
  const TvSlack slack = FillAtoms(args, largest_lse, state);
  WorstCaseTvOptions options;
  options.tolerance = std::max(0.0, double{args.tv_tolerance} - slack.rounding - slack.heavy);
  TvAtoms<double, double> atoms;
  atoms.mass = state->mass;
  atoms.half_width = state->half_width;
  atoms.top_token_mass = state->top_token_mass;
  atoms.top_half_width = state->top_half_width;
  const WorstCaseTvResult worst = WorstCaseTv(atoms, options, &state->tv);
  const double heavy = worst.heavy_tokens_used > 0 ? slack.heavy : 0;
  const double bound = worst.worst_case_tv + slack.rounding + heavy;
  return bound <= 1 ? bound : 1;
}

double SkippedShareOf(const FinishArgs& args) {
  if (args.skipped_lse_nat == -kFloatInfinity) return 0;
  const double largest_lse = LargestLse(args);
  if (!(largest_lse > -kUnknownBound)) return 1;
  double kept = 0;
  for (int32_t j = 0; j < args.atom_count; ++j) {
    // An unbounded atom adds nothing, and neither does an empty one.
    const double half_width = KnownOrInfinity(args.logit_half_width[j]) + MassSlack(args, j);
    kept += std::exp(args.block_lse[j] - largest_lse - half_width);
  }
  // 2^-20 covers the sum (2^24 terms of 2^-53), exp, and step 3: masses that were reported too high
  // are below 2^-91 of all of the served mass, of which `kept` has at least e^-20 unless an atom is
  // unbounded, and then the bound is 1 anyway.
  return SkippedShare(args.skipped_lse_nat, largest_lse + std::log(kept * (1 - 0x1p-20)));
}

void CompleteCertificate(const FinishArgs& args, bool masses_known, double skipped_share, double tv,
                         Certificate* certificate) {
  certificate->worst_case_tv = std::min(ToFloatRoundedUp(tv), 1.0f);
  certificate->skipped_share = std::min(ToFloatRoundedUp(skipped_share), 1.0f);
  certificate->value_term = ToFloatRoundedUp(args.value_term);
  certificate->value_radius = ToFloatRoundedUp(args.value_radius);
  certificate->output_error_bound = kFloatInfinity;
  if (!masses_known) return;
  const double bound =
      KnownOrInfinity(args.value_term) +
      2 * MultiplyRoundedUp(certificate->worst_case_tv, KnownOrInfinity(args.value_radius)) +
      KnownOrInfinity(args.rounding_term);
  certificate->output_error_bound = ToFloatRoundedUp(RoundUp(bound));
}

}  // namespace reference
}  // namespace certkv
