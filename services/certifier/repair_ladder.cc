#include "services/certifier/repair_ladder.h"

#include <algorithm>
#include <cmath>

#include "absl/types/span.h"
#include "kernels/bounds/repair_order.h"
#include "kernels/ops/attend.h"

namespace certkv::certifier {
namespace {

// Below this no certificate can be: the finishing step adds BlockLseSlackNat, at least 2^-14 nats,
// to every half-width and to its result.
constexpr double kReachableTvMin = 0x1p-13;
// Aims below the limit, because repaired keys move the masses that a prediction takes as they are.
constexpr double kTvAim = 0.95;
constexpr double kValueAim = 1 - 0x1p-10;
// What a repaired tile's half-width is taken to be in a prediction: arithmetic slack, about.
constexpr double kRepairedHalfWidthNat = 0x1p-12;

// How far down each bound has to come.
struct Targets {
  double tv = 0;
  double value = 0;
};

// The output's limit is split between value term and key term 2 TV* R_v: the value term takes what
// the key term leaves when that is a quarter or more, for values are the cheaper rung; else each
// gets half.
Targets TargetsOf(const LadderEvidence& evidence, const Tolerances& tolerances) {
  const ReadCertificate& certificate = evidence.certificate;
  const double radius = certificate.value_radius;
  Targets targets = {tolerances.tv_tolerance, double{tolerances.value_tolerance} * radius};
  if (tolerances.output_tolerance == 0) return targets;
  const double room = double{tolerances.output_tolerance} - evidence.rounding_term;
  const double key_term =
      2 * radius * std::min<double>(certificate.worst_case_tv, tolerances.tv_tolerance);
  if (key_term <= 0.75 * room) {
    targets.value = std::min(targets.value, room - key_term);
  } else {
    targets.value = std::min(targets.value, room / 2);
    targets.tv = std::min(targets.tv, room / 4 / radius);
  }
  return targets;
}

// Sets `bit` of a tile; false when it was set.
bool Take(int32_t tile, uint8_t bit, uint8_t* sources) {
  if ((sources[tile] & bit) != 0) return false;
  sources[tile] |= bit;
  return true;
}

// Copies the atoms to the workspace as masses, with what a repair would leave of their half-widths.
// False when they can't be ranked.
bool FillAtoms(const LadderEvidence& evidence, LadderWorkspace* workspace) {
  if (!std::isfinite(evidence.lse_nat)) return false;
  const int32_t first = evidence.tiles.begin * evidence.atoms_per_tile;
  const int32_t end = evidence.tiles.end * evidence.atoms_per_tile;
  for (int32_t a = 0; a < evidence.atom_count; ++a) {
    workspace->atom_mass[a] = std::exp(double{evidence.block_lse[a]} - evidence.lse_nat);
    workspace->top_token_mass[a] = std::exp(double{evidence.block_max_logit[a]} - evidence.lse_nat);
    const double half_width = evidence.logit_half_width[a];
    workspace->half_width[a] = half_width;
    workspace->top_half_width[a] = evidence.top_half_width[a];
    // The tail and the sink are exact already.
    const bool repairable = a >= first && a < end;
    workspace->repaired_half_width[a] =
        repairable ? std::min(half_width, kRepairedHalfWidthNat) : half_width;
  }
  return true;
}

}  // namespace

void LadderWorkspace::Reserve(int64_t tile_count, int64_t atom_count) {
  const auto grow = [](std::vector<double>* array, int64_t size) {
    if (static_cast<int64_t>(array->size()) < size) array->resize(static_cast<size_t>(size));
  };
  order.reserve(static_cast<size_t>(std::max(tile_count, atom_count)));
  grow(&tile_mass, tile_count);
  grow(&tile_error, tile_count);
  grow(&atom_mass, atom_count);
  grow(&top_token_mass, atom_count);
  grow(&half_width, atom_count);
  grow(&top_half_width, atom_count);
  grow(&repaired_half_width, atom_count);
  tried_half_width.reserve(static_cast<size_t>(atom_count));
}

void HeadLadder::ClimbToHead(TileSpan tiles, uint8_t* sources) {
  rung_ = Rung::kHead;
  for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
    sources[tile] = kSourceOriginalKeys | kSourceOriginalValues;
  }
}

