#include "services/kvstore/lease_table.h"

#include "kernels/core/check.h"

namespace certkv::kvstore {

void LeaseTable::Add(LeaseId id, SessionId session, std::vector<BlockId> blocks,
                     int64_t deadline_ns) {
  const bool is_new =
      leases_.emplace(id, Lease{session, std::move(blocks), deadline_ns, ++sequence_}).second;
  CERTKV_CHECK(is_new, "lease ids are never used twice");
  by_deadline_.insert({deadline_ns, id});
}

const Lease* LeaseTable::Find(LeaseId id, SessionId session) const {
  const auto it = leases_.find(id);
  return it == leases_.end() || it->second.session != session ? nullptr : &it->second;
}

void LeaseTable::SetDeadline(LeaseId id, int64_t deadline_ns) {
  Lease& lease = leases_.at(id);
  CERTKV_CHECK(by_deadline_.erase({lease.deadline_ns, id}) == 1, "a lease is in the order once");
  lease.deadline_ns = deadline_ns;
  by_deadline_.insert({deadline_ns, id});
}

Lease LeaseTable::TakeOut(LeaseId id) {
  const auto it = leases_.find(id);
  CERTKV_CHECK(it != leases_.end(), "a lease is taken out once");
  Lease lease = std::move(it->second);
  leases_.erase(it);
  CERTKV_CHECK(by_deadline_.erase({lease.deadline_ns, id}) == 1, "a lease is in the order once");
  return lease;
}

LeaseId LeaseTable::FirstExpired(int64_t now_ns) const {
  if (by_deadline_.empty() || by_deadline_.begin()->first > now_ns) return LeaseId{};
  return by_deadline_.begin()->second;
}

}  // namespace certkv::kvstore
