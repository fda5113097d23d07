// Three processes and four workers under load, while all of them are killed, stopped and restarted
// and the connections between them cut:
// every output is certified or exact and right, or there is none, and the memory comes back.
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/system/chaos_worker.h"
#include "tests/system/reclaim.h"
#include "tests/system/socket_proxy.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

constexpr int kWorkers = 4;
constexpr char kModel[] = "chaos";
constexpr int64_t kLeaseMs = 2000;

class ChaosTest : public SystemTest {
 protected:
  void StartWorker(size_t place) {
    auto worker = WorkerProcess::Start(*cluster_, kModel, "chaos", kLeaseMs, targets_);
    ASSERT_TRUE(worker.ok()) << worker.status();
    workers_[place] = *std::move(worker);
  }
  // A proxy before each service, whose connections are cut.
  void StartProxies() {
    targets_ = cluster_->options();
    std::string* const targets[] = {&targets_.kvstore_target, &targets_.certifier_target,
                                    &targets_.gate_target};
    for (size_t i = 0; i < 3; ++i) {
      const std::string upstream = targets[i]->substr(std::string("unix:").size());
      proxies_[i] = std::make_unique<SocketProxy>(
          absl::StrCat(cluster_->directory(), "/proxy-", i, ".sock"), upstream);
      *targets[i] = "unix:" + proxies_[i]->path();
    }
  }
  void DisturbConnections() {
    SocketProxy& proxy = *proxies_[random_() % 3];
    switch (random_() % 3) {
      case 0:
        return proxy.Cut();
      case 1:
        return proxy.HalfClose();
      default:
        ++stalls_;
        proxy.Stall(true);
        absl::SleepFor(absl::Milliseconds(50 + random_() % 250));
        proxy.Stall(false);
        proxy.Cut();  // in the middle of what has gathered
    }
  }
  void EndWorker(size_t place) {
    kill(workers_[place]->pid(), SIGCONT);
    workers_[place]->Kill();
    total_.Add(ChaosTally::FromText(workers_[place]->LastLine("tally ")));
    EXPECT_EQ(workers_[place]->LastLine("wrong "), "");
  }
  void Pause(pid_t pid) {
    kill(pid, SIGSTOP);
    absl::SleepFor(absl::Milliseconds(100 + random_() % 300));
    kill(pid, SIGCONT);
  }
  // One thing that goes wrong.
  void Disturb() {
    static constexpr ClusterService kServices[] = {
        ClusterService::kStore, ClusterService::kCertifier, ClusterService::kGate};
    const uint32_t what = random_() % 14;
    const ClusterService service = kServices[random_() % 3];
    const size_t worker = random_() % kWorkers;
    if (what < 4) {
      ++service_kills_;
      cluster_->Kill(service);
      absl::SleepFor(absl::Milliseconds(random_() % 300));
      ASSERT_TRUE(cluster_->Restart(service).ok());
    } else if (what < 6) {
      ++pauses_;
      Pause(cluster_->pid(service));
    } else if (what < 8) {
      ++pauses_;
      Pause(workers_[worker]->pid());
    } else if (what >= 10) {
      DisturbConnections();
    } else {
      ++worker_kills_;
      EndWorker(worker);
      StartWorker(worker);
    }
  }

  std::mt19937 random_{20260301};
  client::Options targets_;
  std::unique_ptr<SocketProxy> proxies_[3];  // end after the workers
  std::unique_ptr<WorkerProcess> workers_[kWorkers];
  ChaosTally total_;
  int service_kills_ = 0;
  int worker_kills_ = 0;
  int pauses_ = 0;
  int stalls_ = 0;
};

TEST_P(ChaosTest, NoOutputIsUncertifiedOrWrongAndMemoryComesBack) {
  const char* seconds = std::getenv("CERTKV_CHAOS_SECONDS");
  StartCluster("gate:\n  lease_duration: 500ms\n");
  StartProxies();
  for (size_t i = 0; i < kWorkers; ++i) StartWorker(i);
  const absl::Time end = absl::Now() + absl::Seconds(seconds == nullptr ? 20 : std::atoi(seconds));
  while (absl::Now() < end && !HasFatalFailure()) {
    absl::SleepFor(absl::Milliseconds(100 + random_() % 500));
    Disturb();
  }
  absl::SleepFor(absl::Seconds(2));  // all is well again: reads are certified
  for (size_t i = 0; i < kWorkers; ++i) EndWorker(i);
  CacheHoldings held;
  for (int i = 0; i < 1000; ++i) {
    const auto now = HoldingsOf(*cluster_, kModel);
    if (now.ok()) held = *now;
    // The certifier keeps its reader's session.
    if (now.ok() && held.blocks_leased == 0 && held.blocks_writing == 0) break;
    absl::SleepFor(absl::Milliseconds(10));
  }
  std::printf(
      "chaos: %d services and %d workers killed, %d pauses, %d connections cut, %d stalls\n%s\n"
      "leased blocks at the end: %d\n",
      service_kills_, worker_kills_, pauses_,
      static_cast<int>(proxies_[0]->cut_count() + proxies_[1]->cut_count() +
                       proxies_[2]->cut_count()),
      stalls_, total_.ToText().c_str(), held.blocks_leased);
  EXPECT_EQ(total_.uncertified, 0);
  EXPECT_EQ(total_.wrong, 0);
  EXPECT_EQ(held.blocks_leased, 0) << "all memory is back";
  EXPECT_EQ(held.blocks_writing, 0);
  EXPECT_GT(total_.certified, 1000);
  EXPECT_GT(total_.exact, 0);
  EXPECT_GT(total_.errors, 0) << "a chaos that nobody notices is none";
}

INSTANTIATE_TEST_SUITE_P(Shapes, ChaosTest, ::testing::Values(ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
