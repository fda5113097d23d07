// A cluster over six hosts while links are cut and slowed down, hosts are lost, and all servers are
// restarted with the next release: every output is certified within tolerance or exact, and every
// other answer is an error with a reason. Prints what happened in each phase; with
// CERTKV_RESULT_FILE it writes that (bench/results/hosts.json is of a run of the whole program).
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/slab_layout.h"
#include "tests/system/chaos_worker.h"
#include "tests/system/host_cluster.h"
#include "tests/system/result_file.h"
#include "tests/system/sequence_fixture.h"

namespace certkv {
namespace {

constexpr char kModel[] = "hosts";
constexpr char kNextRelease[] = "1-2";
constexpr int64_t kLeaseMs = 2000;
constexpr int kWorkerHosts[] = {0, 1, 2, 0};
// Less than the workers' five sequences have, so that blocks are evicted and come from other nodes.
constexpr int32_t kSlots = 14;
constexpr absl::Duration kSettle = absl::Seconds(1);

class HostsTest : public ::testing::TestWithParam<HostKind> {
 protected:
  void Start() {
    const CacheSpec spec = SmallSpec();
    auto cluster = HostCluster::Start(
        GetParam(),
        absl::StrCat("  device_memory: ", SlabLayout(spec, SlabKind::kDevice, kSlots).slab_bytes(),
                     "\n  backing_memory: ",
                     SlabLayout(spec, SlabKind::kBacking, kSlots).slab_bytes(), "\n"),
        "  lease_duration: 3s\n");
    if (absl::IsFailedPrecondition(cluster.status())) {
      GTEST_SKIP() << "no network namespaces here, so Loopback runs alone: " << cluster.status();
    }
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    for (const int host : kWorkerHosts) {
      auto worker = cluster_->StartWorker(host, kModel, "chaos", kLeaseMs);
      ASSERT_TRUE(worker.ok()) << worker.status();
      workers_.push_back(*std::move(worker));
    }
    std::printf(
        "| phase | reads/s | certified heads | exact heads | errors | longest without an "
        "answer, ms |\n|---|---|---|---|---|---|\n");
  }
  void TearDown() override {
    if (HasFailure() && cluster_ != nullptr) std::cerr << cluster_->Logs();
  }
  bool has_namespaces() const { return GetParam() == HostKind::kNamespaces; }
  HostServer& Server(const std::string& program, int host) {
    return cluster_->server(program, host);
  }

  ChaosTally Total() const {
    ChaosTally total;
    for (const auto& worker : workers_) {
      total.Add(ChaosTally::FromText(worker->LastLine("tally ")));
    }
    return total;
  }
  // Of the answers that came since `begin`.
  int64_t LongestGapMs(absl::Time begin) const {
    int64_t longest = 0;
    for (const auto& worker : workers_) {
      for (const std::string& line : worker->Lines("gap ")) {
        const std::vector<std::string> words = absl::StrSplit(line, ' ');
        int64_t at = 0;
        int64_t gap = 0;
        if (words.size() == 2 && absl::SimpleAtoi(words[0], &at) &&
            absl::SimpleAtoi(words[1], &gap) && at >= absl::ToUnixMillis(begin)) {
          longest = std::max(longest, gap);
        }
      }
    }
    return longest;
  }
  // `disturb`, a while of it, `restore`, and what the workers made of that.
  void Phase(const std::string& name, absl::Duration duration, const std::function<void()>& disturb,
             const std::function<void()>& restore) {
    SCOPED_TRACE(name);
    const ChaosTally before = Total();
    const absl::Time begin = absl::Now();
    disturb();
    absl::SleepFor(duration);
    restore();
    absl::SleepFor(kSettle);
    const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
    last_ = Total();
    last_.reads -= before.reads;
    last_.certified -= before.certified;
    last_.exact -= before.exact;
    last_.errors -= before.errors;
    const int64_t gap_ms = LongestGapMs(begin);
    std::printf("| %s | %.0f | %lld | %lld | %lld | %lld |\n", name.c_str(),
                static_cast<double>(last_.reads) / seconds, static_cast<long long>(last_.certified),
                static_cast<long long>(last_.exact), static_cast<long long>(last_.errors),
                static_cast<long long>(gap_ms));
    AddResult({{"network", has_namespaces() ? "namespaces" : "loopback"},
               {"phase", name},
               {"reads_per_second", static_cast<double>(last_.reads) / seconds},
               {"certified_heads", last_.certified},
               {"exact_heads", last_.exact},
               {"errors", last_.errors},
               {"uncertified", last_.uncertified},
               {"wrong", last_.wrong},
               {"longest_without_answer_ms", gap_ms}});
    std::fflush(stdout);
    EXPECT_GT(last_.reads, 0) << "somebody goes on";
    EXPECT_EQ(last_.uncertified, 0);
    EXPECT_EQ(last_.wrong, 0);
  }
  // Cuts a host off, as far as this network can.
  void CutOff(int host, bool is_cut) {
    if (has_namespaces()) {
      EXPECT_TRUE(cluster_->network().SetLink(host, !is_cut).ok());
    } else {
      cluster_->Signal(host, is_cut ? SIGSTOP : SIGCONT);
    }
  }
  void Lose(HostServer& server) { cluster_->Kill(server); }
  void Return(HostServer& server) { EXPECT_TRUE(cluster_->Run(server).ok()); }

