// The named limits of CertKV. A limit that an operator may want to move is in the config instead.
#ifndef CERTKV_KERNELS_CORE_LIMITS_H_
#define CERTKV_KERNELS_CORE_LIMITS_H_

#include <cstdint>

namespace certkv {

// Geometry of a cache.
inline constexpr int32_t kTileTokens = 64;      // tokens of a tile
inline constexpr int32_t kSubBlockTokens = 16;  // tokens of a sub-block
inline constexpr int32_t kSubBlocksPerTile = kTileTokens / kSubBlockTokens;
inline constexpr int32_t kBlockTokensMax = 1024;  // a block is 64 to 1024 tokens
inline constexpr int32_t kHeadDimMax = 256;
inline constexpr int32_t kGroupSizeMax = 16;  // query heads per KV head
inline constexpr int32_t kLayersMax = 256;
inline constexpr int32_t kKvHeadsMax = 256;
inline constexpr int32_t kWitnessBandsMax = 4;
inline constexpr float kWitnessWeightMin = 0x1p-8f;
inline constexpr float kWitnessWeightMax = 0x1p8f;
inline constexpr int32_t kModelNameBytesMax = 256;

// One read.
inline constexpr int64_t kSequenceTokensMax = int64_t{1} << 24;
inline constexpr int32_t kTilesPerReadMax = static_cast<int32_t>(kSequenceTokensMax / kTileTokens);

// Requests on the wire.
inline constexpr int32_t kBlocksPerCallMax = 4096;  // block keys or handles in one call
inline constexpr int32_t kReadsPerAttendMax = 256;  // sequences in one Attend message
inline constexpr int32_t kCertificatesPerReportMax = 65536;
inline constexpr int32_t kMessageBytesMax = 4 << 20;  // gRPC message, either direction
inline constexpr int32_t kTenantSaltBytesMax = 64;
inline constexpr int32_t kExtraKeyBytesMax = 1024;

// Files.
inline constexpr int64_t kSafetensorsHeaderBytesMax = 16 << 20;
inline constexpr int64_t kConfigFileBytesMax = 1 << 20;

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_LIMITS_H_
