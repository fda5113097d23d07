#include "services/certifier/service.h"

// Boost 1.74's Asio uses std::exchange without including it.
#include <utility>
//
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/certifier/fake_cache.h"
#include "services/certifier/read_checker.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "tests/support/fake_clock.h"

namespace certkv::certifier {
namespace {

using ::testing::Each;
using ::testing::SizeIs;

constexpr int64_t kTokenCount = 64 * 3 + 20;

// Gives the fake cache to whoever names it.
class FakeProvider final : public CacheProvider {
 public:
  explicit FakeProvider(FakeCache* fake) : fake_(fake) {}
  void Acquire(const SpecDigest& spec_digest, int64_t staging_id, Done done) override {
    if (spec_digest != fake_->cache()->spec_digest()) {
      return done(MakeError(absl::StatusCode::kNotFound, "CACHE_NOT_FOUND", "another cache"));
    }
    if (staging_id != 0 && staging_id != kFakeStagingId) {
      return done(MakeError(absl::StatusCode::kNotFound, "STAGING_NOT_FOUND", "another worker"));
    }
    done(AcquiredCache{fake_->cache(), staging_id == 0 ? nullptr : fake_->staging()});
  }

 private:
  FakeCache* const fake_;
};

// A server on an in-process channel.
class ServiceTest : public ::testing::Test {
 protected:
  ServiceTest() : ServiceTest(SmallSpec(2, 2, 2, 64)) {}
  explicit ServiceTest(const CacheSpec& spec) : fake_(spec, 8), random_(17) {
    fake_.Put(RandomSequence(fake_.spec(), kTokenCount, 1.0f, &random_));
    queries_ = RandomQueries(fake_.spec(), 1.0f, &random_);
    kernels_ = KernelsOf(Backend::kCpu);
    lease_ = TestLease({.tv_tolerance = 0.2f, .value_tolerance = 0.5f});
  }
  ~ServiceTest() override { Stop(); }

  void Start() {
    work_.emplace(io_context_.get_executor());
    for (int i = 0; i < 2; ++i) threads_.emplace_back([this] { io_context_.run(); });
    server_ = CertifierServer::CreateWith(config_, &clock_, &io_context_,
                                          std::make_unique<FakeProvider>(&fake_), kernels_);
    grpc::ServerBuilder builder;
    for (grpc::Service* service : server_->grpc_services()) builder.RegisterService(service);
    grpc_server_ = builder.BuildAndStart();
    stub_ = v1::Certifier::NewStub(grpc_server_->InProcessChannel(grpc::ChannelArguments()));
  }
  void Stop() {
    if (grpc_server_ == nullptr) return;
    grpc_server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(5));
    server_.reset();
    work_.reset();
    io_context_.stop();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    grpc_server_.reset();
  }

  // A unary call with a deadline.
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::Certifier::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return FromGrpcStatus((stub_.get()->*method)(&context, request, response));
  }

  v1::OpenViewRequest ViewRequest() const {
    v1::OpenViewRequest request;
    request.set_spec_digest(std::string(fake_.cache()->spec_digest().view()));
    for (const BlockHandle& block : fake_.blocks()) {
      *request.add_blocks() = BlockHandleToProto(block);
    }
    request.mutable_tail()->set_staging_id(kFakeStagingId);
    request.mutable_tail()->set_staging_slot(kFakeTailSlot);
    request.mutable_tail()->set_token_count(kTokenCount % 64);
    *request.mutable_policy() = PolicyLeaseToProto(lease_);
    return request;
  }
  int64_t OpenView(const v1::OpenViewRequest& request) {
    v1::OpenViewResponse response;
    const absl::Status status = Call(&v1::Certifier::Stub::OpenView, request, &response);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_GT(response.view_id(), 0);
    return response.view_id();
  }
  std::string OpenViewReason(const v1::OpenViewRequest& request) {
    v1::OpenViewResponse response;
    return ReasonOf(Call(&v1::Certifier::Stub::OpenView, request, &response));
  }
  v1::Read ReadOf(int64_t view_id, int32_t layer = 0, int64_t position = kTokenCount - 1) const {
    v1::Read read;
    read.set_view_id(view_id);
    read.set_layer(layer);
    read.set_query_position(position);
    read.set_queries(
        std::string(reinterpret_cast<const char*>(queries_.data()), queries_.size() * 4));
    return read;
  }
  // One message on a stream of its own.
  v1::AttendResponse Attend(const v1::AttendRequest& request, absl::Status* end = nullptr) {
    grpc::ClientContext context;
    const auto stream = stub_->Attend(&context);
    v1::AttendResponse response;
    stream->Write(request);
    stream->WritesDone();
    stream->Read(&response);
    v1::AttendResponse more;
    EXPECT_FALSE(stream->Read(&more));
    const absl::Status status = FromGrpcStatus(stream->Finish());
    if (end != nullptr) {
      *end = status;
    } else {
      EXPECT_TRUE(status.ok()) << status;
    }
    return response;
  }
  v1::ReadResult AttendOne(const v1::Read& read) {
    v1::AttendRequest request;
    *request.add_reads() = read;
    v1::AttendResponse response = Attend(request);
    EXPECT_EQ(response.results_size(), 1);
    return response.results_size() == 1 ? response.results(0) : v1::ReadResult();
  }

