// What the tests of the certifier's service share: a server over a fake cache, and its client.
#ifndef CERTKV_TESTS_SUPPORT_CERTIFIER_SERVICE_FIXTURE_H_
#define CERTKV_TESTS_SUPPORT_CERTIFIER_SERVICE_FIXTURE_H_

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
#include "services/certifier/service.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "tests/support/fake_clock.h"

namespace certkv::certifier {

inline constexpr int64_t kTokenCount = 64 * 3 + 20;

// Gives the fake cache to whoever names it.
class FakeProvider final : public CacheProvider {
 public:
  explicit FakeProvider(FakeCache* fake) : fake_(fake) {}
  void Acquire(const CacheOwner& owner, int64_t staging_id, Done done,
               const std::string& /*traceparent*/) override {
    if (owner.spec_digest != fake_->cache()->spec_digest()) {
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
    *request.mutable_policy() = PolicyLeaseToProto(lease_, clock_.NowMs());
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

}  // namespace certkv::certifier

#endif  // CERTKV_TESTS_SUPPORT_CERTIFIER_SERVICE_FIXTURE_H_
