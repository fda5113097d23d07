// Clients of two gates that share a ledger, one of them killed at a time: requests go on at the
// other, and nothing is counted twice or overspent.
#include <gtest/gtest.h>
#include <signal.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "clients/cli/child_process.h"
#include "clients/cpp/rpc.h"
#include "tests/support/redis_server.h"
#include "tests/system/run_cli.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using client::Attention;
using client::ReadResult;

class GatesTest : public SystemTest {
 protected:
  // Gate 0 is the cluster's. Leases of half a second, so that a request without a gate is exact
  // soon.
  void Start(const std::string& gate_yaml) {
    StartCluster(absl::StrCat(
        "gate:\n  lease_duration: 500ms\n  ledger_redis: unix:", redis_.socket(), "\n", gate_yaml));
    ASSERT_NE(cluster_, nullptr);
    sockets_ = {cluster_->options().gate_target.substr(5), cluster_->directory() + "/gate-1.sock"};
    StartGateOne();
  }
  void StartGateOne() {
    auto process =
        cli::ChildProcess::Start({BinaryDirectory() + "/certkv-gate", "--socket", sockets_[1],
                                  "--config", cluster_->ConfigPath(ClusterService::kGate)},
                                 {absl::StrCat("CERTKV_RUNTIME_DIR=", cluster_->directory())},
                                 cluster_->directory() + "/gate-1.log");
    ASSERT_TRUE(process.ok()) << process.status();
    gate_one_ = *std::move(process);
    ASSERT_TRUE(WaitUntilServing("unix:" + sockets_[1], *gate_one_).ok());
  }
  void Kill(int gate) {
    if (gate == 0) return cluster_->Kill(ClusterService::kGate);
    gate_one_.reset();
  }
  void Restart(int gate) {
    if (gate == 1) return StartGateOne();
    ASSERT_TRUE(cluster_->Restart(ClusterService::kGate).ok());
  }
  client::Options BothGates() const {
    client::Options options = cluster_->options();
    options.gate_target = absl::StrCat("unix:", sockets_[0], ",", sockets_[1]);
    return options;
  }
  std::unique_ptr<client::Request> OpenAtBoth(const std::string& id) {
    client::RequestOptions options;
    options.tolerances = &tolerances_;
    auto request = client::Request::Open(BothGates(), id, options);
    EXPECT_TRUE(request.ok()) << request.status();
    return request.ok() ? *std::move(request) : nullptr;
  }

  RedisServer redis_;
  std::vector<std::string> sockets_;
  std::unique_ptr<cli::ChildProcess> gate_one_;
};

