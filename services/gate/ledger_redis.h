// The ledger in a Redis server: ledger.lua, run there by EVALSHA.
//
// One server, not a cluster. Whenever its process is another than the one that was joined, or its
// keys are gone, a new epoch begins: requests of the one before are void (ledger.h), and tenants'
// budgets are used up for their first window. So nothing depends on what Redis has kept on disk: a
// restart, a promoted replica, a restored backup and FLUSHALL cost budget, never give it twice.
//
// A call has a connection to itself. One that fails or comes late closes it, because its answer
// could be taken for the next one's. A late answer is that call's alone: a busy machine makes some.
// After kLateAnswersMax in a row, or a connection that breaks or can't be made, all calls fail at
// once for kRetryAfter; then one tries.
#ifndef CERTKV_SERVICES_GATE_LEDGER_REDIS_H_
#define CERTKV_SERVICES_GATE_LEDGER_REDIS_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "services/gate/ledger.h"
#include "services/gate/ledger_address.h"

struct redisContext;

namespace certkv::gate {

struct RedisOptions {
  RedisAddress address;
  std::string password;                 // "" = none
  std::string prefix = "certkv:gate:";  // of keys
  int64_t keep_ms = 0;  // a request that nothing was heard of for so long is forgotten
};

class RedisLedger final : public Ledger {
 public:
  static constexpr std::chrono::milliseconds kRetryAfter{100};
  static constexpr int kLateAnswersMax = 3;

  // Connects with the first call.
  explicit RedisLedger(RedisOptions options);
  ~RedisLedger() override;

  absl::StatusOr<LedgerState> Open(const std::string& request,
                                   const LedgerOpening& opening) override;
  absl::StatusOr<LedgerState> Load(const std::string& request) override;
  absl::StatusOr<LedgerGrant> Grant(const std::string& request, const LedgerTenant& tenant,
                                    const LedgerGrantAsk& ask) override;
  absl::StatusOr<LedgerCount> Count(const std::string& request, const LedgerTenant& tenant,
                                    const LedgerBatch& batch) override;
  absl::StatusOr<LedgerGrant> Decide(const std::string& request, const LedgerTenant& tenant,
                                     int64_t units, bool exact) override;
  absl::StatusOr<LedgerState> Close(const std::string& request) override;
  absl::StatusOr<std::vector<int64_t>> TenantsCommitted(const std::vector<std::string>& tenants,
                                                        int64_t window_ms) override;
  absl::StatusOr<LedgerPolicy> PutPolicy(const LedgerPolicy& policy) override;

 private:
  using Words = std::vector<std::string>;
  struct Free {
    void operator()(redisContext* context) const;
  };
  struct Connection {
    std::unique_ptr<redisContext, Free> context;
    std::string script;  // its SHA
    std::string epoch;
  };

  absl::StatusOr<Connection> Connect() const;
  // Sends a command and takes the answer, a list or one word, in what is left of the deadline.
  static absl::StatusOr<Words> Ask(redisContext* context, const Words& command);
  absl::StatusOr<Connection> TakeConnection();
  absl::StatusOr<Words> Run(const std::string& operation, const std::string& request,
                            const LedgerTenant& tenant, const Words& arguments);
  // Run; an epoch that has ended is joined anew once. The answer has at least so many words, and no
  // status.
  absl::StatusOr<Words> RunInEpoch(const std::string& operation, const std::string& request,
                                   const LedgerTenant& tenant, const Words& arguments,
                                   size_t word_count_min);
  // RunInEpoch of what a request is told of.
  absl::StatusOr<Words> Step(const std::string& operation, const std::string& request,
                             const LedgerTenant& tenant, const Words& arguments);
  // After a call that failed: what does it say of the next ones?
  void NoteFailure();
  void NoteAnswer();

  const RedisOptions options_;
  absl::Mutex mutex_;
  std::vector<Connection> idle_ ABSL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point down_until_ ABSL_GUARDED_BY(mutex_);  // 0 = it is up
  int late_answers_ ABSL_GUARDED_BY(mutex_) = 0;                              // in a row
};

}  // namespace certkv::gate

#endif  // CERTKV_SERVICES_GATE_LEDGER_REDIS_H_
