// kill -9 of each service: the client gets exact outputs or errors, never an uncertified one.
#include <gtest/gtest.h>
#include <signal.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "clients/cli/child_process.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/status.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using client::Attention;
using client::ReadResult;

// Policy leases of half a second, so that an outage of gate is felt soon.
constexpr char kShortLeases[] = "gate:\n  lease_duration: 500ms\n";

class OutageTest : public SystemTest {
 protected:
  // A worker, a sequence, a request, and an attention that has read once.
  void Open(const std::string& id) {
    data_ = std::make_unique<TestSequence>(SmallSpec(), 300, 11);
    worker_ = AttachWorker(data_->spec);
    sequence_ = Put(*worker_, *data_);
    request_ = OpenRequest(id);
    auto attention = Attention::Open(*worker_, *sequence_, *request_);
    ASSERT_TRUE(attention.ok()) << attention.status();
    attention_ = *std::move(attention);
    first_results_ = Read();
    for (const ReadResult& result : first_results_) ASSERT_FALSE(result.in_process);
  }
  std::vector<ReadResult> Read() { return ReadAndCheck(*attention_, *data_, 300, ++seed_); }

  uint32_t seed_ = 0;
  std::vector<ReadResult> first_results_;  // of Open
  std::unique_ptr<TestSequence> data_;
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::Request> request_;
  std::unique_ptr<Attention> attention_;
};

TEST_P(OutageTest, ReadsAreExactWhileTheCertifierIsDownAndCertifiedAgainAfterwards) {
  if (GetParam() == ClusterShape::kAllInOne) GTEST_SKIP() << "needs a certifier of its own";
  StartCluster();
  Open("certifier-dies");
  cluster_->Kill(ClusterService::kCertifier);
  for (int i = 0; i < 3; ++i) {
    for (const ReadResult& result : Read()) {
      EXPECT_TRUE(result.in_process);
      for (const auto& certificate : result.certificates) {
        EXPECT_EQ(certificate.outcome, Outcome::kExact);
      }
    }
  }
  ASSERT_TRUE(cluster_->Restart(ClusterService::kCertifier).ok());
  bool certified = false;
  for (int i = 0; i < 50 && !certified; ++i) {
    for (const ReadResult& result : Read()) certified = !result.in_process;
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_TRUE(certified);
  // Gate was up all the time: it has the exact reads in its ledger too.
  const auto risk = request_->Close();
  ASSERT_TRUE(risk.ok()) << risk.status();
  EXPECT_GE(risk->reads_exact, 3 * 2 * 6);
}

TEST_P(OutageTest, ReadsAreExactOnceGateIsGoneAndItsLeaseHasExpired) {
  if (GetParam() == ClusterShape::kAllInOne) GTEST_SKIP() << "needs a gate of its own";
  StartCluster(kShortLeases);
  Open("gate-dies");
  cluster_->Kill(ClusterService::kGate);
  absl::SleepFor(absl::Milliseconds(700));
  for (const ReadResult& result : Read()) {
    EXPECT_TRUE(result.in_process);
    for (const auto& certificate : result.certificates) {
      EXPECT_EQ(certificate.outcome, Outcome::kExact);
    }
  }
  // A gate that was restarted has lost the ledger: the request stays exact and says so.
  ASSERT_TRUE(cluster_->Restart(ClusterService::kGate).ok());
  absl::SleepFor(absl::Milliseconds(700));
  for (const ReadResult& result : Read()) {
    for (const auto& certificate : result.certificates) {
      EXPECT_EQ(certificate.outcome, Outcome::kExact);
    }
  }
  // New requests are governed again.
  const auto fresh = OpenRequest("after-restart");
  EXPECT_EQ(fresh->CurrentLease().read_mode, ReadMode::kEnforce);
}

TEST_P(OutageTest, ReadsFailOnceTheStoreIsGoneAndItsLeasesHaveExpired) {
  StartCluster();
  data_ = std::make_unique<TestSequence>(SmallSpec(), 300, 12);
  client::Options options = cluster_->options();
  options.lease_duration_ms = 600;
  options.rpc_timeout_ms = 500;
  auto worker = client::Worker::Attach(options, data_->spec);
  ASSERT_TRUE(worker.ok()) << worker.status();
  worker_ = *std::move(worker);
  sequence_ = Put(*worker_, *data_);
  request_ = OpenRequest("store-dies");
  auto attention = Attention::Open(*worker_, *sequence_, *request_);
  ASSERT_TRUE(attention.ok()) << attention.status();
  attention_ = *std::move(attention);
  absl::SleepFor(absl::Milliseconds(1500));  // renewed more than once meanwhile
  Read();
  cluster_->Kill(ClusterService::kStore);
  absl::SleepFor(absl::Milliseconds(900));
  const std::vector<float> queries = TestQueries(data_->spec, 1);
  client::ReadRequest read;
  read.query_position = 299;
  read.queries = queries.data();
  const auto results = attention_->Attend({read});
  ASSERT_TRUE(results.ok());
  EXPECT_EQ(ReasonOf((*results)[0].status), "LEASE_LOST") << (*results)[0].status;
  EXPECT_TRUE((*results)[0].outputs.empty());
  if (GetParam() == ClusterShape::kThreeProcesses) {
    EXPECT_TRUE(absl::StrContains(cluster_->Logs(), "store_lost"));
  }

  ASSERT_TRUE(cluster_->Restart(ClusterService::kStore).ok());
  attention_.reset();
  sequence_.reset();
  const auto again = AttachWorker(data_->spec, "again");
  const auto sequence = Put(*again, *data_);
  EXPECT_EQ(sequence->shared_block_count(), 0) << "this store starts empty";
}

TEST_P(OutageTest, NoReadIsEverUncertifiedWhileServicesAreKilledAtRandom) {
  if (GetParam() == ClusterShape::kAllInOne) GTEST_SKIP() << "kills one of three services";
  StartCluster(kShortLeases);
  Open("chaos");
  int64_t answered = 0;
  for (int round = 0; round < 6; ++round) {
    const ClusterService victim =
        round % 2 == 0 ? ClusterService::kCertifier : ClusterService::kGate;
    cluster_->Kill(victim);
    const absl::Time until = absl::Now() + absl::Milliseconds(300);
    while (absl::Now() < until) answered += static_cast<int64_t>(Read().size());
    ASSERT_TRUE(cluster_->Restart(victim).ok());
    answered += static_cast<int64_t>(Read().size());
  }
  EXPECT_GT(answered, 12);  // each was held against the truth by ReadAndCheck
}

TEST_P(OutageTest, NoBudgetIsOverspentWhenCertifiersDieHoldingSlices) {
  if (GetParam() == ClusterShape::kAllInOne) GTEST_SKIP() << "needs a certifier of its own";
  // A request may spend what about thirty reads of both layers do, in slices of a few.
  constexpr double kBudget = 4;
  StartCluster(absl::StrCat("gate:\n  lease_duration: 10s\n  risk_mode: cumulative\n",
                            "  budget_slice_share: 0.2\n  cumulative_budget: ", kBudget, "\n"));
  Open("dies-with-a-slice");
  double served = SumOfTv(first_results_, Outcome::kCertified);
  double exact = 0;  // float arithmetic of exact reads: never refused, charged beside the budget
  int64_t certified_after_a_death = 0;
  const auto read = [&] {
    const std::vector<ReadResult> results = Read();
    exact += SumOfTv(results, Outcome::kExact);
    const double certified = SumOfTv(results, Outcome::kCertified);
    served += certified;
    return certified;
  };
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < 3; ++i) read();
    cluster_->Kill(ClusterService::kCertifier);
    read();
    ASSERT_TRUE(cluster_->Restart(ClusterService::kCertifier).ok());
    for (int i = 0; i < 20; ++i) {
      if (read() > 0) {
        ++certified_after_a_death;
        break;
      }
      absl::SleepFor(absl::Milliseconds(50));
    }
    ASSERT_LE(served, kBudget);
  }
  EXPECT_GT(served, 0);
  EXPECT_GT(certified_after_a_death, 0) << "the rest of a dead certifier's slice is given anew";
  const auto risk = request_->Close();
  ASSERT_TRUE(risk.ok()) << risk.status();
  EXPECT_EQ(risk->budget, kBudget);
  // All slices were returned: what is left committed is what was served.
  EXPECT_GE(risk->budget_committed, served + exact - 1e-6);
  EXPECT_LE(risk->budget_committed, served + exact + 1e-6);
}

