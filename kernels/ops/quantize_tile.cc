#include "kernels/ops/quantize_tile.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/half.h"
#include "kernels/core/status.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ops/device.h"
#include "kernels/ops/tile_checksum.h"
#include "kernels/reference/reference.h"

namespace certkv {
namespace {

constexpr float kF16Max = 65504.0f;

// Largest magnitude in `rows` rows, as bits: 16-bit floats without sign order like integers.
// `width` is a multiple of 16, as head dims are.
uint16_t MagnitudeMax(const uint16_t* first, int64_t stride, int32_t width, int rows) {
  typedef int16_t Words __attribute__((vector_size(16)));
  Words max[2] = {};
  for (int t = 0; t < rows; ++t) {
    const uint16_t* row = first + t * stride;
    for (int32_t i = 0; i < width; i += 16) {
      for (int k = 0; k < 2; ++k) {
        Words words;
        std::memcpy(&words, row + i + 8 * k, sizeof(words));
        words &= 0x7fff;
        max[k] = words > max[k] ? words : max[k];
      }
    }
  }
  max[0] = max[0] > max[1] ? max[0] : max[1];
  int16_t largest = 0;
  for (int k = 0; k < 8; ++k) largest = std::max(largest, static_cast<int16_t>(max[0][k]));
  return static_cast<uint16_t>(largest);
}

// Errors: as QuantizeTile, for the first element (by token, then channel) whose magnitude exceeds
// `limit` bits.
absl::Status CheckRows(OriginalDtype dtype, const uint16_t* rows, int64_t stride, int32_t width,
                       uint16_t limit, absl::string_view what) {
  if (MagnitudeMax(rows, stride, width, kTileTokens) <= limit) return absl::OkStatus();
  for (int t = 0; t < kTileTokens; ++t) {
    const uint16_t* row = rows + t * stride;
    if (MagnitudeMax(row, stride, width, 1) <= limit) continue;
    int i = 0;
    while ((row[i] & 0x7fff) <= limit) ++i;
    const float value = OriginalToFloat(dtype, row[i]);
    const std::string place = absl::StrCat(what, " of token ", t, " of the tile, channel ", i);
    if (!std::isfinite(value)) {
      return MakeError(absl::StatusCode::kInvalidArgument,
                       what == "key" ? "NON_FINITE_KEY" : "NON_FINITE_VALUE",
                       absl::StrCat(place, " is ", value,
                                    ", must be finite; find out where the model makes it"));
    }
    return MakeError(absl::StatusCode::kInvalidArgument, "KEY_OUT_OF_RANGE",
                     absl::StrCat(place, " is ", value, ", must be within +-", kF16Max,
                                  " in an affine key format, whose scales are fp16; store this "
                                  "layer as BF16 or FP8_E4M3"));
  }
  return absl::OkStatus();
}

uint16_t FiniteMax(OriginalDtype dtype) { return dtype == OriginalDtype::kF16 ? 0x7bff : 0x7f7f; }

absl::Status CheckKeys(const QuantizeTileArgs& args) {
  const OriginalDtype dtype = args.spec->original_dtype;
  const bool is_affine = IsAffine(args.layout->key_format);
  return CheckRows(dtype, args.keys, args.key_stride, args.layout->head_dim,
                   is_affine ? AffineKeyLimit(dtype) : FiniteMax(dtype), "key");
}

absl::Status CheckValues(const QuantizeTileArgs& args) {
  const OriginalDtype dtype = args.spec->original_dtype;
  return CheckRows(dtype, args.values, args.value_stride, args.layout->value_dim, FiniteMax(dtype),
                   "value");
}

// The CPU's encoders look at affine keys and rotated values while they encode them, so that nothing
// is read twice; what they refuse is named here.
absl::Status QuantizeOnCpu(const QuantizeTileArgs& args) {
  if (!IsAffine(args.layout->key_format)) CERTKV_RETURN_IF_ERROR(CheckKeys(args));
  if (!IsRotated(args.layout->value_format)) CERTKV_RETURN_IF_ERROR(CheckValues(args));
  CERTKV_ASSIGN_OR_RETURN(const CpuIsa isa, SelectedCpuIsa());
  if (cpu::QuantizeTile(isa, args)) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(CheckTileOriginals(args));
  return MakeError(absl::StatusCode::kAborted, "ORIGINALS_CHANGED",
                   "keys or values that could not be encoded are other ones a moment later; leave "
                   "them alone until the call returns");
}

}  // namespace

absl::Status CheckTileOriginals(const QuantizeTileArgs& args) {
  CERTKV_RETURN_IF_ERROR(CheckKeys(args));
  return CheckValues(args);
}

void WriteTileChecksums(const QuantizeTileArgs& args) {
  TileHeader header;
  std::memcpy(&header, args.scan, sizeof(header));
  if (args.layout->has_witness_weights) {
    header.key_check = WitnessWeightsCheck(args.witness_weights, args.layout->head_dim);
  }
  header.detail_checksum = DetailChecksum(*args.layout, args.detail);
  header.original_checksum =
      OriginalChecksum(*args.layout, args.keys, args.key_stride, args.values, args.value_stride);
  std::memcpy(args.scan, &header, sizeof(header));
  header.scan_checksum = ScanChecksum(*args.layout, args.scan);
  std::memcpy(args.scan, &header, sizeof(header));
}

absl::Status QuantizeTile(Backend backend, const QuantizeTileArgs& args) {
  CERTKV_CHECK(args.key_stride >= args.layout->head_dim, "rows of keys don't overlap");
  CERTKV_CHECK(args.value_stride >= args.layout->value_dim, "rows of values don't overlap");
  CERTKV_CHECK(args.layout->key_format != KeyFormat::kK8D || args.layout->dither_secret != 0,
               "a cache with dithered keys has a secret");
  CERTKV_CHECK((args.witness_weights != nullptr) == args.layout->has_witness_weights,
               "weights are given exactly to layouts that have them");
  if (backend != Backend::kCpu) CERTKV_RETURN_IF_ERROR(CheckTileOriginals(args));
  switch (backend) {
    case Backend::kReference:
      reference::QuantizeTile(args);
      break;
    case Backend::kCpu:
      CERTKV_RETURN_IF_ERROR(QuantizeOnCpu(args));
      break;
    case Backend::kCuda: {
      if (args.layout->key_format == KeyFormat::kK8D) return LacksOperation("K8D keys");
      CERTKV_ASSIGN_OR_RETURN(const DeviceOps* const device, RegisteredDevice());
      CERTKV_RETURN_IF_ERROR(device->quantize_tile(args));
      break;
    }
  }
  WriteTileChecksums(args);
  return absl::OkStatus();
}

absl::Status DequantizeTile(const TileLayout& layout, const uint8_t* scan, const uint8_t* detail,
                            float* keys, float* values) {
  CERTKV_RETURN_IF_ERROR(CheckTile(layout, scan));
  reference::DequantizeTile(layout, scan, detail, keys, values);
  return absl::OkStatus();
}

}  // namespace certkv
