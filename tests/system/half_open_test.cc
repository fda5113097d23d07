// Connections whose other end is gone and did not say so.
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cpp/request.h"
#include "tests/support/loopback.h"
#include "tests/support/tcp_proxy.h"
#include "tests/system/cluster.h"

namespace certkv {
namespace {

class HalfOpenTest : public ::testing::Test {
 protected:
  void SetUp() override {
    port_ = UnusedPort();
    auto cluster = Cluster::Start(
        ClusterShape::kAllInOne, "",
        {.server_yaml = absl::StrCat(
             "server:\n  tcp_security: insecure\n  tcp_address: 127.0.0.1:", port_, "\n")});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
    options_ = cluster_->options();
    options_.rpc_timeout_ms = 1000;
  }

  int32_t port_ = 0;
  std::unique_ptr<Cluster> cluster_;
  client::Options options_;
};

TEST_F(HalfOpenTest, AConnectionThatWentSilentIsMadeAnew) {
  TcpProxy proxy(port_);
  options_.gate_target = proxy.address();
  const auto request = client::Request::Open(options_, "long", {});
  ASSERT_TRUE(request.ok()) << request.status();
  ASSERT_TRUE((*request)->Risk().ok());
  proxy.FreezeOpen();
  EXPECT_FALSE((*request)->Risk().ok()) << "its connection is half open";
  const absl::Time end = absl::Now() + absl::Seconds(40);
  absl::Status status = absl::UnknownError("not asked");
  while (!status.ok() && absl::Now() < end) status = (*request)->Risk().status();
  EXPECT_TRUE(status.ok()) << "after 40 s: " << status;
}

TEST_F(HalfOpenTest, AGateThatAcceptsAndSaysNothingIsPassedOver) {
  int32_t silent_port = 0;
  const UniqueFd silent = ListenOnLoopback(&silent_port);  // the system accepts, nobody reads
  options_.rpc_timeout_ms = 5000;
  options_.gate_target = absl::StrCat("ipv4:127.0.0.1:", silent_port, ",127.0.0.1:", port_);
  for (int i = 0; i < 5; ++i) {
    const auto request = client::Request::Open(options_, absl::StrCat("r", i), {});
    EXPECT_TRUE(request.ok()) << request.status();
  }
}

}  // namespace
}  // namespace certkv
