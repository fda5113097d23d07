// The processes of a SystemModel that have a state of their own.
#ifndef CERTKV_TESTS_SIMULATION_SYSTEM_CLIENT_H_
#define CERTKV_TESTS_SIMULATION_SYSTEM_CLIENT_H_

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "clients/cpp/retry_plan.h"
#include "tests/simulation/system_model.h"

namespace certkv {

inline constexpr int64_t kBlockLeaseMs = 1000;
inline constexpr int32_t kChains = 5;
inline constexpr int32_t kChainLength = 3;

struct SystemModel::Client {
  explicit Client(int64_t number) : id(number) {}

  const int64_t id;  // of this process: another one after a restart
  StoreHarness::Worker worker;
  int64_t store_life = 0;  // of the store that `worker` is attached to
  client::LeaseBook leases{kBlockLeaseMs};
  // The sequence that it reads: blocks of a chain under one lease.
  int32_t chain = 0;
  LeaseId lease{};
  int64_t lookup_call = 0;  // the last one; its answer is taken once, as a call's is
  std::vector<BlockHandle> blocks;
  std::optional<client::RetryPlan> retry;  // of a write that was refused
  int64_t retry_time_ms = 0;
  int64_t repair_time_ms = 0;  // when it may ask for a repair again
  std::set<LeaseId> renewing;
  // Its request at gate.
  std::string request;
  int64_t reporter_id = 0;   // of its book
  int64_t request_life = 0;  // of the gate that gave its first lease
  std::unique_ptr<client::ReportBook> book;
  int64_t sent_batch = 0;  // that an answer is waited for
  int64_t send_again_ms = 0;
  int64_t renew_policy_ms = 0;
  // The read that is under way.
  int64_t read_call = 0;  // 0: none
  int64_t read_timeout_ms = 0;
  client::LeaseInUse read_lease;
};

struct SystemModel::Certifier {
  certifier::BudgetBook budgets{64};
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SIMULATION_SYSTEM_CLIENT_H_
