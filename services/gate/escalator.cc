#include "services/gate/escalator.h"

#include <algorithm>

namespace certkv::gate {
namespace {

constexpr size_t kCountedHeadsMax = 16384;

}  // namespace

bool Escalator::AddRepair(int32_t layer, int32_t query_head, const Escalation& terms,
                          int64_t now_ms) {
  if (terms.repairs == 0) return false;
  // A clock that was set back begins a new window too.
  if (now_ms - window_start_ms_ >= terms.window_ms || now_ms < window_start_ms_) {
    repairs_.clear();
    window_start_ms_ = now_ms;
  }
  // A client names what heads it likes; so many no model has.
  if (repairs_.size() >= kCountedHeadsMax && !repairs_.contains({layer, query_head})) return false;
  int32_t& count = repairs_[{layer, query_head}];
  if (++count < terms.repairs) return false;
  count = 0;
  Expire(now_ms);
  const int64_t until_ms = now_ms + terms.duration_ms;
  const auto of_layer = std::count_if(escalated_.begin(), escalated_.end(), [&](const auto& entry) {
    return entry.first.first == layer && entry.first.second != query_head;
  });
  const bool whole_layer = of_layer + 1 >= terms.heads_of_a_layer ||
                           escalated_.size() >= static_cast<size_t>(kEscalatedMax);
  if (!whole_layer) return Escalate({layer, query_head}, until_ms);
  absl::erase_if(escalated_, [layer](const auto& entry) { return entry.first.first == layer; });
  return Escalate({layer, -1}, until_ms);
}

bool Escalator::Escalate(Place place, int64_t until_ms) {
  if (escalated_.size() >= static_cast<size_t>(kEscalatedMax) && !escalated_.contains(place)) {
    return false;
  }
  escalated_[place] = until_ms;
  return true;
}

std::vector<HeadRule> Escalator::Rules(int64_t now_ms) const {
  std::vector<HeadRule> rules;
  for (const auto& [place, until_ms] : escalated_) {
    if (now_ms < until_ms) {
      rules.push_back({.layer = place.first, .query_head = place.second, .exact = true});
    }
  }
  std::sort(rules.begin(), rules.end(), [](const HeadRule& a, const HeadRule& b) {
    return std::make_pair(a.layer, a.query_head) < std::make_pair(b.layer, b.query_head);
  });
  return rules;
}

bool Escalator::Expire(int64_t now_ms) {
  const size_t before = escalated_.size();
  absl::erase_if(escalated_, [now_ms](const auto& entry) { return entry.second <= now_ms; });
  return escalated_.size() != before;
}

}  // namespace certkv::gate
