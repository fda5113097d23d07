// Block keys: the content identity of a block of tokens in a prefix chain.
//
//   key = SHA-256(domain, parent key, token ids, CacheSpec digest, rank, tenant salt, extra keys)
//
// Two workers that compute the same tokens after the same prefix with the same model get the same
// key on every machine; a different tenant salt gives keys that never meet.
#ifndef CERTKV_KERNELS_CORE_BLOCK_KEY_H_
#define CERTKV_KERNELS_CORE_BLOCK_KEY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/core/ids.h"

namespace certkv {

// What a chain's keys depend on beside its tokens.
struct BlockKeyContext {
  SpecDigest spec_digest;
  int32_t rank = 0;         // tensor-parallel rank whose KV heads the blocks hold
  std::string tenant_salt;  // at most 64 bytes; tenants with different salts share nothing
};

// Key of the block that holds `token_ids` (any count > 0) after `parent`; the first block of a
// chain has the all-zero parent. `extra_keys` is opaque (LoRA id, image hash, an engine's own
// block hash), at most 1024 bytes.
BlockKey ComputeBlockKey(const BlockKeyContext& context, const BlockKey& parent,
                         absl::Span<const int32_t> token_ids, absl::string_view extra_keys = "");

// Keys of the floor(tokens / block_tokens) whole blocks of a sequence, in order.
std::vector<BlockKey> ComputeBlockKeys(const BlockKeyContext& context,
                                       absl::Span<const int32_t> token_ids, int32_t block_tokens);

// The 64 bits that a tile's header carries to say whose tile it is: a hash of the block key, layer,
// KV head and tile index. A reader compares it, so that a neighbour's bytes are never served.
uint64_t TileIdentityTag(const BlockKey& key, int32_t layer, int32_t kv_head, int32_t tile);

}  // namespace certkv

#endif  // CERTKV_KERNELS_CORE_BLOCK_KEY_H_
