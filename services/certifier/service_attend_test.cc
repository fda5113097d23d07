#include "services/certifier/service_attend.h"

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

TEST_F(ServiceTest, TellsHowLongThreadsAreBusyAndMessagesWait) {
  absl::Notification go;
  std::atomic<int> started{0};
  kernels_.attend = [&](const AttendArgs& args, const AttendResult& result, void* workspace) {
    ++started;
    go.WaitForNotification();
    clock_.AdvanceMs(10);
    return ::certkv::Attend(Backend::kCpu, args, result, workspace);
  };
  config_.read_threads = 1;
  Start();
  const int64_t view = OpenView(ViewRequest());
  grpc::ClientContext context;
  const auto stream = stub_->Attend(&context);
  v1::AttendRequest request;
  *request.add_reads() = ReadOf(view);
  // The server has two threads: the third message waits until one of them is free.
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Write(request));
  while (started < 2) absl::SleepFor(absl::Milliseconds(1));
  for (int i = 0; i < 500; ++i) {
    clock_.AdvanceMs(1);
    absl::SleepFor(absl::Milliseconds(1));
  }
  go.Notify();
  v1::AttendResponse response;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(stream->Read(&response));
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
  const CertifierCounters& counters = server_->counters();
  // Two KV heads a message, 10 ms each; two were busy while the clock went on.
  EXPECT_GE(counters.busy_ns, int64_t{2 * 500 + 6 * 10} * 1'000'000);
  const HistogramSnapshot queue = counters.queue_seconds.Snapshot();
  EXPECT_EQ(queue.cumulative_counts.back(), 3);
  EXPECT_GE(queue.sum, 0.25) << "the third came at most 250 ms late";
  EXPECT_LE(queue.sum, 0.6) << "the first two did not wait";
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
