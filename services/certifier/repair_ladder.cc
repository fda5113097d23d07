#include "services/certifier/repair_ladder.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/ops/attend.h"

namespace certkv {
namespace {

// Below this no certificate can be: the finishing step adds BlockLseSlackNat, at least 2^-14 nats,
// to every half-width and to its result.
constexpr double kReachableTvMin = 0x1p-13;
// Aims below the limit, because repaired keys move the masses that a prediction takes as they are.
constexpr double kTvAim = 0.95;
constexpr double kValueAim = 1 - 0x1p-10;
// What a repaired tile's half-width is taken to be in a prediction: arithmetic slack, about.
constexpr float kRepairedHalfWidthNat = 0x1p-12f;

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

// Tiles whose `bit` is not yet set, by falling score, in workspace->order. Returns how many.
int32_t OrderTiles(TileSpan tiles, uint8_t bit, const uint8_t* sources,
                   LadderWorkspace* workspace) {
  int32_t count = 0;
  for (int32_t tile = tiles.begin; tile < tiles.end; ++tile) {
    if ((sources[tile] & bit) == 0) workspace->order[count++] = tile;
  }
  const std::vector<double>& score = workspace->score;
  std::sort(workspace->order.begin(), workspace->order.begin() + count,
            [&score](int32_t a, int32_t b) {
              return score[a] != score[b] ? score[a] > score[b] : a < b;
            });
  return count;
}

void Take(int32_t count, uint8_t bit, const LadderWorkspace& workspace, uint8_t* sources) {
  for (int32_t i = 0; i < count; ++i) sources[workspace.order[i]] |= bit;
}

// Copies the atoms to the workspace as masses. False when they can't be ranked.
bool FillAtoms(const LadderEvidence& evidence, LadderWorkspace* workspace) {
  if (!std::isfinite(evidence.lse_nat)) return false;
  for (int32_t a = 0; a < evidence.atom_count; ++a) {
    workspace->mass[a] = std::exp(double{evidence.block_lse[a]} - evidence.lse_nat);
    workspace->top_mass[a] = std::exp(double{evidence.block_max_logit[a]} - evidence.lse_nat);
    workspace->half_width[a] = evidence.logit_half_width[a];
    if (!std::isfinite(workspace->mass[a])) return false;
  }
  return true;
}

WorstCaseTvResult Predict(const LadderEvidence& evidence, double tolerance,
                          LadderWorkspace* workspace) {
  const auto count = static_cast<size_t>(evidence.atom_count);
  const TvAtoms<double, float> atoms = {
      .mass = absl::MakeConstSpan(workspace->mass.data(), count),
      .half_width = absl::MakeConstSpan(workspace->half_width.data(), count),
      .top_token_mass = absl::MakeConstSpan(workspace->top_mass.data(), count),
  };
  return WorstCaseTv(atoms, {.tolerance = tolerance}, &workspace->worst_case_tv);
}

// By how much the bound falls when the atom's half-width becomes 0, at the worst case found:
// its terms of the dual function F(lambda, r) of tv_relaxation.h, before minus after.
double DropOfAtom(double mass, float half_width, const WorstCaseTvResult& worst) {
  const double c = std::min<double>(half_width, kTvHalfWidthMax);
  const double r = worst.adversary_share;
  const double lambda = worst.multiplier;
  const double h = (1 - r) * std::exp(c) + r * std::exp(-c);
  return mass * (std::max(0.0, lambda * h - 1) - std::max(0.0, lambda - 1) +
                 lambda * r * (1 - std::exp(-c)));
}

}  // namespace

void LadderWorkspace::Reserve(int64_t tile_count, int64_t atom_count) {
  const auto grow = [](auto* array, int64_t size) {
    if (static_cast<int64_t>(array->size()) < size) array->resize(static_cast<size_t>(size));
  };
  grow(&order, tile_count);
  grow(&score, tile_count);
  grow(&mass, atom_count);
  grow(&top_mass, atom_count);
  grow(&half_width, atom_count);
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
  for (int32_t tile = evidence.tiles.begin; tile < evidence.tiles.end; ++tile) {
    workspace->score[tile] = evidence.tile_value_error[tile];
  }
  const int32_t candidates = OrderTiles(evidence.tiles, kSourceOriginalValues, sources, workspace);
  // From the small end: how many can stay quantized?
  double kept_error = 0;
  int32_t count = candidates;
  while (count > 0) {
    const double error = workspace->score[workspace->order[count - 1]];
    if (!(kept_error + error <= value_target)) break;
    kept_error += error;
    --count;
  }
  count = std::min(candidates, std::max({count, value_tiles_, 1}));
  Take(count, kSourceOriginalValues, *workspace, sources);
  value_tiles_ += count;
  return count;
}

int32_t HeadLadder::ClimbKeys(const LadderEvidence& evidence, double tv_target,
                              LadderWorkspace* workspace, uint8_t* sources) {
  if (key_rounds_++ >= kRepairRoundsMax || !(tv_target >= kReachableTvMin)) return 0;
  if (!FillAtoms(evidence, workspace)) return 0;
  WorstCaseTvResult worst = Predict(evidence, tv_target, workspace);
  const auto first_atom = [&](int32_t tile) { return tile * evidence.atoms_per_tile; };
  for (int32_t tile = evidence.tiles.begin; tile < evidence.tiles.end; ++tile) {
    double drop = 0;
    for (int32_t a = first_atom(tile); a < first_atom(tile + 1); ++a) {
      drop += DropOfAtom(workspace->mass[a], workspace->half_width[a], worst);
    }
    workspace->score[tile] = drop;
  }
  const int32_t candidates = OrderTiles(evidence.tiles, kSourceOriginalKeys, sources, workspace);
  // First guess: as many as their drops say. Then predict, and take half as many more on a miss.
  double predicted = worst.worst_case_tv;
  int32_t count = 0;
  while (count < candidates && !(predicted <= tv_target)) {
    predicted -= workspace->score[workspace->order[count++]];
  }
  count = std::min(candidates, std::max({count, key_tiles_, 1}));
  int32_t repaired = 0;
  while (true) {
    for (; repaired < count; ++repaired) {
      const int32_t tile = workspace->order[repaired];
      std::fill_n(workspace->half_width.begin() + first_atom(tile), evidence.atoms_per_tile,
                  kRepairedHalfWidthNat);
    }
    worst = Predict(evidence, tv_target, workspace);
    if (worst.worst_case_tv <= tv_target) break;
    if (count == candidates) return 0;  // not even with every key
    count = std::min(candidates, count + std::max(1, count / 2));
  }
  Take(count, kSourceOriginalKeys, *workspace, sources);
  key_tiles_ += count;
  return count;
}

}  // namespace certkv
