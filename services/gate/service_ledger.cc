#include "services/gate/service_ledger.h"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <chrono>
#include <string>
#include <utility>

#include "kernels/core/status.h"
#include "services/common/private_file.h"
#include "services/gate/ledger_address.h"
#include "services/gate/ledger_redis.h"

namespace certkv::gate {

absl::StatusOr<std::unique_ptr<LedgerRunner>> LedgerRunner::Create(const GateConfig& config) {
  if (config.ledger_redis.empty()) {
    return std::unique_ptr<LedgerRunner>(new LedgerRunner(config, nullptr));
  }
  RedisOptions options;
  CERTKV_ASSIGN_OR_RETURN(options.address, ParseRedisAddress(config.ledger_redis));
  if (!config.ledger_password_file.empty()) {
    CERTKV_ASSIGN_OR_RETURN(options.password, ReadTokenFile(config.ledger_password_file));
  }
  // Longer than any lease of it may live, so that nobody holds a slice of what is forgotten.
  options.keep_ms = std::max(config.idle_timeout_ms, kLeaseDurationMaxMs) + config.retention_ms;
  return std::unique_ptr<LedgerRunner>(
      new LedgerRunner(config, std::make_unique<RedisLedger>(std::move(options))));
}

LedgerRunner::LedgerRunner(const GateConfig& config, std::unique_ptr<Ledger> ledger)
    : timeout_(config.ledger_timeout_ms), ledger_(std::move(ledger)) {
  if (ledger_ == nullptr) return;
  threads_ = std::make_unique<boost::asio::thread_pool>(static_cast<size_t>(config.ledger_threads));
}

LedgerRunner::~LedgerRunner() {
  if (threads_ != nullptr) threads_->join();
}

void LedgerRunner::Run(std::function<void()> call) {
  if (threads_ == nullptr) return call();
  const auto now = std::chrono::steady_clock::now();
  if (waiting_.fetch_add(1) >= kLedgerQueueMax) {
    waiting_.fetch_sub(1);
    const LedgerDeadline over(now);
    return call();
  }
  boost::asio::post(*threads_, [this, call = std::move(call), deadline = now + timeout_] {
    waiting_.fetch_sub(1);
    const LedgerDeadline limit(deadline);
    call();
  });
}

}  // namespace certkv::gate
