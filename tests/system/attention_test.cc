// What the client library makes of a certifier's answers: whatever a certifier says, an output that
// the lease doesn't allow never reaches the engine.
#include "clients/cpp/attention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/errors.h"
#include "tests/system/scripted_certifier.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using certifier::v1::AttendResponse;

constexpr int64_t kTokenCount = 200;

class AttentionTest : public SystemTest {
 protected:
  void Open(ReadMode mode = ReadMode::kEnforce) {
    StartCluster();
    data_ = std::make_unique<TestSequence>(SmallSpec(), kTokenCount, 31);
    certifier_ = std::make_unique<ScriptedCertifier>(
        data_->spec, absl::StrCat(cluster_->directory(), "/scripted.sock"));
    client::Options options = cluster_->options();
    options.certifier_target = certifier_->target();
    options.rpc_timeout_ms = 2000;
    auto worker = client::Worker::Attach(options, data_->spec);
    ASSERT_TRUE(worker.ok()) << worker.status();
    worker_ = *std::move(worker);
    sequence_ = Put(*worker_, *data_);
    request_ = OpenRequest("scripted", 0.2f, mode);
    auto attention = client::Attention::Open(*worker_, *sequence_, *request_);
    ASSERT_TRUE(attention.ok()) << attention.status();
    attention_ = *std::move(attention);
    queries_ = TestQueries(data_->spec, 32);
  }
  // One read of layer 1.
  client::ReadResult Read() {
    client::ReadRequest read;
    read.layer = 1;
    read.query_position = kTokenCount - 1;
    read.queries = queries_.data();
    auto results = attention_->Attend(absl::MakeConstSpan(&read, 1));
    EXPECT_TRUE(results.ok()) << results.status();
    if (!results.ok() || results->size() != 1) return {};
    return std::move(results->front());
  }
  // Reads with every answer spoilt by `spoil`; the answer must not be used.
  void ExpectRefused(const char* what, const std::function<void(AttendResponse*)>& spoil) {
    SCOPED_TRACE(what);
    certifier_->SetScript([spoil](AttendResponse* response) {
      spoil(response);
      return grpc::Status::OK;
    });
    const client::ReadResult refused = Read();
    EXPECT_EQ(ReasonOf(refused.status), "ANSWER_INVALID") << refused.status;
    EXPECT_TRUE(refused.outputs.empty());
    // The next honest answer is taken.
    certifier_->SetScript(nullptr);
    const client::ReadResult taken = Read();
    EXPECT_TRUE(taken.status.ok()) << taken.status;
    EXPECT_FALSE(taken.in_process);
  }
  static type::Certificate* First(AttendResponse* response) {
    return response->mutable_results(0)->mutable_certificates(0);
  }
  // The read was answered by this process from the originals, and rightly.
  void ExpectExactInProcess(const client::ReadResult& result) {
    ASSERT_TRUE(result.status.ok()) << result.status;
    EXPECT_TRUE(result.in_process);
    client::ReadRequest read;
    read.layer = 1;
    read.query_position = kTokenCount - 1;
    read.queries = queries_.data();
    EXPECT_EQ(CheckReadAgainstTruth(*data_, read, result, Tolerances()), "");
    for (const ReadCertificate& certificate : result.certificates) {
      EXPECT_EQ(certificate.outcome, Outcome::kExact);
    }
  }

  std::unique_ptr<TestSequence> data_;
  std::unique_ptr<ScriptedCertifier> certifier_;
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::Request> request_;
  std::unique_ptr<client::Attention> attention_;
  std::vector<float> queries_;
};

TEST_P(AttentionTest, AnswersOutsideTheLeaseAreRefused) {
  Open();
  ExpectRefused("tv above the tolerance",
                [](AttendResponse* response) { First(response)->set_worst_case_tv(0.25f); });
  ExpectRefused("value term above the tolerance",
                [](AttendResponse* response) { First(response)->set_value_term(0.5f); });
  ExpectRefused("NaN for a bound", [](AttendResponse* response) {
    First(response)->set_worst_case_tv(std::numeric_limits<float>::quiet_NaN());
  });
  ExpectRefused("observed where the lease enforces", [](AttendResponse* response) {
    First(response)->set_outcome(type::OUTCOME_OBSERVED);
  });
  ExpectRefused("no outcome", [](AttendResponse* response) {
    First(response)->set_outcome(type::OUTCOME_UNSPECIFIED);
  });
}

TEST_P(AttentionTest, AnswersOfAnotherShapeOrReadAreRefused) {
  Open();
  ExpectRefused("another layer", [](AttendResponse* response) { First(response)->set_layer(0); });
  ExpectRefused("another position", [](AttendResponse* response) {
    First(response)->set_query_position(kTokenCount - 2);
  });
  ExpectRefused("one head's certificate twice",
                [](AttendResponse* response) { First(response)->set_query_head(1); });
  ExpectRefused("a certificate less", [](AttendResponse* response) {
    response->mutable_results(0)->mutable_certificates()->RemoveLast();
  });
  ExpectRefused("outputs cut short", [](AttendResponse* response) {
    response->mutable_results(0)->mutable_outputs()->resize(4);
  });
  ExpectRefused("another request", [](AttendResponse* response) {
    response->set_request_number(response->request_number() + 1);
  });
  ExpectRefused("no result", [](AttendResponse* response) { response->clear_results(); });
}

