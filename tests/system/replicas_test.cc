// Several certifiers of one store under load, one of them killed: 0 uncertified outputs, no read
// lost. Prints throughput and tail; with CERTKV_RESULT_FILE it writes them (bench/results/
// replicas.json is of a run of the whole program).
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cli/child_process.h"
#include "clients/cli/truth.h"
#include "tests/system/result_file.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using client::Attention;
using client::ReadRequest;
using client::ReadResult;

constexpr int kReaders = 4;         // threads, each with a sequence's view and a request
constexpr int32_t kTokens = 8192;   // of the sequence
constexpr int kQueryChoices = 8;    // reads repeat these, so that their truths are computed once
constexpr int32_t kLayerCount = 2;  // of SmallSpec
constexpr int64_t kPhaseMs = 1200;

enum Phase { kAllUp, kOneKilled, kBackAgain, kPhaseCount };
constexpr const char* kPhaseNames[] = {"all up", "one killed (-9)", "started again"};

// One read as it was answered.
struct Answer {
  Phase phase = kAllUp;
  int64_t nanoseconds = 0;
  int32_t query = 0;  // which of kQueryChoices
  int32_t layer = 0;
  ReadResult result;
};

// Replicas beside the cluster's certifier, each at a socket of its own.
class ReplicasTest : public SystemTest {
 protected:
  ReplicasTest() : data_(SmallSpec(), kTokens, 21) {}

