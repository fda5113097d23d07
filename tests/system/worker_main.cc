// certkv-test-worker STORE MODEL MODE LEASE_MS CERTIFIER GATE: a worker process for tests to kill,
// stop and go on.
//
// "holding" on stdout says that it holds a lease. See WorkerProcess in reclaim.h for the modes.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>

#include "absl/time/clock.h"
#include "clients/cpp/worker.h"
#include "kernels/core/status.h"
#include "tests/system/chaos_worker.h"
#include "tests/system/reclaim.h"
#include "tests/system/sequence_fixture.h"

namespace certkv {
namespace {

constexpr int32_t kTokens = 2048;
constexpr size_t kSequencesHeld = 3;

void Say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

template <typename T>
T OrDie(absl::StatusOr<T> value) {
  if (value.ok()) return *std::move(value);
  Say("error " + value.status().ToString());
  std::exit(1);
}

std::unique_ptr<client::Sequence> Put(client::Worker& worker, TestSequence& data, int32_t number) {
  data.token_ids[0] = number;  // another prefix: nothing of it is in the store
  return OrDie(
      worker.PutSequence(data.token_ids, data.layers(), client::DefaultKeyContext(worker.spec())));
}

void Load(client::Worker& worker, TestSequence& data) {
  std::deque<std::unique_ptr<client::Sequence>> held;
  for (int32_t i = 0;; ++i) {
    held.push_back(Put(worker, data, i));
    if (i == 0) Say("holding");
    if (held.size() > kSequencesHeld) held.pop_front();
  }
}

void Hold(client::Worker& worker, TestSequence& data) {
  const auto sequence = Put(worker, data, 0);
  Say("holding");
  while (sequence->CheckLease().ok()) absl::SleepFor(absl::Milliseconds(5));
  Say("lost " + ReasonOf(sequence->CheckLease()) + " " +
      std::string(sequence->CheckLease().message()));
  // The session goes on: what was sealed is found again.
  const auto again = OrDie(worker.Lookup(data.token_ids, client::DefaultKeyContext(data.spec)));
  Say("found " + std::to_string(again->blocks().size()));
  while (true) pause();
}

void Fork(client::Worker& worker, TestSequence& data) {
  const auto sequence = Put(worker, data, 0);
  const pid_t child = fork();
  if (child == 0) {  // keeps the descriptor socket open, and does nothing else
    while (true) pause();
  }
  Say("child " + std::to_string(child));
  Say("holding");
  while (true) pause();
}

int Main(int argc, char** argv) {
  if (argc != 7) {
    std::fprintf(stderr, "usage: certkv-test-worker STORE MODEL MODE LEASE_MS CERTIFIER GATE\n");
    return 2;
  }
  client::Options options;
  options.kvstore_target = argv[1];
  options.worker_name = argv[2];
  options.lease_duration_ms = std::atol(argv[4]);
  options.certifier_target = argv[5];
  options.gate_target = argv[6];
  if (const char* directory = std::getenv(kWorkerTlsDirectory); directory != nullptr) {
    options.ca_file = std::string(directory) + "ca.crt";
    options.certificate_file = std::string(directory) + "engine.crt";
    options.key_file = std::string(directory) + "engine.key";
  }
  CacheSpec spec = SmallSpec();
  spec.model = argv[2];
  const std::string mode = argv[3];
  if (mode == "chaos") {
    const char* const timeout = std::getenv(kWorkerRpcTimeoutMs);
    options.rpc_timeout_ms = timeout == nullptr ? 1000 : std::atol(timeout);
    options.seal_timeout_ms = 2000;
    Say("holding");  // soon
    RunChaosWorker(options, spec, static_cast<uint32_t>(getpid()));
  }
  TestSequence data(spec, kTokens, 1);
  const auto worker = OrDie(client::Worker::Attach(options, spec));
  if (mode == "load") Load(*worker, data);
  if (mode == "hold") Hold(*worker, data);
  if (mode == "fork") Fork(*worker, data);
  std::fprintf(stderr, "no mode %s\n", argv[3]);
  return 2;
}

}  // namespace
}  // namespace certkv

int main(int argc, char** argv) { return certkv::Main(argc, argv); }
