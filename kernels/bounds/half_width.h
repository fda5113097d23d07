// The box of a logit: half-widths c with |l^ - l| <= c (docs/bounds.md, section 2).
//
//   q   query in the frame in which keys are scored, [d]
//   k   original key, k^ the key as dequantized, r = k - k^
//   s   logit scale, normally 1/sqrt(d)
//   l   = s q.k, l^ = s q.k^ (nats); l^ - l = -s q.r
//
// Every function here bounds |s q.r|, or one further error of l^, on its own. Bounds of the same
// error are alternatives (take the smallest, MinHalfWidth); bounds of different errors add
// (AddRoundedUp). An additive bias or mask shared by both logits changes nothing, and neither does
// soft-capping, which is 1-Lipschitz.
//
// Units: half-widths and slacks in nats; norms in key or query units.
// Rounding: up. Each sum of n products of floats is computed in double, where the products are
//   exact and the sum and the scaling lose at most (n + 1) 2^-53 of it; RoundUp gives back 2^-18.
// Errors: none; a NaN or negative input, or spans of different lengths, give +infinity.
//   So does 0 * infinity: a channel whose error is unknown is unknown even if q is 0 there.
// Threads: pure functions. Nothing is allocated.
#ifndef CERTKV_KERNELS_BOUNDS_HALF_WIDTH_H_
#define CERTKV_KERNELS_BOUNDS_HALF_WIDTH_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/core/cache_spec.h"

namespace certkv {

// Scale bound (Hoelder): s * sum_i |q_i| u_i >= |s q.r| when |r_i| <= u_i.
double ScaleHalfWidth(absl::Span<const float> query,
                      absl::Span<const float> channel_error,  // u, [d], key units
                      double logit_scale);

// ||x||_2, rounded up.
double NormRoundedUp(absl::Span<const float> x);

// How channels are split into bands. Every band is a union of RoPE frequency pairs, so a rotation
// moves no norm between bands and a witness stays valid at another position (RoPE lemma).
struct BandSplit {
  int32_t channel_count = 0;  // d, >= 1
  int32_t rotary_dim = 0;     // even, [0, d]
  RopePairing pairing = RopePairing::kInterleaved;
  int32_t band_count = 4;  // [1, kWitnessBandsMax]
};

// Band in [0, band_count) of a channel in [0, d). The format's own definition, WitnessBandOf of
// kernels/core, so that who writes a witness and who reads it cannot differ.
int32_t BandOfChannel(const BandSplit& split, int32_t channel);

// ||(q_i / w_i)_b||_2 of each band, rounded up. All +infinity when the sizes do not fit the split.
void BandNorms(const BandSplit& split,
               absl::Span<const float> query,            // q, [d]
               absl::Span<const float> witness_weights,  // w > 0, [d]; empty: all 1
               absl::Span<double> band_norm);            // [band_count] out

// Witness bound (Cauchy-Schwarz by band; WitCert, arXiv 2607.28699):
// s * sum_b ||q_b|| W_b >= |s q.r| when ||r_b|| <= W_b. Both sides may be weighted, because
// q.r = sum_i (q_i / w_i)(w_i r_i): ||(q_i / w_i)_b||, and W_b >= ||(w_i r_i)_b||.
double WitnessHalfWidth(absl::Span<const double> band_norm,    // of BandNorms, [B]
                        absl::Span<const float> band_witness,  // W_b, [B], key units
                        double logit_scale);

// The smallest of the half-widths that a format offers; unknown ones do not count.
// +infinity when none is offered.
double MinHalfWidth(absl::Span<const double> half_width);

// What a float dot product can lose.
struct DotRounding {
  int64_t channel_count = 0;  // d
  double logit_scale = 0;     // s
  double query_norm = 0;      // ||q||, rounded up
  double key_norm = 0;        // largest ||k^|| in the block, rounded up
};

// gamma * s * ||q|| * key_norm with gamma = (d + 2) 2^-24: error of s * q.k^ in float, accumulated
// in any order, one rounding per product, per addition and for the scale.
//
// d + 1 roundings in sequence lose FloatRoundingFactor(d + 1) of s sum |q_i k_i|, and
// Cauchy-Schwarz bounds that sum. FloatRoundingFactor(d + 1) <= (d + 2) 2^-24 while (d + 1)(d + 2)
// <= 2^24, that is, for d <= 4094; above that the larger of both is taken. Products that underflow
// lose up to 2^-150 each; s d 2^-149 covers them.
//
// This is one path. The box of l^ - l needs it twice when both logits are computed in float: once
// with k^ and once with the norm of the original keys.
double DotRoundingSlack(const DotRounding& dot);

// s * sum_i |q_i - q^_i| * key_abs_max_i: error of l^ when the kernel scores with a rounded query.
double QueryRoundingSlack(absl::Span<const float> query, absl::Span<const float> rounded_query,
                          absl::Span<const float> key_abs_max,  // [d], largest |k^_i| in the block
                          double logit_scale);

}  // namespace certkv

#endif  // CERTKV_KERNELS_BOUNDS_HALF_WIDTH_H_