  void StartReplicas(int count, const std::string& gate_yaml = "") {
    StartCluster(gate_yaml);
    targets_ = {cluster_->options().certifier_target.substr(5)};
    for (int i = 1; i < count; ++i) {
      targets_.push_back(absl::StrCat(cluster_->directory(), "/certifier-", i, ".sock"));
      extra_.emplace_back();
      StartExtra(i);
    }
    Pin(cluster_->pid(ClusterService::kCertifier), 0);
  }
  void StartExtra(int number) {
    auto process = cli::ChildProcess::Start(
        {absl::StrCat(BinaryDirectory(), "/certkv-certifier"), "--socket", targets_[number]},
        {absl::StrCat("CERTKV_RUNTIME_DIR=", cluster_->directory())},
        absl::StrCat(cluster_->directory(), "/certifier-", number, ".log"));
    ASSERT_TRUE(process.ok()) << process.status();
    extra_[number - 1] = *std::move(process);
    ASSERT_TRUE(WaitUntilServing("unix:" + targets_[number], *extra_[number - 1]).ok());
    Pin(extra_[number - 1]->pid(), number);
  }
  // Each replica on one processor, as far as there are any.
  static void Pin(pid_t pid, int number) {
    cpu_set_t all;
    CPU_ZERO(&all);
    ASSERT_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
    std::vector<int> processors;
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &all)) processors.push_back(i);
    }
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(processors[number % processors.size()], &one);
    EXPECT_EQ(sched_setaffinity(pid, sizeof(one), &one), 0);
  }
  client::Options Options() const {
    client::Options options = cluster_->options();
    options.certifier_target = "unix:" + absl::StrJoin(targets_, ",");
    return options;
  }

  // Reads until the last phase is over. Calls that did not come back well are counted.
  void ReadOn(Attention& attention, int reader, std::vector<Answer>* answers) {
    for (int32_t i = reader; phase_ != kPhaseCount; ++i) {
      Answer answer;
      answer.query = i % kQueryChoices;
      answer.layer = i % kLayerCount;
      ReadRequest read;
      read.layer = answer.layer;
      read.query_position = kTokens - 1;
      read.queries = queries_[answer.query].data();
      const Phase phase = phase_;
      const int64_t begin = absl::GetCurrentTimeNanos();
      auto results = attention.Attend({read});
      answer.nanoseconds = absl::GetCurrentTimeNanos() - begin;
      if (phase == kPhaseCount) return;
      answer.phase = phase;
      ++asked_;
      if (!results.ok()) continue;
      answer.result = std::move((*results)[0]);
      answers->push_back(std::move(answer));
    }
  }

  void MakeTruths() {
    for (int32_t query = 0; query < kQueryChoices; ++query) {
      for (int32_t layer = 0; layer < kLayerCount; ++layer) {
        for (int32_t head = 0; head < data_.spec.query_head_count(); ++head) {
          truths_[{query, layer}].push_back(
              cli::ComputeHeadTruth(data_.spec, data_.layers()[layer], head,
                                    queries_[query].data() + int64_t{head} * data_.spec.head_dim, 0,
                                    kTokens)
                  .output);
        }
      }
    }
  }
  // "" when the answer's outputs are certified within tolerance, or exact, and within their bounds.
  std::string Check(const Answer& answer) const {
    if (!answer.result.status.ok()) return answer.result.status.ToString();
    const auto& truths = truths_.at({answer.query, answer.layer});
    if (answer.result.certificates.size() != truths.size()) return "not one record for each head";
    for (size_t head = 0; head < truths.size(); ++head) {
      const ReadCertificate& c = answer.result.certificates[head];
      const bool is_allowed = c.outcome == Outcome::kExact ||
                              (c.outcome == Outcome::kCertified && MeetsTolerances(c, tolerances_));
      const size_t value_dim = truths[head].size();
      const double error = cli::Distance(
          truths[head],
          absl::MakeConstSpan(answer.result.outputs).subspan(head * value_dim, value_dim));
      if (!is_allowed || !(error <= c.output_error_bound)) {
        return absl::StrCat("head ", head, ": ", OutcomeName(c.outcome), ", tv ", c.worst_case_tv,
                            ", error ", error, ", bound ", c.output_error_bound);
      }
    }
    return "";
  }

  // Four readers through the three phases; what they got.
  std::vector<Answer> Run() {
    auto worker = client::Worker::Attach(Options(), data_.spec);
    EXPECT_TRUE(worker.ok()) << worker.status();
    for (int i = 0; i < kQueryChoices; ++i) queries_.push_back(TestQueries(data_.spec, 40 + i));
    MakeTruths();
    std::vector<std::unique_ptr<client::Sequence>> sequences;
    std::vector<std::unique_ptr<client::Request>> requests;
    std::vector<std::unique_ptr<Attention>> attentions;
    for (int i = 0; i < kReaders; ++i) {
      sequences.push_back(Put(**worker, data_));
      requests.push_back(OpenRequest(absl::StrCat("reader-", i)));
      auto attention = Attention::Open(**worker, *sequences[i], *requests[i]);
      EXPECT_TRUE(attention.ok()) << attention.status();
      attentions.push_back(*std::move(attention));
    }
    std::array<std::vector<Answer>, kReaders> answers;
    std::vector<std::thread> threads;
    threads.reserve(kReaders);
    for (int i = 0; i < kReaders; ++i) {
      threads.emplace_back([&, i] { ReadOn(*attentions[i], i, &answers[i]); });
    }
    absl::SleepFor(absl::Milliseconds(kPhaseMs));
    phase_ = kOneKilled;
    cluster_->Kill(ClusterService::kCertifier);
    absl::SleepFor(absl::Milliseconds(kPhaseMs));
    EXPECT_TRUE(cluster_->Restart(ClusterService::kCertifier).ok());
    Pin(cluster_->pid(ClusterService::kCertifier), 0);
    phase_ = kBackAgain;
    absl::SleepFor(absl::Milliseconds(kPhaseMs));
    phase_ = kPhaseCount;
    for (std::thread& thread : threads) thread.join();
    std::vector<Answer> all;
    for (std::vector<Answer>& some : answers) {
      std::move(some.begin(), some.end(), std::back_inserter(all));
    }
    attentions.clear();
    for (const auto& request : requests) {
      const auto risk = request->Close();
      EXPECT_TRUE(risk.ok()) << risk.status();
      if (risk.ok()) counted_ += risk->read_count;
    }
    return all;
  }

  // Opens views until the worker's balancer is connected to both of two certifiers.
  void MeetBoth(client::Worker& worker, client::Sequence& sequence) {
    const auto other = OpenRequest("other");
    const auto has_opened = [](const std::string& log) {
      return absl::StrContains(log, "store_attached");
    };
    for (int i = 0; i < 200; ++i) {
      ASSERT_TRUE(Attention::Open(worker, sequence, *other).ok());
      std::ifstream log(cluster_->directory() + "/certifier-1.log");
      if (has_opened(cluster_->Logs()) &&
          has_opened(std::string(std::istreambuf_iterator<char>(log), {}))) {
        break;
      }
      ASSERT_LT(i, 199) << "the balancer finds one certifier alone";
      absl::SleepFor(absl::Milliseconds(20));
    }
  }

  // What happened in one phase.
  struct Tally {
    std::vector<int64_t> nanoseconds;
    int64_t in_process = 0;
  };
  static void Print(int replicas, const std::array<Tally, kPhaseCount>& tallies) {
    for (int phase = 0; phase < kPhaseCount; ++phase) {
      std::vector<int64_t> times = tallies[phase].nanoseconds;
      ASSERT_FALSE(times.empty());
      std::sort(times.begin(), times.end());
      const auto at = [&](double share) {
        return 1e-6 * static_cast<double>(times[static_cast<size_t>(share * (times.size() - 1))]);
      };
      std::printf("| %d | %s | %.0f | %.1f | %.1f | %.1f | %lld |\n", replicas, kPhaseNames[phase],
                  1e3 * static_cast<double>(times.size()) / kPhaseMs, at(0.5), at(0.99), at(1.0),
                  static_cast<long long>(tallies[phase].in_process));
      AddResult({{"replicas", replicas},
                 {"phase", kPhaseNames[phase]},
                 {"reads_per_second", 1e3 * static_cast<double>(times.size()) / kPhaseMs},
                 {"p50_ms", at(0.5)},
                 {"p99_ms", at(0.99)},
                 {"most_ms", at(1.0)},
                 {"read_in_process", tallies[phase].in_process}});
    }
  }

  void RunWith(int replicas) {
    StartReplicas(replicas);
    const std::vector<Answer> answers = Run();
    std::array<Tally, kPhaseCount> tallies;
    for (const Answer& answer : answers) {
      EXPECT_EQ(Check(answer), "") << kPhaseNames[answer.phase];
      tallies[answer.phase].nanoseconds.push_back(answer.nanoseconds);
      tallies[answer.phase].in_process += answer.result.in_process ? 1 : 0;
    }
    EXPECT_EQ(static_cast<int64_t>(answers.size()), asked_) << "a call failed";
    EXPECT_EQ(counted_, asked_ * data_.spec.query_head_count()) << "gate counts each read once";
    Print(replicas, tallies);
    // A read that begins as the last of its phase may meet the death.
    EXPECT_LE(tallies[kAllUp].in_process, kReaders);
    if (replicas > 1) {
      // Each view was opened again at another replica, at once.
      EXPECT_LE(tallies[kOneKilled].in_process, kReaders);
      EXPECT_LE(tallies[kBackAgain].in_process, kReaders);
    } else {
      EXPECT_GT(tallies[kOneKilled].in_process, 0);
    }
  }

  TestSequence data_;
  std::vector<std::string> targets_;  // paths
  std::vector<std::unique_ptr<cli::ChildProcess>> extra_;
  std::vector<std::vector<float>> queries_;
  std::map<std::pair<int32_t, int32_t>, std::vector<std::vector<double>>> truths_;
  std::atomic<Phase> phase_{kAllUp};
  std::atomic<int64_t> asked_{0};
  int64_t counted_ = 0;
};

