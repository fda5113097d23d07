// Three replicas of gate at one Redis under load, while one of them and then Redis are killed.
#include <gtest/gtest.h>
#include <hiredis/hiredis.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "clients/cli/child_process.h"
#include "clients/cpp/rpc.h"
#include "tests/support/redis_server.h"
#include "tests/system/cluster.h"

namespace certkv {
namespace {

namespace v1 = gate::v1;

constexpr int kReplicas = 3;
constexpr int kReporters = 4;
constexpr double kBudget = 100;
// Of a read: a whole number of units, so that sums of doubles are exact.
constexpr float kTv = 0.0625f;
constexpr char kReported[] = "requests/reported";
constexpr char kDecided[] = "requests/decided";
constexpr absl::Duration kDecisionLimit = absl::Milliseconds(50);

enum Phase { kAllUp, kReplicaDown, kRedisDown, kRedisBack, kPhaseCount };
constexpr const char* kPhaseNames[] = {"all up", "a replica killed", "Redis killed",
                                       "Redis restarted"};

// What the load saw in one phase.
struct Tally {
  std::vector<double> decision_ms;  // answered, either way
  int64_t accepted = 0;
  int64_t refused = 0;
  int64_t refused_by_ledger = 0;  // the explanation says so
  int64_t failed = 0;             // no answer within kDecisionLimit, or an error
  int64_t batches = 0;            // counted or known to have been
  int64_t report_failures = 0;
};

class LedgerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char directory[] = "/tmp/certkv-ledger-XXXXXX";
    ASSERT_NE(mkdtemp(directory), nullptr);
    directory_ = directory;
    for (int i = 0; i < kReplicas; ++i) {
      const std::string base = absl::StrCat(directory_, "/gate", i);
      std::ofstream(base + ".yaml")
          << "gate:\n  risk_mode: cumulative\n  cumulative_budget: " << kBudget
          << "\n  budget_slice_share: 0.01\n  ledger_redis: "
          << "unix:" << redis_.socket() << "\n";
      auto process = cli::ChildProcess::Start({BinaryDirectory() + "/certkv-gate", "--socket",
                                               base + ".sock", "--config", base + ".yaml"},
                                              {}, base + ".log");
      ASSERT_TRUE(process.ok()) << process.status();
      processes_.push_back(*std::move(process));
      targets_.push_back("unix:" + base + ".sock");
      const absl::Status serves = WaitUntilServing(targets_.back(), *processes_.back());
      ASSERT_TRUE(serves.ok()) << serves;
      stubs_.push_back(v1::Gate::NewStub(client::MakeChannel(targets_.back())));
    }
  }
  void TearDown() override {
    processes_.clear();
    std::filesystem::remove_all(directory_);
  }

  absl::Status Open(int replica, const std::string& id, type::PolicyLease* lease) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    v1::OpenRequestRequest request;
    request.set_request_id(id);
    v1::OpenRequestResponse response;
    const grpc::Status status = stubs_[replica]->OpenRequest(&context, request, &response);
    if (!status.ok()) return absl::UnavailableError(status.error_message());
    *lease = response.lease();
    return absl::OkStatus();
  }
  static type::Certificate Read() {
    type::Certificate read;
    read.set_worst_case_tv(kTv);
    read.set_first_worst_case_tv(kTv);
    read.set_value_radius(1);
    read.set_rung(type::RUNG_NONE);
    read.set_outcome(type::OUTCOME_CERTIFIED);
    return read;
  }
  // A field of a request's account in Redis.
  int64_t Field(const std::string& request, const char* field) {
    redisContext* context = redisConnectUnix(redis_.socket().c_str());
    auto* reply = static_cast<redisReply*>(
        redisCommand(context, "HGET certkv:gate:r:%s %s", request.c_str(), field));
    int64_t value = -1;
    if (reply != nullptr && reply->type == REDIS_REPLY_STRING) {
      EXPECT_TRUE(absl::SimpleAtoi(reply->str, &value));
    }
    freeReplyObject(reply);
    redisFree(context);
    return value;
  }

  void Decide();
  void ReportAll(int64_t reporter_id);
  void ReportBatches(int64_t reporter_id, int replica, int64_t* number, v1::ReportRequest* batch,
                     type::PolicyLease* lease);
  void PrintTable();

  RedisServer redis_{/*keeps_data=*/true};
  std::string directory_;
  std::vector<std::string> targets_;
  std::vector<std::unique_ptr<cli::ChildProcess>> processes_;
  std::vector<std::unique_ptr<v1::Gate::Stub>> stubs_;
  std::atomic<int> phase_ = kAllUp;
  std::atomic<bool> stop_ = false;
  absl::Mutex mutex_;
  Tally tallies_[kPhaseCount] ABSL_GUARDED_BY(mutex_);
  std::atomic<int64_t> served_reads_ = 0;     // within slices, reported or not
  std::atomic<int64_t> confirmed_reads_ = 0;  // in batches that were answered
  std::atomic<int64_t> in_doubt_reads_ = 0;   // in batches without an answer at the end
};