TEST_P(GatesTest, RequestsGoOnAtTheOtherGateAndAreCountedOnce) {
  Start("  risk_mode: cumulative\n  cumulative_budget: 100\n");
  const TestSequence data(SmallSpec(), 300, 11);
  const auto worker = AttachWorker(data.spec);
  const auto sequence = Put(*worker, data);
  std::vector<std::unique_ptr<client::Request>> requests;
  std::vector<std::unique_ptr<Attention>> attentions;
  // Each begins at one of the gates, whichever.
  for (int i = 0; i < 4; ++i) {
    requests.push_back(OpenAtBoth(absl::StrCat("r", i)));
    auto attention = Attention::Open(*worker, *sequence, *requests.back());
    ASSERT_TRUE(attention.ok()) << attention.status();
    attentions.push_back(*std::move(attention));
  }
  std::vector<double> certified(4);
  std::vector<double> exact(4);
  uint32_t seed = 1;
  const auto read_all = [&] {
    int not_certified = 0;
    for (int i = 0; i < 4; ++i) {
      const std::vector<ReadResult> results = ReadAndCheck(*attentions[i], data, 300, ++seed);
      certified[i] += SumOfTv(results, Outcome::kCertified);
      exact[i] += SumOfTv(results, Outcome::kExact);
      for (const ReadResult& result : results) not_certified += result.in_process ? 1 : 0;
    }
    return not_certified;
  };
  EXPECT_EQ(read_all(), 0);
  for (const int victim : {0, 1, 0}) {
    Kill(victim);
    // Longer than a lease, so that each was renewed by a gate that had never heard of its request.
    const absl::Time begin = absl::Now();
    int in_process = 0;
    while (absl::Now() - begin < absl::Milliseconds(1200)) {
      in_process = read_all();
      absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_EQ(in_process, 0) << "reads are certified while gate " << victim << " is away";
    for (const auto& request : requests) {
      const absl::Status flushed = request->Flush();
      EXPECT_TRUE(flushed.ok()) << flushed;
    }
    Restart(victim);
  }
  for (int i = 0; i < 4; ++i) {
    const auto risk = requests[i]->Close();
    ASSERT_TRUE(risk.ok()) << risk.status();
    EXPECT_EQ(risk->budget, 100);
    EXPECT_GT(certified[i], 1);
    // All slices were returned: the ledger has what was read, once, whoever counted it.
    EXPECT_NEAR(risk->budget_committed, certified[i] + exact[i], 1e-6) << i;
  }
}

TEST_P(GatesTest, APolicyThatIsSetAtOneGateHoldsAtBothAndOutlivesEither) {
  Start("");
  const auto policy_of = [this](int gate) {
    gate::v1::Policy policy;
    const absl::Status status =
        client::CallUnary(20000, client::Retry::kIdempotent, [&](grpc::ClientContext& context) {
          return gate::v1::Gate::NewStub(client::MakeChannel("unix:" + sockets_[gate]))
              ->GetPolicy(&context, {}, &policy);
        });
    EXPECT_TRUE(status.ok()) << status;
    return policy;
  };
  const auto wait_for = [&](int gate, int64_t version) {
    for (int i = 0; i < 500 && policy_of(gate).version() < version; ++i) {
      absl::SleepFor(absl::Milliseconds(20));
    }
    return policy_of(gate);
  };
  EXPECT_EQ(policy_of(1).version(), 1);
  const auto set = RunCli("--gate unix:" + sockets_[0] + " policy set --tv-tolerance 0.03");
  ASSERT_EQ(set.exit_code, 0) << set.errors;
  EXPECT_EQ(policy_of(0).version(), 2);
  EXPECT_FLOAT_EQ(wait_for(1, 2).tolerances().tv_tolerance(), 0.03f);
  // A gate that starts has it before it serves.
  Kill(0);
  Restart(0);
  EXPECT_EQ(policy_of(0).version(), 2);
  // A file that is read again holds at both, too.
  const std::string config = cluster_->ConfigPath(ClusterService::kGate);
  std::ofstream(config, std::ios::app) << "  tv_tolerance: 0.04\n";
  ASSERT_EQ(kill(gate_one_->pid(), SIGHUP), 0);
  EXPECT_FLOAT_EQ(wait_for(0, 3).tolerances().tv_tolerance(), 0.04f);
  EXPECT_FLOAT_EQ(wait_for(1, 3).tolerances().tv_tolerance(), 0.04f);
}

TEST_P(GatesTest, WithoutAnyGateReadsAreExactAndWithOneCertifiedAgain) {
  Start("");
  const TestSequence data(SmallSpec(), 300, 12);
  const auto worker = AttachWorker(data.spec);
  const auto sequence = Put(*worker, data);
  const auto request = OpenAtBoth("r");
  auto attention = Attention::Open(*worker, *sequence, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  uint32_t seed = 1;
  const auto is_certified = [&] {
    bool certified = true;
    for (const ReadResult& result : ReadAndCheck(**attention, data, 300, ++seed)) {
      certified = certified && !result.in_process;
    }
    return certified;
  };
  EXPECT_TRUE(is_certified());
  Kill(0);
  Kill(1);
  absl::SleepFor(absl::Milliseconds(700));
  EXPECT_FALSE(is_certified()) << "its lease has run out";
  // The ledger knows the request, so either gate takes it on.
  Restart(1);
  bool certified = false;
  for (int i = 0; i < 100 && !certified; ++i) {
    absl::SleepFor(absl::Milliseconds(50));
    certified = is_certified();
  }
  EXPECT_TRUE(certified);
}

INSTANTIATE_TEST_SUITE_P(Shapes, GatesTest, ::testing::Values(ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
