#include "tests/conformance/adversary.h"

#include <cmath>

#include "gtest/gtest.h"
#include "kernels/core/half.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::conformance {

namespace {

double Residual(SequenceCase* sequence, int64_t token, int channel) {
  const auto tile = static_cast<int>(token / kTileTokens);
  return sequence->OriginalKey(token, channel) -
         reference::DecodeKey(sequence->layout(), sequence->scan(tile), sequence->detail(tile),
                              static_cast<int>(token % kTileTokens), channel);
}

int64_t TokenOfHead(int g) { return int64_t{5} * g; }

}  // namespace

std::vector<float> QueriesAgainstScales(SequenceCase* sequence, double share) {
  const TileLayout& layout = sequence->layout();
  const int d = layout.head_dim;
  const double half_range = AffineDepthOf(layout.key_format).half_range;
  std::vector<float> queries(int64_t{sequence->spec().group_size} * d);
  for (int g = 0; g < sequence->spec().group_size; ++g) {
    const auto tile = static_cast<int>(TokenOfHead(g) / kTileTokens);
    for (int i = 0; i < d; ++i) {
      const double box =
          half_range * F16ToFloat(reference::ReadKeyScale(layout, sequence->scan(tile), i));
      const double residual = Residual(sequence, TokenOfHead(g), i);
      if (std::fabs(residual) >= share * box) queries[g * d + i] = residual > 0 ? 1.0f : -1.0f;
    }
  }
  return queries;
}

std::vector<float> QueriesAgainstWitness(SequenceCase* sequence) {
  const int d = sequence->layout().head_dim;
  std::vector<float> queries(int64_t{sequence->spec().group_size} * d);
  for (int g = 0; g < sequence->spec().group_size; ++g) {
    double square = 0;
    for (int i = 0; i < d; ++i) square += std::pow(Residual(sequence, TokenOfHead(g), i), 2);
    for (int i = 0; i < d; ++i) {
      queries[g * d + i] =
          static_cast<float>(Residual(sequence, TokenOfHead(g), i) / std::sqrt(square));
    }
  }
  return queries;
}

void AddReadWithCanary(Canary canary, Backend backend, const SequenceCase& sequence,
                       BoundTally* tally) {
  const AttendArgs& args = sequence.args();
  ReadResult result(args);
  ASSERT_NO_FATAL_FAILURE(result.Run(backend, args));
  if (canary == Canary::kHalfWidth) {
    for (int64_t n = 0; n < int64_t{args.group_size} * result.atom_count(); ++n) {
      result.mutable_view()->logit_half_width[n] *= 0.5f;
    }
  }
  const SequenceRows original = OriginalRows(sequence);
  FinishWorkspace workspace;
  for (int g = 0; g < args.group_size; ++g) {
    const SequenceRows served_rows = ServedRows(sequence, args, g);
    Certificate certificate = FinishHead(backend, args, g, result, 0.0f, &workspace);
    if (canary == Canary::kWorstCaseTv) certificate.worst_case_tv *= 0.5f;
    if (canary == Canary::kOutputBound) certificate.output_error_bound *= 0.5f;
    AddHead(args, g, result, certificate, AttendExactly(original, args, g),
            AttendExactly(served_rows, args, g), tally);
  }
}

}  // namespace certkv::conformance
