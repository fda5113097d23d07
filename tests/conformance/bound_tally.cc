#include "tests/conformance/bound_tally.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "kernels/reference/sequence.h"

namespace certkv::conformance {
namespace {

// Rounding of the truth itself, computed here in double: logits of up to 256 products.
constexpr double kTruthRounding = 0x1p-44;

// log sum exp and largest of the exact logits of one atom.
struct AtomTruth {
  double lse;
  double max_logit;
};

AtomTruth TruthOfAtom(const HeadAttention& exact, int64_t begin, int64_t end) {
  const double max = *std::max_element(&exact.logit[begin], &exact.logit[end - 1] + 1);
  double sum = 0;
  for (int64_t n = begin; n < end; ++n) sum += std::exp(exact.logit[n] - max);
  return {max + std::log(sum), max};
}

bool IsWithin(float reported, double truth, double half_width, double head_lse) {
  const double slack = BlockLseSlackNat(reported);
  if (std::fabs(reported - truth) <= half_width + slack) return true;
  return std::max<double>(reported, truth + half_width) < head_lse - kNegligibleNat;
}

// The token of [begin, end) with the largest served logit; -1 when rounding may have made another
// one the largest.
int64_t ClearTop(const HeadAttention& served, int64_t begin, int64_t end) {
  int64_t top = begin;
  double second = -std::numeric_limits<double>::infinity();
  for (int64_t n = begin + 1; n < end; ++n) {
    if (served.logit[n] > served.logit[top]) {
      second = served.logit[top];
      top = n;
    } else {
      second = std::max(second, served.logit[n]);
    }
  }
  const double largest = served.logit[top];
  return largest - second > 0x1p-6 * (1 + std::fabs(largest)) ? top : -1;
}

}  // namespace

void BoundTally::Merge(const BoundTally& other) {
  cells += other.cells;
  reads += other.reads;
  half_width_violations += other.half_width_violations;
  atom_violations += other.atom_violations;
  tv_violations += other.tv_violations;
  output_violations += other.output_violations;
  own_tops += other.own_tops;
  tightness.insert(tightness.end(), other.tightness.begin(), other.tightness.end());
  worst_tv = std::max(worst_tv, other.worst_tv);
  worst_tv_bound = std::max(worst_tv_bound, other.worst_tv_bound);
}

double BoundTally::MedianTightness() const {
  if (tightness.empty()) return 0;
  std::vector<float> sorted = tightness;
  const auto middle = sorted.begin() + static_cast<int64_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

std::string BoundTally::Summary() const {
  return absl::StrFormat(
      "%d cells, %d reads, violations: %d half-width, %d atom, %d TV, %d output; median c / error "
      "%.2f of %d atoms; worst TV %.4f, worst bound %.4f",
      cells, reads, half_width_violations, atom_violations, tv_violations, output_violations,
      MedianTightness(), tightness.size(), worst_tv, worst_tv_bound);
}

void AddHead(const AttendArgs& args, int g, const ReadResult& result,
             const Certificate& certificate, const HeadAttention& exact,
             const HeadAttention& served, BoundTally* tally) {
  ++tally->reads;
  for (int32_t a = 0; a < result.atom_count(); ++a) {
    const reference::TokenRange tokens = reference::AtomTokens(args, a);
    if (tokens.begin >= tokens.end) continue;
    const int64_t begin = tokens.begin - args.token_begin;
    const int64_t end = tokens.end - args.token_begin;
    const double half_width = result.half_width(g)[a];
    double error_max = 0;
    for (int64_t n = begin; n < end; ++n) {
      ++tally->cells;
      const double error = std::fabs(served.logit[n] - exact.logit[n]);
      if (!(error <= half_width)) ++tally->half_width_violations;
      error_max = std::max(error_max, error);
    }
    const double top_half_width = result.top_half_width(g)[a];
    if (!(top_half_width <= half_width)) ++tally->atom_violations;
    if (top_half_width < half_width) ++tally->own_tops;
    const int64_t top = ClearTop(served, begin, end);
    if (top >= 0 && !(std::fabs(served.logit[top] - exact.logit[top]) <= top_half_width)) {
      ++tally->half_width_violations;
    }
    const AtomTruth truth = TruthOfAtom(exact, begin, end);
    if (!IsWithin(result.block_lse(g)[a], truth.lse, half_width, served.lse) ||
        !IsWithin(result.block_max_logit(g)[a], truth.max_logit, half_width, served.lse)) {
      ++tally->atom_violations;
    }
    if (error_max > 0 && !reference::KeyIsExact(args, g, tokens.begin)) {
      tally->tightness.push_back(static_cast<float>(half_width / error_max));
    }
  }
  const double tv = TotalVariation(exact, served);
  if (!(tv <= certificate.worst_case_tv)) ++tally->tv_violations;
  const double truth_rounding = kTruthRounding * certificate.value_radius;
  if (!(Distance(exact.output, result.output(g)) <=
        certificate.output_error_bound + truth_rounding)) {
    ++tally->output_violations;
  }
  tally->worst_tv = std::max(tally->worst_tv, tv);
  tally->worst_tv_bound = std::max(tally->worst_tv_bound, double{certificate.worst_case_tv});
}

Certificate FinishHead(Backend backend, const AttendArgs& args, int g, const ReadResult& result,
                       float tv_tolerance, FinishWorkspace* workspace) {
  FinishArgs finish{};
  finish.atom_count = result.atom_count();
  finish.block_lse = result.block_lse(g).data();
  finish.block_max_logit = result.block_max_logit(g).data();
  finish.logit_half_width = result.half_width(g).data();
  finish.top_half_width = result.top_half_width(g).data();
  finish.sink_index = args.sink_logits != nullptr ? result.atom_count() - 1 : -1;
  finish.value_term = result.view().value_term[g];
  finish.rounding_term = result.view().rounding_term[g];
  finish.value_radius = result.view().value_radius[0];
  finish.tv_tolerance = tv_tolerance;
  Certificate certificate;
  const absl::Status status = FinishCertificate(backend, finish, workspace, &certificate);
  EXPECT_TRUE(status.ok()) << status;
  return certificate;
}

namespace {

using RowsOfHead = std::function<const SequenceRows&(int g)>;

void AddHeads(Backend backend, const SequenceCase& sequence, const SequenceRows& original,
              const RowsOfHead& served_rows, BoundTally* tally) {
  const AttendArgs& args = sequence.args();
  ReadResult result(args);
  ASSERT_NO_FATAL_FAILURE(result.Run(backend, args));
  FinishWorkspace workspace;
  for (int g = 0; g < args.group_size; ++g) {
    const HeadAttention exact = AttendExactly(original, args, g);
    const HeadAttention served = AttendExactly(served_rows(g), args, g);
    const Certificate certificate = FinishHead(backend, args, g, result, 0.2f, &workspace);
    AddHead(args, g, result, certificate, exact, served, tally);
  }
}

}  // namespace

void AddRead(Backend backend, const SequenceCase& sequence, const SequenceRows& original,
             const SequenceRows& served, BoundTally* tally) {
  AddHeads(
      backend, sequence, original, [&served](int) -> const SequenceRows& { return served; }, tally);
}

void AddRead(Backend backend, const SequenceCase& sequence, BoundTally* tally) {
  SequenceRows rows;
  AddHeads(
      backend, sequence, OriginalRows(sequence),
      [&rows, &sequence](int g) -> const SequenceRows& {
        rows = ServedRows(sequence, sequence.args(), g);
        return rows;
      },
      tally);
}

}  // namespace certkv::conformance
