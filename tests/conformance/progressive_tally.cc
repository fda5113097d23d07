#include "tests/conformance/progressive_tally.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"

namespace certkv::conformance {
namespace {

// Rounding of the truth itself, computed here in double.
constexpr double kTruthRounding = 0x1p-40;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double LogSumExp(const std::vector<double>& logits) {
  double max = -kInfinity;
  for (const double logit : logits) max = std::max(max, logit);
  if (std::isinf(max)) return max;
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - max);
  return max + std::log(sum);
}

// The softmax that the head really serves: over R and the sink.
HeadAttention Restrict(const ProgressiveRead& read, int g, const HeadAttention& served) {
  const AttendArgs& args = read.args();
  HeadAttention kept;
  for (size_t n = 0; n < served.logit.size(); ++n) {
    const bool is_read = read.IsRead(g, args.token_begin + static_cast<int64_t>(n));
    kept.logit.push_back(is_read ? served.logit[n] : -kInfinity);
  }
  kept.logit.push_back(args.sink_logits == nullptr ? -kInfinity : double{args.sink_logits[g]});
  kept.lse = LogSumExp(kept.logit);
  // Not from lse, whose rounding is large where logits are.
  const double max = *std::max_element(kept.logit.begin(), kept.logit.end());
  double sum = 0;
  for (const double logit : kept.logit) sum += std::exp(logit - max);
  for (const double logit : kept.logit) kept.probability.push_back(std::exp(logit - max) / sum);
  return kept;
}

// Exact logits of the tokens with IsRead == `is_read`.
std::vector<double> ExactLogits(const ProgressiveRead& read, int g, const HeadAttention& exact,
                                bool is_read) {
  std::vector<double> logits;
  for (size_t n = 0; n < exact.logit.size(); ++n) {
    if (read.IsRead(g, read.args().token_begin + static_cast<int64_t>(n)) == is_read) {
      logits.push_back(exact.logit[n]);
    }
  }
  return logits;
}

// Is the exact mass of R and the sink between sum m e^-c and sum m e^c of the atoms?
bool KeptMassIsCovered(const ProgressiveRead& read, int g, const HeadAttention& exact) {
  std::vector<double> kept = ExactLogits(read, g, exact, true);
  if (read.args().sink_logits != nullptr) kept.push_back(read.args().sink_logits[g]);
  std::vector<double> lower;
  std::vector<double> upper;
  const int64_t row = int64_t{g} * ProgressiveAtomsMax(read.args());
  for (int32_t a = 0; a < read.view().atom_count[g]; ++a) {
    const double lse = read.view().block_lse[row + a];
    if (lse == kInfinity) return true;  // nothing is claimed
    const double width = double{read.view().logit_half_width[row + a]} +
                         BlockLseSlackNat(read.view().block_lse[row + a]);
    lower.push_back(lse - width);
    upper.push_back(lse + width);
  }
  const double exact_lse = LogSumExp(kept);
  return LogSumExp(lower) <= exact_lse + kTruthRounding &&
         exact_lse <= LogSumExp(upper) + kTruthRounding;
}

double ValueNormMax(const AttendArgs& args, const SequenceRows& original) {
  const int d_v = args.layout->value_dim;
  double max = 0;
  for (int64_t t = args.token_begin; t < args.token_end; ++t) {
    double sum = 0;
    for (int i = 0; i < d_v; ++i)
      sum += original.values[t * d_v + i] * original.values[t * d_v + i];
    max = std::max(max, std::sqrt(sum));
  }
  return max;
}

void AddHead(const ProgressiveRead& read, int g, const Certificate& certificate,
             const SequenceRows& original, const SequenceRows& served, ProgressiveTally* tally) {
  const AttendArgs& args = read.args();
  const HeadAttention exact = AttendExactly(original, args, g);
  const HeadAttention kept = Restrict(read, g, AttendExactly(served, args, g));
  ++tally->reads;
  for (int64_t t = args.token_begin; t < args.token_end; ++t) {
    ++tally->cells;
    if (t < int64_t{args.tile_count} * kTileTokens) ++tally->stored_cells;
    if (read.IsRead(g, t)) ++tally->cells_read;
  }
  const double skipped = LogSumExp(ExactLogits(read, g, exact, false));
  const double bound = read.view().skipped_lse_nat[g];
  const bool covered = skipped <= bound || skipped - bound <= kTruthRounding * std::fabs(bound);
  if (!covered) ++tally->skip_violations;
  if (!(std::exp(skipped - exact.lse) <= certificate.skipped_share + kTruthRounding)) {
    ++tally->share_violations;
  }
  if (skipped > -kInfinity) tally->looseness.push_back(static_cast<float>(bound - skipped));
  if (!KeptMassIsCovered(read, g, exact)) ++tally->kept_violations;
  const double norm = ValueNormMax(args, original);
  if (!(certificate.value_radius >= norm * (1 - 0x1p-30))) ++tally->radius_violations;
  const double tv = TotalVariation(exact, kept);
  if (!(tv <= certificate.worst_case_tv)) ++tally->tv_violations;
  if (!(Distance(exact.output, read.output(g)) <=
        certificate.output_error_bound + kTruthRounding * norm)) {
    ++tally->output_violations;
  }
  tally->share_max = std::max(tally->share_max, double{certificate.skipped_share});
  tally->worst_tv = std::max(tally->worst_tv, tv);
  tally->worst_bound = std::max(tally->worst_bound, double{certificate.worst_case_tv});
}

}  // namespace

