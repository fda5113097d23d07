#include "services/kvstore/slab_memory.h"

#include <utility>

#include "absl/strings/string_view.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

// What /proc/<pid>/maps shows.
absl::string_view MemfdName(SlabKind kind) {
  switch (kind) {
    case SlabKind::kDevice:
      return "certkv-device";
    case SlabKind::kBacking:
      return "certkv-backing";
    case SlabKind::kStaging:
      return "certkv-staging";
  }
  return "certkv";
}

}  // namespace

absl::StatusOr<std::shared_ptr<SlabMemory>> SlabMemory::Create(const CacheSpec& spec, SlabKind kind,
                                                               int32_t slot_count,
                                                               uint64_t dither_secret) {
  SlabLayout layout(spec, kind, slot_count, dither_secret);
  CERTKV_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd(MemfdName(kind), layout.slab_bytes()));
  CERTKV_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Map(fd.get(), Mapping::Access::kReadWrite));
  layout.WriteHeader(mapping.data());
  Mapping reader_mapping;
  if (kind != SlabKind::kStaging) {
    CERTKV_RETURN_IF_ERROR(SealAgainstWrites(fd.get()));
    CERTKV_ASSIGN_OR_RETURN(fd, ReopenReadOnly(fd.get()));
    CERTKV_ASSIGN_OR_RETURN(reader_mapping, Mapping::Map(fd.get(), Mapping::Access::kReadOnly));
  }
  return std::shared_ptr<SlabMemory>(new SlabMemory(std::move(layout), std::move(fd),
                                                    std::move(mapping), std::move(reader_mapping)));
}

SlabMemory::SlabMemory(SlabLayout layout, UniqueFd export_fd, Mapping mapping,
                       Mapping reader_mapping)
    : layout_(std::move(layout)),
      export_fd_(std::move(export_fd)),
      mapping_(std::move(mapping)),
      reader_mapping_(std::move(reader_mapping)) {}

absl::Status SlabMemory::AddDeviceCopy(const DevicePlace& place) {
  CERTKV_ASSIGN_OR_RETURN(device_copy_, DeviceCopy::Create(place, layout_, base()));
  return absl::OkStatus();
}

}  // namespace certkv::kvstore
