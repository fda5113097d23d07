#include "kernels/core/tile_layout.h"

#include "kernels/core/check.h"

namespace certkv {
namespace {

int64_t RoundUpToPlane(int64_t bytes) {
  return (bytes + kPlaneAlignment - 1) / kPlaneAlignment * kPlaneAlignment;
}

bool Is16Bit(KeyFormat format) { return format == KeyFormat::kF16 || format == KeyFormat::kBf16; }

int64_t FineBytes(KeyFormat format, int32_t head_dim) {
  switch (format) {
    case KeyFormat::kK8:
    case KeyFormat::kK8D:
    case KeyFormat::kFp8E4m3:
      return int64_t{8} * head_dim;
    case KeyFormat::kK6:
      return int64_t{4} * head_dim;
    case KeyFormat::kK4:
    case KeyFormat::kF16:
    case KeyFormat::kBf16:
      return 0;
  }
  return 0;
}

int64_t ValueBytes(ValueFormat format, int32_t value_dim) {
  switch (format) {
    case ValueFormat::kV4:
      return int64_t{256} * ((value_dim + 31) / 32);
    case ValueFormat::kV8:
      return int64_t{16} * value_dim;
    case ValueFormat::kF16:
    case ValueFormat::kBf16:
      return int64_t{32} * value_dim;
  }
  return 0;
}

}  // namespace

TileLayout MakeTileLayout(const CacheSpec& spec, int32_t layer, uint64_t dither_secret) {
  CERTKV_CHECK(layer >= 0 && layer < spec.layer_count(), "layer is inside the spec");
  const LayerSpec& layer_spec = spec.layers[layer];
  TileLayout layout{};
  layout.key_format = layer_spec.key_format;
  layout.value_format = layer_spec.value_format;
  layout.head_dim = spec.head_dim;
  layout.value_dim = spec.value_dim;
  layout.witness_bands = layer_spec.witness_bands;
  layout.has_witness_weights = !layer_spec.witness_weights.empty();
  layout.rope_pairing = spec.rope_pairing;
  layout.rotary_dim = spec.rotary_dim;
  layout.dither_secret = layer_spec.key_format == KeyFormat::kK8D ? dither_secret : 0;

  const bool affine = !Is16Bit(layout.key_format) && layout.key_format != KeyFormat::kFp8E4m3;
  layout.scale_bytes = affine ? int64_t{2} * spec.head_dim : 0;
  layout.scale_offset = sizeof(TileHeader);
  layout.zero_offset = layout.scale_offset + RoundUpToPlane(layout.scale_bytes);
  layout.witness_offset = layout.zero_offset + RoundUpToPlane(layout.scale_bytes);
  layout.coarse_offset = layout.witness_offset + int64_t{kTileTokens} * layout.witness_bands;
  layout.coarse_bytes = int64_t{Is16Bit(layout.key_format) ? 32 : 8} * spec.head_dim;
  layout.scan_bytes = layout.coarse_offset + kSubBlocksPerTile * layout.coarse_bytes;

  layout.fine_bytes = FineBytes(layout.key_format, spec.head_dim);
  layout.value_offset = layout.fine_bytes;
  layout.value_bytes = ValueBytes(layout.value_format, spec.value_dim);
  layout.sub_block_bytes = layout.value_offset + layout.value_bytes;
  layout.value_scale_offset = kSubBlocksPerTile * layout.sub_block_bytes;
  layout.detail_bytes =
      layout.value_scale_offset + (Is16Bit(layout.key_format) ? 0 : 2 * kTileTokens);
  return layout;
}

bool IsAffine(KeyFormat format) {
  return format == KeyFormat::kK8 || format == KeyFormat::kK8D || format == KeyFormat::kK6 ||
         format == KeyFormat::kK4;
}

bool IsRotated(ValueFormat format) {
  return format == ValueFormat::kV4 || format == ValueFormat::kV8;
}

AffineDepth AffineDepthOf(KeyFormat format) {
  constexpr float kQuotientSlack = 0x1p-14f;
  switch (format) {
    case KeyFormat::kK8:
    case KeyFormat::kK8D:
      return {0xff, 0.0f, 0.5f + kQuotientSlack};
    case KeyFormat::kK6:
      return {0xfc, 1.5f, 2.0f + kQuotientSlack};
    case KeyFormat::kK4:
      return {0xf0, 7.5f, 8.0f + kQuotientSlack};
    case KeyFormat::kFp8E4m3:
    case KeyFormat::kF16:
    case KeyFormat::kBf16:
      break;
  }
  CERTKV_CHECK(false, "only K8, K8D, K6 and K4 are affine");
  return {};
}

}  // namespace certkv