ProgressiveRead::ProgressiveRead(const AttendArgs& args, float skip_tolerance)
    : args_{args, nullptr}, tolerances_(args.group_size, skip_tolerance) {
  args_.skip_tolerance = tolerances_.data();
  const int64_t heads = args.group_size;
  const int64_t atoms = heads * ProgressiveAtomsMax(args);
  const int64_t outputs = heads * args.layout->value_dim;
  memory_.assign(outputs + 4 * heads + 3 * atoms + 1, std::nanf(""));
  float* at = memory_.data();
  const auto take = [&at](int64_t count) {
    float* piece = at;
    at += count;
    return piece;
  };
  counts_.assign(heads, -1);
  masks_.assign(heads * args.tile_count, 0xff);
  view_ = {.outputs = take(outputs),
           .lse_nat = take(heads),
           .atom_count = counts_.data(),
           .block_lse = take(atoms),
           .block_max_logit = take(atoms),
           .logit_half_width = take(atoms),
           .value_term = take(heads),
           .rounding_term = take(heads),
           .value_radius = take(1),
           .skipped_lse_nat = take(heads),
           .sub_blocks_read = masks_.data()};
}

absl::Status ProgressiveRead::TryRun(Backend backend) {
  const AlignedBytes workspace = AllocateAligned(ProgressiveWorkspaceBytes(args_.read));
  return AttendProgressive(backend, args_, view_, workspace.get());
}

void ProgressiveRead::Run(Backend backend) {
  const absl::Status status = TryRun(backend);
  ASSERT_TRUE(status.ok()) << status;
}

Certificate ProgressiveRead::Finish(Backend backend, int g) const {
  const int64_t row = int64_t{g} * ProgressiveAtomsMax(args_.read);
  FinishArgs finish{};
  finish.atom_count = view_.atom_count[g];
  finish.block_lse = view_.block_lse + row;
  finish.block_max_logit = view_.block_max_logit + row;
  finish.logit_half_width = view_.logit_half_width + row;
  finish.sink_index = args_.read.sink_logits != nullptr ? ProgressiveSinkAtom(args_.read) : -1;
  finish.value_term = view_.value_term[g];
  finish.rounding_term = view_.rounding_term[g];
  finish.value_radius = view_.value_radius[0];
  finish.tv_tolerance = 0.2f;
  finish.skipped_lse_nat = view_.skipped_lse_nat[g];
  FinishWorkspace workspace;
  Certificate certificate;
  const absl::Status status = FinishCertificate(backend, finish, &workspace, &certificate);
  EXPECT_TRUE(status.ok()) << status;
  return certificate;
}

bool ProgressiveRead::IsRead(int g, int64_t token) const {
  const int64_t tile = token / kTileTokens;
  if (tile >= args_.read.tile_count) return true;
  const uint8_t mask = view_.sub_blocks_read[int64_t{g} * args_.read.tile_count + tile];
  return (mask >> (token % kTileTokens / kSubBlockTokens) & 1) != 0;
}

absl::Span<const float> ProgressiveRead::output(int g) const {
  const int64_t d_v = args_.read.layout->value_dim;
  return {view_.outputs + g * d_v, static_cast<size_t>(d_v)};
}

void ProgressiveTally::Merge(const ProgressiveTally& other) {
  reads += other.reads;
  cells += other.cells;
  cells_read += other.cells_read;
  stored_cells += other.stored_cells;
  skip_violations += other.skip_violations;
  share_violations += other.share_violations;
  kept_violations += other.kept_violations;
  radius_violations += other.radius_violations;
  tv_violations += other.tv_violations;
  output_violations += other.output_violations;
  looseness.insert(looseness.end(), other.looseness.begin(), other.looseness.end());
  share_max = std::max(share_max, other.share_max);
  worst_tv = std::max(worst_tv, other.worst_tv);
  worst_bound = std::max(worst_bound, other.worst_bound);
}

double ProgressiveTally::MedianLooseness() const {
  if (looseness.empty()) return 0;
  std::vector<float> sorted = looseness;
  const auto middle = sorted.begin() + static_cast<int64_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

std::string ProgressiveTally::Summary() const {
  return absl::StrFormat(
      "%d cells, %d reads, %.3f of the stored tokens read; violations: %d skip, %d share, %d kept, "
      "%d radius, %d TV, %d output; bound of the skipped mass: median %.2f nats above it; largest "
      "share %.4f, TV %.4f, bound %.4f",
      cells, reads, ShareRead(), skip_violations, share_violations, kept_violations,
      radius_violations, tv_violations, output_violations, MedianLooseness(), share_max, worst_tv,
      worst_bound);
}

void AddProgressiveRead(Backend backend, const ProgressiveRead& read, const SequenceRows& original,
                        const SequenceRows& served, ProgressiveTally* tally) {
  for (int g = 0; g < read.args().group_size; ++g) {
    AddHead(read, g, read.Finish(backend, g), original, served, tally);
  }
}

}  // namespace certkv::conformance
