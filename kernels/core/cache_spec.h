// CacheSpec: geometry and numerics of one model's KV cache.
//
// Everything that changes what stored bytes mean is a field here, and the digest of all fields is
// part of every block key, so that blocks of different models, geometries or formats never meet.
#ifndef CERTKV_KERNELS_CORE_CACHE_SPEC_H_
#define CERTKV_KERNELS_CORE_CACHE_SPEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/core/half.h"
#include "kernels/core/ids.h"

namespace certkv {

// How a key is encoded in the device tier. See docs/formats.md.
enum class KeyFormat : uint8_t {
  kK8 = 1,       // affine INT8 per channel per tile, as two nibble planes
  kK6 = 2,       // K8's codes without their two lowest bits
  kK4 = 3,       // K8's coarse nibble plane alone
  kFp8E4m3 = 4,  // raw cast with one scale per tensor; needs witness_bands = 4
  kF16 = 5,
  kBf16 = 6,
  kK8D = 7,  // K8 with subtractive dither (docs/bounds.md, section 10); no witness
};

// How a value is encoded in the device tier.
enum class ValueFormat : uint8_t {
  kV4 = 1,  // Hadamard-rotated, affine INT4, one scale and zero per token
  kV8 = 2,  // Hadamard-rotated, affine INT8, one scale and zero per token
  kF16 = 5,
  kBf16 = 6,
};

// Which channels RoPE rotates together.
enum class RopePairing : uint8_t {
  kNone = 1,         // no rotary embedding
  kInterleaved = 2,  // (2i, 2i+1)
  kHalfSplit = 3,    // (i, i + rotary_dim/2)
};

const char* KeyFormatName(KeyFormat format);      // "K8", ..., "?" for an unknown value
const char* ValueFormatName(ValueFormat format);  // "V4", ...
// "K8V4", "FP8_E4M3+V8", "F16".
std::string FormatPairName(KeyFormat key_format, ValueFormat value_format);

struct LayerSpec {
  KeyFormat key_format = KeyFormat::kK8;
  ValueFormat value_format = ValueFormat::kV4;
  // Bands of the token witness: 0 (no witness), 1 or 4 bytes per token. FP8_E4M3 requires 4,
  // K8D, F16 and BF16 require 0.
  int32_t witness_bands = 0;
  // FP8_E4M3 only: the tensor's scale, k^ = scale * e4m3. Finite and > 0.
  float fp8_key_scale = 1.0f;
  // Tokens that a query sees, itself included: token t is read by the query at position p when
  // p - sliding_window < t <= p. 0 = no window.
  int32_t sliding_window = 0;
  // Weight of each channel in the token witness, [kv_head_count][head_dim], or empty: all 1. In
  // [kWitnessWeightMin, kWitnessWeightMax]; only with witness_bands. Any weights are sound; those
  // that fit a model's queries make half-widths smaller (bounds/witness_weights.h chooses them).
  std::vector<float> witness_weights = {};
};

struct CacheSpec {
  std::string model;                           // name and revision of the weights, 1 to 256 bytes
  int32_t kv_head_count = 0;                   // KV heads of this rank, [1, 256]
  int32_t group_size = 0;                      // query heads per KV head, [1, 16]
  int32_t head_dim = 0;                        // d: 64, 80, 96, 128 or 256
  int32_t value_dim = 0;                       // d_v: 64, 80, 96, 128 or 256
  int32_t block_tokens = kDefaultBlockTokens;  // a multiple of 64 in [64, 1024]
  RopePairing rope_pairing = RopePairing::kInterleaved;
  int32_t rotary_dim = 0;       // rotated channels, even, [0, d]; 0 exactly when pairing is kNone
  float rope_theta = 10000.0f;  // base of the rotary frequencies, > 0 (ignored when kNone)
  float logit_scale = 0.0f;     // s, finite and > 0, normally 1/sqrt(d)
  float soft_cap = 0.0f;        // nats; cap * tanh(logit / cap); 0 = none
  OriginalDtype original_dtype = OriginalDtype::kF16;
  std::vector<LayerSpec> layers;  // [1, 256]

  static constexpr int32_t kDefaultBlockTokens = 64;

  int32_t layer_count() const { return static_cast<int32_t>(layers.size()); }
  int32_t query_head_count() const { return kv_head_count * group_size; }
  int32_t tiles_per_block() const { return block_tokens / 64; }
};

// Errors: InvalidArgument [CACHE_SPEC_INVALID], naming the field, the value seen and the limit.
absl::Status ValidateCacheSpec(const CacheSpec& spec);

// The witness weights of a layer's KV head, [head_dim] inside `spec`; null: all 1.
const float* WitnessWeightsOf(const CacheSpec& spec, int32_t layer, int32_t kv_head);

// Are some of its keys dithered (K8D)? Then the cache has a secret (docs/formats.md, section 3).
bool IsDithered(const CacheSpec& spec);

// SHA-256 over a versioned little-endian encoding of every field. `spec` must be valid.
SpecDigest DigestCacheSpec(const CacheSpec& spec);

// One line for logs and errors: "SmolLM2-135M 4 layers x 3 KV heads x 3, d 64/64, block 64, K8V4".
std::string DescribeCacheSpec(const CacheSpec& spec);

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_CACHE_SPEC_H_
