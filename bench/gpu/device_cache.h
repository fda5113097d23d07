// Sequences in device memory for benchmarks: sealed there, and repeated until they are as many
// bytes as asked for.
#ifndef CERTKV_BENCH_GPU_DEVICE_CACHE_H_
#define CERTKV_BENCH_GPU_DEVICE_CACHE_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/status.h"
#include "kernels/core/tile_layout.h"
#include "kernels/cuda/runtime.h"
#include "kernels/ops/attend.h"

namespace certkv::bench {

// Host data on the device.
template <typename T>
absl::StatusOr<cuda::Buffer> Upload(const std::vector<T>& data) {
  const auto size_bytes = static_cast<int64_t>(data.size() * sizeof(T));
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer buffer, cuda::Buffer::Allocate(size_bytes));
  CERTKV_RETURN_IF_ERROR(buffer.CopyFrom(data.data(), size_bytes));
  return buffer;
}

// The first `filled_bytes` of the buffer repeated to its end.
absl::Status Repeat(const cuda::Stream& stream, const cuda::Buffer& buffer, int64_t filled_bytes);

// Tiles of one layer as originals: keys [tile][64][d], then values, fp16.
struct DeviceOriginals {
  cuda::Buffer keys;
  cuda::Buffer values;
  int32_t tile_count;

  static absl::StatusOr<DeviceOriginals> Make(const cuda::Stream& stream, int32_t dim,
                                              int32_t tile_count);
};

// The same sealed: scan records side by side, then detail records.
struct DeviceTiles {
  CacheSpec spec;
  TileLayout layout;
  cuda::Buffer scans;
  cuda::Buffer details;
  cuda::Buffer records;  // SealTile of every tile
  int32_t tile_count;

  // Allocates; Seal writes them.
  static absl::StatusOr<DeviceTiles> Make(const CacheSpec& spec, const DeviceOriginals& originals);
  int Seal(CUstream_st* stream) const;
  AttendTile tile(int32_t n) const;
};

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_GPU_DEVICE_CACHE_H_
