// Who may have how many slots of a cache, and who makes room for whom.
#include <algorithm>
#include <cstdint>

#include "kernels/core/check.h"
#include "services/kvstore/cache.h"

namespace certkv::kvstore {
namespace {

// How many slots others can be made to give up.
int32_t Reach(int32_t idle, const TierShare& share) {
  return std::min(idle, std::max(0, share.used - share.guaranteed));
}

int32_t SlotsOf(int64_t bytes, const SlotPool& pool) {
  return static_cast<int32_t>(
      std::min<int64_t>(bytes / pool.layout().slot_bytes(), pool.slot_count()));
}

}  // namespace

TenantUse& Cache::MutableUse(TenantIndex tenant) {
  const auto index = static_cast<size_t>(tenant);
  // Without a quota: nothing is promised, and all may be taken.
  while (tenants_.size() <= index) {
    TenantUse use;
    use.device.limit = device_.slot_count();
    use.backing.limit = backing_.slot_count();
    tenants_.push_back(use);
  }
  return tenants_[index];
}

TenantUse Cache::UseOf(TenantIndex tenant) const {
  const auto index = static_cast<size_t>(tenant);
  return index < tenants_.size() ? tenants_[index] : TenantUse{};
}

void Cache::SetQuota(TenantIndex tenant, const TenantQuota& quota) {
  TenantUse& use = MutableUse(tenant);
  use.device.guaranteed = SlotsOf(quota.device_guaranteed_bytes, device_);
  use.backing.guaranteed = SlotsOf(quota.backing_guaranteed_bytes, backing_);
  use.device.limit = quota.device_limit_bytes == 0 ? device_.slot_count()
                                                   : SlotsOf(quota.device_limit_bytes, device_);
  use.backing.limit = quota.backing_limit_bytes == 0 ? backing_.slot_count()
                                                     : SlotsOf(quota.backing_limit_bytes, backing_);
}

bool Cache::IsOverBacking(TenantIndex tenant) const {
  const TierShare& share = tenants_[static_cast<size_t>(tenant)].backing;
  return share.used > share.guaranteed;
}
bool Cache::IsOverDevice(TenantIndex tenant) const {
  const TierShare& share = tenants_[static_cast<size_t>(tenant)].device;
  return share.used > share.guaranteed;
}

bool Cache::MakeBackingRoom(TenantIndex tenant, int32_t count, int64_t now_ms,
                            SlotRefusal* refusal) {
  const TierShare& own = MutableUse(tenant).backing;
  const EvictionOrder& order = index_.order();
  const auto is_own = [tenant](TenantIndex other) { return other == tenant; };
  const auto is_over = [this](TenantIndex other) { return IsOverBacking(other); };
  // What can't be reached even by evicting every block that may go is refused before any goes.
  const int64_t over = int64_t{own.used} + count - own.limit;
  // A limit that is the whole tier is none.
  const bool has_limit = own.limit < backing_.slot_count();
  *refusal = {SlabKind::kBacking, has_limit};
  if (count > own.limit || over > order.idle_count(tenant)) return false;
  int64_t reach = int64_t{backing_.free_count()} + order.idle_count(tenant);
  for (size_t i = 0; i < tenants_.size(); ++i) {
    const auto other = static_cast<TenantIndex>(i);
    if (other != tenant) reach += Reach(order.idle_count(other), tenants_[i].backing);
  }
  refusal->by_quota = false;
  if (reach < count) return false;
  refusal->by_quota = has_limit;
  while (int64_t{own.used} + count > own.limit) {
    const BlockId victim = index_.order().NextEvictable(is_own);
    if (victim == BlockId::kNone) return false;
    Remove(victim, BlockEventKind::kEvicted, now_ms);
  }
  refusal->by_quota = false;
  while (backing_.free_count() < count) {
    BlockId victim = index_.order().NextEvictable(is_over);
    if (victim == BlockId::kNone) victim = index_.order().NextEvictable(is_own);
    if (victim == BlockId::kNone) return false;
    Remove(victim, BlockEventKind::kEvicted, now_ms);
  }
  return true;
}

bool Cache::MakeDeviceRoom(TenantIndex tenant, int32_t count, int64_t now_ms,
                           SlotRefusal* refusal) {
  const TierShare& own = MutableUse(tenant).device;
  const EvictionOrder& order = index_.order();
  const auto is_own = [tenant](TenantIndex other) { return other == tenant; };
  const auto is_over = [this](TenantIndex other) { return IsOverDevice(other); };
  const int64_t over = int64_t{own.used} + count - own.limit;
  *refusal = {SlabKind::kDevice, own.limit < device_.slot_count()};
  if (count > own.limit || over > order.idle_device_count(tenant)) return false;
  int64_t reach = int64_t{device_.free_count()} + order.idle_device_count(tenant);
  for (size_t i = 0; i < tenants_.size(); ++i) {
    const auto other = static_cast<TenantIndex>(i);
    if (other != tenant) reach += Reach(order.idle_device_count(other), tenants_[i].device);
  }
  refusal->by_quota = false;
  if (reach < count) return false;
  for (int64_t i = 0; i < over; ++i) Demote(order.NextDemotable(is_own), now_ms);
  while (device_.free_count() < count) {
    BlockId victim = order.NextDemotable(is_over);
    if (victim == BlockId::kNone) victim = order.NextDemotable(is_own);
    CERTKV_CHECK(victim != BlockId::kNone, "what was counted as reachable can be demoted");
    Demote(victim, now_ms);
  }
  return true;
}

bool Cache::TakeSlots(const SlotDemand& demand, int64_t now_ms, SlotGrant* grant,
                      SlotRefusal* refusal) {
  if (!MakeBackingRoom(demand.tenant, demand.backing_count, now_ms, refusal) ||
      !MakeDeviceRoom(demand.tenant, demand.device_count, now_ms, refusal)) {
    return false;
  }
  grant->tenant = demand.tenant;
  grant->backing = backing_.Take(demand.backing_count);
  grant->device = device_.Take(demand.device_count);
  TenantUse& use = MutableUse(demand.tenant);
  use.backing.used += demand.backing_count;
  use.device.used += demand.device_count;
  return true;
}

void Cache::ReturnSlots(const SlotGrant& grant) {
  for (const int32_t slot : grant.backing) backing_.Free(slot);
  for (const int32_t slot : grant.device) device_.Free(slot);
  TenantUse& use = MutableUse(grant.tenant);
  use.backing.used -= static_cast<int32_t>(grant.backing.size());
  use.device.used -= static_cast<int32_t>(grant.device.size());
}

std::vector<BlockId> Cache::PreviewEvictions(const TenantIndex* tenant, int32_t count) const {
  const auto may_go = [this, tenant](TenantIndex other) {
    return IsOverBacking(other) || (tenant != nullptr && other == *tenant);
  };
  return index_.order().Preview(count, may_go);
}

int32_t Cache::DemoteDownTo(int32_t used_max, int32_t count_max, int64_t now_ms) {
  int32_t count = 0;
  for (; count < count_max && device_.slot_count() - device_.free_count() > used_max; ++count) {
    const BlockId victim =
        index_.order().NextDemotable([this](TenantIndex other) { return IsOverDevice(other); });
    if (victim == BlockId::kNone) break;
    Demote(victim, now_ms);
  }
  return count;
}

int32_t Cache::SpillDownTo(int32_t used_max, int32_t count_max, int64_t now_ms) {
  int32_t count = 0;
  for (; count < count_max && backing_.slot_count() - backing_.free_count() > used_max; ++count) {
    const BlockId victim =
        index_.order().NextEvictable([this](TenantIndex other) { return IsOverBacking(other); });
    if (victim == BlockId::kNone || spill_ == nullptr ||
        !spill_->Contains(spec_digest_, index_.Get(victim).key)) {
      break;
    }
    Remove(victim, BlockEventKind::kEvicted, now_ms);
  }
  return count;
}

void Cache::SetPinned(BlockId id, bool pinned, int64_t end_ns) {
  const auto end = pin_ends_.find(id);
  if (end != pin_ends_.end()) {
    pins_by_end_.erase({end->second, id});
    pin_ends_.erase(end);
  }
  if (pinned && end_ns != 0) {
    pin_ends_[id] = end_ns;
    pins_by_end_.insert({end_ns, id});
  }
  if (index_.Get(id).pinned == pinned) return;
  index_.SetPinned(id, pinned);
  MutableUse(index_.Get(id).tenant).pinned += pinned ? 1 : -1;
}

int64_t Cache::PinEndOf(BlockId id) const {
  const auto end = pin_ends_.find(id);
  return end == pin_ends_.end() ? 0 : end->second;
}

BlockId Cache::FirstEndedPin(int64_t now_ns) const {
  if (pins_by_end_.empty() || pins_by_end_.begin()->first > now_ns) return BlockId::kNone;
  return pins_by_end_.begin()->second;
}

}  // namespace certkv::kvstore
