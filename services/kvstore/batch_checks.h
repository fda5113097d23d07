// Checks and errors that several calls of the engine share.
#ifndef CERTKV_SERVICES_KVSTORE_BATCH_CHECKS_H_
#define CERTKV_SERVICES_KVSTORE_BATCH_CHECKS_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/core/ids.h"

namespace certkv::kvstore {

// Errors: InvalidArgument [BATCH_SIZE], `count` of `field` is not in [1, 4096].
absl::Status CheckBatch(size_t count, absl::string_view field);

// NotFound [LEASE_NOT_FOUND].
absl::Status LeaseNotFound(LeaseId lease);

// Unavailable [ORIGINALS_PENDING], with a retry delay: they come soon, or the block is lost.
absl::Status OriginalsPending(const BlockKey& key);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_BATCH_CHECKS_H_
