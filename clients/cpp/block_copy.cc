#include "clients/cpp/block_copy.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/cpp/leased_tiles.h"
#include "kernels/core/half.h"
#include "kernels/core/slab_layout.h"
#include "kernels/core/status.h"
#include "kernels/core/tile_layout.h"
#include "kernels/ops/quantize_tile.h"

namespace certkv::client {
namespace {

// One tile's decoded keys and values.
struct DecodedTile {
  explicit DecodedTile(const CacheSpec& spec)
      : keys(int64_t{kTileTokens} * spec.head_dim), values(int64_t{kTileTokens} * spec.value_dim) {}
  std::vector<float> keys, values;
};

// Copies one layer and KV head into keys and values, tile by tile.
class HeadCopy {
 public:
  HeadCopy(const Worker& worker, const BlockHandle& handle, int64_t block, BlockSource source)
      : worker_(worker), handle_(handle), block_(block), source_(source), decoded_(worker.spec()) {}

  absl::Status Copy(int32_t layer, int32_t kv_head, uint16_t* keys, uint16_t* values) {
    const SlabLayout& device = worker_.device_layout();
    const CacheSpec& spec = worker_.spec();
    if (source_ == BlockSource::kOriginal) {
      const SlabLayout& backing = worker_.backing_layout();
      const int32_t slot = handle_.backing.slot;
      std::memcpy(keys, worker_.backing_base() + backing.key_offset(slot, layer, kv_head),
                  int64_t{2} * spec.block_tokens * spec.head_dim);
      std::memcpy(values, worker_.backing_base() + backing.value_offset(slot, layer, kv_head),
                  int64_t{2} * spec.block_tokens * spec.value_dim);
    }
    for (int32_t tile = 0; tile < device.tiles_per_block(); ++tile) {
      const int32_t slot = handle_.device.slot;
      AttendTile stored{};
      stored.scan = worker_.device_base() + device.scan_offset(slot, layer, kv_head, tile);
      stored.detail = worker_.device_base() + device.detail_offset(slot, layer, kv_head, tile);
      uint16_t* tile_keys = keys + int64_t{tile} * kTileTokens * spec.head_dim;
      uint16_t* tile_values = values + int64_t{tile} * kTileTokens * spec.value_dim;
      if (source_ == BlockSource::kOriginal) {
        stored.original_keys = tile_keys;
        stored.original_values = tile_values;
      }
      CERTKV_RETURN_IF_ERROR(VerifyLeasedTile(
          worker_, handle_.key, {.block = block_, .layer = layer, .kv_head = kv_head, .tile = tile},
          stored));
      if (source_ == BlockSource::kQuantized) {
        CERTKV_RETURN_IF_ERROR(Decode(layer, stored, tile_keys, tile_values));
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Decode(int32_t layer, const AttendTile& stored, uint16_t* keys, uint16_t* values) {
    CERTKV_RETURN_IF_ERROR(DequantizeTile(worker_.device_layout().tile_layout(layer), stored.scan,
                                          stored.detail, decoded_.keys.data(),
                                          decoded_.values.data()));
    const auto narrow = [dtype = worker_.spec().original_dtype](float number) {
      return FloatToOriginal(dtype, number);
    };
    std::transform(decoded_.keys.begin(), decoded_.keys.end(), keys, narrow);
    std::transform(decoded_.values.begin(), decoded_.values.end(), values, narrow);
    return absl::OkStatus();
  }

  const Worker& worker_;
  const BlockHandle& handle_;
  const int64_t block_;
  const BlockSource source_;
  DecodedTile decoded_;
};

}  // namespace

int64_t BlockElements(const CacheSpec& spec) {
  return int64_t{spec.layer_count()} * spec.kv_head_count * spec.block_tokens *
         (spec.head_dim + spec.value_dim);
}

absl::Status CopyBlock(const Worker& worker, const Sequence& sequence, int64_t block,
                       BlockSource source, uint16_t* out) {
  const auto block_count = static_cast<int64_t>(sequence.blocks().size());
  if (!(block >= 0 && block < block_count)) {
    return MakeError(absl::StatusCode::kInvalidArgument, "READ_INVALID",
                     absl::StrCat("block is ", block, ", must be in [0, ", block_count, ")"));
  }
  CERTKV_RETURN_IF_ERROR(sequence.CheckLease());
  const BlockHandle& handle = sequence.blocks()[block];
  CERTKV_RETURN_IF_ERROR(CheckGenerations(worker, handle, block, /*after=*/false));
  const CacheSpec& spec = worker.spec();
  HeadCopy copy(worker, handle, block, source);
  absl::Status status;
  for (int32_t layer = 0; layer < spec.layer_count() && status.ok(); ++layer) {
    for (int32_t head = 0; head < spec.kv_head_count && status.ok(); ++head) {
      uint16_t* values = out + int64_t{spec.block_tokens} * spec.head_dim;
      status = copy.Copy(layer, head, out, values);
      out = values + int64_t{spec.block_tokens} * spec.value_dim;
    }
  }
  // A slot that was reused meanwhile explains whatever else is wrong.
  CERTKV_RETURN_IF_ERROR(CheckGenerations(worker, handle, block, /*after=*/true));
  return status;
}

}  // namespace certkv::client
