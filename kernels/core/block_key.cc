#include "kernels/core/block_key.h"

#include "kernels/core/check.h"
#include "kernels/core/limits.h"
#include "kernels/core/sha256.h"

namespace certkv {
namespace {

constexpr absl::string_view kBlockKeyDomain = "certkv.block.v1";

uint64_t Mix(uint64_t x) {  // splitmix64 finalizer (Steele, Lea, Flood 2014)
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

BlockKey ComputeBlockKey(const BlockKeyContext& context, const BlockKey& parent,
                         absl::Span<const int32_t> token_ids, absl::string_view extra_keys) {
  CERTKV_CHECK(!token_ids.empty(), "a block holds tokens");
  CERTKV_CHECK(
      context.tenant_salt.size() <= kTenantSaltBytesMax && extra_keys.size() <= kExtraKeyBytesMax,
      "salt and extra keys were checked against their limits at the door");
  Sha256 hash;
  hash.AddBytes(kBlockKeyDomain);
  hash.AddBytes(parent.view());
  hash.AddU32(static_cast<uint32_t>(token_ids.size()));
  for (const int32_t id : token_ids) hash.AddU32(static_cast<uint32_t>(id));
  hash.AddBytes(context.spec_digest.view());
  hash.AddU32(static_cast<uint32_t>(context.rank));
  hash.AddSized(context.tenant_salt);
  hash.AddSized(extra_keys);
  return BlockKey{hash.Finish()};
}

std::vector<BlockKey> ComputeBlockKeys(const BlockKeyContext& context,
                                       absl::Span<const int32_t> token_ids, int32_t block_tokens) {
  CERTKV_CHECK(block_tokens > 0, "block_tokens comes from a valid CacheSpec");
  std::vector<BlockKey> keys;
  keys.reserve(token_ids.size() / block_tokens);
  BlockKey parent;
  for (size_t first = 0; first + block_tokens <= token_ids.size(); first += block_tokens) {
    parent = ComputeBlockKey(context, parent, token_ids.subspan(first, block_tokens));
    keys.push_back(parent);
  }
  return keys;
}

uint64_t TileIdentityTag(const BlockKey& key, int32_t layer, int32_t kv_head, int32_t tile) {
  uint64_t head = 0;
  std::memcpy(&head, key.bytes.data(), sizeof(head));
  const uint64_t place = static_cast<uint64_t>(layer) << 40 | static_cast<uint64_t>(kv_head) << 20 |
                         static_cast<uint64_t>(tile);
  return Mix(head ^ Mix(place + 1));
}

}  // namespace certkv
