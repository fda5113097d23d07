// Where every request stands, side by side in memory, so that a list of 100,000 requests looks at
// 64 bytes of each instead of at the request.
//
// Threads: the owner locks Add, Remove and iteration against each other; a Cell may be set by one
// thread (its request's lock) while others read it: each number is then either the old or the new.
#ifndef CERTKV_SERVICES_GATE_RISK_INDEX_H_
#define CERTKV_SERVICES_GATE_RISK_INDEX_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "services/gate/risk_list.h"

namespace certkv::gate {

class Request;

// What lists order and select by.
struct Standing {
  double score = 0;
  double tv_sum = 0;
  double repair_bytes = 0;
  double budget_share = 0;  // committed / budget
  double update_time_ms = 0;
  double event_time_ms = -1;  // of the latest event that is kept; -1: none
  bool closed = false;
  bool troubled = false;
};

class RiskIndex {
 public:
  struct alignas(64) Cell {
    std::atomic<double> score{0};
    std::atomic<double> tv_sum{0};
    std::atomic<double> repair_bytes{0};
    std::atomic<double> budget_share{0};
    std::atomic<double> update_time_ms{0};
    std::atomic<double> event_time_ms{-1};
    std::atomic<bool> closed{false};
    std::atomic<bool> troubled{false};
    const Request* request = nullptr;  // null: free

    void Set(const Standing& standing);
    // The numbers of a RiskRank.
    std::pair<double, double> Rank(RiskOrder order) const;
    // All of the filter but its texts.
    bool Matches(const RiskFilter& filter) const;
  };

  // `request` lives until Remove.
  Cell* Add(const Request* request);
  void Remove(Cell* cell);
  const std::deque<Cell>& cells() const { return cells_; }

 private:
  std::deque<Cell> cells_;
  std::vector<Cell*> free_;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_RISK_INDEX_H_
