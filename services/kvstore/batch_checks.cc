#include "services/kvstore/batch_checks.h"

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {

absl::Status CheckBatch(size_t count, absl::string_view field) {
  if (count >= 1 && count <= static_cast<size_t>(kBlocksPerCallMax)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kInvalidArgument, "BATCH_SIZE",
                   absl::StrCat(field, " has ", count, " entries, must have 1 to ",
                                kBlocksPerCallMax, "; split the call"));
}

}  // namespace certkv::kvstore
