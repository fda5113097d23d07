#include "kernels/core/slab_layout.h"

#include <cstddef>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/check.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

int64_t RoundUp(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

template <typename T>
absl::Status CheckField(absl::string_view field, const T& seen, const T& expected) {
  if (seen == expected) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "SLAB_MISMATCH",
                   absl::StrCat("slab header field ", field, " is ", seen, ", expected ", expected,
                                "; attach again with the store's current cache"));
}

bool NeedsDitherSecret(const CacheSpec& spec, SlabKind kind) {
  return kind == SlabKind::kDevice && IsDithered(spec);
}

int64_t OriginalBytes(const CacheSpec& spec, int32_t dim) {
  return RoundUp(int64_t{2} * spec.block_tokens * dim, kPlaneAlignment);
}

}  // namespace

int64_t SlabLayout::SlotBytes(const CacheSpec& spec, SlabKind kind) {
  if (kind != SlabKind::kDevice) {
    return int64_t{spec.layer_count()} * spec.kv_head_count *
           (OriginalBytes(spec, spec.head_dim) + OriginalBytes(spec, spec.value_dim));
  }
  int64_t bytes = 0;
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    bytes += MakeTileLayout(spec, layer).tile_bytes();
  }
  return bytes * spec.kv_head_count * spec.tiles_per_block();
}

SlabLayout::SlabLayout(const CacheSpec& spec, SlabKind kind, int32_t slot_count,
                       uint64_t dither_secret)
    : kind_(kind),
      slot_count_(slot_count),
      kv_head_count_(spec.kv_head_count),
      tiles_per_block_(spec.tiles_per_block()),
      digest_(DigestCacheSpec(spec)),
      dither_secret_(NeedsDitherSecret(spec, kind) ? dither_secret : 0),
      needs_dither_secret_(NeedsDitherSecret(spec, kind)) {
  CERTKV_CHECK(slot_count >= 1, "a slab has slots");
  regions_offset_ = kSlabPageBytes + RoundUp(int64_t{8} * slot_count, kSlabPageBytes);
  original_key_bytes_ = OriginalBytes(spec, spec.head_dim);
  original_value_bytes_ = OriginalBytes(spec, spec.value_dim);
  slot_bytes_ = SlotBytes(spec, kind);
  int64_t offset = regions_offset_;
  for (int32_t layer = 0; layer < spec.layer_count(); ++layer) {
    tile_layouts_.push_back(MakeTileLayout(spec, layer, dither_secret_));
    layer_offsets_.push_back(offset);
    offset += tile_layouts_.back().tile_bytes() * kv_head_count_ * tiles_per_block_ * slot_count_;
  }
  slab_bytes_ = RoundUp(regions_offset_ + slot_bytes_ * slot_count_, kSlabPageBytes);
}

int64_t SlabLayout::scan_offset(int32_t slot, int32_t layer, int32_t kv_head, int32_t tile) const {
  const TileLayout& tile_layout = tile_layouts_[layer];
  const int64_t records = int64_t{slot_count_} * tiles_per_block_;
  return layer_offsets_[layer] + kv_head * records * tile_layout.tile_bytes() +
         (int64_t{slot} * tiles_per_block_ + tile) * tile_layout.scan_bytes;
}

int64_t SlabLayout::detail_offset(int32_t slot, int32_t layer, int32_t kv_head,
                                  int32_t tile) const {
  const TileLayout& tile_layout = tile_layouts_[layer];
  const int64_t records = int64_t{slot_count_} * tiles_per_block_;
  return layer_offsets_[layer] + kv_head * records * tile_layout.tile_bytes() +
         records * tile_layout.scan_bytes +
         (int64_t{slot} * tiles_per_block_ + tile) * tile_layout.detail_bytes;
}

int64_t SlabLayout::key_offset(int32_t slot, int32_t layer, int32_t kv_head) const {
  return regions_offset_ + slot * slot_bytes_ +
         (int64_t{layer} * kv_head_count_ + kv_head) *
             (original_key_bytes_ + original_value_bytes_);
}

int64_t SlabLayout::value_offset(int32_t slot, int32_t layer, int32_t kv_head) const {
  return key_offset(slot, layer, kv_head) + original_key_bytes_;
}

void SlabLayout::WriteHeader(uint8_t* base) const {
  SlabHeader header{};
  header.magic = kSlabMagic;
  header.version = kSlabVersion;
  header.kind = kind_;
  std::memcpy(header.spec_digest, digest_.bytes.data(), sizeof(header.spec_digest));
  header.slot_count = slot_count_;
  header.slab_bytes = slab_bytes_;
  header.dither_secret = dither_secret_;
  std::memcpy(base, &header, sizeof(header));
}

void SlabLayout::AdoptDitherSecret(const uint8_t* base) {
  std::memcpy(&dither_secret_, base + offsetof(SlabHeader, dither_secret), sizeof(dither_secret_));
  for (TileLayout& layout : tile_layouts_) {
    if (layout.key_format == KeyFormat::kK8D) layout.dither_secret = dither_secret_;
  }
}

absl::Status SlabLayout::CheckHeader(const uint8_t* base, int64_t size_bytes) const {
  CERTKV_RETURN_IF_ERROR(CheckField("size of the mapping in bytes", size_bytes, slab_bytes_));
  SlabHeader header;
  std::memcpy(&header, base, sizeof(header));
  CERTKV_RETURN_IF_ERROR(CheckField("magic", header.magic, kSlabMagic));
  CERTKV_RETURN_IF_ERROR(CheckField("version", header.version, kSlabVersion));
  CERTKV_RETURN_IF_ERROR(
      CheckField("kind", static_cast<uint32_t>(header.kind), static_cast<uint32_t>(kind_)));
  const std::string seen(reinterpret_cast<const char*>(header.spec_digest), 32);
  CERTKV_RETURN_IF_ERROR(CheckField("spec_digest", ToHex(seen), ToHex(digest_.view())));
  CERTKV_RETURN_IF_ERROR(CheckField("slot_count", header.slot_count, slot_count_));
  CERTKV_RETURN_IF_ERROR(CheckField("slab_bytes", header.slab_bytes, slab_bytes_));
  // Not by CheckField: its value stays out of messages.
  if ((header.dither_secret != 0) == needs_dither_secret_) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "SLAB_MISMATCH",
                   absl::StrCat("slab header field dither_secret is ",
                                needs_dither_secret_ ? "0, and the cache has dithered keys"
                                                     : "set, and the slab has no dithered keys",
                                "; attach again with the store's current cache"));
}

}  // namespace certkv
