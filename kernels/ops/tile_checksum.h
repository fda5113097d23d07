// What a tile's header says of bytes elsewhere: its three checksums, and the check of its witness
// weights. XXH3-64 with seed 0.
#ifndef CERTKV_KERNELS_OPS_TILE_CHECKSUM_H_
#define CERTKV_KERNELS_OPS_TILE_CHECKSUM_H_

#include <cstdint>

#include "kernels/core/tile_layout.h"

namespace certkv {

// Of the scan record, with the header's scan_checksum read as 0 and its other two as they are.
uint64_t ScanChecksum(const TileLayout& layout, const uint8_t* scan);

// Of the detail record.
uint64_t DetailChecksum(const TileLayout& layout, const uint8_t* detail);

// Of the 64 rows of keys, continued over the 64 rows of values: of what they hold, not of what lies
// between rows. Strides in elements.
uint64_t OriginalChecksum(const TileLayout& layout, const uint16_t* keys, int64_t key_stride,
                          const uint16_t* values, int64_t value_stride);

// TileHeader::key_check of a tile whose witnesses are weighted: the lower 32 bits over the weights
// [d] as little-endian floats, or 1 where those are 0.
uint32_t WitnessWeightsCheck(const float* weights, int32_t head_dim);

}  // namespace certkv

#endif  // CERTKV_KERNELS_OPS_TILE_CHECKSUM_H_
