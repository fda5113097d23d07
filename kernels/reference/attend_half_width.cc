#include "kernels/reference/attend_half_width.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "kernels/bounds/dither.h"
#include "kernels/bounds/half_width.h"
#include "kernels/bounds/rounding.h"
#include "kernels/core/half.h"
#include "kernels/core/witness.h"
#include "kernels/reference/sequence.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::reference {
namespace {

// One head's query against one quantized tile.
class TileHalfWidth {
 public:
  TileHalfWidth(const AttendArgs& args, int g, absl::Span<const float> query, const uint8_t* scan)
      : layout_(*args.layout),
        scan_(scan),
        header_(ReadHeader(scan)),
        logit_scale_(args.logit_scale) {
    if (IsAffine(layout_.key_format)) {
      scale_half_width_ = MinHalfWidth({FromScales(query), FromDither(args, g, query)});
    }
    if (layout_.witness_bands > 0) {
      const size_t weight_count = layout_.has_witness_weights ? layout_.head_dim : 0;
      BandNorms({layout_.head_dim, layout_.rotary_dim, layout_.rope_pairing, layout_.witness_bands},
                query, absl::MakeConstSpan(args.witness_weights, weight_count),
                absl::MakeSpan(band_norm_.data(), layout_.witness_bands));
    }
  }

  // The smallest of what scales, dither and the token's own witness say.
  double OfToken(int t) const { return MinHalfWidth({scale_half_width_, FromWitness(t)}); }

 private:
  double FromScales(absl::Span<const float> query) const {
    const double half_range = AffineDepthOf(layout_.key_format).half_range;
    std::array<float, kHeadDimMax> channel_error;
    for (int i = 0; i < layout_.head_dim; ++i) {
      const double scale = F16ToFloat(ReadKeyScale(layout_, scan_, i));
      channel_error[i] = ToFloatRoundedUp(half_range * scale);  // the product is exact
    }
    return ScaleHalfWidth(query, absl::MakeConstSpan(channel_error.data(), layout_.head_dim),
                          logit_scale_);
  }

  double FromDither(const AttendArgs& args, int g, absl::Span<const float> query) const {
    if (args.failure_probability == nullptr || args.failure_probability[g] == 0) {
      return kUnknownBound;
    }
    std::array<float, kHeadDimMax> scale;
    for (int i = 0; i < layout_.head_dim; ++i) {
      scale[i] = F16ToFloat(ReadKeyScale(layout_, scan_, i));
    }
    return DitherHalfWidth(query, absl::MakeConstSpan(scale.data(), layout_.head_dim),
                           {.logit_scale = logit_scale_,
                            .token_count = args.token_end - args.token_begin,
                            .failure_probability = args.failure_probability[g]});
  }

  double FromWitness(int t) const {
    if (layout_.witness_bands == 0) return kUnknownBound;
    std::array<float, kWitnessBandsMax> witness;
    for (int b = 0; b < layout_.witness_bands; ++b) {
      witness[b] = DecodeWitness(ReadWitness(layout_, scan_, t, b), header_.witness_exponent);
    }
    return WitnessHalfWidth(absl::MakeConstSpan(band_norm_.data(), layout_.witness_bands),
                            absl::MakeConstSpan(witness.data(), layout_.witness_bands),
                            logit_scale_);
  }

  const TileLayout& layout_;
  const uint8_t* scan_;
  TileHeader header_;
  double logit_scale_;
  double scale_half_width_ = kUnknownBound;
  std::array<double, kWitnessBandsMax> band_norm_{};
};

// Rounding of a served logit and of its weight in double, against exact arithmetic:
//   the dot product, at most (d + 2) * 2^-53 * scale * ||q|| ||k^|| with d <= 256, and K8D's last
//   addition in a key, and the difference in its code, 2^-53 of |k^| + |zero| + |k| each, whose
//   norms are at most 3 * 16 ||k^|| (the channels' extremes may be of different tokens): 2^-44;
//   tanh and its argument: 4 * 2^-53 * cap;
//   exp(l - lse) and the sum of weights: the argument's rounding 2^-52 (|l| + |lse|), and 2^-28
//   for exp and a sum of at most 2^24 terms.
double ArithmeticSlackNat(const AttendArgs& args, double query_norm, double key_norm, double lse) {
  const double magnitude = args.logit_scale * query_norm * key_norm;
  return 0x1p-44 * (magnitude + args.soft_cap + std::fabs(lse)) + 0x1p-28;
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
  return RoundUp(std::sqrt(sum));
}

}  // namespace

float HalfWidthOf(const AttendArgs& args, int g, const TokenRange& tokens, double lse) {
  if (tokens.begin >= tokens.end) return 0;
  const int d = args.layout->head_dim;
  const auto query = absl::MakeConstSpan(args.queries + int64_t{g} * d, d);
  const double query_norm = NormRoundedUp(query);
  // The tokens lie in one tile or in the tail, so its tokens share their source.
  double key_norm = 0;
  for (int64_t t = tokens.begin; t < tokens.end; ++t) {
    key_norm = std::max(key_norm, KnownOrInfinity(KeyNorm(args, g, t)));
  }
  double half_width = 0;
  if (!KeyIsExact(args, g, tokens.begin)) {
    const TileHalfWidth tile(args, g, query, args.tiles[TileOf(args, tokens.begin)].scan);
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      half_width = std::max(half_width, tile.OfToken(static_cast<int>(t % kTileTokens)));
    }
  }
  half_width = AddRoundedUp(half_width, ArithmeticSlackNat(args, query_norm, key_norm, lse));
  return ToFloatRoundedUp(half_width <= kLogitHalfWidthMaxNat ? half_width : kUnknownBound);
}

double CoarseHalfWidth(const AttendArgs& args, int g, int32_t tile) {
  const TileLayout& layout = *args.layout;
  const uint8_t* scan = args.tiles[tile].scan;
  const auto query = absl::MakeConstSpan(args.queries + int64_t{g} * layout.head_dim,
                                         static_cast<size_t>(layout.head_dim));
  const double half_range = AffineDepthOf(KeyFormat::kK4).half_range;
  std::array<float, kHeadDimMax> channel_error;
  for (int i = 0; i < layout.head_dim; ++i) {
    channel_error[i] = ToFloatRoundedUp(half_range * F16ToFloat(ReadKeyScale(layout, scan, i)));
  }
  const double width = ScaleHalfWidth(
      query, absl::MakeConstSpan(channel_error.data(), layout.head_dim), args.logit_scale);
  return AddRoundedUp(width, ArithmeticSlackNat(args, NormRoundedUp(query),
                                                KnownOrInfinity(ReadHeader(scan).key_norm), 0));
}

}  // namespace certkv::reference
