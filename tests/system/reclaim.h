// Workers that are killed under load, and how long the store takes to release what they held.
#ifndef CERTKV_TESTS_SYSTEM_RECLAIM_H_
#define CERTKV_TESTS_SYSTEM_RECLAIM_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "clients/cli/child_process.h"
#include "tests/system/cluster.h"

namespace certkv {

// Where a worker runs.
struct WorkerPlace {
  std::string log_path;
  std::vector<std::string> words;        // before the program's own; none: here
  std::vector<std::string> environment;  // more of it
};
// In a worker's environment: the directory of ca.crt, engine.crt and engine.key, for TCP targets.
inline constexpr char kWorkerTlsDirectory[] = "CERTKV_TEST_TLS_DIRECTORY";
// There too: milliseconds that a call of mode "chaos" may take; 1000 without it.
inline constexpr char kWorkerRpcTimeoutMs[] = "CERTKV_TEST_RPC_TIMEOUT_MS";

// One process of certkv-test-worker: a worker on a cache of its own, named `model`.
class WorkerProcess {
 public:
  // Modes: "load" puts and drops sequences for ever; "hold" holds one and says when its lease is
  // lost; "fork" holds one and leaves its socket to a child; "chaos" is RunChaosWorker. Returns
  // once it holds a lease.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(const WorkerPlace& place,
                                                              const std::string& model,
                                                              const std::string& mode,
                                                              int64_t lease_duration_ms,
                                                              const client::Options& targets);
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(const Cluster& cluster,
                                                              const std::string& model,
                                                              const std::string& mode,
                                                              int64_t lease_duration_ms,
                                                              const client::Options& targets);
  // At the cluster's own sockets.
  static absl::StatusOr<std::unique_ptr<WorkerProcess>> Start(const Cluster& cluster,
                                                              const std::string& model,
                                                              const std::string& mode,
                                                              int64_t lease_duration_ms) {
    return Start(cluster, model, mode, lease_duration_ms, cluster.options());
  }
  pid_t pid() const { return process_->pid(); }
  // Waits until it has written a line that starts with `word`, and returns the rest of that line.
  absl::StatusOr<std::string> WaitFor(const std::string& word);
  // What followed `word` in the last line that started with it; "" when none did.
  std::string LastLine(const std::string& word) const;
  // What followed `word` in each line that started with it.
  std::vector<std::string> Lines(const std::string& word) const;
  // SIGKILL, and reaps it.
  void Kill();

 private:
  WorkerProcess(std::unique_ptr<cli::ChildProcess> process, std::string log_path)
      : process_(std::move(process)), log_path_(std::move(log_path)) {}

  std::unique_ptr<cli::ChildProcess> process_;
  const std::string log_path_;
};

// What the store says about the cache of `model`.
struct CacheHoldings {
  int32_t session_count = 0;
  int32_t blocks_leased = 0;
  int32_t blocks_writing = 0;
  bool none() const { return session_count == 0 && blocks_leased == 0 && blocks_writing == 0; }
};
absl::StatusOr<CacheHoldings> HoldingsOf(const client::Options& options, const std::string& model);
inline absl::StatusOr<CacheHoldings> HoldingsOf(const Cluster& cluster, const std::string& model) {
  return HoldingsOf(cluster.options(), model);
}

struct ReclaimOptions {
  int32_t kill_count = 200;
  int32_t load_workers = 2;  // that go on all the time, on other caches
  uint32_t seed = 1;
};
struct ReclaimResult {
  std::vector<double> milliseconds;  // from before kill(2) until the store says: nothing held
  int32_t kills_with_leases = 0;     // that met a worker with leased blocks
  int32_t kills_while_writing = 0;   // that met blocks half-written
  double Percentile(double percent) const;
};
// Kills workers one after the other at random moments. Errors: DeadlineExceeded, something was
// still held 5 s after a death; and what the cluster says.
absl::StatusOr<ReclaimResult> MeasureReclaim(const Cluster& cluster, const ReclaimOptions& options);

}  // namespace certkv

#endif  // CERTKV_TESTS_SYSTEM_RECLAIM_H_
