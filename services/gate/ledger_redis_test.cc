// The ledger in a real Redis server, and registries that share it.
#include "services/gate/ledger_redis.h"

#include <signal.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/gate/budget_units.h"
#include "services/gate/gate_fixture.h"
#include "services/gate/ledger_record.h"
#include "services/gate/request_registry.h"
#include "tests/support/fake_clock.h"
#include "tests/support/redis_server.h"

namespace certkv::gate {
namespace {

using ::testing::HasSubstr;

constexpr char kName[] = "requests/r";

std::chrono::steady_clock::time_point In(int64_t milliseconds) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(milliseconds);
}

std::unique_ptr<RedisLedger> LedgerAt(const RedisServer& server) {
  RedisOptions options;
  options.address = *ParseRedisAddress("unix:" + server.socket());
  options.keep_ms = 3'600'000;
  return std::make_unique<RedisLedger>(options);
}

class LedgerRedisTest : public ::testing::Test {
 protected:
  void Restart(const std::vector<RedisLedger*>& ledgers) {
    server_->Kill();
    server_->Start();
    for (RedisLedger* ledger : ledgers) {
      // The connection of before is the only one there is.
      EXPECT_EQ(ReasonOf(ledger->Load(kName).status()), "LEDGER_UNAVAILABLE");
    }
    // Until the failure is forgotten.
    absl::SleepFor(absl::Milliseconds(2 * RedisLedger::kRetryAfter.count()));
  }
  LedgerState Open(int64_t limit_units) {
    const auto state = ledger_->Open(kName, {"record", limit_units});
    EXPECT_TRUE(state.ok()) << state.status();
    return *state;
  }
  int64_t Grant(int64_t lease_id, int64_t units, const LedgerTenant& tenant = {}) {
    const auto grant = ledger_->Grant(kName, tenant, {.lease_id = lease_id, .units = units});
    EXPECT_TRUE(grant.ok()) << grant.status();
    return grant->units;
  }
  LedgerCount Count(const LedgerBatch& batch) {
    const auto count = ledger_->Count(kName, {}, batch);
    EXPECT_TRUE(count.ok()) << count.status();
    return *count;
  }
  int64_t Left() { return ledger_->Load(kName)->left_units; }

