#include <array>

#include "kernels/core/limits.h"
#include "kernels/reference/hadamard.h"
#include "kernels/reference/reference.h"
#include "kernels/reference/tile_codec.h"

namespace certkv::reference {

void DequantizeTile(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail,
                    float* keys, float* values) {
  for (int t = 0; keys != nullptr && t < kTileTokens; ++t) {
    for (int i = 0; i < layout.head_dim; ++i) {
      keys[t * layout.head_dim + i] = static_cast<float>(DecodeKey(layout, scan, detail, t, i));
    }
  }
  for (int t = 0; values != nullptr && t < kTileTokens; ++t) {
    std::array<double, kHeadDimMax> value;
    for (int i = 0; i < layout.value_dim; ++i) {
      value[i] = DecodeStoredValue(layout, detail, t, i);
    }
    if (ValuesAreRotated(layout)) RotateHadamard(value.data(), layout.value_dim);
    for (int i = 0; i < layout.value_dim; ++i) {
      values[t * layout.value_dim + i] = static_cast<float>(value[i]);
    }
  }
}

}  // namespace certkv::reference
