// What the dither of K8D keys adds to logits. Plain loops: the generator is most of it, and there
// is one for all instruction sets (docs/decisions/0061 says what that costs).
#include <array>
#include <cstdint>

#include "absl/types/span.h"
#include "kernels/bounds/dither.h"
#include "kernels/core/limits.h"
#include "kernels/cpu/attend_state.h"

namespace certkv::cpu {
namespace {

// In double, four sums side by side. Sizes of heads are multiples of 4.
double Dot(const float* x, const float* u, int size) {
  double sums[4] = {};
  for (int i = 0; i < size; i += 4) {
    for (int n = 0; n < 4; ++n) sums[n] += double{x[i + n]} * double{u[i + n]};
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

void SubtractDither(AttendState* state, uint64_t identity_tag, int first, int last,
                    uint32_t heads) {
  const AttendState& s = *state;
  const AttendArgs& args = *s.args;
  alignas(64) std::array<std::array<float, kHeadDimMax>, kGroupSizeMax> x;
  for (int g = 0; g < args.group_size; ++g) {
    for (int i = 0; i < s.head_dim; ++i) x[g][i] = s.queries[g * kRow + i] * s.tile_scale[i];
  }
  std::array<float, kHeadDimMax> u;
  for (int t = first; t < last; ++t) {
    DitherOf({.secret = args.layout->dither_secret, .identity_tag = identity_tag, .token = t},
             absl::MakeSpan(u.data(), s.head_dim));
    for (int g = 0; g < args.group_size; ++g) {
      if ((heads >> g & 1) == 0) continue;
      float& score = s.scores[g * kTileTokens + t];
      score = static_cast<float>(score - Dot(x[g].data(), u.data(), s.head_dim));
    }
  }
}

}  // namespace certkv::cpu