TEST_P(OutageTest, ReadersThatShareARequestShareItsBudget) {
  StartCluster(
      "gate:\n  risk_mode: cumulative\n  budget_slice_share: 0.5\n"
      "  cumulative_budget: 1\n");
  Open("shared");
  // A second holder, as another process of the same request would be.
  const auto other_request = OpenRequest("shared");
  auto other = Attention::Open(*worker_, *sequence_, *other_request);
  ASSERT_TRUE(other.ok()) << other.status();
  double served = SumOfTv(first_results_, Outcome::kCertified);
  for (int i = 0; i < 30; ++i) {
    served += SumOfTv(Read(), Outcome::kCertified);
    served += SumOfTv(ReadAndCheck(**other, *data_, 300, 1000 + i), Outcome::kCertified);
    ASSERT_LE(served, 1.0);
  }
  EXPECT_GT(served, 0.1);
}

TEST_P(OutageTest, AKilledWriterLeavesNoSessionAndNoHalfWrittenBlock) {
  StartCluster();
  const std::string trace = "tests/data/smollm2-135m-4-layers.safetensors";
  client::StoreClient store(cluster_->options());
  for (int i = 0; i < 8; ++i) {
    auto writer =
        cli::ChildProcess::Start({BinaryDirectory() + "/certkv", "--target",
                                  cluster_->options().kvstore_target, "put", "--trace", trace},
                                 {}, cluster_->directory() + "/put.log");
    ASSERT_TRUE(writer.ok()) << writer.status();
    absl::SleepFor(absl::Milliseconds(15 * i));  // from before its first call to after its last
    kill((*writer)->pid(), SIGKILL);
  }
  int64_t sessions = -1;
  for (int i = 0; i < 3000 && sessions != 0; ++i) {
    const auto stats = store.GetStats();
    ASSERT_TRUE(stats.ok()) << stats.status();
    sessions = stats->session_count() + stats->lease_count();
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(sessions, 0);
  auto writer =
      cli::ChildProcess::Start({BinaryDirectory() + "/certkv", "--target",
                                cluster_->options().kvstore_target, "put", "--trace", trace},
                               {}, cluster_->directory() + "/put.log");
  ASSERT_TRUE(writer.ok());
  while ((*writer)->CheckRunning().ok()) absl::SleepFor(absl::Milliseconds(10));
  const auto stats = store.GetStats();
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->caches(0).device_slots_used(), 27);
  EXPECT_EQ(stats->caches(0).backing_slots_used(), 27);
}

INSTANTIATE_TEST_SUITE_P(Shapes, OutageTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
