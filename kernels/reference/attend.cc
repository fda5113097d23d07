// Two passes over the range. The first writes what each atom is (log-sum-exp, largest logit,
// half-width) and each head's log-sum-exp, which fixes the served distribution; the second sums
// values under it. Logits are computed twice, so that no scratch is needed.
#include "kernels/ops/attend.h"

#include <cmath>

#include "kernels/bounds/rounding.h"
#include "kernels/reference/attend_half_width.h"
#include "kernels/reference/attend_parts.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/sequence.h"

namespace certkv::reference {
namespace {

// The one with the largest served logit; `tokens` has one.
TokenRange TopToken(const AttendArgs& args, int g, const TokenRange& tokens) {
  int64_t top = tokens.begin;
  double top_logit = ServedLogit(args, g, top);
  for (int64_t t = tokens.begin + 1; t < tokens.end; ++t) {
    const double logit = ServedLogit(args, g, t);
    if (logit > top_logit) {
      top = t;
      top_logit = logit;
    }
  }
  return {top, top + 1};
}

// Writes the head's atoms but their half-widths; returns the head's log-sum-exp.
double WriteAtoms(const AttendArgs& args, const AttendResult& result, int g) {
  const int32_t atom_count = AttendAtomCount(args);
  LogSumExp head;
  for (int32_t a = 0; a < atom_count; ++a) {
    LogSumExp atom;
    const TokenRange tokens = AtomTokens(args, a);
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      const double logit = ServedLogit(args, g, t);
      atom.Add(logit);
      head.Add(logit);
    }
    if (a == atom_count - 1) {
      atom.Add(SinkLogit(args, g));
      head.Add(SinkLogit(args, g));
    }
    const int64_t index = int64_t{g} * atom_count + a;
    result.block_lse[index] = static_cast<float>(atom.Value());
    result.block_max_logit[index] = static_cast<float>(atom.max());
  }
  return head.Value();
}

void WriteValues(const AttendArgs& args, const AttendResult& result, int g, double lse) {
  ValueSums sums;
  double value_term = 0;
  for (int32_t tile = 0; tile < args.tile_count; ++tile) {
    result.tile_value_error[int64_t{g} * args.tile_count + tile] = 0;
  }
  double tile_error = 0;
  for (int64_t t = args.token_begin; t < args.token_end; ++t) {
    const double weight = std::exp(ServedLogit(args, g, t) - lse);
    AddValue(args, g, t, weight, &sums);
    const int32_t tile = TileOf(args, t);
    if (tile < 0) continue;
    if (t % kTileTokens == 0) tile_error = 0;
    // A weight that underflows is below 2^-1000; this keeps an infinite eta infinite.
    const double error = (weight + 0x1p-1000) * ValueErrorBound(args, g, t);
    tile_error += error;
    value_term += error;
    result.tile_value_error[int64_t{g} * args.tile_count + tile] =
        ToFloatRoundedUp(tile_error * (1 + kSumInflation));
  }
  result.value_term[g] = ToFloatRoundedUp(value_term * (1 + kSumInflation));
  float* output =
      result.outputs == nullptr ? nullptr : result.outputs + int64_t{g} * args.layout->value_dim;
  result.rounding_term[g] = ToFloatRoundedUp(WriteOutput(args, &sums, output));
}

}  // namespace

int64_t AttendWorkspaceBytes(const AttendArgs& /*args*/) { return 0; }

void Attend(const AttendArgs& args, const AttendResult& result, void* /*workspace*/) {
  const int32_t atom_count = AttendAtomCount(args);
  for (int g = 0; g < args.group_size; ++g) {
    const double lse = WriteAtoms(args, result, g);
    result.lse_nat[g] = static_cast<float>(lse);
    for (int32_t a = 0; a < atom_count; ++a) {
      const int64_t index = int64_t{g} * atom_count + a;
      const TokenRange tokens = AtomTokens(args, a);
      result.logit_half_width[index] = HalfWidthOf(args, g, tokens, lse);
      if (result.top_half_width == nullptr) continue;
      result.top_half_width[index] =
          tokens.begin < tokens.end ? HalfWidthOf(args, g, TopToken(args, g, tokens), lse) : 0;
    }
    WriteValues(args, result, g, lse);
  }
  result.value_radius[0] = ValueRadius(args);
}

}  // namespace certkv::reference