  CertifierConfig config_;
  FakeCache fake_;
  std::mt19937_64 random_;
  std::vector<float> queries_;
  ReadKernels kernels_;
  PolicyLease lease_;
  FakeClock clock_;
  boost::asio::io_context io_context_;
  std::optional<boost::asio::executor_work_guard<boost::asio::io_context::executor_type>> work_;
  std::vector<std::thread> threads_;
  std::unique_ptr<CertifierServer> server_;
  std::unique_ptr<grpc::Server> grpc_server_;
  std::unique_ptr<v1::Certifier::Stub> stub_;
};

TEST_F(ServiceTest, AttendGivesOutputsWithinTheirBounds) {
  Start();
  const int64_t view = OpenView(ViewRequest());
  for (int32_t layer = 0; layer < 2; ++layer) {
    const v1::ReadResult result = AttendOne(ReadOf(view, layer));
    ASSERT_EQ(result.code(), 0) << result.message();
    ASSERT_THAT(result.certificates(), SizeIs(4));
    ASSERT_EQ(result.outputs().size(), size_t{4 * 64 * 4});
    EXPECT_TRUE(result.tile_sources().empty());
    for (int32_t head = 0; head < 4; ++head) {
      const type::Certificate& certificate = result.certificates(head);
      EXPECT_EQ(certificate.outcome(), type::OUTCOME_CERTIFIED);
      EXPECT_EQ(certificate.layer(), layer);
      EXPECT_EQ(certificate.query_head(), head);
      EXPECT_LE(certificate.worst_case_tv(), 0.2f);
      ReadRequest request;
      request.layer = layer;
      request.query_position = kTokenCount - 1;
      request.queries = queries_;
      const ExactAttention exact = ExactAttentionOf(fake_, request, head);
      double error_square = 0;
      for (int i = 0; i < 64; ++i) {
        float output = 0;
        std::memcpy(&output, result.outputs().data() + (head * 64 + i) * 4, 4);
        error_square += (output - exact.output[i]) * (output - exact.output[i]);
      }
      EXPECT_LE(std::sqrt(error_square), certificate.output_error_bound());
    }
  }
}

