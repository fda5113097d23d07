// Escalator: which heads and layers of one request are read exactly for a while, because they
// needed too many repairs.
//
// Repairs of a head are counted in windows that follow each other (not a sliding one: a burst over
// the border of two counts in both). Once `repairs` are reached in one the head is escalated for
// `duration_ms`; when `heads_of_a_layer` heads of a layer are, the layer is.
//
// Invariants (escalator_test breaks each):
//   1. at most kEscalatedMax rules hold at a time; beyond it the layer of a further head is
//      escalated, and beyond that nothing more is;
//   2. an escalation ends by time alone.
//
// Threads: none; the owner locks. Time is the caller's.
#ifndef CERTKV_SERVICES_GATE_ESCALATOR_H_
#define CERTKV_SERVICES_GATE_ESCALATOR_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/core/policy.h"
#include "services/gate/policy_override.h"

namespace certkv::gate {

inline constexpr int32_t kEscalatedMax = 32;  // half of a lease's rules: overrides have the others

class Escalator {
 public:
  // A read of this head was repaired. Returns true when the head or its layer is escalated by it.
  bool AddRepair(int32_t layer, int32_t query_head, const Escalation& terms, int64_t now_ms);
  // The rules that hold now, by layer and head.
  std::vector<HeadRule> Rules(int64_t now_ms) const;
  // Drops what is over. True when a rule ended.
  bool Expire(int64_t now_ms);

 private:
  using Place = std::pair<int32_t, int32_t>;  // layer, query head or -1

  bool Escalate(Place place, int64_t until_ms);

  absl::flat_hash_map<Place, int32_t> repairs_;  // in this window
  int64_t window_start_ms_ = 0;
  absl::flat_hash_map<Place, int64_t> escalated_;  // until when
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_ESCALATOR_H_
