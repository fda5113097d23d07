// The property that budgets are for, against an oracle that knows what was really served: whatever
// reporters and certifiers do, including dying at any moment, what the requests of a tenant serve
// stays within each request's budget and within the tenant's.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "services/gate/budget_units.h"
#include "services/gate/gate_fixture.h"
#include "services/gate/request_registry.h"
#include "tests/support/fake_clock.h"

namespace certkv::gate {
namespace {

// A client that reports, and the certifier that it reads from. It keeps to its slice, as
// clients/cpp does.
struct Client {
  std::string request;
  int64_t reporter_id = 0;
  int64_t batch_number = 0;
  std::optional<PolicyLease> lease;
  int64_t spent_units = 0;                  // of the lease's slice
  std::vector<ReadCertificate> unreported;  // served
  std::optional<OwnedBatch> unanswered;     // sent, its answer lost: it is sent again
  std::vector<ReturnedSlice> returns;       // to be told
  int64_t last_returned = 0;                // lease id: an answer on its way may still name it
};

// Everything at once: the registry under test, its clients, and the truth.
class SliceModel {
 public:
  explicit SliceModel(uint32_t seed) : random_(seed) {
    const double limit = std::pow(10, Uniform() * 3 - 1);
    config_.policy = CumulativePolicy(limit, std::max(0.02, Uniform() * 0.6));
    if (seed % 3 == 0) {
      config_.policy.risk_mode = RiskMode::kAnytime;
      config_.policy.failure_probability = 0.1;
    }
    config_.policy.tenant_budget = limit * (0.3 + 2 * Uniform());
    config_.policy.tenant_window_ms = 60'000;
    config_.reporters_per_request_max = 1000;
    registry_ = std::make_unique<RequestRegistry>(config_, &clock_);
  }

  void Step() {
    const double choice = Uniform();
    if (clients_.empty() || choice < 0.05) return Open();
    Client& client = clients_[random_() % clients_.size()];
    if (choice < 0.60) {
      Read(&client);
    } else if (choice < 0.80) {
      Report(&client);
    } else if (choice < 0.88) {
      // The certifier dies: what it held is gone. Its client knows what it was served.
      Return(&client);
    } else if (choice < 0.93) {
      // The client dies, with its slice and what it did not report.
      client = clients_.back();
      clients_.pop_back();
    } else if (choice < 0.96) {
      Decide(client.request);
    } else {
      clock_.AdvanceMs(static_cast<int64_t>(Uniform() * 20'000));
      registry_->Sweep();
      windows_begun_ = (clock_.NowMs() - FakeClock::kStartMs) / 60'000 + 1;
    }
  }

  void Check() {
    int64_t tenant_units = 0;
    for (const auto& [name, units] : served_units_) {
      const auto risk = registry_->GetRisk(name);
      ASSERT_TRUE(risk.ok());
      ASSERT_LE(ToAmount(units), risk->budget_committed) << name;
      ASSERT_LE(risk->budget_committed, risk->budget) << name;
      ASSERT_FALSE(risk->forced_exact) << name;
      tenant_units += units;
    }
    // A slice of a window may be spent in a later one, so the windows are taken together.
    ASSERT_LE(ToAmount(tenant_units),
              config_.policy.tenant_budget * static_cast<double>(windows_begun_));
  }
  int64_t served_units() const {
    int64_t sum = 0;
    for (const auto& named : served_units_) sum += named.second;
    return sum;
  }
  int64_t return_count() const { return return_count_; }

 private:
  double Uniform() { return std::uniform_real_distribution<double>(0, 1)(random_); }

  void Open() {
    const std::string id = absl::StrCat("r", random_() % 3);
    RequestTerms terms;
    terms.tenant = "tenant";
    const auto lease = registry_->OpenRequest(id, "", terms);
    ASSERT_TRUE(lease.ok()) << lease.status();
    Client client;
    client.request = absl::StrCat("requests/", id);
    client.reporter_id = ++last_reporter_;
    client.lease = *lease;
    served_units_.try_emplace(client.request, 0);
    clients_.push_back(client);
  }

  void Read(Client* client) {
    if (!client->lease.has_value() || client->lease->read_mode != ReadMode::kEnforce ||
        clock_.NowMs() >= client->lease->expire_time_ms) {
      return;
    }
    const auto tv = static_cast<float>(Uniform() * Uniform() * 0.2);
    const int64_t units = SpentUnits(tv);
    if (client->spent_units + units > LimitUnits(client->lease->budget_slice)) {
      ReadCertificate exact = Exact(tv);
      client->unreported.push_back(exact);
      return;
    }
    client->spent_units += units;
    served_units_[client->request] += units;
    client->unreported.push_back(Certified(tv));
  }

  void Return(Client* client) {
    if (!client->lease.has_value()) return;
    client->returns.push_back({client->lease->lease_id, client->spent_units});
    client->last_returned = client->lease->lease_id;
    client->lease.reset();
    ++return_count_;
  }

  void Report(Client* client) {
    OwnedBatch batch;
    if (client->unanswered.has_value()) {
      batch = *client->unanswered;
    } else {
      batch = {.reporter_id = client->reporter_id,
               .batch_number = ++client->batch_number,
               .lease_id = client->lease.has_value() ? client->lease->lease_id : 0,
               .certificates = std::move(client->unreported),
               .returned = std::move(client->returns)};
      client->unreported.clear();
      client->returns.clear();
    }
    const auto answer = registry_->Report(client->request, batch.batch());
    ASSERT_TRUE(answer.ok()) << answer.status();
    if (Uniform() < 0.2) {  // the answer is lost
      client->unanswered = batch;
      return;
    }
    client->unanswered.reset();
    if (!answer->lease.has_value() || answer->lease->lease_id == client->last_returned) return;
    if (!client->lease.has_value() || client->lease->lease_id != answer->lease->lease_id) {
      // The old lease is over; half of the time its rest is returned.
      if (Uniform() < 0.5) Return(client);
      client->spent_units = 0;
    }
    client->lease = answer->lease;
  }

  void Decide(const std::string& request) {
    const auto tv = static_cast<float>(Uniform() * 0.2);
    const auto decision = registry_->Decide(request, Certified(tv));
    ASSERT_TRUE(decision.ok());
    if (decision->accepted) served_units_[request] += SpentUnits(tv);
  }

  std::mt19937 random_;
  GateConfig config_;
  FakeClock clock_;
  std::unique_ptr<RequestRegistry> registry_;
  std::vector<Client> clients_;
  std::map<std::string, int64_t> served_units_;  // certified, by request: the truth
  int64_t last_reporter_ = 0;
  int64_t windows_begun_ = 1;
  int64_t return_count_ = 0;
};

TEST(SliceModelTest, NothingIsOverspentWhoeverDiesAndWheneverItDoes) {
  int64_t served_units = 0;
  int64_t return_count = 0;
  for (uint32_t seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    SliceModel model(seed);
    for (int step = 0; step < 600; ++step) {
      model.Step();
      model.Check();
      if (HasFatalFailure()) return;
    }
    served_units += model.served_units();
    return_count += model.return_count();
  }
  EXPECT_GT(ToAmount(served_units), 100) << "not vacuous";
  EXPECT_GT(return_count, 1000);
}

}  // namespace
}  // namespace certkv::gate