TEST_F(ServiceTest, AnswersManyMessagesInTheirOrder) {
  Start();
  const int64_t view = OpenView(ViewRequest());
  grpc::ClientContext context;
  const auto stream = stub_->Attend(&context);
  constexpr int kMessages = 100;
  std::thread writer([&] {
    for (int i = 0; i < kMessages; ++i) {
      v1::AttendRequest request;
      request.set_request_number(1000 + i);
      for (int k = 0; k < i % 5; ++k) *request.add_reads() = ReadOf(view, k % 2, 10 * (i % 20));
      ASSERT_TRUE(stream->Write(request));
    }
    stream->WritesDone();
  });
  for (int i = 0; i < kMessages; ++i) {
    v1::AttendResponse response;
    ASSERT_TRUE(stream->Read(&response)) << i;
    EXPECT_EQ(response.request_number(), 1000 + i);
    ASSERT_EQ(response.results_size(), i % 5);
    for (int k = 0; k < i % 5; ++k) {
      EXPECT_EQ(response.results(k).code(), 0) << response.results(k).message();
      EXPECT_EQ(response.results(k).certificates(0).layer(), k % 2);
      EXPECT_EQ(response.results(k).certificates(0).query_position(), 10 * (i % 20));
    }
  }
  writer.join();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServiceTest, AnErrorIsInsideItsReadAndTheStreamGoesOn) {
  Start();
  const int64_t view = OpenView(ViewRequest());
  v1::AttendRequest request;
  *request.add_reads() = ReadOf(view);
  *request.add_reads() = ReadOf(view + 1);
  *request.add_reads() = ReadOf(view, 7);
  *request.add_reads() = ReadOf(view);
  request.mutable_reads(3)->mutable_queries()->resize(31);
  *request.add_reads() = ReadOf(view, 0, kTokenCount);
  *request.add_reads() = ReadOf(view, 1);
  const v1::AttendResponse response = Attend(request);
  ASSERT_EQ(response.results_size(), 6);
  const char* const reasons[] = {"",           "VIEW_NOT_FOUND",   "LAYER_UNKNOWN",
                                 "QUERY_SIZE", "POSITION_OUTSIDE", ""};
  for (int i = 0; i < 6; ++i) {
    const v1::ReadResult& result = response.results(i);
    EXPECT_EQ(result.reason(), reasons[i]);
    EXPECT_EQ(result.code() == 0, result.reason().empty());
    EXPECT_EQ(result.outputs().empty(), result.code() != 0);
    EXPECT_EQ(result.certificates_size(), result.code() == 0 ? 4 : 0);
  }
  EXPECT_EQ(server_->counters().ErrorsByReason().at("LAYER_UNKNOWN"), 1);
}

TEST_F(ServiceTest, LeavesOutputsOutWhenAskedTo) {
  Start();
  v1::AttendRequest request;
  *request.add_reads() = ReadOf(OpenView(ViewRequest()));
  request.set_certificates_only(true);
  const v1::AttendResponse response = Attend(request);
  EXPECT_TRUE(response.results(0).outputs().empty());
  EXPECT_THAT(response.results(0).certificates(), SizeIs(4));
}

TEST_F(ServiceTest, AnAuditSaysWhereTilesWereReadFrom) {
  lease_ = TestLease({.tv_tolerance = 0, .value_tolerance = 0});
  Start();
  v1::AttendRequest request;
  *request.add_reads() = ReadOf(OpenView(ViewRequest()));
  request.set_audit(true);
  const v1::AttendResponse response = Attend(request);
  ASSERT_EQ(response.results(0).tile_sources().size(), size_t{4 * 3});
  EXPECT_THAT(response.results(0).tile_sources(), Each(char{3}));
  EXPECT_EQ(response.results(0).certificates(0).outcome(), type::OUTCOME_EXACT);
}

TEST_F(ServiceTest, CertifyMeasuresWithoutOutputsOrRepair) {
  lease_ = TestLease({.tv_tolerance = 0.001f});
  Start();
  const int64_t view = OpenView(ViewRequest());
  v1::CertifyRequest request;
  *request.add_reads() = ReadOf(view);
  *request.add_reads() = ReadOf(view, 5);
  v1::CertifyResponse response;
  ASSERT_TRUE(Call(&v1::Certifier::Stub::Certify, request, &response).ok());
  ASSERT_EQ(response.results_size(), 2);
  EXPECT_TRUE(response.results(0).outputs().empty());
  ASSERT_THAT(response.results(0).certificates(), SizeIs(4));
  EXPECT_EQ(response.results(0).certificates(0).outcome(), type::OUTCOME_OBSERVED);
  EXPECT_EQ(response.results(0).certificates(0).repair_bytes(), 0);
  EXPECT_EQ(response.results(1).reason(), "LAYER_UNKNOWN");
}

TEST_F(ServiceTest, RefusesAUnaryCallWithoutADeadline) {
  Start();
  grpc::ClientContext context;
  v1::OpenViewResponse response;
  const absl::Status status = FromGrpcStatus(stub_->OpenView(&context, ViewRequest(), &response));
  EXPECT_EQ(ReasonOf(status), "DEADLINE_REQUIRED");
}

