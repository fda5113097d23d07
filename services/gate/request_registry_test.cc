#include "services/gate/request_registry.h"

#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/status.h"
#include "services/gate/gate_fixture.h"
#include "tests/support/fake_clock.h"

namespace certkv::gate {
namespace {

using ::testing::HasSubstr;

class RequestRegistryTest : public ::testing::Test {
 protected:
  void Make() { registry_ = std::make_unique<RequestRegistry>(config_, &clock_); }
  // Opens requests/<id> and reports one read of this bound.
  void OpenWithRead(const std::string& id, float tv) {
    ASSERT_TRUE(registry_->OpenRequest(id, "", {}).ok());
    const OwnedBatch batch{.certificates = {Certified(tv)}};
    ASSERT_TRUE(registry_->Report("requests/" + id, batch.batch()).ok());
  }
  static std::vector<std::string> Names(const RiskPage& page) {
    std::vector<std::string> names;
    for (const RequestRisk& risk : page.risks) names.push_back(risk.request);
    return names;
  }

  GateConfig config_;
  FakeClock clock_;
  std::unique_ptr<RequestRegistry> registry_ = std::make_unique<RequestRegistry>(config_, &clock_);
};

TEST_F(RequestRegistryTest, RefusesBadIdsNamesAndLabels) {
  for (const std::string& id : {std::string(), std::string("a/b"), std::string("a b"),
                                std::string("\xc3\xa9"), std::string(129, 'x')}) {
    EXPECT_EQ(ReasonOf(registry_->OpenRequest(id, "", {}).status()), "REQUEST_ID_INVALID") << id;
    EXPECT_EQ(ReasonOf(registry_->GetRisk("requests/" + id).status()), "REQUEST_NAME_INVALID");
  }
  EXPECT_EQ(ReasonOf(registry_->GetRisk("a").status()), "REQUEST_NAME_INVALID");
  EXPECT_EQ(ReasonOf(registry_->OpenRequest("a", std::string(257, 'l'), {}).status()),
            "REQUEST_LABEL_INVALID");
  EXPECT_TRUE(registry_->OpenRequest(std::string(128, 'x'), std::string(256, 'l'), {}).ok());
}

TEST_F(RequestRegistryTest, RefusesLooserTolerances) {
  EXPECT_EQ(
      ReasonOf(registry_->OpenRequest("a", "", {Tolerances{0.5f, 0.05f, 0}, ReadMode::kEnforce})
                   .status()),
      "TOLERANCE_INVALID");
  EXPECT_EQ(ReasonOf(registry_->GetRisk("requests/a").status()), "REQUEST_NOT_FOUND")
      << "nothing was opened";
}

TEST_F(RequestRegistryTest, ReleasesReportersOfUnknownRequests) {
  const OwnedBatch batch{.batch_number = 17, .certificates = {Certified(0.1f)}};
  const auto answer = registry_->Report("requests/nobody", batch.batch());
  ASSERT_TRUE(answer.ok());
  EXPECT_EQ(answer->action, DirectiveAction::kRelease);
  EXPECT_FALSE(answer->lease.has_value());
  EXPECT_THAT(answer->explanation, HasSubstr("gate was restarted"));
}

TEST_F(RequestRegistryTest, ClosedRequestsStayReadableForTheRetentionTime) {
  OpenWithRead("a", 0.1f);
  const auto risk = registry_->CloseRequest("requests/a");
  ASSERT_TRUE(risk.ok());
  EXPECT_TRUE(risk->closed);
  EXPECT_TRUE(registry_->CloseRequest("requests/a").ok()) << "idempotent";
  clock_.AdvanceMs(config_.retention_ms - 1);
  registry_->Sweep();
  EXPECT_EQ(registry_->GetRisk("requests/a")->totals.sums.read_count, 1);
  clock_.AdvanceMs(1);
  registry_->Sweep();
  EXPECT_EQ(ReasonOf(registry_->GetRisk("requests/a").status()), "REQUEST_NOT_FOUND");
  EXPECT_TRUE(registry_->OpenRequest("a", "", {}).ok()) << "the id is free again";
}

TEST_F(RequestRegistryTest, ClosesIdleRequests) {
  OpenWithRead("idle", 0.1f);
  clock_.AdvanceMs(config_.idle_timeout_ms - 1);
  OpenWithRead("busy", 0.1f);
  EXPECT_EQ(registry_->Sweep(), 0);
  clock_.AdvanceMs(1);
  EXPECT_EQ(registry_->Sweep(), 1);
  const auto risk = registry_->GetRisk("requests/idle");
  EXPECT_TRUE(risk->closed);
  EXPECT_EQ(risk->events.back().kind, "IDLE");
  EXPECT_FALSE(registry_->GetRisk("requests/busy")->closed);
}

TEST_F(RequestRegistryTest, RefusesOpenRequestsAtTheLimitButGivesUpClosedOnes) {
  config_.request_limit = 2;
  Make();
  ASSERT_TRUE(registry_->OpenRequest("a", "", {}).ok());
  ASSERT_TRUE(registry_->OpenRequest("b", "", {}).ok());
  const absl::Status status = registry_->OpenRequest("c", "", {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "REQUEST_LIMIT");
  EXPECT_TRUE(registry_->OpenRequest("a", "", {}).ok()) << "one that is open may be opened again";
  ASSERT_TRUE(registry_->CloseRequest("requests/a").ok());
  EXPECT_TRUE(registry_->OpenRequest("c", "", {}).ok());
  EXPECT_EQ(ReasonOf(registry_->GetRisk("requests/a").status()), "REQUEST_NOT_FOUND");
}

TEST_F(RequestRegistryTest, AMillionRequestsOfOneClientTakeNoMoreThanTheLimit) {
  config_.request_limit = 1000;
  config_.retained_limit = 100;
  Make();
  OpenWithRead("of-somebody-else", 0.1f);
  int64_t opened = 0;
  int64_t refused = 0;
  for (int i = 0; i < 1'000'000; ++i) {
    const absl::Status status = registry_->OpenRequest(absl::StrCat("flood-", i), "", {}).status();
    opened += status.ok() ? 1 : 0;
    refused += ReasonOf(status) == "REQUEST_LIMIT" ? 1 : 0;
  }
  EXPECT_EQ(opened, 999);
  EXPECT_EQ(refused, 999'001);
  EXPECT_EQ(registry_->sizes().open, 1000);
  const OwnedBatch batch{.batch_number = 2, .certificates = {Certified(0.1f)}};
  EXPECT_TRUE(registry_->Report("requests/of-somebody-else", batch.batch())->lease.has_value())
      << "who was there is served";
  // One that closes what it opened takes no more either.
  ASSERT_TRUE(registry_->CloseRequest("requests/flood-0").ok());
  for (int i = 0; i < 100'000; ++i) {
    const std::string id = absl::StrCat("again-", i);
    ASSERT_TRUE(registry_->OpenRequest(id, "", {}).ok()) << i;
    ASSERT_TRUE(registry_->CloseRequest("requests/" + id).ok());
  }
  EXPECT_EQ(registry_->sizes().open, 999);
  EXPECT_EQ(registry_->sizes().closed, 1);
}

TEST_F(RequestRegistryTest, TenantsShareOneBudgetPerWindow) {
  config_.policy = CumulativePolicy(10, 0.5);
  config_.policy.tenant_budget = 6;
  config_.policy.tenant_window_ms = 60'000;
  Make();
  const auto slice_of = [this](const char* id, const char* tenant) {
    RequestTerms terms;
    terms.tenant = tenant;
    const auto lease = registry_->OpenRequest(id, "", terms);
    EXPECT_TRUE(lease.ok()) << lease.status();
    return lease.ok() ? lease->budget_slice : -1;
  };
  EXPECT_EQ(slice_of("a", "one"), 5);
  EXPECT_EQ(slice_of("b", "one"), 1) << "what the tenant has left";
  EXPECT_EQ(slice_of("c", "one"), 0);
  EXPECT_EQ(slice_of("d", "two"), 5) << "another tenant";
  EXPECT_EQ(slice_of("e", ""), 5) << "no tenant, no limit";
  clock_.AdvanceMs(60'000);
  registry_->Sweep();
  EXPECT_EQ(slice_of("c2", "one"), 5) << "a new window";
}

TEST_F(RequestRegistryTest, AClockThatJumpsBackGivesNoBudgetTwice) {
  config_.policy = CumulativePolicy(10, 0.5);
  config_.policy.tenant_budget = 5;
  config_.policy.tenant_window_ms = 60'000;
  Make();
  RequestTerms terms;
  terms.tenant = "one";
  EXPECT_EQ(registry_->OpenRequest("a", "", terms)->budget_slice, 5);
  clock_.AdvanceMs(-3'600'000);
  registry_->Sweep();
  EXPECT_EQ(registry_->OpenRequest("b", "", terms)->budget_slice, 0);
  clock_.AdvanceMs(3'600'000);
  registry_->Sweep();
  EXPECT_EQ(registry_->OpenRequest("c", "", terms)->budget_slice, 0) << "the window is the same";
}

TEST_F(RequestRegistryTest, AClockThatJumpsForwardEndsLeasesAndGivesNoBudgetTwice) {
  config_.policy = CumulativePolicy(10, 0.5);
  Make();
  const auto lease = registry_->OpenRequest("a", "", {});
  ASSERT_TRUE(lease.ok());
  EXPECT_EQ(lease->budget_slice, 5);
  clock_.AdvanceMs(365 * int64_t{86'400'000});
  EXPECT_LT(lease->expire_time_ms, clock_.NowMs()) << "its holder reads exactly";
  // It comes back before anybody swept: what it holds is not given anew.
  OwnedBatch batch{.lease_id = lease->lease_id, .certificates = {Certified(0.1f)}};
  const auto answer = registry_->Report("requests/a", batch.batch());
  ASSERT_TRUE(answer.ok()) << answer.status();
  ASSERT_TRUE(answer->lease.has_value());
  EXPECT_LE(answer->lease->budget_slice, 5);
  EXPECT_NE(answer->lease->lease_id, lease->lease_id);
  batch = {.batch_number = 2, .lease_id = answer->lease->lease_id};
  batch.returned = {{lease->lease_id, LimitUnits(0.1)}, {answer->lease->lease_id, 0}};
  ASSERT_TRUE(registry_->Report("requests/a", batch.batch()).ok());
  EXPECT_LE(registry_->GetRisk("requests/a")->budget_committed, 10);
  clock_.AdvanceMs(365 * int64_t{86'400'000});
  EXPECT_EQ(registry_->Sweep(), 1) << "silent for a year";
  EXPECT_TRUE(registry_->GetRisk("requests/a")->closed);
}

TEST_F(RequestRegistryTest, RefusesBadTenantsAndModelsAndTooMany) {
  config_.tenant_limit = 1;
  Make();
  const auto reason = [this](const std::string& tenant, const std::string& model) {
    RequestTerms terms;
    terms.tenant = tenant;
    terms.model = model;
    return ReasonOf(registry_->OpenRequest(absl::StrCat("r-", tenant.size()), "", terms).status());
  };
  EXPECT_EQ(reason("<b>", ""), "TENANT_INVALID");
  EXPECT_EQ(reason(std::string(65, 't'), ""), "TENANT_INVALID");
  EXPECT_EQ(reason("", "a b"), "MODEL_INVALID");
  EXPECT_EQ(reason("", std::string(129, 'm')), "MODEL_INVALID");
  EXPECT_EQ(reason("a", "HuggingFaceTB/SmolLM2-135M"), "");
  EXPECT_EQ(reason("bb", ""), "TENANT_LIMIT");
}

TEST_F(RequestRegistryTest, ListsTheRiskiestFirst) {
  OpenWithRead("low", 0.01f);
  OpenWithRead("high", 0.19f);
  OpenWithRead("middle", 0.1f);
  ASSERT_TRUE(registry_->OpenRequest("none", "", {}).ok());
  const auto page = registry_->ListRisks({});
  EXPECT_EQ(Names(*page), (std::vector<std::string>{"requests/high", "requests/middle",
                                                    "requests/low", "requests/none"}));
  EXPECT_EQ(page->next_page_token, "");
}

TEST_F(RequestRegistryTest, ListsClosedRequestsOnlyWhenAsked) {
  OpenWithRead("a", 0.1f);
  OpenWithRead("b", 0.05f);
  ASSERT_TRUE(registry_->CloseRequest("requests/a").ok());
  EXPECT_EQ(Names(*registry_->ListRisks({})), std::vector<std::string>{"requests/b"});
  EXPECT_EQ(registry_->ListRisks({.filter = {.include_closed = true}})->risks.size(), 2u);
}

TEST_F(RequestRegistryTest, PagesTellEachRequestOnce) {
  std::set<std::string> expected;
  for (int i = 0; i < 23; ++i) {
    // Groups of equal risk, so that a page ends inside one.
    OpenWithRead(absl::StrCat("r", i), 0.01f * static_cast<float>(i / 6));
    expected.insert(absl::StrCat("requests/r", i));
  }
  std::set<std::string> seen;
  std::string token;
  int pages = 0;
  do {
    const auto page = registry_->ListRisks({.page_size = 5, .page_token = token});
    ASSERT_TRUE(page.ok()) << page.status();
    for (const std::string& name : Names(*page)) EXPECT_TRUE(seen.insert(name).second) << name;
    token = page->next_page_token;
    ASSERT_LE(++pages, 5);
  } while (!token.empty());
  EXPECT_EQ(seen, expected);
}

TEST_F(RequestRegistryTest, RefusesBadPages) {
  EXPECT_EQ(ReasonOf(registry_->ListRisks({.page_size = -1}).status()), "PAGE_SIZE_INVALID");
  EXPECT_EQ(ReasonOf(registry_->ListRisks({.page_size = 1001}).status()), "PAGE_SIZE_INVALID");
  for (const char* token : {"x", "...", "1.3ff0000000000000.3ff0000000000000.nobody",
                            "1.7ff8000000000000.3ff0000000000000.requests/a",
                            "1.3ff0000000000000.7ff8000000000000.requests/a",
                            "1.zzzzzzzzzzzzzzzz.3ff0000000000000.requests/a",
                            "2.3ff0000000000000.3ff0000000000000.requests/a"}) {
    EXPECT_EQ(ReasonOf(registry_->ListRisks({.page_size = 5, .page_token = token}).status()),
              "PAGE_TOKEN_INVALID")
        << token;
  }
}

TEST_F(RequestRegistryTest, ListsByWhatIsAskedFor) {
  OpenWithRead("one-large", 0.19f);
  OpenWithRead("many-small", 0.1f);
  const OwnedBatch more{.batch_number = 2,
                        .certificates = std::vector<ReadCertificate>(20, Certified(0.1f))};
  ASSERT_TRUE(registry_->Report("requests/many-small", more.batch()).ok());
  clock_.AdvanceMs(5);
  ReadCertificate repaired = Certified(0.01f);
  repaired.rung = Rung::kKeys;
  repaired.repair_bytes = 4096;
  ASSERT_TRUE(registry_->OpenRequest("repaired", "", {}).ok());
  const OwnedBatch batch{.certificates = {repaired}};
  ASSERT_TRUE(registry_->Report("requests/repaired", batch.batch()).ok());
  const auto first = [this](RiskOrder order) {
    return Names(*registry_->ListRisks({.page_size = 1, .order = order}))[0];
  };
  EXPECT_EQ(first(RiskOrder::kScore), "requests/one-large");
  EXPECT_EQ(first(RiskOrder::kSum), "requests/many-small");
  EXPECT_EQ(first(RiskOrder::kRepairBytes), "requests/repaired");
  EXPECT_EQ(first(RiskOrder::kUpdateTime), "requests/repaired");
  EXPECT_EQ(registry_->ListRisks({.page_size = 1})->request_count, 3);
}

TEST_F(RequestRegistryTest, ListsWhatIsFilteredFor) {
  const auto open = [this](const char* id, const char* label, const char* tenant, const char* model,
                           float tv) {
    RequestTerms terms;
    terms.tenant = tenant;
    terms.model = model;
    ASSERT_TRUE(registry_->OpenRequest(id, label, terms).ok());
    const OwnedBatch batch{.certificates = {Certified(tv)}};
    ASSERT_TRUE(registry_->Report(absl::StrCat("requests/", id), batch.batch()).ok());
  };
  open("a", "long prompt", "red", "small", 0.1f);
  open("b", "short", "red", "large", 0.02f);
  open("c", "long answer", "blue", "small", 0.9f);  // outside tolerance
  const auto names = [this](RiskFilter filter) {
    return Names(*registry_->ListRisks({.filter = std::move(filter)}));
  };
  using List = std::vector<std::string>;
  EXPECT_EQ(names({.tenant = "red"}), (List{"requests/a", "requests/b"}));
  EXPECT_EQ(names({.model = "small"}), (List{"requests/c", "requests/a"}));
  EXPECT_EQ(names({.label_part = "long"}), (List{"requests/c", "requests/a"}));
  EXPECT_EQ(names({.score_min = 0.05f}), (List{"requests/c", "requests/a"}));
  EXPECT_EQ(names({.only_troubled = true}), List{"requests/c"});
  EXPECT_EQ(names({.tenant = "red", .model = "small"}), List{"requests/a"});
  EXPECT_TRUE(names({.tenant = "nobody"}).empty());
  EXPECT_EQ(ReasonOf(registry_->ListRisks({.filter = {.score_min = 2}}).status()),
            "FILTER_INVALID");
  EXPECT_EQ(ReasonOf(registry_->ListRisks({.filter = {.score_min = std::nanf("")}}).status()),
            "FILTER_INVALID");
}

TEST_F(RequestRegistryTest, ListsTheLatestEventsOfAllRequests) {
  std::vector<std::string> expected;
  for (int i = 0; i < 20; ++i) {
    clock_.AdvanceMs(10);
    const bool has_event = i % 2 == 0;
    OpenWithRead(absl::StrCat("r", i), has_event ? 0.9f : 0.01f);  // outside tolerance, or not
    if (has_event) expected.insert(expected.begin(), absl::StrCat("requests/r", i));
  }
  const auto names = [this](int64_t since_ms, int32_t count) {
    std::vector<std::string> told;
    int64_t last_ms = std::numeric_limits<int64_t>::max();
    for (const NamedEvent& named : registry_->ListEvents(since_ms, count)) {
      EXPECT_LE(named.event.time_ms, last_ms);
      EXPECT_GE(named.event.time_ms, since_ms);
      last_ms = named.event.time_ms;
      told.push_back(named.request);
    }
    return told;
  };
  EXPECT_EQ(names(0, 100), expected);
  EXPECT_EQ(names(0, 3), (std::vector<std::string>{expected.begin(), expected.begin() + 3}));
  EXPECT_EQ(names(clock_.NowMs() - 10, 100), std::vector<std::string>{expected[0]});
  EXPECT_TRUE(names(clock_.NowMs() + 1, 100).empty());
  // A request that was told of before, and an earlier one that has another event.
  clock_.AdvanceMs(10);
  const OwnedBatch batch{.batch_number = 2, .certificates = {Certified(0.9f)}};
  ASSERT_TRUE(registry_->Report("requests/r4", batch.batch()).ok());
  EXPECT_EQ(names(0, 1), std::vector<std::string>{"requests/r4"});
  EXPECT_EQ(names(0, 100).size(), expected.size() + 1);
}

TEST_F(RequestRegistryTest, ForgetsTheOldestClosedRequestsBeyondTheLimit) {
  config_.retained_limit = 2;
  Make();
  for (const char* id : {"a", "b", "c"}) {
    OpenWithRead(id, 0.1f);
    ASSERT_TRUE(registry_->CloseRequest(absl::StrCat("requests/", id)).ok());
  }
  registry_->Sweep();
  EXPECT_EQ(ReasonOf(registry_->GetRisk("requests/a").status()), "REQUEST_NOT_FOUND");
  EXPECT_TRUE(registry_->GetRisk("requests/b").ok());
}

TEST_F(RequestRegistryTest, TellsOnlyChanges) {
  OpenWithRead("a", 0.1f);
  int64_t change_count = 0;
  EXPECT_TRUE(registry_->GetRiskIfChanged("requests/a", &change_count)->has_value());
  EXPECT_FALSE(registry_->GetRiskIfChanged("requests/a", &change_count)->has_value());
  ASSERT_TRUE(registry_->CloseRequest("requests/a").ok());
  EXPECT_TRUE((*registry_->GetRiskIfChanged("requests/a", &change_count))->closed);
}

TEST_F(RequestRegistryTest, UpdatesThePolicyOnlyFromTheVersionInForce) {
  Policy policy = registry_->policy();
  policy.tolerances.tv_tolerance = 0.1f;
  const auto updated = registry_->UpdatePolicy(policy);
  ASSERT_TRUE(updated.ok());
  EXPECT_EQ(updated->version, 2);
  const absl::Status stale = registry_->UpdatePolicy(policy).status();
  EXPECT_EQ(stale.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(stale), "POLICY_VERSION");
  policy.version = 0;
  EXPECT_EQ(registry_->UpdatePolicy(policy)->version, 3);
  policy.tolerances.tv_tolerance = 2;
  EXPECT_EQ(ReasonOf(registry_->UpdatePolicy(policy).status()), "POLICY_INVALID");
  EXPECT_EQ(registry_->policy().tolerances.tv_tolerance, 0.1f);
  EXPECT_EQ(registry_->OpenRequest("a", "", {})->policy_version, 3);
}

TEST_F(RequestRegistryTest, CountsExactlyFromManyThreads) {
  constexpr int kThreads = 4;
  constexpr int kBatches = 200;
  ASSERT_TRUE(registry_->OpenRequest("a", "", {}).ok());
  std::vector<std::thread> threads;
  for (int t = 1; t <= kThreads; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 1; i <= kBatches; ++i) {
        const OwnedBatch batch{.reporter_id = t,
                               .batch_number = i,
                               .certificates = {Certified(0.125f, 0, t), Certified(0.125f, 1, t)}};
        EXPECT_TRUE(registry_->Report("requests/a", batch.batch()).ok());
        EXPECT_TRUE(registry_->Report("requests/a", batch.batch()).ok());  // a repetition
        EXPECT_TRUE(
            registry_->ListRisks({.page_size = i % 50, .filter = {.include_closed = true}}).ok());
        registry_->Sweep();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto risk = registry_->GetRisk("requests/a");
  EXPECT_EQ(risk->totals.sums.read_count, kThreads * kBatches * 2);
  EXPECT_EQ(risk->totals.sums.tv_sum, kThreads * kBatches * 2 * 0.125);
}

}  // namespace
}  // namespace certkv::gate