// Decisions one after the other, at the replicas in turn.
void LedgerTest::Decide() {
  for (int i = 0; !stop_; ++i) {
    const int phase = phase_;
    grpc::ClientContext context;
    const absl::Time begin = absl::Now();
    context.set_deadline(absl::ToChronoTime(begin + kDecisionLimit));
    v1::DecideRequest request;
    request.set_request(kDecided);
    *request.mutable_certificate() = Read();
    v1::DecideResponse response;
    const grpc::Status status = stubs_[i % kReplicas]->Decide(&context, request, &response);
    const double took_ms = absl::ToDoubleMilliseconds(absl::Now() - begin);
    {
      absl::MutexLock lock(&mutex_);
      Tally& tally = tallies_[phase];
      if (!status.ok()) {
        ++tally.failed;
      } else {
        tally.decision_ms.push_back(took_ms);
        ++(response.accepted() ? tally.accepted : tally.refused);
        tally.refused_by_ledger +=
            static_cast<int64_t>(absl::StrContains(response.explanation(), "shared ledger"));
      }
    }
    absl::SleepFor(absl::Milliseconds(1));
  }
}

// Serves reads within its slice and reports them in batches of two, at whatever replica answers.
void LedgerTest::ReportAll(int64_t reporter_id) {
  v1::ReportRequest batch;
  type::PolicyLease lease;
  int64_t number = 1;
  for (int replica = static_cast<int>(reporter_id) % kReplicas; !stop_;
       replica = (replica + 1) % kReplicas) {
    ReportBatches(reporter_id, replica, &number, &batch, &lease);
    absl::SleepFor(absl::Milliseconds(5));
  }
  in_doubt_reads_ += batch.certificates_size();
}

void LedgerTest::ReportBatches(int64_t reporter_id, int replica, int64_t* number,
                               v1::ReportRequest* batch, type::PolicyLease* lease) {
  grpc::ClientContext context;
  // A new connection now and then, so that every reporter meets every replica.
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(400));
  const auto stream = stubs_[replica]->Report(&context);
  while (!stop_) {
    const int phase = phase_;
    // What was sent and not answered is sent again as it was.
    if (batch->batch_number() != *number) {
      batch->Clear();
      batch->set_request(kReported);
      batch->set_reporter_id(reporter_id);
      batch->set_batch_number(*number);
      batch->set_lease_id(lease->lease_id());
      int64_t fits = static_cast<int64_t>(lease->budget_slice() / kTv);
      if (lease->read_mode() != type::READ_MODE_ENFORCE) fits = 0;
      for (int i = 0; i < 2 && i < fits; ++i) {
        *batch->add_certificates() = Read();
        lease->set_budget_slice(lease->budget_slice() - kTv);
        ++served_reads_;
      }
    }
    v1::ReportResponse response;
    const bool answered = stream->Write(*batch) && stream->Read(&response);
    absl::MutexLock lock(&mutex_);
    if (!answered) {
      ++tallies_[phase].report_failures;
      return;
    }
    ++tallies_[phase].batches;
    confirmed_reads_ += batch->certificates_size();
    batch->clear_certificates();
    ++*number;
    // A lease that is only prolonged keeps what is left of its slice.
    if (response.has_lease() && response.lease().lease_id() != lease->lease_id()) {
      *lease = response.lease();
    } else if (response.has_lease()) {
      lease->set_read_mode(response.lease().read_mode());
    } else {
      lease->set_read_mode(type::READ_MODE_EXACT);
    }
  }
}

