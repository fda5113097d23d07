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
#include "tests/support/certifier_service_fixture.h"
#include "tests/support/fake_clock.h"

namespace certkv::certifier {
namespace {

using ::testing::Each;
using ::testing::SizeIs;

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
  *update.mutable_policy() = PolicyLeaseToProto(lease_, clock_.NowMs());
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

}  // namespace
}  // namespace certkv::certifier