TEST_F(ServiceTest, RefusesBadViewsAtTheDoor) {
  Start();
  v1::OpenViewRequest request = ViewRequest();
  request.mutable_spec_digest()->at(3) ^= 1;
  EXPECT_EQ(OpenViewReason(request), "CACHE_NOT_FOUND");
  request.set_spec_digest("short");
  EXPECT_EQ(OpenViewReason(request), "DIGEST_SIZE");
  request = ViewRequest();
  request.mutable_blocks(1)->mutable_device()->set_slot(1 << 20);
  EXPECT_EQ(OpenViewReason(request), "HANDLE_INVALID");
  request = ViewRequest();
  auto* device = request.mutable_blocks(1)->mutable_device();
  device->set_generation(device->generation() + 2);
  EXPECT_EQ(OpenViewReason(request), "BLOCK_REUSED");
  request = ViewRequest();
  request.mutable_tail()->set_token_count(64);
  EXPECT_EQ(OpenViewReason(request), "TAIL_INVALID");
  request.mutable_tail()->set_staging_id(4);
  EXPECT_EQ(OpenViewReason(request), "STAGING_NOT_FOUND");
  request = ViewRequest();
  request.mutable_policy()->set_lease_id(0);
  EXPECT_EQ(OpenViewReason(request), "POLICY_LEASE_INVALID");
  request = ViewRequest();
  for (int i = 0; i < kBlocksPerCallMax; ++i) *request.add_blocks() = request.blocks(0);
  EXPECT_EQ(OpenViewReason(request), "BATCH_SIZE");
}

TEST_F(ServiceTest, LimitsViewsAndForgetsClosedOnes) {
  config_.view_limit = 2;
  Start();
  const int64_t first = OpenView(ViewRequest());
  OpenView(ViewRequest());
  EXPECT_EQ(OpenViewReason(ViewRequest()), "VIEW_LIMIT");
  v1::CloseViewRequest close;
  close.set_view_id(first);
  v1::CloseViewResponse closed;
  EXPECT_TRUE(Call(&v1::Certifier::Stub::CloseView, close, &closed).ok());
  EXPECT_TRUE(Call(&v1::Certifier::Stub::CloseView, close, &closed).ok());
  EXPECT_EQ(AttendOne(ReadOf(first)).reason(), "VIEW_NOT_FOUND");
  OpenView(ViewRequest());
}

TEST_F(ServiceTest, AnUpdateMovesBlocksTailAndLease) {
  Start();
  v1::OpenViewRequest open = ViewRequest();
  open.mutable_blocks()->DeleteSubrange(2, 1);
  open.clear_tail();
  const int64_t view = OpenView(open);
  EXPECT_EQ(AttendOne(ReadOf(view, 0, 127)).code(), 0);
  EXPECT_EQ(AttendOne(ReadOf(view, 0, 128)).reason(), "POSITION_OUTSIDE");
  v1::UpdateViewRequest update;
  update.set_view_id(view);
  *update.add_appended_blocks() = ViewRequest().blocks(2);
  *update.mutable_tail() = ViewRequest().tail();
  lease_.sequence = 2;
  lease_.read_mode = ReadMode::kExact;
  *update.mutable_policy() = PolicyLeaseToProto(lease_);
  v1::UpdateViewResponse updated;
  ASSERT_TRUE(Call(&v1::Certifier::Stub::UpdateView, update, &updated).ok());
  const v1::ReadResult result = AttendOne(ReadOf(view));
  ASSERT_EQ(result.code(), 0) << result.message();
  EXPECT_EQ(result.certificates(0).outcome(), type::OUTCOME_EXACT);
  update.clear_appended_blocks();
  update.clear_policy();
  update.mutable_tail()->set_token_count(5);
  ASSERT_TRUE(Call(&v1::Certifier::Stub::UpdateView, update, &updated).ok());
  EXPECT_EQ(AttendOne(ReadOf(view)).reason(), "POSITION_OUTSIDE");
  update.set_view_id(view + 1);
  EXPECT_EQ(ReasonOf(Call(&v1::Certifier::Stub::UpdateView, update, &updated)), "VIEW_NOT_FOUND");
}

