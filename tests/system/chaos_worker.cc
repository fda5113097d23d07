#include "tests/system/chaos_worker.h"

#include <unistd.h>

#include <cstdio>
#include <memory>
#include <random>
#include <sstream>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cpp/attention.h"
#include "clients/cpp/request.h"
#include "clients/cpp/worker.h"
#include "kernels/core/status.h"
#include "tests/system/sequence_fixture.h"

namespace certkv {
namespace {

constexpr int kSequences = 5;  // that the workers share
constexpr int32_t kTokens = 64 * 3 + 20;
constexpr int kReadsPerSequence = 12;
constexpr absl::Duration kGapMin = absl::Milliseconds(20);

class ChaosWorker {
 public:
  ChaosWorker(client::Options options, const CacheSpec& spec, uint32_t seed)
      : options_(std::move(options)), spec_(spec), random_(seed) {
    tolerances_.tv_tolerance = 0.2f;
    for (int i = 0; i < kSequences; ++i) data_.emplace_back(spec, kTokens, 500 + i);
  }

  [[noreturn]] void Run() {
    while (true) {
      auto worker = client::Worker::Attach(options_, spec_);
      if (worker.ok()) {
        while (UseOnce(**worker)) continue;
      } else {
        Count(worker.status());
        absl::SleepFor(absl::Milliseconds(20));
      }
    }
  }

 private:
  // One sequence, some reads. False when the worker should attach again.
  bool UseOnce(client::Worker& worker) {
    const TestSequence& data = data_[random_() % kSequences];
    auto sequence =
        worker.PutSequence(data.token_ids, data.layers(), client::DefaultKeyContext(worker.spec()));
    if (!sequence.ok()) {
      Count(sequence.status());
      return false;
    }
    client::RequestOptions request_options;
    request_options.tolerances = &tolerances_;
    auto request = client::Request::Open(
        options_, absl::StrCat("chaos-", getpid(), "-", ++requests_), request_options);
    if (!request.ok()) Count(request.status());
    const std::unique_ptr<client::Request> governed =
        request.ok() ? *std::move(request) : client::Request::Ungoverned("chaos");
    auto attention = client::Attention::Open(worker, **sequence, *governed);
    if (!attention.ok()) {
      Count(attention.status());
      return false;
    }
    bool all_good = true;
    for (int i = 0; i < kReadsPerSequence; ++i) all_good &= ReadOnce(**attention, data);
    return all_good;
  }

  bool ReadOnce(client::Attention& attention, const TestSequence& data) {
    const std::vector<float> queries = TestQueries(spec_, static_cast<uint32_t>(random_()));
    client::ReadRequest read;
    read.layer = static_cast<int32_t>(random_() % 2);
    read.query_position = kTokens - 1 - static_cast<int64_t>(random_() % 100);
    read.queries = queries.data();
    const auto results = attention.Attend({read});
    const absl::Status status = results.ok() ? (*results)[0].status : results.status();
    if (status.ok()) {
      NoteGap();
      Check(data, read, (*results)[0]);
    } else {
      Count(status);
    }
    if (absl::Now() - said_ > absl::Milliseconds(50)) Say();
    return status.ok();
  }

  void Check(const TestSequence& data, const client::ReadRequest& read,
             const client::ReadResult& result) {
    ++tally_.reads;
    for (const ReadCertificate& certificate : result.certificates) {
      tally_.certified += certificate.outcome == Outcome::kCertified ? 1 : 0;
      tally_.exact += certificate.outcome == Outcome::kExact ? 1 : 0;
      const bool is_fair =
          certificate.outcome == Outcome::kExact || certificate.outcome == Outcome::kCertified;
      tally_.uncertified += is_fair ? 0 : 1;
    }
    const std::string wrong = CheckReadAgainstTruth(data, read, result, tolerances_);
    if (wrong.empty()) return;
    ++tally_.wrong;
    std::printf("wrong %s\n", wrong.c_str());
    Say();
  }

  // Says how long it was without an answer, when that was long.
  void NoteGap() {
    const absl::Time now = absl::Now();
    if (now - answered_ > kGapMin && answered_ != absl::InfinitePast()) {
      std::printf("gap %lld %lld\n", static_cast<long long>(absl::ToUnixMillis(now)),
                  static_cast<long long>(absl::ToInt64Milliseconds(now - answered_)));
    }
    answered_ = now;
  }

  void Count(const absl::Status& status) {
    ++tally_.errors;
    const std::string reason = ReasonOf(status);
    ++tally_.reasons[reason.empty() ? absl::StatusCodeToString(status.code()) : reason];
    Say();
  }

  void Say() {
    said_ = absl::Now();
    std::printf("tally %s\n", tally_.ToText().c_str());
    std::fflush(stdout);
  }

  const client::Options options_;
  const CacheSpec spec_;
  std::mt19937 random_;
  Tolerances tolerances_;
  std::vector<TestSequence> data_;
  int64_t requests_ = 0;
  ChaosTally tally_;
  absl::Time said_ = absl::InfinitePast();
  absl::Time answered_ = absl::InfinitePast();
};

}  // namespace

std::string ChaosTally::ToText() const {
  std::string text =
      absl::StrCat("reads=", reads, " certified=", certified, " exact=", exact, " errors=", errors,
                   " uncertified=", uncertified, " wrong=", wrong);
  for (const auto& [reason, count] : reasons) absl::StrAppend(&text, " ", reason, ":", count);
  return text;
}

ChaosTally ChaosTally::FromText(const std::string& text) {
  ChaosTally tally;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const std::vector<std::string> parts = absl::StrSplit(word, absl::ByAnyChar("=:"));
    int64_t count = 0;
    if (parts.size() != 2 || !absl::SimpleAtoi(parts[1], &count)) continue;
    if (parts[0] == "reads")
      tally.reads = count;
    else if (parts[0] == "certified")
      tally.certified = count;
    else if (parts[0] == "exact")
      tally.exact = count;
    else if (parts[0] == "errors")
      tally.errors = count;
    else if (parts[0] == "uncertified")
      tally.uncertified = count;
    else if (parts[0] == "wrong")
      tally.wrong = count;
    else
      tally.reasons[parts[0]] = count;
  }
  return tally;
}

void ChaosTally::Add(const ChaosTally& other) {
  reads += other.reads;
  certified += other.certified;
  exact += other.exact;
  errors += other.errors;
  uncertified += other.uncertified;
  wrong += other.wrong;
  for (const auto& [reason, count] : other.reasons) reasons[reason] += count;
}

void RunChaosWorker(const client::Options& options, const CacheSpec& spec, uint32_t seed) {
  ChaosWorker(options, spec, seed).Run();
}

}  // namespace certkv
