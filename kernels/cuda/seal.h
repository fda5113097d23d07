// Sealing on a GPU: encodes 64 tokens of one layer and KV head into a tile. kernels/ops/
// quantize_tile.h says what the bytes are, here is how it is launched. Needs no CUDA to include.
//
// One launch seals many tiles, one block each. Nothing is allocated and nothing waits. The header's
// three checksums, and the check of witness weights, are left 0: XXH3 is made on the host, of what
// the tile is when it arrives there.
#ifndef CERTKV_KERNELS_CUDA_SEAL_H_
#define CERTKV_KERNELS_CUDA_SEAL_H_

#include <cstdint>

#include "kernels/core/tile_layout.h"

struct CUstream_st;

namespace certkv::cuda {

// One tile; device addresses, as in QuantizeTileArgs.
struct SealTile {
  const uint16_t* keys;
  const uint16_t* values;
  const float* witness_weights;  // null where the layout has none
  int64_t key_stride;            // elements
  int64_t value_stride;
  uint64_t identity_tag;
  uint8_t* scan;
  uint8_t* detail;
};

// What all tiles of a launch share.
struct SealFormat {
  TileLayout layout;
  OriginalDtype original_dtype;
  float fp8_key_scale;  // FP8_E4M3 only
};

// Queues the kernel. `tiles` is a device address. 0, or the number of a cudaError_t. Originals are
// finite, affine keys within +-65504: who calls it has checked that as kernels/ops does. Aborts on
// K8D keys, which kernels/ops refuses for a device.
int LaunchSeal(const SealFormat& format, const SealTile* tiles, int32_t tile_count,
               CUstream_st* stream);

}  // namespace certkv::cuda

#endif  // CERTKV_KERNELS_CUDA_SEAL_H_