void LedgerTest::PrintTable() {
  absl::MutexLock lock(&mutex_);
  printf("%-18s %9s %9s %9s %9s %8s %8s %9s\n", "phase", "accepted", "refused", "no answer",
         "p50 ms", "p99 ms", "max ms", "batches");
  for (int phase = 0; phase < kPhaseCount; ++phase) {
    Tally& tally = tallies_[phase];
    std::vector<double>& times = tally.decision_ms;
    std::sort(times.begin(), times.end());
    const auto at = [&times](double share) {
      if (times.empty()) return 0.0;
      return times[static_cast<size_t>(share * static_cast<double>(times.size() - 1))];
    };
    printf("%-18s %9ld %9ld %9ld %9.2f %8.2f %8.2f %9ld\n", kPhaseNames[phase], tally.accepted,
           tally.refused, tally.failed, at(0.5), at(0.99), at(1), tally.batches);
  }
}

TEST_F(LedgerTest, NoBudgetIsOverspentAndNothingCountedTwiceWhateverIsKilled) {
  type::PolicyLease lease;
  ASSERT_TRUE(Open(0, "reported", &lease).ok());
  ASSERT_TRUE(Open(1, "decided", &lease).ok());
  const double opener_slices = 2 * lease.budget_slice();
  EXPECT_GT(opener_slices, 0);
  std::vector<std::thread> threads;
  for (int i = 0; i < kReporters; ++i) threads.emplace_back([this, i] { ReportAll(100 + i); });
  threads.emplace_back([this] { Decide(); });
  threads.emplace_back([this] { Decide(); });

  absl::SleepFor(absl::Milliseconds(1500));
  phase_ = kReplicaDown;
  kill(processes_[0]->pid(), SIGKILL);
  absl::SleepFor(absl::Milliseconds(1500));
  phase_ = kRedisDown;
  redis_.Kill();
  absl::SleepFor(absl::Milliseconds(1500));
  phase_ = kRedisBack;
  redis_.Start();
  absl::SleepFor(absl::Milliseconds(2000));
  stop_ = true;
  for (std::thread& thread : threads) thread.join();
  PrintTable();

  absl::MutexLock lock(&mutex_);
  int64_t accepted = 0;
  int64_t in_doubt = 0;
  for (const Tally& tally : tallies_) {
    accepted += tally.accepted;
    in_doubt += tally.failed;
  }
  printf(
      "reported: %ld reads served, %ld confirmed, %ld counted; decided: %ld accepted, %ld "
      "counted; budget %.0f = %.0f reads\n",
      served_reads_.load(), confirmed_reads_.load(), Field(kReported, "reads"), accepted,
      Field(kDecided, "reads"), kBudget, kBudget / kTv);
  // Nothing is overspent, served or decided.
  EXPECT_LE(static_cast<double>(served_reads_) * kTv, kBudget);
  EXPECT_LE(static_cast<double>(accepted) * kTv, kBudget);
  EXPECT_GT(served_reads_, 0);
  // Every batch once: what was answered is counted, and no more than was sent.
  EXPECT_GE(Field(kReported, "reads"), confirmed_reads_);
  EXPECT_LE(Field(kReported, "reads"), confirmed_reads_ + in_doubt_reads_);
  EXPECT_GE(Field(kDecided, "reads"), accepted);
  EXPECT_LE(Field(kDecided, "reads"), accepted + in_doubt);
  // Decisions go on while a replica is gone, and fail closed, with a reason, while Redis is, and
  // for the requests of before once it is back.
  EXPECT_GT(tallies_[kAllUp].accepted, 0);
  EXPECT_GT(tallies_[kReplicaDown].batches, 0);
  EXPECT_GT(tallies_[kRedisDown].refused_by_ledger, 0);
  EXPECT_GT(tallies_[kRedisBack].batches, 0);
  EXPECT_GT(tallies_[kRedisBack].refused, 0);
  EXPECT_EQ(tallies_[kRedisBack].accepted, 0) << "what was spent before is not known";
  EXPECT_GT(tallies_[kReplicaDown].accepted, 0);
}

}  // namespace
}  // namespace certkv