TEST_F(ServiceTest, AnExpiredLeaseServesNothing) {
  lease_.expire_time_ms = FakeClock::kStartMs + 100;
  Start();
  const int64_t view = OpenView(ViewRequest());
  EXPECT_EQ(AttendOne(ReadOf(view)).code(), 0);
  clock_.AdvanceMs(100);
  const v1::ReadResult result = AttendOne(ReadOf(view));
  EXPECT_EQ(result.reason(), "POLICY_LEASE_EXPIRED");
  EXPECT_TRUE(result.outputs().empty());
}

TEST_F(ServiceTest, ALostStoreServesNothing) {
  Start();
  const int64_t view = OpenView(ViewRequest());
  fake_.cache()->MarkDead();
  const v1::ReadResult result = AttendOne(ReadOf(view));
  EXPECT_EQ(result.reason(), "STORE_UNREACHABLE");
  EXPECT_EQ(result.code(), static_cast<int>(absl::StatusCode::kUnavailable));
}

TEST_F(ServiceTest, ClosesIdleViews) {
  config_.view_idle_ms = 60'000;
  Start();
  const int64_t view = OpenView(ViewRequest());
  clock_.AdvanceMs(61'000);
  for (int i = 0; i < 100 && AttendOne(ReadOf(view)).code() == 0; ++i) {
    clock_.AdvanceMs(61'000);  // the read has just used it
    absl::SleepFor(absl::Milliseconds(100));
  }
  EXPECT_EQ(AttendOne(ReadOf(view)).reason(), "VIEW_NOT_FOUND");
}

TEST_F(ServiceTest, EndsAStreamThatSendsTooManyReads) {
  Start();
  const int64_t view = OpenView(ViewRequest());
  v1::AttendRequest request;
  for (int i = 0; i <= kReadsPerAttendMax; ++i) *request.add_reads() = ReadOf(view);
  absl::Status status;
  Attend(request, &status);
  EXPECT_EQ(ReasonOf(status), "BATCH_SIZE");
  EXPECT_EQ(AttendOne(ReadOf(view)).code(), 0);
}

TEST_F(ServiceTest, TakesNoMoreMessagesThanAreInFlight) {
  config_.messages_in_flight = 3;
  absl::Notification go;
  std::atomic<int> started{0};
  kernels_.attend = [&](const AttendArgs& args, const AttendResult& result, void* workspace) {
    ++started;
    go.WaitForNotification();
    return ::certkv::Attend(Backend::kCpu, args, result, workspace);
  };
  config_.read_threads = 1;
  Start();
  const int64_t view = OpenView(ViewRequest());
  grpc::ClientContext context;
  const auto stream = stub_->Attend(&context);
  std::atomic<int> written{0};
  std::thread writer([&] {
    for (int i = 0; i < 50; ++i) {
      v1::AttendRequest request;
      request.set_request_number(i);
      for (int k = 0; k < kReadsPerAttendMax; ++k) *request.add_reads() = ReadOf(view);
      if (!stream->Write(request)) return;
      ++written;
    }
    stream->WritesDone();
  });
  while (started == 0) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(absl::Milliseconds(300));
  // Three taken, and what the transport itself holds.
  EXPECT_LT(written, 10);
  context.TryCancel();
  absl::SleepFor(absl::Milliseconds(100));  // it has to reach the server
  go.Notify();
  writer.join();
  v1::AttendResponse response;
  while (stream->Read(&response)) continue;
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  Stop();                                          // the kernels use what is on this stack
  EXPECT_LT(started, 3 * kReadsPerAttendMax * 2);  // what nobody waits for is not computed
}

TEST_F(ServiceTest, SurvivesClientsThatGoAwayInTheMiddle) {
  Start();
  const int64_t view = OpenView(ViewRequest());
  for (int round = 0; round < 20; ++round) {
    grpc::ClientContext context;
    const auto stream = stub_->Attend(&context);
    for (int i = 0; i < round % 4; ++i) {
      v1::AttendRequest request;
      for (int k = 0; k < 20; ++k) *request.add_reads() = ReadOf(view);
      stream->Write(request);
    }
    context.TryCancel();
    EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(AttendOne(ReadOf(view)).code(), 0);
}

TEST_F(ServiceTest, DrainingAnswersWhatWasTakenAndEndsStreams) {
  absl::Notification go;
  std::atomic<int> started{0};
  kernels_.attend = [&](const AttendArgs& args, const AttendResult& result, void* workspace) {
    ++started;
    go.WaitForNotification();
    return ::certkv::Attend(Backend::kCpu, args, result, workspace);
  };
  Start();
  const int64_t view = OpenView(ViewRequest());
  grpc::ClientContext idle_context;
  const auto idle = stub_->Attend(&idle_context);
  grpc::ClientContext context;
  const auto stream = stub_->Attend(&context);
  v1::AttendRequest request;
  request.set_request_number(7);
  *request.add_reads() = ReadOf(view);
  ASSERT_TRUE(stream->Write(request));
  while (started == 0) absl::SleepFor(absl::Milliseconds(1));
  server_->Drain();
  v1::AttendResponse response;
  EXPECT_FALSE(idle->Read(&response));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(idle->Finish())), "DRAINING");
  go.Notify();
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(response.request_number(), 7);
  EXPECT_EQ(response.results(0).code(), 0);
  EXPECT_FALSE(stream->Read(&response));
  const absl::Status status = FromGrpcStatus(stream->Finish());
  EXPECT_EQ(ReasonOf(status), "DRAINING");
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(OpenViewReason(ViewRequest()), "DRAINING");
  grpc::ClientContext late_context;
  const auto late = stub_->Attend(&late_context);
  EXPECT_FALSE(late->Read(&response));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(late->Finish())), "DRAINING");
  Stop();  // the kernels use what is on this stack
}

