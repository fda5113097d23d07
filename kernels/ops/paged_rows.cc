#include "kernels/ops/paged_rows.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "kernels/cpu/cpu.h"
#include "kernels/ops/device.h"

namespace certkv {
namespace {

constexpr int64_t kDeviceAlignment = 16;  // bytes that the kernel moves at once

bool IsAligned(const PagedRows& rows) {
  const int64_t elements = rows.bits_of_code == nullptr ? kDeviceAlignment / 2 : kDeviceAlignment;
  bool aligned = reinterpret_cast<uintptr_t>(rows.base) % kDeviceAlignment == 0 &&
                 reinterpret_cast<uintptr_t>(rows.out) % kDeviceAlignment == 0 &&
                 rows.page_stride % elements == 0 && rows.head_stride % elements == 0 &&
                 rows.channel_run % elements == 0 && rows.channel_count % elements == 0 &&
                 rows.out_head_stride % 8 == 0;
  for (int32_t token = 0; token < rows.page_tokens; ++token) {
    aligned = aligned && rows.token_places[token] % elements == 0;
  }
  for (int32_t c = 0; c < rows.channel_count; c += static_cast<int32_t>(elements)) {
    aligned = aligned && rows.channel_places[c] % elements == 0;
  }
  return aligned;
}

}  // namespace

void CopyPagedRows(const PagedRows& rows) { cpu::CopyPagedRows(rows); }

absl::Status CopyPagedRowsOnDevice(absl::Span<const PagedRows> rows) {
  CERTKV_ASSIGN_OR_RETURN(const DeviceOps* const device, RegisteredDevice());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (IsAligned(rows[i])) continue;
    return MakeError(
        absl::StatusCode::kInvalidArgument, "PAGED_CACHE_INVALID",
        absl::StrCat("rows ", i, " at 0x", absl::Hex(reinterpret_cast<uintptr_t>(rows[i].base)),
                     " of a device's pages have channels in runs of ", rows[i].channel_run,
                     ", page stride ", rows[i].page_stride, " and head stride ",
                     rows[i].head_stride,
                     " elements; the kernel has an instance for addresses, "
                     "strides and runs that are multiples of ",
                     kDeviceAlignment, " bytes. Copy such pages to the host, and seal them there"));
  }
  if (rows.empty()) return absl::OkStatus();
  return device->copy_paged_rows(rows);
}

}  // namespace certkv
