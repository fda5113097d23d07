// Two passes over the range. The first writes what each atom is (log-sum-exp, largest logit,
// half-width) and each head's log-sum-exp, which fixes the served distribution; the second sums
// values under it. Logits are computed twice, so that no scratch is needed.
#include "kernels/ops/attend.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/bounds/rounding.h"
#include "kernels/reference/attend_half_width.h"
#include "kernels/reference/hadamard.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/sequence.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Sums of p^ eta and of p^ v^: a term has at most 2^24 tokens * 2^-53 of rounding, and p^ itself
// 2^-40 (see ArithmeticSlackNat, which holds the same rounding of exp).
constexpr double kSumInflation = 0x1p-28;

// log sum exp of numbers that arrive one by one; -infinity while there is none.
class LogSumExp {
 public:
  void Add(double logit) {
    if (logit == -kInfinity) return;
    if (logit > max_) {
      sum_ = sum_ * std::exp(max_ - logit) + 1;
      max_ = logit;
    } else {
      sum_ += std::exp(logit - max_);
    }
  }
  double max() const { return max_; }
  double Value() const { return sum_ == 0 ? -kInfinity : max_ + std::log(sum_); }

 private:
  double max_ = -kInfinity;
  double sum_ = 0;
};

double SinkLogit(const AttendArgs& args, int g) {
  return args.sink_logits == nullptr ? -kInfinity : double{args.sink_logits[g]};
}

double ServedLogit(const AttendArgs& args, int g, int64_t token) {
  std::array<double, kHeadDimMax> key;
  ReadKey(args, g, token, key.data());
  double dot = 0;
  for (int i = 0; i < args.layout->head_dim; ++i) {
    dot += args.queries[int64_t{g} * args.layout->head_dim + i] * key[i];
  }
  const double logit = args.logit_scale * dot;
  return args.soft_cap > 0 ? args.soft_cap * std::tanh(logit / args.soft_cap) : logit;
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

// Sums of the second pass for one head.
struct ValueSums {
  std::array<double, kHeadDimMax> plain{};
  std::array<double, kHeadDimMax> rotated{};
  double magnitude = 0;  // sum p^ ||v^||_2
};

void AddValue(const AttendArgs& args, int g, int64_t token, double weight, ValueSums* sums) {
  std::array<double, kHeadDimMax> value;
  const bool is_rotated = ReadValue(args, g, token, value.data());
  auto& sum = is_rotated ? sums->rotated : sums->plain;
  double norm_square = 0;
  for (int i = 0; i < args.layout->value_dim; ++i) {
    sum[i] += weight * value[i];
    norm_square += value[i] * value[i];
  }
  sums->magnitude += weight * std::sqrt(norm_square);
}

// Rounds the output to float and returns a bound on ||o^ - sum p^ v^||_2.
double WriteOutput(const AttendArgs& args, ValueSums* sums, float* output) {
  RotateHadamard(sums->rotated.data(), args.layout->value_dim);
  double error_square = 0;
  for (int i = 0; i < args.layout->value_dim; ++i) {
    const double exact = sums->plain[i] + sums->rotated[i];
    const auto rounded = static_cast<float>(exact);
    error_square += (exact - rounded) * (exact - rounded);
    if (output != nullptr) output[i] = rounded;
  }
  return std::sqrt(error_square) * (1 + kSumInflation) + sums->magnitude * kSumInflation;
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

// Largest ||v||_2 of the originals, from the tiles' headers and the tail itself.
float ValueRadius(const AttendArgs& args) {
  double radius = 0;
  for (int64_t t = args.token_begin; t < args.token_end; ++t) {
    const int32_t tile = TileOf(args, t);
    if (tile >= 0) {
      radius = std::max(radius, double{ReadHeader(args.tiles[tile].scan).value_radius});
      continue;
    }
    std::array<double, kHeadDimMax> value;
    ReadValue(args, 0, t, value.data());
    double sum = 0;
    for (int i = 0; i < args.layout->value_dim; ++i) sum += value[i] * value[i];
    radius = std::max(radius, std::sqrt(sum) * (1 + 0x1p-42));
  }
  return ToFloatRoundedUp(radius);
}

}  // namespace

int64_t AttendWorkspaceBytes(const AttendArgs& /*args*/) { return 0; }

void Attend(const AttendArgs& args, const AttendResult& result, void* /*workspace*/) {
  const int32_t atom_count = AttendAtomCount(args);
  for (int g = 0; g < args.group_size; ++g) {
    const double lse = WriteAtoms(args, result, g);
    result.lse_nat[g] = static_cast<float>(lse);
    for (int32_t a = 0; a < atom_count; ++a) {
      result.logit_half_width[int64_t{g} * atom_count + a] = AtomHalfWidth(args, g, a, lse);
    }
    WriteValues(args, result, g, lse);
  }
  result.value_radius[0] = ValueRadius(args);
}

}  // namespace certkv::reference