TEST_P(ReplicasTest, OneAloneIsReplacedByExactReads) { RunWith(1); }
TEST_P(ReplicasTest, TwoGoOnAsOne) { RunWith(2); }
TEST_P(ReplicasTest, FourGoOnAsThree) { RunWith(4); }

TEST_P(ReplicasTest, ABudgetThatReadersAtTwoShareIsNotOverspent) {
  constexpr double kBudget = 4;  // about thirty reads of both layers, in slices of a few
  StartReplicas(2, absl::StrCat("gate:\n  lease_duration: 10s\n  risk_mode: cumulative\n",
                                "  budget_slice_share: 0.1\n  cumulative_budget: ", kBudget, "\n"));
  const TestSequence data(SmallSpec(), 300, 31);
  // One balancer, which is connected to both certifiers when both have been asked, and then gives
  // them views in turn: of the two below, one each.
  auto worker = client::Worker::Attach(Options(), data.spec);
  ASSERT_TRUE(worker.ok()) << worker.status();
  const auto sequence = Put(**worker, data);
  MeetBoth(**worker, *sequence);
  std::array<std::unique_ptr<client::Request>, 2> holders;
  std::array<std::unique_ptr<Attention>, 2> attentions;
  for (int i = 0; i < 2; ++i) {
    holders[i] = OpenRequest("shared");  // as two processes would
    auto attention = Attention::Open(**worker, *sequence, *holders[i]);
    ASSERT_TRUE(attention.ok()) << attention.status();
    attentions[i] = *std::move(attention);
  }
  double served = 0;
  double exact = 0;
  uint32_t seed = 0;
  const auto read_both = [&] {
    double certified = 0;
    for (const auto& attention : attentions) {
      const std::vector<ReadResult> results = ReadAndCheck(*attention, data, 300, ++seed);
      exact += SumOfTv(results, Outcome::kExact);
      certified += SumOfTv(results, Outcome::kCertified);
    }
    served += certified;
    EXPECT_LE(served, kBudget);
    return certified;
  };
  EXPECT_GT(read_both(), 0);
  int certified_after_a_death = 0;
  double last = 1;
  for (int round = 0; round < 8; ++round) {
    read_both();
    if (round % 2 == 0) {
      cluster_->Kill(ClusterService::kCertifier);
    } else {
      extra_[0].reset();
    }
    // The other one goes on with the slices that gate gives anew.
    for (int i = 0; i < 5; ++i) {
      last = read_both();
      if (last > 0) break;
      absl::SleepFor(absl::Milliseconds(50));
    }
    certified_after_a_death += last > 0 ? 1 : 0;
    if (round % 2 == 0) {
      ASSERT_TRUE(cluster_->Restart(ClusterService::kCertifier).ok());
    } else {
      StartExtra(1);
    }
  }
  EXPECT_GT(certified_after_a_death, 0);
  EXPECT_EQ(last, 0) << "the budget is used up, and reads are exact";
  EXPECT_GT(served, 0.7 * kBudget);
  double committed = 0;
  for (const auto& holder : holders) {
    const auto risk = holder->Close();
    ASSERT_TRUE(risk.ok()) << risk.status();
    committed = risk->budget_committed;
  }
  // All slices were returned: what is left committed is what was served.
  EXPECT_NEAR(committed, served + exact, 1e-6);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReplicasTest, ::testing::Values(ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
