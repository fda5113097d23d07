#include "services/gate/risk_index.h"

namespace certkv::gate {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

}  // namespace

void RiskIndex::Cell::Set(const Standing& standing) {
  score.store(standing.score, kRelaxed);
  tv_sum.store(standing.tv_sum, kRelaxed);
  repair_bytes.store(standing.repair_bytes, kRelaxed);
  budget_share.store(standing.budget_share, kRelaxed);
  update_time_ms.store(standing.update_time_ms, kRelaxed);
  event_time_ms.store(standing.event_time_ms, kRelaxed);
  closed.store(standing.closed, kRelaxed);
  troubled.store(standing.troubled, kRelaxed);
}

std::pair<double, double> RiskIndex::Cell::Rank(RiskOrder order) const {
  const double its_score = score.load(kRelaxed);
  switch (order) {
    case RiskOrder::kScore:
      return {its_score, tv_sum.load(kRelaxed)};
    case RiskOrder::kSum:
      return {tv_sum.load(kRelaxed), its_score};
    case RiskOrder::kRepairBytes:
      return {repair_bytes.load(kRelaxed), its_score};
    case RiskOrder::kBudgetShare:
      return {budget_share.load(kRelaxed), its_score};
    case RiskOrder::kUpdateTime:
      return {update_time_ms.load(kRelaxed), its_score};
  }
  return {};
}

bool RiskIndex::Cell::Matches(const RiskFilter& filter) const {
  if (closed.load(kRelaxed) && !filter.include_closed) return false;
  if (filter.only_troubled && !troubled.load(kRelaxed)) return false;
  return score.load(kRelaxed) >= filter.score_min;
}

RiskIndex::Cell* RiskIndex::Add(const Request* request) {
  Cell* cell = nullptr;
  if (free_.empty()) {
    cell = &cells_.emplace_back();
  } else {
    cell = free_.back();
    free_.pop_back();
  }
  cell->Set({});
  cell->request = request;
  return cell;
}

void RiskIndex::Remove(Cell* cell) {
  cell->request = nullptr;
  free_.push_back(cell);
}

}  // namespace certkv::gate
