// SealPlan: what one sealing call is going to do with each of its blocks.
#ifndef CERTKV_SERVICES_KVSTORE_SEAL_PLAN_H_
#define CERTKV_SERVICES_KVSTORE_SEAL_PLAN_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/ids.h"
#include "services/kvstore/block_writer.h"
#include "services/kvstore/cache.h"
#include "services/kvstore/session_table.h"
#include "services/kvstore/store_engine.h"

namespace certkv::kvstore {

// What happens to one block of the call.
enum class SealAction : uint8_t {
  kStore = 1,  // new: originals from staging, both tiers
  kShare,      // sealed before: nothing to do
  kPromote,    // sealed before, in the backing tier only: its planes are made again
  kReplace,    // sealed before, its originals are damaged: as kStore, under its old record
};

struct StoreEngine::SealPlan {
  struct Item {
    SealEntry entry;
    SealAction action = SealAction::kStore;
    BlockId block = BlockId::kNone;  // where it was sealed before
    int32_t write = -1;              // index into `writes`
  };

  SessionId session{};
  TenantIndex tenant{};
  BlockPriority priority = BlockPriority::kNormal;
  bool from_device_staging = false;
  std::shared_ptr<Cache> cache;
  std::shared_ptr<StagingArea> staging;
  std::vector<Item> items;
  std::vector<BlockId> held;          // blocks that were sealed before, by item
  std::vector<BlockId> held_parents;  // parents that are not of this call
  bool claimed = false;               // keys, slots and promotions are taken
  std::vector<BlockWrite> writes;
  SlotGrant grant;

  // Checks what can be told from the entries alone and from the session's reservations.
  // Errors: InvalidArgument [DUPLICATE_ENTRY | BLOCK_KEY_INVALID]; FailedPrecondition
  // [RESERVATION_NOT_FOUND].
  static absl::Status CheckEntries(const Session& session, absl::Span<const SealEntry> entries);

  // Has the session the staging memory in which the originals are, and the cache a copy on that
  // GPU? Errors: FailedPrecondition [DEVICE_STAGING_MISSING].
  absl::Status CheckStaging(const Session& session) const;

  // Fills items, or returns false when another call is at work on something that this one needs.
  // Changes nothing but the plan.
  // Errors: FailedPrecondition [PARENT_NOT_FOUND | BLOCK_DAMAGED]; InvalidArgument
  // [PARENT_MISMATCH].
  absl::StatusOr<bool> Decide(const Session& session, absl::Span<const SealEntry> entries);
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_SEAL_PLAN_H_
