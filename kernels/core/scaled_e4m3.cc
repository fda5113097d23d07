#include "kernels/core/scaled_e4m3.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

const char* DtypeName(OriginalDtype dtype) {
  return dtype == OriginalDtype::kF16 ? "float16" : "bfloat16";
}

}  // namespace

float ExactScaleAbove(float scale, OriginalDtype dtype) {
  // e4m3's smallest number is 2^-9, its largest 448 = 1.75 * 2^8; those of fp16 are 2^-24 and
  // 1.999 * 2^15, those of bf16 2^-133 and 1.99 * 2^127.
  const int exponent_min = dtype == OriginalDtype::kF16 ? -15 : -124;
  const int exponent_max = dtype == OriginalDtype::kF16 ? 7 : 119;
  int exponent = 0;
  const float fraction = std::frexp(scale, &exponent);  // in [0.5, 1)
  if (fraction == 0.5f) --exponent;
  return std::ldexp(1.0f, std::clamp(exponent, exponent_min, exponent_max));
}

absl::StatusOr<E4m3Originals> ScaleE4m3(float scale, OriginalDtype dtype) {
  if (!(scale > 0 && std::isfinite(scale))) {
    return MakeError(absl::StatusCode::kInvalidArgument, "FP8_SCALE_INVALID",
                     absl::StrFormat("the scale of an FP8 cache is %g, must be finite and > 0; "
                                     "pass the tensor's k_scale or v_scale",
                                     scale));
  }
  E4m3Originals originals{};
  for (int code = 0; code < 256; ++code) {
    const float number = E4m3ToFloat(static_cast<uint8_t>(code));
    // 4 + 24 bits, and no exponent that double lacks: exact.
    const double product = double{number} * double{scale};
    originals[code] = FloatToOriginal(dtype, static_cast<float>(product));
    if (std::isnan(number)) continue;
    const double original = OriginalToFloat(dtype, originals[code]);
    if (original == product) continue;
    return MakeError(
        absl::StatusCode::kInvalidArgument, "FP8_SCALE_INEXACT",
        absl::StrFormat(
            "the scale of an FP8 cache is %.9g, and code 0x%02x (%g) times it is %.12g, "
            "which %s can't hold (nearest is %.12g), so that certificates would be of "
            "other numbers than the engine's; quantize the cache with a power of two "
            "(%g), or keep it in %s",
            scale, code, number, product, DtypeName(dtype), original, ExactScaleAbove(scale, dtype),
            DtypeName(dtype)));
  }
  return originals;
}

}  // namespace certkv
