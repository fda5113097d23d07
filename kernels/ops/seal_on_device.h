// Seals tiles whose originals are in a device's memory already, and moves what was sealed there.
// Nothing passes through the host.
//
// Addresses are of the process's device: its memory, and pinned host memory. Operations run on the
// default stream, after whatever was queued there before, in one launch for each DeviceSeal and one
// for all runs, and return when they are done.
#ifndef CERTKV_KERNELS_OPS_SEAL_ON_DEVICE_H_
#define CERTKV_KERNELS_OPS_SEAL_ON_DEVICE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/tile_layout.h"

namespace certkv {

struct DeviceTile {
  const uint16_t* keys;    // [64][d], contiguous, as in QuantizeTileArgs
  const uint16_t* values;  // [64][d_v]
  int32_t kv_head;         // whose witness weights they are weighted with
  uint64_t identity_tag;
  uint8_t* scan;    // [layout->scan_bytes] out, 64-byte aligned
  uint8_t* detail;  // [layout->detail_bytes] out, 64-byte aligned
};

// Tiles of one layer.
struct DeviceSeal {
  const CacheSpec* spec;
  int32_t layer;
  const TileLayout* layout;  // MakeTileLayout(*spec, layer)
  std::vector<DeviceTile> tiles;
};

// Has the device a kernel for every layer of the spec? Errors: Unimplemented
// [DEVICE_LACKS_OPERATION], naming what it lacks: K8D keys.
absl::Status CheckSealsOnDevice(const CacheSpec& spec);

// Writes the records of all tiles, bit for bit those of QuantizeTile(Backend::kCuda), but for the
// header's checksums and check of weights, which are 0: WriteTileChecksums makes them of what
// arrives on the host. The originals were checked (CheckTileOriginals), and nobody else can write
// to them meanwhile.
// Errors: as CheckSealsOnDevice; FailedPrecondition [DEVICE_MISSING]; ResourceExhausted
//         [DEVICE_MEMORY_FULL]; Internal [DEVICE_FAILED]. Nothing may be used of the records then.
// Threads: concurrent calls are safe when their outputs differ.
absl::Status SealOnDevice(absl::Span<const DeviceSeal> seals);

// A run of bytes; both addresses and the size are multiples of 16. Runs don't overlap.
struct DeviceRun {
  const void* from;
  void* to;
  int64_t size_bytes;
};

// Copies all runs. Errors: FailedPrecondition [DEVICE_MISSING]; ResourceExhausted
// [DEVICE_MEMORY_FULL]; Internal [DEVICE_FAILED].
absl::Status CopyRunsOnDevice(absl::Span<const DeviceRun> runs);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_SEAL_ON_DEVICE_H_
