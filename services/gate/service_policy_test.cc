// Two replicas of gate that share a policy in a real Redis server.
#include "services/gate/service_policy.h"

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/gate/ledger_redis.h"
#include "tests/support/fake_clock.h"
#include "tests/support/redis_server.h"

namespace certkv::gate {
namespace {

std::chrono::steady_clock::time_point Soon() {
  return std::chrono::steady_clock::now() + std::chrono::seconds(20);
}

Policy WithTolerance(float tv_tolerance, int64_t version = 0) {
  Policy policy;
  policy.version = version;
  policy.tolerances.tv_tolerance = tv_tolerance;
  return policy;
}

struct Replica {
  Replica(const RedisServer& server, const Clock* clock, float tv_tolerance) {
    GateConfig config;
    config.policy = WithTolerance(tv_tolerance, 1);
    RedisOptions options;
    options.address = *ParseRedisAddress("unix:" + server.socket());
    options.keep_ms = 60'000;
    ledger = std::make_unique<RedisLedger>(options);
    registry = std::make_unique<RequestRegistry>(config, clock, ledger.get());
    share = std::make_unique<PolicyShare>(registry.get(), ledger.get());
  }
  float tolerance() const { return registry->policy().tolerances.tv_tolerance; }
  int64_t version() const { return registry->policy().version; }

  std::unique_ptr<RedisLedger> ledger;
  std::unique_ptr<RequestRegistry> registry;
  std::unique_ptr<PolicyShare> share;
};

class PolicyShareTest : public ::testing::Test {
 protected:
  static void WaitForRetry() {
    absl::SleepFor(absl::Milliseconds(2 * RedisLedger::kRetryAfter.count()));
  }

