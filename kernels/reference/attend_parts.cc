#include "kernels/reference/attend_parts.h"

#include <algorithm>

#include "kernels/bounds/rounding.h"
#include "kernels/reference/hadamard.h"
#include "kernels/reference/sequence.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::reference {

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

}  // namespace certkv::reference
