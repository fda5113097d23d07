#include "kernels/bounds/repair_order.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/bounds/output_bound.h"
#include "kernels/bounds/rounding.h"

namespace certkv {
namespace {

// Orders [0, count) by descending score. `score` must not return NaN.
template <typename Score>
void OrderByScore(size_t count, const Score& score, std::vector<int32_t>* order) {
  order->resize(count);
  std::iota(order->begin(), order->end(), 0);
  std::sort(order->begin(), order->end(), [&](int32_t a, int32_t b) {
    const double score_a = score(a);
    const double score_b = score(b);
    return score_a > score_b || (score_a == score_b && a < b);
  });
}

// 0 * infinity is an unknown product.
double Product(double a, double b) {
  return KnownOrInfinity(KnownOrInfinity(a) * KnownOrInfinity(b));
}

class KeyRepair {
 public:
  KeyRepair(const KeyRepairInput& input, WorstCaseTvWorkspace* workspace,
            std::vector<double>* scratch, std::vector<int32_t>* order)
      : input_(input), workspace_(workspace), half_width_(*scratch), order_(*order) {}

  RepairChoice Choose();

 private:
  double Score(int32_t block) const;
  double Contribution(double mass, double half_width) const;
  double Predict(int32_t block_count, bool decide_only);

  const KeyRepairInput& input_;
  WorstCaseTvWorkspace* workspace_;
  std::vector<double>& half_width_;
  std::vector<int32_t>& order_;
};

double KeyRepair::Contribution(double mass, double half_width) const {
  const double c = std::min(half_width, kTvHalfWidthMax);
  const double r = input_.found.adversary_share;
  const double lambda = input_.found.multiplier;
  const double height = (1 - r) * std::exp(c) + r * std::exp(-c);
  return mass * (std::max(0.0, lambda * height - 1) - lambda * r * std::exp(-c));
}

double KeyRepair::Score(int32_t block) const {
  const double mass = KnownOrInfinity(input_.atoms.mass[block]);
  const double before = KnownOrInfinity(input_.atoms.half_width[block]);
  const double after = KnownOrInfinity(input_.repaired_half_width[block]);
  if (!(after < before) || mass == 0) return 0;  // nothing to gain
  // Without a usable worst case (an unbounded atom takes all), the widest go first, by mass.
  double drop = before >= kTvHalfWidthMax ? kUnknownBound : mass * (before - after);
  if (input_.found.multiplier > 0 && before < kTvHalfWidthMax) {
    drop = std::max(0.0, Contribution(mass, before) - Contribution(mass, after));
  }
  if (input_.repair_bytes.empty()) return drop;
  return drop / static_cast<double>(std::max<int64_t>(1, input_.repair_bytes[block]));
}

// TV* with the first `block_count` blocks of the order repaired, or any bound on its side of the
// target.
double KeyRepair::Predict(int32_t block_count, bool decide_only) {
  const auto count = static_cast<int32_t>(order_.size());
  for (int32_t k = 0; k < count; ++k) {
    const int32_t block = order_[k];
    const double before = KnownOrInfinity(input_.atoms.half_width[block]);
    const double after = KnownOrInfinity(input_.repaired_half_width[block]);
    half_width_[block] = k < block_count ? std::min(before, after) : before;
  }
  WorstCaseTvOptions options;
  options.tolerance = input_.tv_max;
  options.decide_only = decide_only;
  return WorstCaseTv(
             TvAtoms<double, double>{input_.atoms.mass, half_width_, input_.atoms.top_token_mass,
                                     input_.atoms.top_half_width},
             options, workspace_)
      .worst_case_tv;
}

RepairChoice KeyRepair::Choose() {
  const auto count = static_cast<int32_t>(input_.atoms.mass.size());
  order_.clear();
  if (input_.atoms.half_width.size() != input_.atoms.mass.size() ||
      input_.repaired_half_width.size() != input_.atoms.mass.size() ||
      (!input_.repair_bytes.empty() && input_.repair_bytes.size() != input_.atoms.mass.size())) {
    return {};
  }
  // Scores once, not in every comparison; the scratch is free until the first prediction.
  half_width_.resize(count);
  for (int32_t k = 0; k < count; ++k) half_width_[k] = Score(k);
  OrderByScore(
      count, [&](int32_t k) { return half_width_[k]; }, &order_);
  double met_bound = kUnknownBound;  // of the prefix that met the target last
  const auto meets = [&](int32_t block_count) {
    const double bound = Predict(block_count, true);
    if (!(bound <= input_.tv_max)) return false;
    met_bound = bound;
    return true;
  };
  int32_t too_few = -1;
  int32_t enough = 0;
  while (enough < count && !meets(enough)) {
    too_few = enough;
    enough = std::max(1, 2 * enough);
  }
  if (enough >= count) {
    enough = count;
    if (!meets(count)) return {count, Predict(count, false), false};
  }
  while (too_few + 1 < enough) {
    const int32_t middle = too_few + (enough - too_few) / 2;
    (meets(middle) ? enough : too_few) = middle;
  }
  // The last prefix that met the target is the first `enough` blocks.
  return {enough, std::min(Predict(enough, false), met_bound), true};
}

}  // namespace

RepairChoice ChooseValueRepairs(const ValueRepairInput& input, std::vector<int32_t>* order) {
  RepairChoice choice;
  order->clear();
  if (input.block_mass.size() != input.value_error_bound.size()) return choice;
  const auto term = [&](int32_t j) {
    return Product(input.block_mass[j], input.value_error_bound[j]);
  };
  OrderByScore(input.block_mass.size(), term, order);
  double mass = 0;
  for (const double m : input.block_mass) mass += KnownOrInfinity(m);
  // With an unknown mass only a sum of 0 is known to be small.
  const auto mean = [&](double sum) {
    if (sum == 0) return 0.0;
    return mass < kUnknownBound ? RoundUp(sum / mass) : kUnknownBound;
  };
  // What is left after repairing the first k blocks, summed from the smallest term: a difference
  // from the whole would lose small remainders next to a large repaired term.
  const auto count = static_cast<int32_t>(order->size());
  double left = 0;
  int32_t first_kept = count;
  while (first_kept > 0) {
    const double with_next = left + term((*order)[first_kept - 1]);
    if (!(mean(with_next) <= input.value_term_max)) break;
    left = with_next;
    --first_kept;
  }
  choice.block_count = first_kept;
  choice.predicted = mean(left);
  choice.meets_target = choice.predicted <= input.value_term_max;
  return choice;
}

RepairChoice ChooseKeyRepairs(const KeyRepairInput& input, WorstCaseTvWorkspace* workspace,
                              std::vector<double>* scratch, std::vector<int32_t>* order) {
  return KeyRepair(input, workspace, scratch, order).Choose();
}

}  // namespace certkv
