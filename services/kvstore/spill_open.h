// Opens the tier on disk that the config asks for.
#ifndef CERTKV_SERVICES_KVSTORE_SPILL_OPEN_H_
#define CERTKV_SERVICES_KVSTORE_SPILL_OPEN_H_

#include <memory>

#include "absl/status/statusor.h"
#include "services/common/clock.h"
#include "services/kvstore/config.h"
#include "services/kvstore/spill_tier.h"

namespace certkv::kvstore {

// Null when none is configured. A disk that fails or holds damaged files is logged (spill_off), and
// the tier says so in its statistics: the store goes on from memory. A large store logs its
// progress (spill_opening). Waits for the disk.
// Errors: FailedPrecondition [SPILL_FOREIGN | SPILL_FORMAT | SPILL_SPEC_MISMATCH | SPILL_IN_USE]:
// somebody has to decide, so the server does not start.
absl::StatusOr<std::unique_ptr<SpillTier>> OpenSpill(const KvStoreConfig& config,
                                                     const Clock* clock);

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SPILL_OPEN_H_
