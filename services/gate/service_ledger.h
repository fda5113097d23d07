// Where calls run that may have to wait for a shared ledger.
#ifndef CERTKV_SERVICES_GATE_SERVICE_LEDGER_H_
#define CERTKV_SERVICES_GATE_SERVICE_LEDGER_H_

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <atomic>
#include <boost/asio/thread_pool.hpp>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "services/gate/config.h"
#include "services/gate/ledger.h"

namespace certkv::gate {

// Calls that wait for a thread; of more, each is answered at once as if the ledger did not.
inline constexpr int32_t kLedgerQueueMax = 4096;

// With a ledger, calls have threads of their own, so that gRPC's never wait, and a time that begins
// when they come: one that waited too long for its thread finds the ledger unavailable.
// Threads: safe.
class LedgerRunner {
 public:
  // Without ledger_redis there is no ledger and no thread.
  // Errors: InvalidArgument [CONFIG_INVALID]; as ReadTokenFile.
  static absl::StatusOr<std::unique_ptr<LedgerRunner>> Create(const GateConfig& config);
  ~LedgerRunner();

  Ledger* ledger() const { return ledger_.get(); }  // may be null
  // Runs `call`, here when there is no ledger.
  void Run(std::function<void()> call);

 private:
  LedgerRunner(const GateConfig& config, std::unique_ptr<Ledger> ledger);

  const std::chrono::milliseconds timeout_;
  const std::unique_ptr<Ledger> ledger_;
  std::atomic<int32_t> waiting_ = 0;
  std::unique_ptr<boost::asio::thread_pool> threads_;
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_SERVICE_LEDGER_H_