TEST_F(ServiceTest, LimitsStreams) {
  config_.stream_limit = 1;
  Start();
  const int64_t view = OpenView(ViewRequest());
  grpc::ClientContext context;
  const auto stream = stub_->Attend(&context);
  v1::AttendRequest request;
  *request.add_reads() = ReadOf(view);
  v1::AttendResponse response;
  ASSERT_TRUE(stream->Write(request) && stream->Read(&response));
  grpc::ClientContext second_context;
  const auto second = stub_->Attend(&second_context);
  EXPECT_FALSE(second->Read(&response));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(second->Finish())), "STREAM_LIMIT");
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

// 128 query heads with 128 channels: an answer has 64 KiB of outputs.
class WideServiceTest : public ServiceTest {
 protected:
  WideServiceTest() : ServiceTest(SmallSpec(1, 8, 16, 128)) {}
};

TEST_F(WideServiceTest, RefusesReadsWhoseAnswersDoNotFitIntoTheMessage) {
  Start();
  const int64_t view = OpenView(ViewRequest());
  v1::AttendRequest request;
  for (int i = 0; i < 60; ++i) *request.add_reads() = ReadOf(view);
  const v1::AttendResponse response = Attend(request);
  ASSERT_EQ(response.results_size(), 60);
  EXPECT_LE(response.ByteSizeLong(), size_t{kMessageBytesMax});
  EXPECT_EQ(response.results(0).code(), 0) << response.results(0).message();
  EXPECT_EQ(response.results(59).reason(), "ANSWER_TOO_LARGE");
}

TEST_F(ServiceTest, ACumulativeLeaseIsNotOverspentByAMessage) {
  lease_.risk_mode = RiskMode::kCumulative;
  lease_.budget_slice = 2;
  Start();
  const int64_t view = OpenView(ViewRequest());
  const int64_t other_view = OpenView(ViewRequest());  // the same lease
  v1::AttendRequest request;
  for (int i = 0; i < 100; ++i) *request.add_reads() = ReadOf(i % 2 == 0 ? view : other_view);
  const v1::AttendResponse response = Attend(request);
  double spent = 0;
  int exact = 0;
  for (const v1::ReadResult& result : response.results()) {
    ASSERT_EQ(result.code(), 0) << result.message();
    for (const type::Certificate& certificate : result.certificates()) {
      if (certificate.outcome() == type::OUTCOME_CERTIFIED) spent += certificate.worst_case_tv();
      exact += certificate.outcome() == type::OUTCOME_EXACT;
    }
  }
  EXPECT_LE(spent, 2);
  EXPECT_GT(spent, 1);
  EXPECT_GT(exact, 0);
}

}  // namespace
}  // namespace certkv::certifier