  void CutLinks() {
    Phase(
        "a node cut off", absl::Seconds(3), [&] { CutOff(0, true); }, [&] { CutOff(0, false); });
    if (has_namespaces()) {
      HostNetwork& network = cluster_->network();
      Phase(
          "two nodes cut off from each other", absl::Seconds(2),
          [&] { EXPECT_TRUE(network.SetPath(0, 1, false).ok()); },
          [&] { EXPECT_TRUE(network.SetPath(0, 1, true).ok()); });
      Phase(
          "a slow link to a node: " + network.slow_link(), absl::Seconds(3),
          [&] { EXPECT_TRUE(network.SetSlow(2, true).ok()); },
          [&] { EXPECT_TRUE(network.SetSlow(2, false).ok()); });
    }
    Phase(
        "etcd and Redis cut off", absl::Seconds(3), [&] { CutOff(kControlHost, true); },
        [&] { CutOff(kControlHost, false); });
    int64_t early = 0;
    Phase(
        "a gate cut off", absl::Seconds(4),
        [&] {
          CutOff(kFirstGateHost, true);
          absl::SleepFor(absl::Seconds(3));  // leases of before are over
          early = Total().certified;
        },
        [&] {
          EXPECT_GT(Total().certified, early) << "the other gate has taken over";
          CutOff(kFirstGateHost, false);
        });
  }
  void LoseHosts() {
    HostServer& gate = Server("certkv-gate", kFirstGateHost);
    HostServer& certifier = Server("certkv-certifier", 0);
    HostServer& store = Server("certkv-kvstore", 1);
    HostServer& its_certifier = Server("certkv-certifier", 1);
    Phase(
        "a gate killed (-9)", absl::Seconds(2), [&] { Lose(gate); }, [&] { Return(gate); });
    Phase(
        "a certifier killed (-9)", absl::Seconds(2), [&] { Lose(certifier); },
        [&] { Return(certifier); });
    Phase(
        "a node lost (-9)", absl::Seconds(3),
        [&] {
          Lose(store);
          Lose(its_certifier);
        },
        [&] {
          Return(store);
          Return(its_certifier);
        });
  }
  // One after the other, with the next release and these clocks.
  void RestartAll(const std::function<int64_t(const HostServer&)>& skew_ms) {
    for (HostServer& server : cluster_->servers()) {
      const absl::Status status = cluster_->Replace(server, kNextRelease, skew_ms(server));
      EXPECT_TRUE(status.ok()) << status;
      absl::SleepFor(absl::Milliseconds(200));
    }
  }
  void Upgrade() {
    Phase(
        "rolling restart, next release", absl::ZeroDuration(),
        [&] { RestartAll([](const HostServer&) { return 0; }); }, [] {});
    Phase(
        "all well again", absl::Seconds(2), [] {}, [] {});
    EXPECT_GT(last_.certified, last_.exact);
  }
  // Of gates, stores and workers no two have the same time; a node's two servers have. Under TLS
  // clocks are ahead: a server whose certificate is not valid yet does not start.
  void SetClocksWrong() {
    const int64_t minutes = has_namespaces() ? 60'000 : -60'000;
    const auto skew_ms = [minutes](const HostServer& server) {
      static constexpr int64_t kSkews[] = {0, 10, 5, 20, 15};
      return kSkews[server.host] * minutes;
    };
    Phase(
        "rolling restart, clocks minutes apart", absl::ZeroDuration(), [&] { RestartAll(skew_ms); },
        [] {});
    const int64_t lost_before = Total().reasons["LEASE_LOST"];
    Phase(
        "clocks minutes apart", absl::Seconds(3), [] {}, [] {});
    EXPECT_GT(last_.certified, 100);
    EXPECT_GT(last_.certified, last_.exact) << "policy leases hold as long as gate says";
    EXPECT_EQ(Total().reasons["LEASE_LOST"], lost_before) << "and so do leases of blocks";
  }

