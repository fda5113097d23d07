#include "services/kvstore/batch_checks.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/retry_delay.h"

namespace certkv::kvstore {

absl::Status CheckBatch(size_t count, absl::string_view field) {
  if (count >= 1 && count <= static_cast<size_t>(kBlocksPerCallMax)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BATCH_SIZE",
                   absl::StrCat(field, " has ", count, " entries, must have 1 to ",
                                kBlocksPerCallMax, "; split the call"));
}

absl::Status LeaseNotFound(LeaseId lease) {
  return MakeError(absl::StatusCode::kNotFound, "LEASE_NOT_FOUND",
                   absl::StrCat("lease ", static_cast<int64_t>(lease),
                                " is not held by this session: it was released, has expired, or "
                                "never was; look the blocks up again"));
}

absl::Status OriginalsPending(const BlockKey& key) {
  constexpr int64_t kRetryMs = 20;
  return WithRetryDelay(
      MakeError(absl::StatusCode::kUnavailable, "ORIGINALS_PENDING",
                absl::StrCat("originals of block ", ToHex(key.view(), 8),
                             " are still on their way from another store; ask again")),
      kRetryMs);
}

}  // namespace certkv::kvstore
