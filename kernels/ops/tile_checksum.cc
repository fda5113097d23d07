#include "kernels/ops/tile_checksum.h"

// With XXH_STATIC_LINKING_ONLY (CMakeLists.txt) the state lives on the stack: sealing allocates
// nothing. On x86 the library picks the widest instruction set that the processor has.
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include <cstddef>

namespace certkv {
namespace {

constexpr int64_t kChecksumBegin = offsetof(TileHeader, scan_checksum);
constexpr int64_t kChecksumEnd = kChecksumBegin + int64_t{sizeof(uint64_t)};

void AddRows(XXH3_state_t* state, const uint16_t* rows, int64_t stride, int32_t width) {
  if (stride == width) {
    XXH3_64bits_update(state, rows, sizeof(uint16_t) * width * kTileTokens);
    return;
  }
  for (int t = 0; t < kTileTokens; ++t) {
    XXH3_64bits_update(state, rows + t * stride, sizeof(uint16_t) * width);
  }
}

}  // namespace

uint64_t ScanChecksum(const TileLayout& layout, const uint8_t* scan) {
  const uint64_t zero = 0;
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, scan, kChecksumBegin);
  XXH3_64bits_update(&state, &zero, sizeof(zero));
  XXH3_64bits_update(&state, scan + kChecksumEnd, layout.scan_bytes - kChecksumEnd);
  return XXH3_64bits_digest(&state);
}

uint64_t DetailChecksum(const TileLayout& layout, const uint8_t* detail) {
  return XXH3_64bits(detail, layout.detail_bytes);
}

uint64_t OriginalChecksum(const TileLayout& layout, const uint16_t* keys, int64_t key_stride,
                          const uint16_t* values, int64_t value_stride) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  AddRows(&state, keys, key_stride, layout.head_dim);
  AddRows(&state, values, value_stride, layout.value_dim);
  return XXH3_64bits_digest(&state);
}

uint32_t WitnessWeightsCheck(const float* weights, int32_t head_dim) {
  const auto check =
      static_cast<uint32_t>(XXH3_64bits(weights, sizeof(float) * static_cast<size_t>(head_dim)));
  return check == 0 ? 1 : check;
}

}  // namespace certkv
