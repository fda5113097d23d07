// The Gate service over an in-process channel.
#include "services/gate/service.h"

#include <grpcpp/grpcpp.h>

#include <boost/asio/executor_work_guard.hpp>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/gate/gate_fixture.h"
#include "tests/support/fake_clock.h"
#include "tests/support/gate_service_fixture.h"

namespace certkv {
namespace {

namespace v1 = gate::v1;
using ::testing::HasSubstr;

TEST_F(GateServiceTest, OpensReportsAndClosesARequest) {
  const type::PolicyLease lease = Open("a");
  EXPECT_EQ(lease.request(), "requests/a");
  EXPECT_EQ(lease.expire_time_ms(), FakeClock::kStartMs + 30'000);

  ReportCall call(stub_.get());
  v1::ReportRequest batch = Batch("a", 1, {gate::Certified(0.125f, 2, 5), gate::Exact(0.5f)});
  batch.set_failed_read_count(3);
  batch.set_lease_id(lease.lease_id());
  v1::ReportResponse response;
  ASSERT_TRUE(call.Exchange(batch, &response));
  EXPECT_EQ(response.request(), "requests/a");
  EXPECT_EQ(response.batch_number(), 1);
  EXPECT_EQ(response.directive().action(), v1::DIRECTIVE_ACTION_CONTINUE);
  EXPECT_EQ(response.lease().lease_id(), lease.lease_id());
  EXPECT_TRUE(call.End().ok());

  v1::CloseRequestRequest close;
  close.set_request("requests/a");
  v1::RequestRisk risk;
  ASSERT_TRUE(Call(&v1::Gate::Stub::CloseRequest, close, &risk).ok());
  EXPECT_TRUE(risk.closed());
  EXPECT_EQ(risk.read_count(), 2);
  EXPECT_EQ(risk.failed_read_count(), 3);
  EXPECT_EQ(risk.reads_certified_first(), 1);
  EXPECT_EQ(risk.reads_exact(), 1);
  EXPECT_EQ(risk.max_worst_case_tv(), 0.125f);
  EXPECT_EQ(risk.sum_worst_case_tv(), 0.125);
  EXPECT_EQ(risk.risk_score(), 0.5f);
  ASSERT_EQ(risk.heads_size(), 2);
  EXPECT_EQ(risk.heads(0).layer(), 2);
  EXPECT_EQ(risk.heads(0).query_head(), 5);
  ASSERT_EQ(risk.histogram_bounds_size(), risk.heads(0).histogram_size());
  for (int i = 0; i < risk.histogram_bounds_size(); ++i) {
    EXPECT_EQ(risk.heads(0).histogram(i), risk.histogram_bounds(i) == 0.125f ? 1 : 0);
  }
  EXPECT_EQ(risk.histogram_bounds(risk.histogram_bounds_size() - 1), 1);
}

TEST_F(GateServiceTest, RefusesEveryUnaryCallWithoutADeadline) {
  const auto reason = [this](auto method, const auto& request, auto* response) {
    grpc::ClientContext context;
    return ReasonOf(FromGrpcStatus((stub_.get()->*method)(&context, request, response)));
  };
  using Stub = v1::Gate::Stub;
  v1::OpenRequestResponse opened;
  v1::DecideResponse decided;
  v1::RequestRisk risk;
  v1::ListRequestRisksResponse page;
  v1::Policy policy;
  EXPECT_EQ(reason(&Stub::OpenRequest, v1::OpenRequestRequest(), &opened), "DEADLINE_REQUIRED");
  EXPECT_EQ(reason(&Stub::Decide, v1::DecideRequest(), &decided), "DEADLINE_REQUIRED");
  EXPECT_EQ(reason(&Stub::CloseRequest, v1::CloseRequestRequest(), &risk), "DEADLINE_REQUIRED");
  EXPECT_EQ(reason(&Stub::GetRequestRisk, v1::GetRequestRiskRequest(), &risk), "DEADLINE_REQUIRED");
  EXPECT_EQ(reason(&Stub::ListRequestRisks, v1::ListRequestRisksRequest(), &page),
            "DEADLINE_REQUIRED");
  EXPECT_EQ(reason(&Stub::GetPolicy, v1::GetPolicyRequest(), &policy), "DEADLINE_REQUIRED");
  EXPECT_EQ(reason(&Stub::UpdatePolicy, v1::UpdatePolicyRequest(), &policy), "DEADLINE_REQUIRED");
}

TEST_F(GateServiceTest, ErrorsCarryTheirReasonAndDomain) {
  v1::GetRequestRiskRequest request;
  request.set_request("requests/nobody");
  v1::RequestRisk risk;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  const grpc::Status status = stub_->GetRequestRisk(&context, request, &risk);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  type::ErrorDetail detail;
  ASSERT_TRUE(detail.ParseFromString(status.error_details()));
  EXPECT_EQ(detail.reason(), "REQUEST_NOT_FOUND");
  EXPECT_EQ(detail.domain(), "gate.certkv");
}

TEST_F(GateServiceTest, CountsABatchOnceAcrossStreams) {
  Open("a");
  for (int i = 0; i < 3; ++i) {
    ReportCall call(stub_.get());  // as after a broken stream
    v1::ReportResponse response;
    ASSERT_TRUE(call.Exchange(Batch("a", 1, {gate::Certified(0.1f)}), &response));
    EXPECT_EQ(response.batch_number(), 1);
    call.context.TryCancel();
  }
  EXPECT_EQ(Risk("a").read_count(), 1);
}

TEST_F(GateServiceTest, EndsTheStreamAtABadBatchAndCountsNothingOfIt) {
  Open("a");
  const auto reason_of = [this](const v1::ReportRequest& batch) {
    ReportCall call(stub_.get());
    v1::ReportResponse response;
    EXPECT_FALSE(call.Exchange(batch, &response));
    return ReasonOf(call.End());
  };
  v1::ReportRequest bad = Batch("a", 1, {gate::Certified(0.1f), gate::Certified(0.1f)});
  bad.mutable_certificates(1)->set_worst_case_tv(std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(reason_of(bad), "CERTIFICATE_INVALID");
  EXPECT_EQ(reason_of(Batch("a", 2, {})), "BATCH_GAP");
  EXPECT_EQ(reason_of(Batch("a", 0, {})), "REPORT_INVALID");
  bad = Batch("a", 1, {});
  bad.set_request("a");
  EXPECT_EQ(reason_of(bad), "REQUEST_NAME_INVALID");
  EXPECT_EQ(Risk("a").read_count(), 0);
}

TEST_F(GateServiceTest, TakesLargeBatchesAndRefusesOversizedMessages) {
  Open("a");
  ReportCall call(stub_.get());
  v1::ReportResponse response;
  const std::vector<ReadCertificate> many(40'000, gate::Certified(0.125f));
  ASSERT_TRUE(call.Exchange(Batch("a", 1, many), &response));
  EXPECT_TRUE(call.End().ok());
  EXPECT_EQ(Risk("a").read_count(), 40'000);
  EXPECT_EQ(Risk("a").sum_worst_case_tv(), 5000);

  ReportCall large(stub_.get());
  v1::ReportRequest batch = Batch("a", 2, {});
  batch.set_request(std::string(kMessageBytesMax + 1, 'x'));
  large.Exchange(batch, &response);
  EXPECT_EQ(large.End().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(GateServiceTest, ForcesExactAfterAReadOutsideTolerance) {
  Open("a");
  ReportCall call(stub_.get());
  v1::ReportResponse response;
  ASSERT_TRUE(call.Exchange(Batch("a", 1, {gate::Certified(0.9f)}), &response));
  EXPECT_EQ(response.directive().action(), v1::DIRECTIVE_ACTION_FORCE_EXACT);
  EXPECT_EQ(response.lease().read_mode(), type::READ_MODE_EXACT);
  const v1::RequestRisk risk = Risk("a");
  EXPECT_EQ(risk.reads_outside_tolerance(), 1);
  EXPECT_TRUE(risk.forced_exact());
  ASSERT_EQ(risk.events_size(), 1);
  EXPECT_EQ(risk.events(0).kind(), "OUTSIDE_TOLERANCE");
}

TEST_F(GateServiceTest, ReleasesReportersAfterARestart) {
  Open("a");
  Stop();
  Start();
  ReportCall call(stub_.get());
  v1::ReportResponse response;
  ASSERT_TRUE(call.Exchange(Batch("a", 9, {gate::Certified(0.1f)}), &response));
  EXPECT_EQ(response.directive().action(), v1::DIRECTIVE_ACTION_RELEASE);
  EXPECT_FALSE(response.has_lease());
  EXPECT_THAT(response.directive().explanation(), HasSubstr("gate was restarted"));
}

TEST_F(GateServiceTest, DecidesOneRead) {
  Open("a");
  v1::DecideRequest request;
  request.set_request("requests/a");
  *request.mutable_certificate() = ReadCertificateToProto(gate::Certified(0.3f));
  v1::DecideResponse response;
  ASSERT_TRUE(Call(&v1::Gate::Stub::Decide, request, &response).ok());
  EXPECT_FALSE(response.accepted());
  EXPECT_EQ(response.next_rung(), type::RUNG_KEYS);
  request.mutable_certificate()->set_worst_case_tv(0.1f);
  request.mutable_certificate()->set_rung(type::RUNG_KEYS);
  ASSERT_TRUE(Call(&v1::Gate::Stub::Decide, request, &response).ok());
  EXPECT_TRUE(response.accepted());
  EXPECT_EQ(Risk("a").reads_repaired_keys(), 1);
  request.mutable_certificate()->set_value_term(std::numeric_limits<float>::quiet_NaN());
  EXPECT_EQ(ReasonOf(Call(&v1::Gate::Stub::Decide, request, &response)), "CERTIFICATE_INVALID");
}

TEST_F(GateServiceTest, ListsRisksInPages) {
  for (int i = 1; i <= 5; ++i) {
    const std::string id = absl::StrCat("r", i);
    Open(id);
    ReportCall call(stub_.get());
    v1::ReportResponse response;
    ASSERT_TRUE(
        call.Exchange(Batch(id, 1, {gate::Certified(0.01f * static_cast<float>(i))}), &response));
  }
  v1::ListRequestRisksRequest request;
  request.set_page_size(3);
  v1::ListRequestRisksResponse page;
  ASSERT_TRUE(Call(&v1::Gate::Stub::ListRequestRisks, request, &page).ok());
  ASSERT_EQ(page.risks_size(), 3);
  EXPECT_EQ(page.risks(0).request(), "requests/r5");
  request.set_page_token(page.next_page_token());
  ASSERT_TRUE(Call(&v1::Gate::Stub::ListRequestRisks, request, &page).ok());
  ASSERT_EQ(page.risks_size(), 2);
  EXPECT_EQ(page.risks(1).request(), "requests/r1");
  EXPECT_EQ(page.next_page_token(), "");
}

TEST_F(GateServiceTest, UpdatesThePolicy) {
  v1::Policy policy;
  ASSERT_TRUE(Call(&v1::Gate::Stub::GetPolicy, v1::GetPolicyRequest(), &policy).ok());
  EXPECT_EQ(policy.version(), 1);
  EXPECT_EQ(policy.tolerances().tv_tolerance(), 0.2f);
  v1::UpdatePolicyRequest update;
  *update.mutable_policy() = policy;
  update.mutable_policy()->mutable_tolerances()->set_tv_tolerance(0.05f);
  ASSERT_TRUE(Call(&v1::Gate::Stub::UpdatePolicy, update, &policy).ok());
  EXPECT_EQ(policy.version(), 2);
  EXPECT_EQ(ReasonOf(Call(&v1::Gate::Stub::UpdatePolicy, update, &policy)), "POLICY_VERSION");
  update.mutable_policy()->clear_read_mode();
  EXPECT_EQ(ReasonOf(Call(&v1::Gate::Stub::UpdatePolicy, update, &policy)), "READ_MODE_INVALID");
  EXPECT_EQ(Open("a").tolerances().tv_tolerance(), 0.05f);
}

TEST_F(GateServiceTest, WatchTellsEachChangeUntilTheRequestIsClosed) {
  Open("a");
  grpc::ClientContext context;
  v1::WatchRequestRiskRequest request;
  request.set_request("requests/a");
  auto reader = stub_->WatchRequestRisk(&context, request);
  v1::RequestRisk risk;
  ASSERT_TRUE(reader->Read(&risk)) << "at once";
  EXPECT_EQ(risk.read_count(), 0);

  ReportCall call(stub_.get());
  v1::ReportResponse response;
  ASSERT_TRUE(call.Exchange(Batch("a", 1, {gate::Certified(0.1f)}), &response));
  ASSERT_TRUE(reader->Read(&risk));
  EXPECT_EQ(risk.read_count(), 1);

  v1::CloseRequestRequest close;
  close.set_request("requests/a");
  v1::RequestRisk closed;
  ASSERT_TRUE(Call(&v1::Gate::Stub::CloseRequest, close, &closed).ok());
  ASSERT_TRUE(reader->Read(&risk));
  EXPECT_TRUE(risk.closed());
  EXPECT_FALSE(reader->Read(&risk));
  EXPECT_TRUE(reader->Finish().ok());
}

TEST_F(GateServiceTest, WatchTellsAtMostTenTimesASecond) {
  Open("a");
  grpc::ClientContext context;
  v1::WatchRequestRiskRequest request;
  request.set_request("requests/a");
  auto reader = stub_->WatchRequestRisk(&context, request);
  v1::RequestRisk risk;
  ASSERT_TRUE(reader->Read(&risk));
  const absl::Time begin = absl::Now();
  std::thread reporter([this] {
    ReportCall call(stub_.get());
    v1::ReportResponse response;
    for (int64_t number = 1; number <= 400; ++number) {
      EXPECT_TRUE(call.Exchange(Batch("a", number, {gate::Certified(0.1f)}), &response));
      absl::SleepFor(absl::Milliseconds(1));
    }
  });
  int message_count = 0;
  do {
    ASSERT_TRUE(reader->Read(&risk));
    ++message_count;
  } while (risk.read_count() < 400);
  const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  reporter.join();
  EXPECT_LE(message_count, seconds * 10 + 2);
  context.TryCancel();
}

TEST_F(GateServiceTest, WatchRefusesUnknownRequestsAndTooManyWatchers) {
  const auto end_of = [this](const std::string& name) {
    grpc::ClientContext context;
    v1::WatchRequestRiskRequest request;
    request.set_request(name);
    auto reader = stub_->WatchRequestRisk(&context, request);
    v1::RequestRisk risk;
    EXPECT_FALSE(reader->Read(&risk));
    return ReasonOf(FromGrpcStatus(reader->Finish()));
  };
  EXPECT_EQ(end_of("requests/nobody"), "REQUEST_NOT_FOUND");
  EXPECT_EQ(end_of("nobody"), "REQUEST_NAME_INVALID");

  Open("a");
  v1::WatchRequestRiskRequest request;
  request.set_request("requests/a");
  grpc::ClientContext contexts[2];
  std::vector<std::unique_ptr<grpc::ClientReader<v1::RequestRisk>>> readers;
  v1::RequestRisk risk;
  for (grpc::ClientContext& context : contexts) {
    readers.push_back(stub_->WatchRequestRisk(&context, request));
    ASSERT_TRUE(readers.back()->Read(&risk));
  }
  EXPECT_EQ(end_of("requests/a"), "WATCH_LIMIT");
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  for (auto& reader : readers) {
    while (reader->Read(&risk)) {
    }
    reader->Finish();
  }
  // The places are free again, once the server has seen the end of the streams.
  for (bool told = false; !told;) {
    grpc::ClientContext context;
    told = stub_->WatchRequestRisk(&context, request)->Read(&risk);
    context.TryCancel();
  }
}

TEST_F(GateServiceTest, DrainEndsStreamsAndKeepsWhatWasCounted) {
  Open("a");
  ReportCall report(stub_.get());
  v1::ReportResponse response;
  ASSERT_TRUE(report.Exchange(Batch("a", 1, {gate::Certified(0.1f)}), &response));
  grpc::ClientContext context;
  v1::WatchRequestRiskRequest request;
  request.set_request("requests/a");
  auto watch = stub_->WatchRequestRisk(&context, request);
  v1::RequestRisk risk;
  ASSERT_TRUE(watch->Read(&risk));

  gate_->Drain();
  EXPECT_FALSE(report.stream->Read(&response));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(report.stream->Finish())), "DRAINING");
  while (watch->Read(&risk)) {
  }
  EXPECT_EQ(ReasonOf(FromGrpcStatus(watch->Finish())), "DRAINING");
  ReportCall late(stub_.get());
  EXPECT_EQ(ReasonOf(late.End()), "DRAINING");
  EXPECT_EQ(Risk("a").read_count(), 1) << "unary calls go on";
}

TEST_F(GateServiceTest, SweepsIdleRequests) {
  Open("a");
  clock_.AdvanceMs(config_.idle_timeout_ms);
  const absl::Time end = absl::Now() + absl::Seconds(30);
  while (!Risk("a").closed() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(20));
  EXPECT_TRUE(Risk("a").closed());
  EXPECT_EQ(Risk("a").events(0).kind(), "IDLE");
}

TEST_F(GateServiceTest, ManyReportersAtOnceAreCountedExactly) {
  Open("a");
  std::vector<std::thread> reporters;
  for (int64_t reporter = 1; reporter <= 8; ++reporter) {
    reporters.emplace_back([this, reporter] {
      ReportCall call(stub_.get());
      v1::ReportResponse response;
      for (int64_t number = 1; number <= 50; ++number) {
        // Every third batch is large enough for the io_context's threads.
        v1::ReportRequest batch =
            Batch("a", number,
                  std::vector<ReadCertificate>(number % 3 == 0 ? 300 : 3, gate::Certified(0.125f)));
        batch.set_reporter_id(reporter);
        EXPECT_TRUE(call.Exchange(batch, &response));
      }
      EXPECT_TRUE(call.End().ok());
    });
  }
  for (std::thread& reporter : reporters) reporter.join();
  EXPECT_EQ(Risk("a").read_count(), 8 * (16 * 300 + 34 * 3));
}

TEST(GateServerTest, RefusesAPolicyThatNoSchemaChecked) {
  GateConfig config;
  config.policy.tolerances.tv_tolerance = 7;
  boost::asio::io_context io_context;
  EXPECT_EQ(ReasonOf(GateServer::Create(config, RealClock(), &io_context).status()),
            "POLICY_INVALID");
}

}  // namespace
}  // namespace certkv