  const LedgerDeadline deadline_{In(20'000)};
  std::unique_ptr<RedisServer> server_ = std::make_unique<RedisServer>();
  std::unique_ptr<RedisLedger> ledger_ = LedgerAt(*server_);
};

TEST_F(LedgerRedisTest, SlicesNeverExceedTheLimitToTheUnit) {
  // The largest budget there is: doubles, which Lua adds with, would be off by hundreds of units.
  const int64_t limit = LimitUnits(kBudgetMax) - 1;
  Open(limit);
  const int64_t slice = RepresentableUnits(limit / 3);
  int64_t given = 0;
  for (int64_t lease = 1; lease <= 10; ++lease) given += Grant(lease, slice);
  EXPECT_LE(given, limit);
  EXPECT_GT(given, limit - 1000);
  EXPECT_EQ(Left(), limit - given) << "exactly";
}

TEST_F(LedgerRedisTest, ASliceIsReturnedOnceAndOnlyWhatWasNotSpent) {
  Open(1000);
  EXPECT_EQ(Grant(1, 400), 400);
  EXPECT_EQ(Grant(2, 400), 400);
  LedgerBatch batch{.reporter_id = 5, .batch_number = 1, .read_count = 2, .certified_units = 100};
  batch.returned = {{1, 100}};
  EXPECT_TRUE(Count(batch).counted);
  EXPECT_EQ(Left(), 500);
  // Sent again, and once more in a batch of its own.
  EXPECT_FALSE(Count(batch).counted);
  batch.batch_number = 2;
  batch.certified_units = 0;
  batch.returned = {{1, 0}, {2, 401}, {77, 0}};
  const LedgerCount count = Count(batch);
  EXPECT_TRUE(count.counted);
  EXPECT_EQ(Left(), 500) << "one that is overspent, or not known, gives nothing back";
  EXPECT_FALSE(count.state.overrun);
}

TEST_F(LedgerRedisTest, ABatchIsCountedOnceAndNoneIsLeftOut) {
  Open(1000);
  LedgerBatch batch{.reporter_id = 5, .batch_number = 1, .exact_units = 10};
  EXPECT_TRUE(Count(batch).counted);
  EXPECT_FALSE(Count(batch).counted);
  EXPECT_EQ(Count(batch).expected_batch, 0);
  batch.batch_number = 3;
  EXPECT_FALSE(Count(batch).counted);
  EXPECT_EQ(Count(batch).expected_batch, 2);
  batch.reporter_id = 6;
  batch.batch_number = 1;
  EXPECT_TRUE(Count(batch).counted);
  EXPECT_EQ(Left(), 980);
}

TEST_F(LedgerRedisTest, WhatIsReportedBeyondTheSlicesIsAnOverrunAndSpent) {
  Open(1000);
  Grant(1, 100);
  const LedgerCount count =
      Count({.reporter_id = 5, .batch_number = 1, .read_count = 1, .certified_units = 150});
  EXPECT_TRUE(count.state.overrun);
  EXPECT_EQ(count.state.left_units, 850);
  EXPECT_EQ(Grant(2, 100), 100);
  EXPECT_EQ(Left(), 750) << "a new slice comes on top";
}

TEST_F(LedgerRedisTest, ADecidedReadFitsOrIsRefusedAndAnExactOneIsNotRefused) {
  Open(100);
  EXPECT_EQ(ledger_->Decide(kName, {}, 60, /*exact=*/false)->units, 60);
  EXPECT_EQ(ledger_->Decide(kName, {}, 60, /*exact=*/false)->units, 0);
  EXPECT_EQ(Left(), 40);
  EXPECT_EQ(ledger_->Decide(kName, {}, 60, /*exact=*/true)->units, 60);
  EXPECT_EQ(Left(), -20);
  EXPECT_EQ(Grant(1, 10), 0);
}

TEST_F(LedgerRedisTest, UnionSlicesShrinkSoThatThereIsAlwaysANextOne) {
  const int64_t limit = LimitUnits(1e-3);
  Open(limit);
  int64_t sum = 0;
  for (int64_t n = 0; n < 20; ++n) {
    const auto grant =
        ledger_->Grant(kName, {}, {.lease_id = n + 1, .schedule = SliceSchedule::kUnion});
    EXPECT_EQ(grant->units, limit / ((n + 1) * (n + 2)));
    sum += grant->units;
  }
  EXPECT_LE(sum, limit);
}

TEST_F(LedgerRedisTest, RequestsOfATenantShareItsWindowAndAFreshLedgerBeginsWithItUsedUp) {
  const LedgerTenant tenant{.name = "t", .limit_units = 100, .window_ms = 1000};
  Open(1000);
  EXPECT_EQ(Grant(1, 50, tenant), 0) << "what a lost ledger gave in this window is not known";
  absl::SleepFor(absl::Milliseconds(1100));
  EXPECT_EQ(Grant(2, 80, tenant), 80);
  ASSERT_TRUE(ledger_->Open("requests/other", {"record", 1000}).ok());
  EXPECT_EQ(ledger_->Grant("requests/other", tenant, {.lease_id = 3, .units = 80})->units, 20);
  EXPECT_EQ(ledger_->Decide(kName, tenant, 1, /*exact=*/false)->units, 0);
  absl::SleepFor(absl::Milliseconds(1100));
  EXPECT_EQ(ledger_->Decide(kName, tenant, 1, /*exact=*/false)->units, 1);
  // A slice of the window before gives nothing back to this one.
  LedgerBatch batch{.reporter_id = 5, .batch_number = 1};
  batch.returned = {{2, 0}};
  ASSERT_TRUE(ledger_->Count(kName, tenant, batch)->counted);
  EXPECT_EQ(Grant(4, 200, tenant), 99);
}

TEST_F(LedgerRedisTest, ARestartWithItsDataMakesWhatWasOpenVoid) {
  server_ = std::make_unique<RedisServer>(/*keeps_data=*/true);
  ledger_ = LedgerAt(*server_);
  Open(1000);
  ASSERT_EQ(Grant(1, 100), 100);
  Restart({ledger_.get()});
  const LedgerState state = *ledger_->Load(kName);
  ASSERT_TRUE(state.known) << "the data is there";
  EXPECT_TRUE(state.is_void) << "and is not believed to be all of it";
  EXPECT_EQ(Grant(2, 100), 0);
  EXPECT_EQ(ledger_->Decide(kName, {}, 1, /*exact=*/false)->units, 0);
  EXPECT_TRUE(Open(1000).is_void) << "opening it again opens no budget";
}

TEST_F(LedgerRedisTest, ALostLedgerKnowsNothingAndGivesNothing) {
  Open(1000);
  ASSERT_EQ(Grant(1, 100), 100);
  Restart({ledger_.get()});
  EXPECT_FALSE(ledger_->Load(kName)->known);
  EXPECT_EQ(Grant(2, 100), 0);
  const auto count = ledger_->Count(kName, {}, {.reporter_id = 1, .batch_number = 1});
  ASSERT_TRUE(count.ok()) << count.status();
  EXPECT_FALSE(count->state.known);
  EXPECT_FALSE(count->counted);
}

TEST_F(LedgerRedisTest, FailsInTimeWhileRedisIsGoneOrSilent) {
  Open(1000);
  const auto ask = [this](int64_t limit_ms) {
    const LedgerDeadline limit(In(limit_ms));
    const auto begin = std::chrono::steady_clock::now();
    const absl::Status status = ledger_->Load(kName).status();
    EXPECT_EQ(ReasonOf(status), "LEDGER_UNAVAILABLE") << status;
    const auto took = std::chrono::steady_clock::now() - begin;
    return std::chrono::duration_cast<std::chrono::milliseconds>(took).count();
  };
  server_->Signal(SIGSTOP);
  for (int i = 0; i < RedisLedger::kLateAnswersMax; ++i) {
    EXPECT_LT(ask(30), 200) << "30 ms, on a machine that is busy";
  }
  EXPECT_LT(ask(1000), 50) << "it failed a moment ago: nobody waits again";
  server_->Signal(SIGCONT);
  absl::SleepFor(absl::Milliseconds(2 * RedisLedger::kRetryAfter.count()));
  EXPECT_TRUE(ledger_->Load(kName).ok());
  server_->Kill();
  EXPECT_LT(ask(1000), 500);
}

TEST_F(LedgerRedisTest, OneLateAnswerRefusesItsOwnCallAlone) {
  Open(1000);
  const auto late = [this](int64_t limit_ms) {
    const LedgerDeadline limit(In(limit_ms));
    return ReasonOf(ledger_->Load(kName).status());
  };
  for (int i = 0; i < 2 * RedisLedger::kLateAnswersMax; ++i) {
    EXPECT_EQ(late(0), "LEDGER_UNAVAILABLE") << "it had no time left when it came";
  }
  EXPECT_TRUE(ledger_->Load(kName).ok()) << "which says nothing of Redis";
  for (int i = 0; i < 2 * RedisLedger::kLateAnswersMax; ++i) {
    server_->Signal(SIGSTOP);
    EXPECT_EQ(late(30), "LEDGER_UNAVAILABLE");
    server_->Signal(SIGCONT);
    EXPECT_TRUE(ledger_->Load(kName).ok()) << "no call in between is refused";
  }
  EXPECT_EQ(Left(), 1000);
}

TEST_F(LedgerRedisTest, RefusesARedisThatForgetsKeys) {
  server_ = std::make_unique<RedisServer>(
      false, std::vector<std::string>{"--maxmemory-policy", "allkeys-lru"});
  ledger_ = LedgerAt(*server_);
  EXPECT_THAT(std::string(ledger_->Load(kName).status().message()), HasSubstr("noeviction"));
}

TEST_F(LedgerRedisTest, ManyAtOnceNeverOverspend) {
  const int64_t limit = 1'000'020;  // the rest of whole slices is worth giving
  Open(limit);
  std::atomic<int64_t> given = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const LedgerDeadline deadline(In(20'000));
      const auto own = LedgerAt(*server_);
      for (int64_t i = 0; i < 500; ++i) {
        const auto grant = own->Grant(kName, {}, {.lease_id = 1000 * t + i + 1, .units = 777});
        ASSERT_TRUE(grant.ok()) << grant.status();
        given += grant->units;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(given, limit) << "all of it, and not a unit more";
  EXPECT_EQ(Left(), 0);
}

TEST(LedgerRecordTest, KeepsEverythingAndRefusesWhatIsNoRecord) {
  LedgerRecord record;
  record.label = "a \"label\"";
  record.terms.tenant = "t";
  record.terms.model = "m/7b";
  record.terms.read_mode = ReadMode::kObserve;
  record.terms.tolerances = Tolerances{.tv_tolerance = 0.1f, .output_tolerance = 3.5f};
  record.risk_mode = RiskMode::kAnytime;
  record.cumulative_budget = 0.1;
  record.budget_slice_share = 1.0 / 3;
  record.failure_probability = 1e-7;
  const auto again = DecodeLedgerRecord(EncodeLedgerRecord(record));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(EncodeLedgerRecord(*again), EncodeLedgerRecord(record));
  EXPECT_EQ(again->terms.tolerances->tv_tolerance, 0.1f);
  EXPECT_EQ(again->budget_slice_share, 1.0 / 3);
  for (const char* text : {"", "record", "{}", "[1]", "{\"version\":1}", "{\"version\":2}"}) {
    EXPECT_EQ(ReasonOf(DecodeLedgerRecord(text).status()), "LEDGER_UNAVAILABLE") << text;
  }
}

TEST(LedgerAddressTest, TakesASocketOrAnAddressAndNoName) {
  EXPECT_EQ(ParseRedisAddress("unix:/run/redis.sock")->unix_path, "/run/redis.sock");
  EXPECT_EQ(ParseRedisAddress("::1:6379")->ip, "::1");
  EXPECT_EQ(ParseRedisAddress("10.0.0.1:6379")->port, 6379);
  for (const char* text : {"", "unix:", "redis:6379", "127.0.0.1", "127.0.0.1:0", ":6379",
                           "127.0.0.1:65536", "127.0.0.1:x"}) {
    EXPECT_EQ(ReasonOf(CheckRedisAddress(text)), "CONFIG_INVALID") << text;
  }
}

// Two replicas of gate, each with connections of its own.
class SharedRegistryTest : public LedgerRedisTest {
 protected:
  SharedRegistryTest() { StartReplicas(CumulativePolicy(10, 0.2)); }
  void StartReplicas(const Policy& policy) {
    GateConfig config;
    config.policy = policy;
    for (int i = 0; i < 2; ++i) {
      ledgers_[i] = LedgerAt(*server_);
      replicas_[i] = std::make_unique<RequestRegistry>(config, &clock_, ledgers_[i].get());
    }
  }
  absl::StatusOr<ReportAnswer> Report(int replica, int64_t number,
                                      std::vector<ReadCertificate> certificates,
                                      int64_t lease_id = 0,
                                      std::vector<ReturnedSlice> returned = {}) {
    const OwnedBatch batch{.reporter_id = 3,
                           .batch_number = number,
                           .lease_id = lease_id,
                           .certificates = std::move(certificates),
                           .returned = std::move(returned)};
    clock_.AdvanceMs(1);  // leases are ordered by it
    return replicas_[replica]->Report(kName, batch.batch());
  }

  FakeClock clock_;
  std::unique_ptr<RedisLedger> ledgers_[2];
  std::unique_ptr<RequestRegistry> replicas_[2];
};

TEST_F(SharedRegistryTest, TheSlicesOfBothReplicasAreWithinOneBudget) {
  double given = 0;
  for (int i = 0; i < 12; ++i) {
    const auto lease = replicas_[i % 2]->OpenRequest("r", "", {});
    ASSERT_TRUE(lease.ok()) << lease.status();
    given += lease->budget_slice;
  }
  EXPECT_EQ(given, 10);
  EXPECT_EQ(replicas_[0]->GetRisk(kName)->budget_left, 0);
}

TEST_F(SharedRegistryTest, TenantsStandTheSameAtEveryReplica) {
  Policy policy = CumulativePolicy(10, 0.2);
  policy.tenant_budget = 50;
  policy.tenant_window_ms = 1000;
  StartReplicas(policy);
  RequestTerms terms;
  terms.tenant = "acme";
  ASSERT_TRUE(replicas_[0]->OpenRequest("early", "", terms).ok());
  EXPECT_TRUE(replicas_[0]->RefreshTenants().ok());
  ASSERT_EQ(replicas_[0]->Tenants().size(), 1u);
  EXPECT_EQ(replicas_[0]->Tenants()[0].committed, 50) << "the ledger is new: all is used up";
  absl::SleepFor(absl::Milliseconds(1100));
  EXPECT_TRUE(replicas_[0]->RefreshTenants().ok());
  EXPECT_EQ(replicas_[0]->Tenants()[0].committed, 0) << "that window is over";
  EXPECT_EQ(replicas_[0]->OpenRequest("a", "", terms)->budget_slice, 2);
  EXPECT_EQ(replicas_[1]->OpenRequest("b", "", terms)->budget_slice, 2);
  for (const auto& replica : replicas_) {
    ASSERT_TRUE(replica->RefreshTenants().ok());
    ASSERT_EQ(replica->Tenants().size(), 1u);
    EXPECT_EQ(replica->Tenants()[0].tenant, "acme");
    EXPECT_EQ(replica->Tenants()[0].budget, 50);
    EXPECT_EQ(replica->Tenants()[0].committed, 4) << "2 at each";
  }
  server_->Kill();
  EXPECT_EQ(ReasonOf(replicas_[0]->RefreshTenants()), "LEDGER_UNAVAILABLE");
}

TEST_F(SharedRegistryTest, AReporterGoesOnAtAnotherReplicaAndIsCountedOnce) {
  const auto lease = replicas_[0]->OpenRequest("r", "", {});
  ASSERT_TRUE(lease.ok()) << lease.status();
  ASSERT_TRUE(Report(0, 1, {Certified(0.125f)}, lease->lease_id)->counted);
  // Its answer was lost, and so is the replica.
  const auto again = Report(1, 1, {Certified(0.125f)}, lease->lease_id);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->counted);
  ASSERT_TRUE(again->lease.has_value());
  EXPECT_NE(again->lease->lease_id, lease->lease_id);
  EXPECT_EQ(again->lease->budget_slice, 2);
  EXPECT_GT(again->lease->sequence, lease->sequence);
  // The other replica takes back what the first one gave.
  const auto next = Report(1, 2, {Certified(0.125f)}, again->lease->lease_id,
                           {{.lease_id = lease->lease_id, .spent_units = SpentUnits(0.125)}});
  ASSERT_TRUE(next->counted);
  EXPECT_EQ(ReasonOf(Report(0, 4, {}).status()), "BATCH_GAP");
  EXPECT_EQ(ledgers_[0]->Load(kName)->left_units, LimitUnits(10 - 2 - 0.125));
  // And where it was first, what was given back is not prolonged.
  const auto back = Report(0, 3, {}, again->lease->lease_id);
  ASSERT_TRUE(back->counted);
  EXPECT_NE(back->lease->lease_id, lease->lease_id);
  EXPECT_GT(back->lease->sequence, again->lease->sequence);
}

TEST_F(SharedRegistryTest, AnotherReplicaTellsWhatTheLedgerHas) {
  ASSERT_TRUE(replicas_[0]->OpenRequest("r", "", {}).ok());
  ASSERT_TRUE(Report(0, 1, {Certified(0.125f)})->counted);
  EXPECT_EQ(ReasonOf(replicas_[1]->GetRisk(kName).status()), "REQUEST_NOT_FOUND");
  ASSERT_TRUE(replicas_[1]->Refresh(kName).ok());
  const auto here = replicas_[0]->GetRisk(kName);
  auto there = replicas_[1]->GetRisk(kName);
  ASSERT_TRUE(there.ok()) << there.status();
  EXPECT_TRUE(there->counts_one_replica);
  EXPECT_EQ(there->budget, here->budget);
  EXPECT_EQ(there->budget_committed, here->budget_committed);
  EXPECT_GT(there->budget_committed, 0);
  EXPECT_EQ(there->totals.sums.read_count, 0) << "its own";
  // What happens elsewhere is told by the next one.
  ASSERT_TRUE(replicas_[0]->Decide(kName, Certified(0.125f))->accepted);
  ASSERT_TRUE(replicas_[0]->CloseRequest(kName).ok());
  ASSERT_TRUE(replicas_[1]->Refresh(kName).ok());
  there = replicas_[1]->GetRisk(kName);
  EXPECT_TRUE(there->closed);
  EXPECT_GT(there->budget_committed, here->budget_committed);

  EXPECT_EQ(ReasonOf(replicas_[1]->Refresh("requests/never")), "REQUEST_NOT_FOUND");
  server_->Kill();
  EXPECT_TRUE(replicas_[1]->Refresh(kName).ok()) << "what is known is told";
  EXPECT_EQ(ReasonOf(replicas_[1]->Refresh("requests/other")), "LEDGER_UNAVAILABLE");
}

TEST_F(SharedRegistryTest, AReadOutsideToleranceForcesTheRequestAtEveryReplica) {
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(replicas_[i]->OpenRequest("r", "", {}).ok());
  ASSERT_TRUE(Report(0, 1, {Certified(0.9f)})->counted);
  const auto lease = replicas_[1]->OpenRequest("r", "", {});
  ASSERT_TRUE(lease.ok()) << lease.status();
  EXPECT_EQ(lease->read_mode, ReadMode::kExact);
  EXPECT_FALSE(replicas_[1]->Decide(kName, Certified(0.1f))->accepted);
}

TEST_F(SharedRegistryTest, DecidesWithinTheBudgetOfAll) {
  StartReplicas(CumulativePolicy(0.5, 0.2));
  // A request that is closed at one is closed at all.
  ASSERT_TRUE(
      ledgers_[0]
          ->Open("requests/closed", {EncodeLedgerRecord(MakeLedgerRecord("", {}, Policy())), 0})
          .ok());
  ASSERT_TRUE(replicas_[1]->Adopt("requests/closed").ok());
  ASSERT_TRUE(replicas_[1]->CloseRequest("requests/closed").ok());
  EXPECT_EQ(ReasonOf(replicas_[0]->OpenRequest("closed", "", {}).status()), "REQUEST_CLOSED");
  // A slice of 0.1 is given; 0.4 is left.
  ASSERT_TRUE(replicas_[0]->OpenRequest("r", "", {}).ok());
  ASSERT_TRUE(replicas_[1]->Adopt(kName).ok());
  int accepted = 0;
  for (int i = 0; i < 8; ++i) {
    accepted += static_cast<int>(replicas_[i % 2]->Decide(kName, Certified(0.125f))->accepted);
  }
  EXPECT_EQ(accepted, 3);
  EXPECT_TRUE(replicas_[0]->Decide(kName, Exact(0.5f))->accepted);
}

TEST_F(SharedRegistryTest, WithoutTheLedgerNothingIsGivenCountedOrAccepted) {
  const auto lease = replicas_[0]->OpenRequest("r", "", {});
  ASSERT_TRUE(lease.ok()) << lease.status();
  server_->Kill();
  const auto decision = replicas_[0]->Decide(kName, Certified(0.125f));
  ASSERT_TRUE(decision.ok());
  EXPECT_FALSE(decision->accepted);
  EXPECT_EQ(decision->next_rung, Rung::kHead);
  EXPECT_THAT(decision->explanation, HasSubstr("shared ledger"));
  EXPECT_TRUE(replicas_[0]->Decide(kName, Exact(0.5f))->accepted) << "exact is never refused";
  EXPECT_EQ(ReasonOf(Report(0, 1, {Certified(0.1f)}).status()), "LEDGER_UNAVAILABLE");
  EXPECT_EQ(replicas_[0]->GetRisk(kName)->totals.sums.read_count, 1) << "the exact one";
  EXPECT_EQ(ReasonOf(replicas_[0]->OpenRequest("s", "", {}).status()), "LEDGER_UNAVAILABLE");
  EXPECT_GT(replicas_[0]->counters().ledger_failures.load(), 0);
}

TEST_F(SharedRegistryTest, ARestartOfRedisMakesRequestsExact) {
  server_ = std::make_unique<RedisServer>(/*keeps_data=*/true);
  StartReplicas(CumulativePolicy(10, 0.2));
  ASSERT_TRUE(replicas_[0]->OpenRequest("r", "", {}).ok());
  Restart({ledgers_[0].get()});
  const auto answer = Report(0, 1, {Certified(0.1f)});
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->action, DirectiveAction::kForceExact);
  EXPECT_EQ(replicas_[1]->OpenRequest("r", "", {})->read_mode, ReadMode::kExact);
  EXPECT_EQ(replicas_[1]->OpenRequest("new", "", {})->budget_slice, 2);
}

TEST_F(SharedRegistryTest, ALostLedgerReleasesItsRequests) {
  ASSERT_TRUE(replicas_[0]->OpenRequest("r", "", {}).ok());
  Restart({ledgers_[0].get()});
  const auto answer = Report(0, 1, {Certified(0.1f)});
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_EQ(answer->action, DirectiveAction::kRelease);
  EXPECT_TRUE(absl::IsNotFound(replicas_[0]->GetRisk(kName).status()));
}

}  // namespace
}  // namespace certkv::gate