  const LedgerDeadline deadline_{Soon()};
  RedisServer server_;
  FakeClock clock_;
  Replica a_{server_, &clock_, 0.1f};
  Replica b_{server_, &clock_, 0.15f};
};

TEST_F(PolicyShareTest, FilesAreEachReplicasOwnUntilTheFirstChange) {
  EXPECT_FALSE(*a_.share->Sync());
  EXPECT_FALSE(*b_.share->Sync());
  EXPECT_EQ(a_.tolerance(), 0.1f);
  EXPECT_EQ(b_.tolerance(), 0.15f);
}

TEST_F(PolicyShareTest, AChangeAtOneIsTakenByTheOtherWithAllThatItSays) {
  Policy asked = WithTolerance(0.05f);
  asked.canary_share = 0.25;
  asked.escalation.repairs = 7;
  asked.overrides.resize(1);
  asked.overrides[0].tenant = "acme";
  asked.overrides[0].tv_tolerance = 0.01f;
  const auto changed = a_.share->Update(asked, "an operator");
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(changed->version, 2);
  EXPECT_EQ(b_.version(), 1);
  EXPECT_TRUE(*b_.share->Sync());
  EXPECT_TRUE(SamePolicy(b_.registry->policy(), a_.registry->policy()));
  EXPECT_EQ(b_.registry->policy().overrides.size(), 1u);
  const PolicyChange audited = b_.registry->LatestPolicyChange();
  EXPECT_EQ(audited.source, "an operator");
  EXPECT_EQ(audited.version, 2);
  EXPECT_THAT(audited.before, testing::HasSubstr("0.15"));
  EXPECT_FALSE(*b_.share->Sync()) << "once";
  EXPECT_EQ(a_.registry->PolicyChanges().size(), 2u);
  // A replica that starts now begins with it.
  Replica c(server_, &clock_, 0.2f);
  EXPECT_TRUE(*c.share->Sync());
  EXPECT_EQ(c.tolerance(), 0.05f);
}

TEST_F(PolicyShareTest, AChangeIsOfTheVersionThatTheLedgerHas) {
  ASSERT_TRUE(a_.share->Update(WithTolerance(0.05f), "a").ok());
  const auto late = b_.share->Update(WithTolerance(0.06f, 1), "b");
  EXPECT_EQ(late.status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(late.status()), "POLICY_VERSION");
  EXPECT_EQ(b_.tolerance(), 0.05f) << "it knows the latest by now";
  EXPECT_EQ(b_.share->Update(WithTolerance(0.06f, 2), "b")->version, 3);
  EXPECT_EQ(a_.share->Update(WithTolerance(0.07f), "a")->version, 4) << "from any version";
  EXPECT_EQ(ReasonOf(a_.share->Update(WithTolerance(7), "a").status()), "POLICY_INVALID");
}

TEST_F(PolicyShareTest, ManyChangesAtOnceAreAllCountedAndEndInOnePolicy) {
  constexpr int kChanges = 50;
  std::vector<std::thread> threads;
  int accepted[2] = {};
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      const LedgerDeadline deadline(Soon());
      Replica& replica = t == 0 ? a_ : b_;
      for (int i = 0; i < kChanges; ++i) {
        const float tolerance = 0.001f * static_cast<float>(1 + 2 * i + t);
        const auto changed = replica.share->Update(WithTolerance(tolerance), "test");
        if (changed.ok()) ++accepted[t];
        EXPECT_TRUE(changed.ok() || ReasonOf(changed.status()) == "POLICY_VERSION");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(a_.share->Sync().ok());
  ASSERT_TRUE(b_.share->Sync().ok());
  EXPECT_EQ(a_.version(), 1 + accepted[0] + accepted[1]) << "no two changes have one version";
  EXPECT_GT(accepted[0], 0);
  EXPECT_GT(accepted[1], 0);
  EXPECT_TRUE(SamePolicy(a_.registry->policy(), b_.registry->policy()));
}

TEST_F(PolicyShareTest, ALostLedgerGetsTheLatestPolicyBack) {
  ASSERT_TRUE(a_.share->Update(WithTolerance(0.05f), "a").ok());
  ASSERT_TRUE(b_.share->Sync().ok());
  ASSERT_TRUE(a_.share->Update(WithTolerance(0.06f), "a").ok());
  server_.Kill();
  const auto refused = a_.share->Update(WithTolerance(0.07f), "a");
  EXPECT_EQ(ReasonOf(refused.status()), "LEDGER_UNAVAILABLE");
  EXPECT_EQ(ReasonOf(b_.share->Sync().status()), "LEDGER_UNAVAILABLE");
  EXPECT_EQ(a_.tolerance(), 0.06f) << "a change that can't be shared is not made";
  server_.Start();  // empty
  WaitForRetry();
  // The one that has missed a change comes first.
  EXPECT_FALSE(*b_.share->Sync());
  EXPECT_EQ(b_.version(), 2);
  EXPECT_FALSE(*a_.share->Sync());
  EXPECT_TRUE(*b_.share->Sync());
  EXPECT_EQ(b_.tolerance(), 0.06f);
  EXPECT_EQ(b_.registry->LatestPolicyChange().source, "a");
  EXPECT_EQ(b_.version(), 3);
}

TEST_F(PolicyShareTest, OfTwoChangesOfOneVersionTheLedgersHolds) {
  ASSERT_TRUE(a_.share->Update(WithTolerance(0.05f), "a").ok());
  server_.Kill();
  EXPECT_FALSE(a_.share->Sync().ok());
  server_.Start();
  WaitForRetry();
  // Who had not seen it makes another version 2.
  EXPECT_EQ(b_.share->Update(WithTolerance(0.06f), "b")->version, 2);
  EXPECT_TRUE(*a_.share->Sync());
  EXPECT_EQ(a_.tolerance(), 0.06f);
  EXPECT_EQ(a_.version(), 2);
}

TEST_F(PolicyShareTest, APolicyThatCannotBeReadIsNamedAndChangesNothing) {
  ASSERT_TRUE(a_.ledger->PutPolicy({.version = 9, .text = "\xff\xff", .source = "x"}).ok());
  const absl::Status status = a_.share->Sync().status();
  EXPECT_EQ(ReasonOf(status), "LEDGER_UNAVAILABLE");
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("version 9"));
  EXPECT_EQ(a_.version(), 1);
  EXPECT_EQ(ReasonOf(a_.share->Update(WithTolerance(0.05f), "a").status()), "LEDGER_UNAVAILABLE");
}

TEST_F(PolicyShareTest, WithoutALedgerThereIsOneGate) {
  PolicyShare alone(a_.registry.get(), nullptr);
  EXPECT_EQ(alone.Update(WithTolerance(0.05f), "a")->version, 2);
  EXPECT_FALSE(*alone.Sync());
}

}  // namespace
}  // namespace certkv::gate
