#include "tests/system/reclaim.h"

#include <signal.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/status.h"

namespace certkv {
namespace {

constexpr int64_t kLongLeaseMs = 600'000;  // no lease of the measurement ends by its deadline
constexpr int32_t kMomentMaxUs = 40'000;   // a worker is killed so long after it began, at most

absl::StatusOr<CacheHoldings> Holdings(client::StoreClient& store, const std::string& model) {
  CERTKV_ASSIGN_OR_RETURN(const auto stats, store.GetStats());
  for (const auto& cache : stats.caches()) {
    if (cache.spec().model() != model) continue;
    return CacheHoldings{cache.session_count(), cache.blocks_leased(), cache.blocks_writing()};
  }
  return CacheHoldings{};
}

// Kills a worker that is at work and waits until the store holds nothing for it.
absl::Status KillOne(const Cluster& cluster, client::StoreClient& store, std::mt19937* random,
                     ReclaimResult* result) {
  const std::string model = "victim";
  CERTKV_ASSIGN_OR_RETURN(auto worker, WorkerProcess::Start(cluster, model, "load", kLongLeaseMs));
  absl::SleepFor(absl::Microseconds((*random)() % kMomentMaxUs));
  CERTKV_ASSIGN_OR_RETURN(CacheHoldings held, Holdings(store, model));
  if (held.blocks_leased > 0) ++result->kills_with_leases;
  if (held.blocks_writing > 0) ++result->kills_while_writing;
  const auto start = std::chrono::steady_clock::now();
  kill(worker->pid(), SIGKILL);
  std::chrono::duration<double, std::milli> passed{};
  do {
    CERTKV_ASSIGN_OR_RETURN(held, Holdings(store, model));
    passed = std::chrono::steady_clock::now() - start;
    if (passed.count() > 5000) {
      return absl::DeadlineExceededError(absl::StrCat(
          "5 s after its death a worker still has ", held.session_count, " sessions, ",
          held.blocks_leased, " leased blocks, ", held.blocks_writing, " half-written blocks"));
    }
  } while (!held.none());
  result->milliseconds.push_back(passed.count());
  worker->Kill();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(
    const Cluster& cluster, const std::string& model, const std::string& mode,
    int64_t lease_duration_ms, const client::Options& targets) {
  static int64_t started_count = 0;
  const std::string log = absl::StrCat(cluster.directory(), "/worker-", ++started_count, ".log");
  return Start({log, {}, {}}, model, mode, lease_duration_ms, targets);
}

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(
    const WorkerPlace& place, const std::string& model, const std::string& mode,
    int64_t lease_duration_ms, const client::Options& targets) {
  std::vector<std::string> words = place.words;
  words.insert(words.end(), {absl::StrCat(BinaryDirectory(), "/certkv-test-worker"),
                             targets.kvstore_target, model, mode, absl::StrCat(lease_duration_ms),
                             targets.certifier_target, targets.gate_target});
  CERTKV_ASSIGN_OR_RETURN(auto process,
                          cli::ChildProcess::Start(words, place.environment, place.log_path));
  std::unique_ptr<WorkerProcess> worker(new WorkerProcess(std::move(process), place.log_path));
  CERTKV_RETURN_IF_ERROR(worker->WaitFor("holding").status());
  return worker;
}

absl::StatusOr<std::string> WorkerProcess::WaitFor(const std::string& word) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (absl::Now() < deadline) {
    std::ifstream file(log_path_);
    std::string line;
    while (std::getline(file, line)) {
      if (absl::StartsWith(line, word)) return line.substr(word.size());
    }
    CERTKV_RETURN_IF_ERROR(process_->CheckRunning());
    absl::SleepFor(absl::Milliseconds(1));
  }
  return absl::DeadlineExceededError(absl::StrCat("no '", word, "' in ", log_path_));
}

std::vector<std::string> WorkerProcess::Lines(const std::string& word) const {
  std::ifstream file(log_path_);
  std::vector<std::string> found;
  for (std::string line; std::getline(file, line);) {
    // The last line may be half-written.
    if (absl::StartsWith(line, word) && !file.eof()) found.push_back(line.substr(word.size()));
  }
  return found;
}

std::string WorkerProcess::LastLine(const std::string& word) const {
  const std::vector<std::string> found = Lines(word);
  return found.empty() ? "" : found.back();
}

void WorkerProcess::Kill() {
  kill(process_->pid(), SIGKILL);
  while (process_->CheckRunning().ok()) absl::SleepFor(absl::Milliseconds(1));
}

absl::StatusOr<CacheHoldings> HoldingsOf(const client::Options& options, const std::string& model) {
  client::StoreClient store(options);
  return Holdings(store, model);
}

double ReclaimResult::Percentile(double percent) const {
  std::vector<double> sorted = milliseconds;
  std::sort(sorted.begin(), sorted.end());
  return sorted[static_cast<size_t>(percent / 100 * static_cast<double>(sorted.size() - 1))];
}

absl::StatusOr<ReclaimResult> MeasureReclaim(const Cluster& cluster,
                                             const ReclaimOptions& options) {
  client::StoreClient store(cluster.options());
  std::mt19937 random(options.seed);
  std::vector<std::unique_ptr<WorkerProcess>> load;
  for (int32_t i = 0; i < options.load_workers; ++i) {
    CERTKV_ASSIGN_OR_RETURN(
        auto worker, WorkerProcess::Start(cluster, absl::StrCat("load-", i), "load", kLongLeaseMs));
    load.push_back(std::move(worker));
  }
  ReclaimResult result;
  for (int32_t i = 0; i < options.kill_count; ++i) {
    CERTKV_RETURN_IF_ERROR(KillOne(cluster, store, &random, &result));
  }
  return result;
}

}  // namespace certkv
