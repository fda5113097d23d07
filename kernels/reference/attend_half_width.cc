#include "kernels/reference/attend_half_width.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "kernels/core/half.h"
#include "kernels/core/witness.h"
#include "kernels/reference/round_up.h"
#include "kernels/reference/sequence.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Hoelder: logit_scale * sum |q_i| u_i, u_i = half_range * scale_i. +infinity where the format has
// no scales.
double HolderHalfWidth(const AttendArgs& args, const float* query, const uint8_t* scan) {
  const TileLayout& layout = *args.layout;
  if (!IsAffine(layout.key_format)) return kInfinity;
  double sum = 0;
  for (int i = 0; i < layout.head_dim; ++i) {
    sum += std::fabs(double{query[i]}) * F16ToFloat(ReadKeyScale(layout, scan, i));
  }
  return args.logit_scale * AffineDepthOf(layout.key_format).half_range * sum;
}

// Cauchy-Schwarz by band: logit_scale * sum_b ||q_b|| w_b of one token. +infinity without a
// witness.
double WitnessHalfWidth(const AttendArgs& args, const float* query, const uint8_t* scan, int t) {
  const TileLayout& layout = *args.layout;
  if (layout.witness_bands == 0) return kInfinity;
  std::array<double, kWitnessBandsMax> norm_squares{};
  for (int i = 0; i < layout.head_dim; ++i) {
    norm_squares[WitnessBandOf(layout, i)] += double{query[i]} * query[i];
  }
  const int16_t exponent = ReadHeader(scan).witness_exponent;
  double sum = 0;
  for (int b = 0; b < layout.witness_bands; ++b) {
    if (norm_squares[b] == 0) continue;  // 0 * infinity is 0: the band isn't asked
    sum += std::sqrt(norm_squares[b]) * DecodeWitness(ReadWitness(layout, scan, t, b), exponent);
  }
  return args.logit_scale * sum;
}

// Rounding of a served logit and of its weight in double, against exact arithmetic:
//   the dot product, at most (d + 2) * 2^-53 * scale * ||q|| ||k^|| with d <= 256: 2^-44 of it;
//   tanh and its argument: 4 * 2^-53 * cap;
//   exp(l - lse) and the sum of weights: the argument's rounding 2^-52 (|l| + |lse|), and 2^-28
//   for exp and a sum of at most 2^24 terms.
double ArithmeticSlackNat(const AttendArgs& args, double query_norm, double key_norm, double lse) {
  const double magnitude = args.logit_scale * query_norm * key_norm;
  return 0x1p-44 * (magnitude + args.soft_cap + std::fabs(lse)) + 0x1p-28;
}

double NormOf(const float* vector, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += double{vector[i]} * vector[i];
  return std::sqrt(sum);
}

// Bound on ||k^|| of the token as head g reads it.
double KeyNorm(const AttendArgs& args, int g, int64_t token) {
  const int32_t tile = TileOf(args, token);
  if (tile >= 0 && !ReadsOriginalKey(args, g, token)) {
    return ReadHeader(args.tiles[tile].scan).key_norm;
  }
  std::array<double, kHeadDimMax> key;
  ReadKey(args, g, token, key.data());
  double sum = 0;
  for (int i = 0; i < args.layout->head_dim; ++i) sum += key[i] * key[i];
  return std::sqrt(sum);
}

}  // namespace

float AtomHalfWidth(const AttendArgs& args, int g, int32_t atom, double lse) {
  constexpr float kUnknown = std::numeric_limits<float>::infinity();
  const TokenRange tokens = AtomTokens(args, atom);
  if (tokens.begin >= tokens.end) return 0;
  const float* query = args.queries + int64_t{g} * args.layout->head_dim;
  const double query_norm = NormOf(query, args.layout->head_dim);
  // An atom lies in one tile or in the tail, so its tokens share source and scales.
  const bool is_exact = KeyIsExact(args, g, tokens.begin);
  const uint8_t* scan = is_exact ? nullptr : args.tiles[TileOf(args, tokens.begin)].scan;
  const double holder = is_exact ? 0 : HolderHalfWidth(args, query, scan);
  double half_width = 0;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    double token_width = ArithmeticSlackNat(args, query_norm, KeyNorm(args, g, t), lse);
    if (!is_exact) {
      const int row = static_cast<int>(t % kTileTokens);
      token_width += std::min(holder, WitnessHalfWidth(args, query, scan, row));
    }
    if (!(token_width <= kLogitHalfWidthMaxNat)) return kUnknown;
    half_width = std::max(half_width, token_width);
  }
  // At most d + 8 roundings of 2^-53 each in a sum of non-negative terms.
  return RoundUpToFloat(half_width * (1 + 0x1p-42));
}

}  // namespace certkv::reference
