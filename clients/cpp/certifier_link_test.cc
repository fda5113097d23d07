#include "clients/cpp/certifier_link.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "services/common/errors.h"

namespace certkv::client {
namespace {

namespace v1 = certkv::certifier::v1;

// Opens views whose ids say which certifier it is.
class FakeCertifier final : public v1::Certifier::Service {
 public:
  explicit FakeCertifier(int64_t number) : number_(number) {}

  grpc::Status OpenView(grpc::ServerContext* /*context*/, const v1::OpenViewRequest* /*request*/,
                        v1::OpenViewResponse* response) override {
    ++opened;
    if (refuses) return ToGrpcStatus(absl::UnavailableError("draining"), "test");
    response->set_view_id(number_);
    return grpc::Status::OK;
  }
  grpc::Status CloseView(grpc::ServerContext* /*context*/, const v1::CloseViewRequest* request,
                         v1::CloseViewResponse* /*response*/) override {
    return request->view_id() == number_ ? grpc::Status::OK
                                         : grpc::Status(grpc::StatusCode::NOT_FOUND, "another's");
  }

  std::atomic<int> opened{0};
  std::atomic<bool> refuses{false};

 private:
  const int64_t number_;
};

class CertifierLinkTest : public ::testing::Test {
 protected:
  CertifierLinkTest() {
    std::string pattern = absl::StrCat(::testing::TempDir(), "certkv_link_XXXXXX");
    directory_ = mkdtemp(pattern.data());
  }
  ~CertifierLinkTest() override { std::filesystem::remove_all(directory_); }

  void Start(int count) {
    std::vector<std::string> paths;
    for (int i = 0; i < count; ++i) {
      paths.push_back(absl::StrCat(directory_, "/", i, ".sock"));
      fakes_.push_back(std::make_unique<FakeCertifier>(i + 1));
      grpc::ServerBuilder builder;
      builder.AddListeningPort("unix:" + paths.back(), grpc::InsecureServerCredentials());
      builder.RegisterService(fakes_.back().get());
      servers_.push_back(builder.BuildAndStart());
    }
    options_.certifier_target = "unix:" + absl::StrJoin(paths, ",");
    options_.rpc_timeout_ms = 5000;
    balancer_ = MakeCertifierBalancer(options_);
  }
  void Stop(int index) { servers_[index]->Shutdown(std::chrono::system_clock::now()); }

  // The number of the certifier that opened the view; 0 when none did.
  int64_t Open(CertifierLink& link) {
    v1::OpenViewResponse response;
    const absl::Status status = link.OpenView("", {}, &response);
    return status.ok() ? response.view_id() : 0;
  }
  // Opens views until every certifier has opened one: the balancer knows all of them.
  void Connect() {
    CertifierLink link(options_, balancer_);
    std::map<int64_t, int> seen;
    for (int i = 0; i < 1000 && seen.size() < fakes_.size(); ++i) {
      ++seen[Open(link)];
      absl::SleepFor(absl::Milliseconds(5));
    }
    ASSERT_EQ(seen.size(), fakes_.size());
  }
  static absl::Status Close(const CertifierLink& link, int64_t view) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    v1::CloseViewRequest request;
    request.set_view_id(view);
    v1::CloseViewResponse response;
    return FromGrpcStatus(link.stub()->CloseView(&context, request, &response));
  }

  std::string directory_;
  std::vector<std::unique_ptr<FakeCertifier>> fakes_;
  std::vector<std::unique_ptr<grpc::Server>> servers_;
  Options options_;
  std::shared_ptr<grpc::Channel> balancer_;
};

TEST_F(CertifierLinkTest, ViewsSpreadEvenlyAndTheirCallsStayWithThem) {
  Start(3);
  Connect();
  for (const auto& fake : fakes_) fake->opened = 0;
  std::vector<std::unique_ptr<CertifierLink>> links;
  for (int i = 0; i < 9; ++i) {
    links.push_back(std::make_unique<CertifierLink>(options_, balancer_));
    const int64_t view = Open(*links.back());
    for (int call = 0; call < 4; ++call) EXPECT_TRUE(Close(*links.back(), view).ok());
    EXPECT_EQ(links.back()->peer(), absl::StrCat("unix:", directory_, "/", view - 1, ".sock"));
  }
  for (const auto& fake : fakes_) EXPECT_EQ(fake->opened, 3);
}

TEST_F(CertifierLinkTest, AnotherCertifierOpensTheViewWhenOneIsGone) {
  Start(2);
  Connect();
  CertifierLink link(options_, balancer_);
  const int64_t first = Open(link);
  ASSERT_NE(first, 0);
  Stop(static_cast<int>(first) - 1);
  EXPECT_FALSE(Close(link, first).ok());
  const int64_t second = Open(link);
  EXPECT_EQ(second, 3 - first);
  EXPECT_TRUE(Close(link, second).ok());
}

TEST_F(CertifierLinkTest, ASecondCertifierIsAskedWhenOneDrains) {
  Start(2);
  Connect();
  fakes_[0]->refuses = true;
  for (int i = 0; i < 4; ++i) {
    CertifierLink link(options_, balancer_);
    EXPECT_EQ(Open(link), 2);
  }
  EXPECT_GT(fakes_[0]->opened, 0);
}

TEST_F(CertifierLinkTest, NoneIsAskedForEverWhenAllAreGone) {
  Start(2);
  Connect();
  Stop(0);
  Stop(1);
  CertifierLink link(options_, balancer_);
  v1::OpenViewResponse response;
  EXPECT_TRUE(absl::IsUnavailable(link.OpenView("", {}, &response)));
  EXPECT_EQ(link.stub(), nullptr);
}

TEST_F(CertifierLinkTest, OneCertifierNeedsNoBalancer) {
  Start(1);
  EXPECT_EQ(balancer_, nullptr);
  CertifierLink link(options_, balancer_);
  EXPECT_NE(link.stub(), nullptr);
  EXPECT_EQ(Open(link), 1);
  EXPECT_TRUE(Close(link, 1).ok());
}

TEST(IsReplicatedTest, ListsAndNamesAreAndSingleAddressesAreNot) {
  for (const char* target : {"unix:/a,/b", "ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1,[::2]:1",
                             "dns:///certifier:7003", "dns:certifier:7003"}) {
    EXPECT_TRUE(IsReplicated(target)) << target;
  }
  for (const char* target : {"unix:/a", "host:7003", "10.0.0.1:7003", "ipv4:10.0.0.1:1", ""}) {
    EXPECT_FALSE(IsReplicated(target)) << target;
  }
}

TEST(StartAnywhereTest, RotatesListsAndLeavesTheRest) {
  EXPECT_EQ(StartAnywhere("unix:/a,/b,/c", 0), "unix:/a,/b,/c");
  EXPECT_EQ(StartAnywhere("unix:/a,/b,/c", 4), "unix:/b,/c,/a");
  EXPECT_EQ(StartAnywhere("ipv6:[::1]:1,[::2]:1", 1), "ipv6:[::2]:1,[::1]:1");
  for (const char* target : {"unix:/a", "dns:///gate:7002", "host:7002", ""}) {
    EXPECT_EQ(StartAnywhere(target, 1), target);
  }
}

}  // namespace
}  // namespace certkv::client