  std::unique_ptr<HostCluster> cluster_;
  std::vector<std::unique_ptr<WorkerProcess>> workers_;
  ChaosTally last_;  // of the last phase
};

TEST_P(HostsTest, NoOutputIsUncertifiedOrWrongWhateverFails) {
  ASSERT_NO_FATAL_FAILURE(Start());
  if (IsSkipped()) return;
  Phase(
      "all well", absl::Seconds(2), [] {}, [] {});
  EXPECT_GT(last_.certified, 100);
  EXPECT_GT(last_.certified, last_.exact);
  CutLinks();
  LoseHosts();
  Upgrade();
  SetClocksWrong();

  double pulled = 0;
  for (int host = 0; host < kNodeHosts; ++host) {
    pulled += cluster_->Metric(host, "certkv_kvstore_cluster_blocks_total");
    EXPECT_EQ(cluster_->Metric(host, "certkv_kvstore_cluster_nodes_total"), kNodeHosts);
  }
  EXPECT_GT(pulled, 0) << "nodes found each other's blocks, the next release's too";
  for (const auto& worker : workers_) {
    worker->Kill();
    EXPECT_EQ(worker->LastLine("wrong "), "");
  }
  const ChaosTally total = Total();
  std::printf("%s\nblocks from other nodes since the restart: %.0f\n", total.ToText().c_str(),
              pulled);
  AddResult({{"network", has_namespaces() ? "namespaces" : "loopback"},
             {"phase", "total"},
             {"reads", total.reads},
             {"certified_heads", total.certified},
             {"exact_heads", total.exact},
             {"errors", total.errors},
             {"reasons", total.reasons},
             {"uncertified", total.uncertified},
             {"wrong", total.wrong}});
  EXPECT_EQ(total.uncertified, 0);
  EXPECT_EQ(total.wrong, 0);
  EXPECT_GT(total.exact, 0);
  EXPECT_GT(total.errors, 0) << "trouble that nobody notices is none";
  for (int host = 0; host < kNodeHosts; ++host) {
    CacheHoldings held;
    held.blocks_leased = -1;
    for (int i = 0; i < 1000; ++i) {
      const auto now = HoldingsOf(cluster_->options(host), kModel);
      if (now.ok()) held = *now;
      if (now.ok() && held.blocks_leased == 0 && held.blocks_writing == 0) break;
      absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_EQ(held.blocks_leased, 0) << "node " << host;
    EXPECT_EQ(held.blocks_writing, 0) << "node " << host;
  }
}

INSTANTIATE_TEST_SUITE_P(Over, HostsTest,
                         ::testing::Values(HostKind::kNamespaces, HostKind::kLoopback),
                         [](const auto& info) {
                           return info.param == HostKind::kNamespaces ? "Namespaces" : "Loopback";
                         });

}  // namespace
}  // namespace certkv