void HeadLadder::Climb(const LadderEvidence& evidence, const Tolerances& tolerances,
                       LadderWorkspace* workspace, uint8_t* sources) {
  const ReadCertificate& certificate = evidence.certificate;
  const Targets targets = TargetsOf(evidence, tolerances);
  // Written so that a NaN bound or target counts as missed.
  const bool value_misses =
      !MeetsValueTolerance(certificate, tolerances) ||
      (tolerances.output_tolerance > 0 && !(certificate.value_term <= targets.value));
  const bool tv_misses = !(certificate.worst_case_tv <= targets.tv);
  // When both miss, both are read in one pass: neither repair makes the other unnecessary.
  int32_t added = 0;
  if (value_misses) {
    const int32_t count = ClimbValues(evidence, targets.value * kValueAim, workspace, sources);
    if (count == 0) return ClimbToHead(evidence.tiles, sources);
    rung_ = std::max(rung_, Rung::kValues);
    added += count;
  }
  if (tv_misses) {
    const int32_t count = ClimbKeys(evidence, targets.tv * kTvAim, workspace, sources);
    if (count == 0) return ClimbToHead(evidence.tiles, sources);
    rung_ = std::max(rung_, Rung::kKeys);
    added += count;
  }
  if (added == 0) ClimbToHead(evidence.tiles, sources);
}

int32_t HeadLadder::ClimbValues(const LadderEvidence& evidence, double value_target,
                                LadderWorkspace* workspace, uint8_t* sources) {
  if (value_rounds_++ >= kRepairRoundsMax) return 0;
  // Attend's errors are weighted already: with equal masses their mean is what is compared.
  const auto count = static_cast<size_t>(evidence.tiles.size());
  std::fill_n(workspace->tile_mass.begin(), count, 1.0);
  std::copy_n(evidence.tile_value_error + evidence.tiles.begin, count,
              workspace->tile_error.begin());
  const ValueRepairInput input = {
      .block_mass = absl::MakeConstSpan(workspace->tile_mass.data(), count),
      .value_error_bound = absl::MakeConstSpan(workspace->tile_error.data(), count),
      .value_term_max = value_target / static_cast<double>(count),
  };
  const RepairChoice choice = ChooseValueRepairs(input, &workspace->order);
  if (!choice.meets_target) return 0;
  const int32_t wanted = std::max({choice.block_count, value_tiles_, 1});
  int32_t added = 0;
  for (size_t i = 0; i < workspace->order.size() && added < wanted; ++i) {
    const int32_t tile = evidence.tiles.begin + workspace->order[i];
    if (Take(tile, kSourceOriginalValues, sources)) ++added;
  }
  value_tiles_ += added;
  return added;
}

int32_t HeadLadder::ClimbKeys(const LadderEvidence& evidence, double tv_target,
                              LadderWorkspace* workspace, uint8_t* sources) {
  if (key_rounds_++ >= kRepairRoundsMax || !(tv_target >= kReachableTvMin)) return 0;
  if (!FillAtoms(evidence, workspace)) return 0;
  const auto count = static_cast<size_t>(evidence.atom_count);
  const auto first = [count](const std::vector<double>& array) {
    return absl::MakeConstSpan(array.data(), count);
  };
  KeyRepairInput input;
  input.atoms = {.mass = first(workspace->atom_mass),
                 .half_width = first(workspace->half_width),
                 .top_token_mass = first(workspace->top_token_mass),
                 .top_half_width = first(workspace->top_half_width)};
  input.repaired_half_width = first(workspace->repaired_half_width);
  input.found = WorstCaseTv(input.atoms, {.tolerance = tv_target}, &workspace->worst_case_tv);
  input.tv_max = tv_target;
  const RepairChoice choice = ChooseKeyRepairs(input, &workspace->worst_case_tv,
                                               &workspace->tried_half_width, &workspace->order);
  if (!choice.meets_target) return 0;
  // Whole tiles are read, so an atom's neighbours come with it; after a miss at least as many
  // tiles again as were repaired so far.
  int32_t added = 0;
  for (size_t i = 0; i < workspace->order.size(); ++i) {
    if (static_cast<int32_t>(i) >= choice.block_count && added >= std::max(key_tiles_, 1)) break;
    const int32_t tile = workspace->order[i] / evidence.atoms_per_tile;
    if (tile < evidence.tiles.begin || tile >= evidence.tiles.end) continue;
    if (Take(tile, kSourceOriginalKeys, sources)) ++added;
  }
  key_tiles_ += added;
  return added;
}

}  // namespace certkv::certifier
