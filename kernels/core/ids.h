// Identities: digests, block keys, handles. Distinct types, so that two of them are never swapped.
#ifndef CERTKV_KERNELS_CORE_IDS_H_
#define CERTKV_KERNELS_CORE_IDS_H_

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace certkv {

// 256 bits under a tag type. Hashable (absl), ordered bytewise.
template <typename Tag>
struct Bytes32 {
  std::array<uint8_t, 32> bytes{};

  friend bool operator==(const Bytes32&, const Bytes32&) = default;
  friend auto operator<=>(const Bytes32&, const Bytes32&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Bytes32& value) {
    return H::combine(std::move(h), value.bytes);
  }
  absl::string_view view() const {
    return absl::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  bool is_zero() const { return *this == Bytes32{}; }
};

struct SpecDigestTag {};
struct BlockKeyTag {};
using SpecDigest = Bytes32<SpecDigestTag>;  // SHA-256 of a CacheSpec
using BlockKey = Bytes32<BlockKeyTag>;      // content identity of a block; see block_key.h

// Lower-case hexadecimal of the first `byte_count` bytes (at most 32).
std::string ToHex(absl::string_view bytes, size_t byte_count = 32);
// Errors: InvalidArgument [DIGEST_SIZE] when `bytes` isn't 32 bytes long.
absl::StatusOr<SpecDigest> SpecDigestFromBytes(absl::string_view bytes);
absl::StatusOr<BlockKey> BlockKeyFromBytes(absl::string_view bytes);

// Ids that the servers hand out. Random 63-bit numbers > 0, so that a stale or forged one is not
// another object's by accident; 0 means "none".
enum class SessionId : int64_t {};
enum class LeaseId : int64_t {};
enum class CacheId : int64_t {};
enum class ViewId : int64_t {};

// Where one representation of a block lies: a slot of a slab, and the slot's generation at the
// time. The generation moves on at every reuse; it is checked before and after every read.
struct SlotRef {
  int32_t slot = -1;        // -1 = not in this tier
  uint64_t generation = 0;  // even while sealed, odd while free or being written
  bool present() const { return slot >= 0; }
  friend bool operator==(const SlotRef&, const SlotRef&) = default;
};

struct BlockHandle {
  BlockKey key;
  SlotRef device;   // quantized planes
  SlotRef backing;  // FP16 originals
};

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_IDS_H_
