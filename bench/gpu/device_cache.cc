#include "bench/gpu/device_cache.h"

#include <algorithm>

#include "bench/kernels/bench_data.h"
#include "kernels/cuda/seal.h"

namespace certkv::bench {
namespace {

constexpr int32_t kDistinctTiles = 64;

absl::StatusOr<cuda::Buffer> UploadRepeated(const cuda::Stream& stream,
                                            const std::vector<uint16_t>& rows, int64_t size_bytes) {
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer buffer, cuda::Buffer::Allocate(size_bytes));
  const int64_t filled = std::min<int64_t>(size_bytes, 2 * static_cast<int64_t>(rows.size()));
  CERTKV_RETURN_IF_ERROR(buffer.CopyFrom(rows.data(), filled));
  CERTKV_RETURN_IF_ERROR(Repeat(stream, buffer, filled));
  return buffer;
}

}  // namespace

absl::Status Repeat(const cuda::Stream& stream, const cuda::Buffer& buffer, int64_t filled_bytes) {
  auto* const bytes = buffer.As<uint8_t>();
  for (int64_t filled = filled_bytes; filled < buffer.size_bytes(); filled *= 2) {
    const int64_t count = std::min(filled, buffer.size_bytes() - filled);
    CERTKV_RETURN_IF_ERROR(cuda::StatusOfLaunch(
        cuda::LaunchCopy(bytes + filled, bytes, count, stream.get()), "repeating a sequence"));
  }
  return stream.Synchronize();
}

absl::StatusOr<DeviceOriginals> DeviceOriginals::Make(const cuda::Stream& stream, int32_t dim,
                                                      int32_t tile_count) {
  std::vector<uint16_t> keys;
  std::vector<uint16_t> values;
  for (int32_t n = 0; n < std::min(tile_count, kDistinctTiles); ++n) {
    std::vector<uint16_t> tile_keys(int64_t{kTileTokens} * dim);
    std::vector<uint16_t> tile_values(tile_keys.size());
    FillOriginals(n, dim, &tile_keys, &tile_values);
    keys.insert(keys.end(), tile_keys.begin(), tile_keys.end());
    values.insert(values.end(), tile_values.begin(), tile_values.end());
  }
  const int64_t size_bytes = int64_t{tile_count} * kTileTokens * dim * 2;
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer device_keys, UploadRepeated(stream, keys, size_bytes));
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer device_values, UploadRepeated(stream, values, size_bytes));
  return DeviceOriginals{std::move(device_keys), std::move(device_values), tile_count};
}

absl::StatusOr<DeviceTiles> DeviceTiles::Make(const CacheSpec& spec,
                                              const DeviceOriginals& originals) {
  const TileLayout layout = MakeTileLayout(spec, 0);
  const int64_t count = originals.tile_count;
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer scans, cuda::Buffer::Allocate(count * layout.scan_bytes));
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer details,
                          cuda::Buffer::Allocate(count * layout.detail_bytes));
  std::vector<cuda::SealTile> tiles;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = n * kTileTokens * spec.head_dim;
    tiles.push_back({originals.keys.As<uint16_t>() + row, originals.values.As<uint16_t>() + row,
                     nullptr, spec.head_dim, spec.value_dim, static_cast<uint64_t>(n),
                     scans.As<uint8_t>() + n * layout.scan_bytes,
                     details.As<uint8_t>() + n * layout.detail_bytes});
  }
  CERTKV_ASSIGN_OR_RETURN(cuda::Buffer records, Upload(tiles));
  return DeviceTiles{
      spec, layout, std::move(scans), std::move(details), std::move(records), originals.tile_count};
}

int DeviceTiles::Seal(CUstream_st* stream) const {
  const cuda::SealFormat format{layout, spec.original_dtype, spec.layers[0].fp8_key_scale};
  return cuda::LaunchSeal(format, records.As<cuda::SealTile>(), tile_count, stream);
}

AttendTile DeviceTiles::tile(int32_t n) const {
  return {scans.As<uint8_t>() + n * layout.scan_bytes,
          details.As<uint8_t>() + n * layout.detail_bytes, nullptr, nullptr};
}

}  // namespace certkv::bench
