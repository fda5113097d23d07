#include "kernels/bounds/half_width.h"

#include <algorithm>
#include <cmath>

#include "kernels/bounds/rounding.h"
#include "kernels/core/tile_layout.h"
#include "kernels/core/witness.h"

namespace certkv {
namespace {

// Scale times a sum of non-negative terms, rounded up. NaN stays visible until here.
double ScaledRoundedUp(double logit_scale, double sum) {
  return RoundUp(KnownOrInfinity(logit_scale) * sum);
}

}  // namespace

double ScaleHalfWidth(absl::Span<const float> query, absl::Span<const float> channel_error,
                      double logit_scale) {
  if (query.size() != channel_error.size()) return kUnknownBound;
  double sum = 0;
  for (size_t i = 0; i < query.size(); ++i) {
    sum += std::fabs(double{query[i]}) * KnownOrInfinity(channel_error[i]);
  }
  return ScaledRoundedUp(logit_scale, sum);
}

double NormRoundedUp(absl::Span<const float> x) {
  double sum = 0;
  for (const float value : x) sum += double{value} * value;
  return RoundUp(std::sqrt(sum));
}

int32_t BandOfChannel(const BandSplit& split, int32_t channel) {
  TileLayout layout{};
  layout.head_dim = split.channel_count;
  layout.rotary_dim = split.rotary_dim;
  layout.rope_pairing = split.pairing;
  layout.witness_bands = split.band_count;
  return WitnessBandOf(layout, channel);
}

void BandNorms(const BandSplit& split, absl::Span<const float> query,
               absl::Span<const float> witness_weights, absl::Span<double> norm) {
  const bool fits = query.size() == static_cast<size_t>(split.channel_count) &&
                    (witness_weights.empty() || witness_weights.size() == query.size()) &&
                    norm.size() == static_cast<size_t>(split.band_count);
  std::fill(norm.begin(), norm.end(), fits ? 0.0 : kUnknownBound);
  if (!fits) return;
  for (int32_t i = 0; i < split.channel_count; ++i) {
    const double weight = witness_weights.empty() ? 1.0 : double{witness_weights[i]};
    const double entry = weight > 0 ? query[i] / weight : kUnknownBound;
    norm[BandOfChannel(split, i)] += entry * entry;
  }
  for (double& value : norm) value = RoundUp(std::sqrt(value));
}

double WitnessHalfWidth(absl::Span<const double> band_norm, absl::Span<const float> band_witness,
                        double logit_scale) {
  if (band_norm.size() != band_witness.size()) return kUnknownBound;
  double sum = 0;
  for (size_t b = 0; b < band_norm.size(); ++b) {
    sum += KnownOrInfinity(band_norm[b]) * KnownOrInfinity(band_witness[b]);
  }
  return ScaledRoundedUp(logit_scale, sum);
}

double MinHalfWidth(absl::Span<const double> half_width) {
  double smallest = kUnknownBound;
  for (const double value : half_width) smallest = std::min(smallest, KnownOrInfinity(value));
  return smallest;
}

double DotRoundingSlack(const DotRounding& dot) {
  if (!(dot.channel_count >= 0)) return kUnknownBound;
  const auto channel_count = static_cast<double>(dot.channel_count);
  const double gamma =
      std::max((channel_count + 2) * 0x1p-24, FloatRoundingFactor(dot.channel_count + 1));
  const double product = KnownOrInfinity(dot.query_norm) * KnownOrInfinity(dot.key_norm);
  return ScaledRoundedUp(dot.logit_scale, gamma * product + channel_count * 0x1p-149);
}

double QueryRoundingSlack(absl::Span<const float> query, absl::Span<const float> rounded_query,
                          absl::Span<const float> key_abs_max, double logit_scale) {
  if (query.size() != rounded_query.size() || query.size() != key_abs_max.size())
    return kUnknownBound;
  double sum = 0;
  for (size_t i = 0; i < query.size(); ++i) {
    // A difference of floats of very different size is rounded once; RoundUp covers it.
    sum += std::fabs(double{query[i]} - rounded_query[i]) * KnownOrInfinity(key_abs_max[i]);
  }
  return ScaledRoundedUp(logit_scale, sum);
}

}  // namespace certkv
