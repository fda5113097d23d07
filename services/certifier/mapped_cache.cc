#include "services/certifier/mapped_cache.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::certifier {

absl::StatusOr<MappedSlab> MappedSlab::Create(const CacheSpec& spec, SlabKind kind,
                                              Mapping mapping) {
  const auto mismatch = [](const auto&... parts) {
    return MakeError(absl::StatusCode::kFailedPrecondition, "SLAB_MISMATCH",
                     absl::StrCat(parts..., "; attach again with the store's current cache"));
  };
  if (mapping.size_bytes() < kSlabPageBytes) {
    return mismatch("slab has ", mapping.size_bytes(), " bytes, at least ", kSlabPageBytes,
                    " are a slab's header");
  }
  SlabHeader header;
  std::memcpy(&header, mapping.data(), sizeof(header));
  // A count that the mapping cannot hold would overflow offsets before CheckHeader sees it.
  const int64_t slot_bytes = SlabLayout::SlotBytes(spec, kind);
  if (!(header.slot_count >= 1 && header.slot_count <= mapping.size_bytes() / slot_bytes)) {
    return mismatch("slab header field slot_count is ", header.slot_count, ", a slab of ",
                    mapping.size_bytes(), " bytes has 1 to ", mapping.size_bytes() / slot_bytes);
  }
  SlabLayout layout(spec, kind, header.slot_count);
  CERTKV_RETURN_IF_ERROR(layout.CheckHeader(mapping.data(), mapping.size_bytes()));
  layout.AdoptDitherSecret(mapping.data());
  return MappedSlab(std::move(mapping), std::move(layout));
}

VerifiedTiles::VerifiedTiles(int32_t slot_count, int32_t layer_count, int32_t kv_head_count)
    : slot_count_(slot_count),
      kv_head_count_(kv_head_count),
      words_(static_cast<size_t>(slot_count) * layer_count * kv_head_count) {}

absl::StatusOr<std::shared_ptr<MappedCache>> MappedCache::Create(CacheSpec spec, Mapping device,
                                                                 Mapping backing) {
  CERTKV_RETURN_IF_ERROR(ValidateCacheSpec(spec));
  CERTKV_ASSIGN_OR_RETURN(MappedSlab device_slab,
                          MappedSlab::Create(spec, SlabKind::kDevice, std::move(device)));
  CERTKV_ASSIGN_OR_RETURN(MappedSlab backing_slab,
                          MappedSlab::Create(spec, SlabKind::kBacking, std::move(backing)));
  return std::shared_ptr<MappedCache>(
      new MappedCache(std::move(spec), std::move(device_slab), std::move(backing_slab)));
}

MappedCache::MappedCache(CacheSpec spec, MappedSlab device, MappedSlab backing)
    : spec_(std::move(spec)),
      spec_digest_(DigestCacheSpec(spec_)),
      device_(std::move(device)),
      backing_(std::move(backing)),
      verified_tiles_(device_.layout().slot_count(), spec_.layer_count(), spec_.kv_head_count) {}

absl::Status MappedCache::ImportDeviceCopy(DeviceRuntime* runtime) {
  CERTKV_ASSIGN_OR_RETURN(
      device_copy_, ImportedSlab::Open(runtime, device_.base(), device_.layout().slab_bytes()));
  compared_copies_ = std::make_unique<VerifiedTiles>(device_.layout().slot_count(),
                                                     spec_.layer_count(), spec_.kv_head_count);
  return absl::OkStatus();
}

absl::Status MappedCache::PinOriginals(DeviceRuntime* runtime) {
  CERTKV_ASSIGN_OR_RETURN(pinned_originals_,
                          PinnedMemory::Pin(runtime, device_copy_->device(), backing_.base(),
                                            backing_.layout().slab_bytes()));
  return absl::OkStatus();
}

absl::Status MappedCache::CheckAlive() const {
  if (alive()) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, "STORE_UNREACHABLE",
                   absl::StrCat("the store of cache ", ToHex(spec_digest_.view(), 8),
                                " closed the connection that the view's blocks came over; look the "
                                "blocks up again and open a new view"));
}

}  // namespace certkv::certifier
