// The Gate service over an in-process channel, for its tests.
#ifndef CERTKV_TESTS_SUPPORT_GATE_SERVICE_FIXTURE_H_
#define CERTKV_TESTS_SUPPORT_GATE_SERVICE_FIXTURE_H_

#include <grpcpp/grpcpp.h>

#include <boost/asio/executor_work_guard.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "certkv/gate/v1/gate.grpc.pb.h"
#include "gtest/gtest.h"
#include "kernels/core/limits.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/gate/gate_fixture.h"
#include "services/gate/service.h"
#include "tests/support/fake_clock.h"

namespace certkv {

// A server with two threads for its io_context, and a stub to it.
class GateServiceTest : public ::testing::Test {
 protected:
  GateServiceTest() : work_guard_(boost::asio::make_work_guard(io_context_)) {
    for (int i = 0; i < 2; ++i) threads_.emplace_back([this] { io_context_.run(); });
    config_.watcher_limit = 2;
    Start();
  }
  ~GateServiceTest() override {
    Stop();
    work_guard_.reset();
    io_context_.stop();
    for (std::thread& thread : threads_) thread.join();
  }

  void Start() {
    gate_ = *GateServer::Create(config_, &clock_, &io_context_);
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    for (grpc::Service* service : gate_->grpc_services()) builder.RegisterService(service);
    server_ = builder.BuildAndStart();
    stub_ = gate::v1::Gate::NewStub(server_->InProcessChannel({}));
  }
  void Stop() {
    gate_->Drain();
    server_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(5));
    server_->Wait();
    stub_.reset();
    server_.reset();
    gate_.reset();
  }

  // Calls a unary method with a deadline; fails the test unless it succeeds.
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (gate::v1::Gate::Stub::*method)(grpc::ClientContext*,
                                                                 const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    return FromGrpcStatus((stub_.get()->*method)(&context, request, response));
  }
  type::PolicyLease Open(const std::string& id) {
    gate::v1::OpenRequestRequest request;
    request.set_request_id(id);
    gate::v1::OpenRequestResponse response;
    EXPECT_TRUE(Call(&gate::v1::Gate::Stub::OpenRequest, request, &response).ok());
    return response.lease();
  }
  gate::v1::RequestRisk Risk(const std::string& id) {
    gate::v1::GetRequestRiskRequest request;
    request.set_request("requests/" + id);
    gate::v1::RequestRisk risk;
    EXPECT_TRUE(Call(&gate::v1::Gate::Stub::GetRequestRisk, request, &risk).ok());
    return risk;
  }
  static gate::v1::ReportRequest Batch(const std::string& id, int64_t number,
                                       const std::vector<ReadCertificate>& certificates) {
    gate::v1::ReportRequest batch;
    batch.set_request("requests/" + id);
    batch.set_reporter_id(77);
    batch.set_batch_number(number);
    for (const ReadCertificate& certificate : certificates) {
      *batch.add_certificates() = ReadCertificateToProto(certificate);
    }
    return batch;
  }

  struct ReportCall {
    explicit ReportCall(gate::v1::Gate::Stub* stub) : stream(stub->Report(&context)) {}
    // One batch and its answer; false when the stream has ended.
    bool Exchange(const gate::v1::ReportRequest& batch, gate::v1::ReportResponse* response) const {
      return stream->Write(batch) && stream->Read(response);
    }
    absl::Status End() const {
      stream->WritesDone();
      gate::v1::ReportResponse response;
      while (stream->Read(&response)) {
      }
      return FromGrpcStatus(stream->Finish());
    }
    grpc::ClientContext context;
    std::unique_ptr<grpc::ClientReaderWriter<gate::v1::ReportRequest, gate::v1::ReportResponse>>
        stream;
  };

  GateConfig config_;
  FakeClock clock_;
  boost::asio::io_context io_context_;
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_guard_;
  std::vector<std::thread> threads_;
  std::unique_ptr<GateServer> gate_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<gate::v1::Gate::Stub> stub_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_GATE_SERVICE_FIXTURE_H_
