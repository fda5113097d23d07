#include "kernels/bounds/dither.h"

#include <cmath>
#include <cstddef>

#include "kernels/bounds/rounding.h"

namespace certkv {
namespace {

constexpr int kRounds = 10;
constexpr int64_t kHeadsMax = 8192;

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
  const std::array<uint32_t, 2> key = {static_cast<uint32_t>(place.request_key),
                                       static_cast<uint32_t>(place.request_key >> 32)};
  const auto head = static_cast<uint32_t>(place.layer * kHeadsMax + place.kv_head);
  std::array<uint32_t, 4> words{};
  for (size_t i = 0; i < u.size(); ++i) {
    if (i % 4 == 0) {
      words = Philox4x32({static_cast<uint32_t>(i / 4), head, static_cast<uint32_t>(place.token),
                          /*what it is for=*/1},
                         key);
    }
    // 24 bits and a half: every one is a float.
    u[i] = (static_cast<float>(words[i % 4] >> 8) - 0x1p23f + 0.5f) * 0x1p-24f;
  }
}

ProbableHalfWidth DitherHalfWidth(absl::Span<const float> query,
                                  absl::Span<const float> channel_scale, const DitheredRead& read) {
  const double delta = read.failure_probability;
  if (query.size() != channel_scale.size() || !(read.token_count >= 1) ||
      !(delta > 0 && delta < 1) || !(read.logit_scale >= 0)) {
    return {kUnknownBound, 1};
  }
  double squares = 0;
  double sum = 0;
  for (size_t i = 0; i < query.size(); ++i) {
    if (!(channel_scale[i] >= 0)) return {kUnknownBound, 1};
    const double term = std::fabs(double{query[i]}) * double{channel_scale[i]};
    squares += term * term;
    sum += term;
  }
  // log, sqrt and the sums lose far less than the 2^-18 that RoundUp gives back.
  const double factor = std::sqrt(2 * std::log(2 * static_cast<double>(read.token_count) / delta));
  const double probable = RoundUp(read.logit_scale * std::sqrt(squares / 12) * factor);
  const double rounding = RoundUp(read.logit_scale * sum * 0x1p-13);
  return {AddRoundedUp(probable, rounding), delta};
}

}  // namespace certkv
