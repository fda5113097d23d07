#include "kernels/bounds/dither.h"

#include <cmath>
#include <cstddef>

#include "kernels/bounds/rounding.h"

namespace certkv {
namespace {

constexpr int kRounds = 10;

// What words of the generator are for: the last word of its counter.
constexpr uint32_t kForDither = 1;
constexpr uint32_t kForCheck = 2;

std::array<uint32_t, 4> WordsOf(uint64_t secret, uint64_t identity_tag, uint32_t index,
                                uint32_t what_for) {
  return Philox4x32({index, static_cast<uint32_t>(identity_tag),
                     static_cast<uint32_t>(identity_tag >> 32), what_for},
                    {static_cast<uint32_t>(secret), static_cast<uint32_t>(secret >> 32)});
}

// Those of the channel and its three neighbours.
std::array<uint32_t, 4> WordsOf(const DitherPlace& place, uint32_t channel) {
  const uint32_t index = static_cast<uint32_t>(place.token) << 16 | channel / 4;
  return WordsOf(place.secret, place.identity_tag, index, kForDither);
}

// 24 bits and a half: every one is a float.
float FromWord(uint32_t word) {
  return (static_cast<float>(word >> 8) - 0x1p23f + 0.5f) * 0x1p-24f;
}

}  // namespace

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

void DitherOf(const DitherPlace& place, absl::Span<float> u) {
  for (size_t i = 0; i < u.size(); i += 4) {
    const std::array<uint32_t, 4> words = WordsOf(place, static_cast<uint32_t>(i));
    for (size_t n = 0; n < 4 && i + n < u.size(); ++n) u[i + n] = FromWord(words[n]);
  }
}

float DitherAt(const DitherPlace& place, int32_t channel) {
  return FromWord(WordsOf(place, static_cast<uint32_t>(channel))[channel % 4]);
}

uint32_t DitherCheck(uint64_t secret, uint64_t identity_tag) {
  return WordsOf(secret, identity_tag, 0, kForCheck)[0];
}

double DitherFactor(int64_t token_count, double failure_probability) {
  if (!(token_count >= 1) || !(failure_probability > 0 && failure_probability < 1)) {
    return kUnknownBound;
  }
  // log and root lose far less than the 2^-18 that RoundUp gives back.
  return RoundUp(
      std::sqrt(std::log(2 * static_cast<double>(token_count) / failure_probability) / 6));
}

double DitherHalfWidth(absl::Span<const float> query, absl::Span<const float> channel_scale,
                       const DitheredRead& read) {
  if (query.size() != channel_scale.size() || !(read.logit_scale >= 0)) return kUnknownBound;
  double squares = 0;
  double sum = 0;
  for (size_t i = 0; i < query.size(); ++i) {
    if (!(channel_scale[i] >= 0)) return kUnknownBound;
    const double term = std::fabs(double{query[i]}) * double{channel_scale[i]};
    squares += term * term;
    sum += term;
  }
  const double probable = RoundUp(read.logit_scale * std::sqrt(squares) *
                                  DitherFactor(read.token_count, read.failure_probability));
  return KnownOrInfinity(AddRoundedUp(probable, RoundUp(read.logit_scale * sum * kDitherLattice)));
}

}  // namespace certkv
