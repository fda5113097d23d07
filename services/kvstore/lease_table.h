// LeaseTable: who may read which blocks until when.
#ifndef CERTKV_SERVICES_KVSTORE_LEASE_TABLE_H_
#define CERTKV_SERVICES_KVSTORE_LEASE_TABLE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "kernels/core/ids.h"
#include "services/kvstore/lru_list.h"

namespace certkv::kvstore {

struct Lease {
  SessionId session{};
  std::vector<BlockId> blocks;  // of the session's cache, each held once per mention
  int64_t deadline_ns = 0;      // monotonic clock
  int64_t sequence = 0;         // rises with every lease made
};

// Invariants:
//  1. A lease is in the deadline order exactly while it is in the table.
//  2. The table never lets a block go by itself: who takes a lease out unholds its blocks.
// Threads: the caller serializes.
class LeaseTable {
 public:
  int32_t size() const { return static_cast<int32_t>(leases_.size()); }

  // `id` is new.
  void Add(LeaseId id, SessionId session, std::vector<BlockId> blocks, int64_t deadline_ns);
  // Null when there is no such lease of that session.
  const Lease* Find(LeaseId id, SessionId session) const;
  const Lease& Get(LeaseId id) const { return leases_.at(id); }  // it is in the table
  void SetDeadline(LeaseId id, int64_t deadline_ns);             // it is in the table
  Lease TakeOut(LeaseId id);                                     // it is in the table
  // visit(lease) for every lease, in no order.
  template <typename Visitor>
  void ForEach(const Visitor& visit) const {
    for (const auto& entry : leases_) visit(entry.second);
  }
  // A lease whose deadline is at or before `now_ns`, or LeaseId{0}.
  LeaseId FirstExpired(int64_t now_ns) const;
  // When the first lease ends; 0 when there is none.
  int64_t FirstDeadline() const { return by_deadline_.empty() ? 0 : by_deadline_.begin()->first; }

 private:
  using Deadline = std::pair<int64_t, LeaseId>;

  absl::flat_hash_map<LeaseId, Lease> leases_;
  absl::btree_set<Deadline> by_deadline_;
  int64_t sequence_ = 0;
};

}  // namespace certkv::kvstore

#endif  // CERTKV_SERVICES_KVSTORE_LEASE_TABLE_H_
