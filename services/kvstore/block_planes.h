// What the files that read and write blocks share: planes, where originals lie, their digest.
#ifndef CERTKV_SERVICES_KVSTORE_BLOCK_PLANES_H_
#define CERTKV_SERVICES_KVSTORE_BLOCK_PLANES_H_

#include <cstdint>

#include "kernels/core/cache_spec.h"
#include "kernels/core/slab_layout.h"

namespace certkv::kvstore {

// One layer and KV head of one block of several: the piece of work that a thread takes.
struct Plane {
  int64_t block;
  int32_t layer;
  int32_t kv_head;
};

inline int64_t PlanesPerBlock(const CacheSpec& spec) {
  return int64_t{spec.layer_count()} * spec.kv_head_count;
}

// Planes are counted by block, layer, KV head.
inline Plane PlaneAt(const CacheSpec& spec, int64_t index) {
  const int64_t in_block = index % PlanesPerBlock(spec);
  return Plane{index / PlanesPerBlock(spec), static_cast<int32_t>(in_block / spec.kv_head_count),
               static_cast<int32_t>(in_block % spec.kv_head_count)};
}

// The originals of one tile in a backing or staging slot, token-major and contiguous.
struct OriginalTile {
  const uint16_t* keys;
  const uint16_t* values;
};
inline OriginalTile OriginalTileAt(const uint8_t* base, const SlabLayout& layout,
                                   const CacheSpec& spec, int32_t slot, const Plane& plane,
                                   int32_t tile) {
  const uint8_t* keys = base + layout.key_offset(slot, plane.layer, plane.kv_head);
  const uint8_t* values = base + layout.value_offset(slot, plane.layer, plane.kv_head);
  return {reinterpret_cast<const uint16_t*>(keys + tile * OriginalKeyBytes(spec)),
          reinterpret_cast<const uint16_t*>(values + tile * OriginalValueBytes(spec))};
}

// XXH3-64 over the original_checksum of all tiles of a block, by layer, KV head, tile.
uint64_t DigestOfChecksums(const uint64_t* checksums, int64_t count);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BLOCK_PLANES_H_
