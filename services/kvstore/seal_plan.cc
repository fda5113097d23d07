#include "services/kvstore/seal_plan.h"

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"

namespace certkv::kvstore {
namespace {

std::string ShortName(const BlockKey& key) { return ToHex(key.view(), 8); }

absl::Status EntryError(absl::StatusCode code, absl::string_view reason, size_t index,
                        absl::string_view text) {
  return MakeError(code, reason, absl::StrCat("entry ", index, " of the seal: ", text));
}

}  // namespace

absl::Status StoreEngine::SealPlan::CheckEntries(const Session& session,
                                                 absl::Span<const SealEntry> entries) {
  absl::flat_hash_set<int32_t> slots;
  absl::flat_hash_set<BlockKey> keys;
  for (size_t i = 0; i < entries.size(); ++i) {
    const SealEntry& entry = entries[i];
    if (entry.key.is_zero() || entry.key == entry.parent) {
      return EntryError(absl::StatusCode::kInvalidArgument, "BLOCK_KEY_INVALID", i,
                        "block_key is all zeros or its own parent_key; compute it from the "
                        "block's tokens");
    }
    if (!slots.insert(entry.staging_slot).second || !keys.insert(entry.key).second) {
      return EntryError(absl::StatusCode::kInvalidArgument, "DUPLICATE_ENTRY", i,
                        absl::StrCat("staging slot ", entry.staging_slot, " or block ",
                                     ShortName(entry.key), " is in the call twice"));
    }
    if (!session.staging->IsReserved(entry.staging_slot)) {
      return EntryError(absl::StatusCode::kFailedPrecondition, "RESERVATION_NOT_FOUND", i,
                        absl::StrCat("staging slot ", entry.staging_slot,
                                     " is not reserved by this session, which has slots 0 to ",
                                     session.staging->slot_count() - 1,
                                     "; reserve it, write it, then seal it once"));
    }
  }
  return absl::OkStatus();
}

absl::Status StoreEngine::SealPlan::CheckStaging(const Session& session) const {
  const DeviceCopy* const copy = session.cache->device_memory()->device_copy();
  const bool has_copy = copy != nullptr && copy->is_ready();
  if (!from_device_staging || (session.staging->on_device() != nullptr && has_copy)) {
    return absl::OkStatus();
  }
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "DEVICE_STAGING_MISSING",
      absl::StrCat("the session has no staging memory on a GPU", has_copy ? "" : " any more",
                   "; write the originals to the mapped staging slots, and seal those"));
}

absl::StatusOr<bool> StoreEngine::SealPlan::Decide(const Session& of,
                                                   absl::Span<const SealEntry> entries) {
  const BlockPriority wanted = priority;
  const bool is_on_device = from_device_staging;
  *this = SealPlan{};
  priority = wanted;
  from_device_staging = is_on_device;
  session = of.id;
  tenant = of.tenant;
  cache = of.cache;
  staging = of.staging;
  const BlockIndex& index = cache->index();
  absl::flat_hash_set<BlockKey> earlier;
  for (size_t i = 0; i < entries.size(); ++i) {
    Item item{entries[i], SealAction::kStore, index.Find(entries[i].key), -1};
    if (cache->claimed_keys().contains(item.entry.key)) return false;
    if (item.block != BlockId::kNone) {
      const BlockRecord& record = index.Get(item.block);
      if (record.promoting) return false;
      if (index.ParentKeyOf(item.block) != item.entry.parent) {
        return EntryError(
            absl::StatusCode::kInvalidArgument, "PARENT_MISMATCH", i,
            absl::StrCat("block ", ShortName(item.entry.key), " is sealed after parent ",
                         ShortName(index.ParentKeyOf(item.block)), ", the call says ",
                         ShortName(item.entry.parent), "; a key must depend on its parent's key"));
      }
      if (record.damaged && record.hold_count > 0) {
        return EntryError(
            absl::StatusCode::kFailedPrecondition, "BLOCK_DAMAGED", i,
            absl::StrCat("originals of block ", ShortName(item.entry.key), " are damaged and ",
                         record.hold_count, " leases still cover it; seal it after they end"));
      }
      item.action = record.damaged            ? SealAction::kReplace
                    : record.device.present() ? SealAction::kShare
                                              : SealAction::kPromote;
      held.push_back(item.block);
    } else if (!item.entry.parent.is_zero() && !earlier.contains(item.entry.parent)) {
      if (cache->claimed_keys().contains(item.entry.parent)) return false;
      const BlockId parent = index.Find(item.entry.parent);
      if (parent == BlockId::kNone || index.Get(parent).damaged) {
        return EntryError(absl::StatusCode::kFailedPrecondition, "PARENT_NOT_FOUND", i,
                          absl::StrCat("parent ", ShortName(item.entry.parent), " of block ",
                                       ShortName(item.entry.key),
                                       " is not in the store; keep a lease on the blocks before, "
                                       "and seal a chain in order"));
      }
      held_parents.push_back(parent);
    }
    earlier.insert(item.entry.key);
    items.push_back(item);
  }
  return true;
}

}  // namespace certkv::kvstore