TEST_P(AttentionTest, UnderAnExactLeaseCertifiedIsNotEnough) {
  Open(ReadMode::kExact);
  const client::ReadResult refused = Read();
  EXPECT_EQ(ReasonOf(refused.status), "ANSWER_INVALID") << refused.status;
  certifier_->SetScript([](AttendResponse* response) {
    for (auto& certificate : *response->mutable_results(0)->mutable_certificates()) {
      certificate.set_outcome(type::OUTCOME_EXACT);
      certificate.set_rung(type::RUNG_HEAD);
    }
    return grpc::Status::OK;
  });
  EXPECT_TRUE(Read().status.ok());
}

TEST_P(AttentionTest, AnErrorOfARetryableReadOpensAnotherView) {
  Open();
  EXPECT_EQ(certifier_->opened_views(), 1);
  std::atomic<int> answers = 0;
  certifier_->SetScript([&answers](AttendResponse* response) {
    if (answers++ == 0) {
      certifier::v1::ReadResult* result = response->mutable_results(0);
      result->Clear();
      result->set_code(grpc::StatusCode::NOT_FOUND);
      result->set_reason("VIEW_NOT_FOUND");
    }
    return grpc::Status::OK;
  });
  const client::ReadResult result = Read();
  EXPECT_TRUE(result.status.ok()) << result.status;
  EXPECT_FALSE(result.in_process);
  EXPECT_EQ(certifier_->opened_views(), 2);
}

TEST_P(AttentionTest, AnErrorOfTheReadItselfIsTheReadsAndIsNotTriedAgain) {
  Open();
  certifier_->SetScript([](AttendResponse* response) {
    certifier::v1::ReadResult* result = response->mutable_results(0);
    // Beside outputs, which are not used then.
    result->set_code(grpc::StatusCode::FAILED_PRECONDITION);
    result->set_reason("ARITHMETIC_LIMIT");
    result->set_message("layer 0");
    return grpc::Status::OK;
  });
  const client::ReadResult result = Read();
  EXPECT_EQ(result.status.code(), absl::StatusCode::kFailedPrecondition) << result.status;
  EXPECT_EQ(ReasonOf(result.status), "ARITHMETIC_LIMIT");
  EXPECT_TRUE(result.outputs.empty());
  EXPECT_EQ(certifier_->attended_messages(), 1);
}

TEST_P(AttentionTest, DamageIsTriedOnceMoreAfterTheStoreHasRepairedWhatItCan) {
  Open();
  certifier_->SetScript([](AttendResponse* response) {
    certifier::v1::ReadResult* result = response->mutable_results(0);
    result->set_code(grpc::StatusCode::DATA_LOSS);
    result->set_reason("ORIGINAL_CHECKSUM_MISMATCH");
    result->set_message("block 3");
    return grpc::Status::OK;
  });
  const client::ReadResult result = Read();
  EXPECT_EQ(result.status.code(), absl::StatusCode::kDataLoss) << result.status;
  EXPECT_EQ(ReasonOf(result.status), "ORIGINAL_CHECKSUM_MISMATCH");
  EXPECT_TRUE(result.outputs.empty());
  EXPECT_EQ(certifier_->attended_messages(), 2);
}

TEST_P(AttentionTest, ACertifierThatBreaksOrHangsIsReplacedByExactReads) {
  Open();
  certifier_->SetScript(
      [](AttendResponse*) { return grpc::Status(grpc::StatusCode::UNAVAILABLE, "going down"); });
  ExpectExactInProcess(Read());
  certifier_->SetScript([](AttendResponse*) {
    absl::SleepFor(absl::Seconds(4));
    return grpc::Status::OK;
  });
  absl::SleepFor(absl::Milliseconds(300));  // past the pause before the certifier is tried again
  const absl::Time start = absl::Now();
  ExpectExactInProcess(Read());
  EXPECT_LT(absl::Now() - start, absl::Seconds(12));
}

TEST_P(AttentionTest, AViewOfMoreBlocksThanACallTakesIsReadWhole) {
  StartCluster();
  CacheSpec spec = SmallSpec();
  spec.kv_head_count = 1;
  spec.group_size = 1;
  constexpr int32_t kTail = 5;
  const int32_t token_count = (kBlocksPerCallMax + 3) * spec.block_tokens + kTail;
  const TestSequence data(spec, token_count, 33);
  const auto worker = AttachWorker(spec);
  ASSERT_NE(worker, nullptr);
  const auto sequence = Put(*worker, data);
  ASSERT_NE(sequence, nullptr);
  EXPECT_EQ(sequence->blocks().size(), kBlocksPerCallMax + 3u);
  const auto request = OpenRequest("long");
  auto attention = client::Attention::Open(*worker, *sequence, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  for (const client::ReadResult& result : ReadAndCheck(**attention, data, token_count, 34)) {
    EXPECT_FALSE(result.in_process);
  }
}

INSTANTIATE_TEST_SUITE_P(Client, AttentionTest, ::testing::Values(ClusterShape::kAllInOne),
                         ShapeName);

}  // namespace
}  // namespace certkv
