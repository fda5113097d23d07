// Programs of two releases beside each other: neighbours work together, others say why not.
//
// Releases here are those that speak the wire versions 1 (this one), 1-2 (the next), 2-3 (the one
// after it); other_release.cc makes them, of this program too.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/status.h"
#include "services/common/wire_version.h"
#include "tests/support/loopback.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

constexpr char kThis[] = "1-1";
constexpr char kNext[] = "1-2";
constexpr char kAfterNext[] = "2-3";
constexpr int32_t kTokens = 64 * 4;

class ReleaseTest : public SystemTest {
 protected:
  ReleaseTest() : data_(SmallSpec(), kTokens, 31) {}
  ~ReleaseTest() override { Speak(kThis); }

  // What this program speaks on the channels that it makes from now on.
  static void Speak(const char* versions) { setenv(kOtherReleaseVersions, versions, 1); }
  void StartServers(const std::string& versions) {
    auto cluster = Cluster::Start(GetParam(), "", {.wire_versions = versions});
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  // Puts and reads with all three servers.
  void PutAndRead(const std::string& who) {
    SCOPED_TRACE(who);
    auto worker = client::Worker::Attach(cluster_->options(), data_.spec);
    ASSERT_TRUE(worker.ok()) << worker.status();
    const auto sequence = Put(**worker, data_);
    ASSERT_NE(sequence, nullptr);
    const auto request = OpenRequest(absl::StrCat("r", ++requests_));
    ASSERT_NE(request, nullptr);
    auto attention = client::Attention::Open(**worker, *sequence, *request);
    ASSERT_TRUE(attention.ok()) << attention.status();
    for (const auto& result : ReadAndCheck(**attention, data_, kTokens, 7)) {
      EXPECT_FALSE(result.in_process) << "read by the certifier";
    }
  }
  // `status` names both sides' versions and who is to be upgraded.
  static void ExpectRefusal(const absl::Status& status, const std::string& says,
                            const std::string& remedy) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(status), "WIRE_VERSION");
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
    EXPECT_THAT(std::string(status.message()), HasSubstr(remedy));
  }

  const TestSequence data_;
  int requests_ = 0;
};

TEST_P(ReleaseTest, AClusterIsUpgradedServerByServerUnderReads) {
  Speak(kThis);
  ASSERT_NO_FATAL_FAILURE(StartServers(""));
  ASSERT_NO_FATAL_FAILURE(PutAndRead("before"));
  auto worker = AttachWorker(data_.spec);
  auto sequence = Put(*worker, data_);
  const auto request = OpenRequest("goes-on");
  auto attention = client::Attention::Open(*worker, *sequence, *request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  for (const ClusterService service : {ClusterService::kCertifier, ClusterService::kGate}) {
    ASSERT_TRUE(cluster_->Replace(service, kNext).ok());
    // What was open goes on, certified by the new one or exact.
    ReadAndCheck(**attention, data_, kTokens, 9);
    ASSERT_NO_FATAL_FAILURE(PutAndRead("a client of this release, half upgraded"));
    Speak(kNext);
    ASSERT_NO_FATAL_FAILURE(PutAndRead("a client of the next release, half upgraded"));
    Speak(kThis);
  }
  attention->reset();
  sequence.reset();
  ASSERT_TRUE(cluster_->Replace(ClusterService::kStore, kNext).ok());
  ASSERT_NO_FATAL_FAILURE(PutAndRead("a client of this release, all upgraded"));
  // And back again.
  ASSERT_TRUE(cluster_->Replace(ClusterService::kCertifier, "").ok());
  ASSERT_NO_FATAL_FAILURE(PutAndRead("an old certifier of the new store"));
}

TEST_P(ReleaseTest, AClientTwoReleasesAheadIsToldToUpgradeTheServer) {
  ASSERT_NO_FATAL_FAILURE(StartServers(""));
  Speak(kAfterNext);
  const auto worker = client::Worker::Attach(cluster_->options(), data_.spec);
  ExpectRefusal(worker.status(), "the client speaks wire versions 2 to 3, the server 1;",
                "upgrade the server to a release that speaks version 2");
  const auto request = client::Request::Open(cluster_->options(), "r", {});
  ExpectRefusal(request.status(), "the server 1;", "upgrade the server");
}

TEST_P(ReleaseTest, AClientTwoReleasesBehindIsToldToUpgrade) {
  ASSERT_NO_FATAL_FAILURE(StartServers(kAfterNext));
  Speak(kThis);
  const auto worker = client::Worker::Attach(cluster_->options(), data_.spec);
  ExpectRefusal(worker.status(), "the client speaks wire versions 1, the server 2 to 3;",
                "upgrade the client to a release that speaks version 2");
  const auto request = client::Request::Open(cluster_->options(), "r", {});
  ExpectRefusal(request.status(), "the server 2 to 3", "upgrade the client");
}

// It maps the store's memory, so it asks before it does.
TEST_P(ReleaseTest, ACertifierTwoReleasesFromItsStoreServesNothing) {
  Speak(kThis);
  ASSERT_NO_FATAL_FAILURE(StartServers(""));
  ASSERT_TRUE(cluster_->Replace(ClusterService::kCertifier, kAfterNext).ok());
  Speak(kNext);  // a neighbour of both
  const auto worker = AttachWorker(data_.spec);
  const auto sequence = Put(*worker, data_);
  const auto request = OpenRequest("r");
  auto attention = client::Attention::Open(*worker, *sequence, *request);
  ExpectRefusal(attention.status(), "wire versions 2 to 3, the server 1;", "upgrade the server");
}

TEST_P(ReleaseTest, StoresPullFromNeighboursOnly) {
  Speak(kNext);  // a neighbour of all
  const std::string peer = absl::StrCat("127.0.0.1:", UnusedPort());
  const std::string insecure = "server:\n  tcp_security: insecure\n";
  auto source = Cluster::Start(GetParam(), "",
                               {.server_yaml = insecure,
                                .store_yaml = "kvstore:\n  bulk_address: " + peer + "\n",
                                .wire_versions = kNext});
  ASSERT_TRUE(source.ok()) << source.status();
  auto target = Cluster::Start(
      GetParam(), "",
      {.server_yaml = insecure, .store_yaml = "kvstore:\n  bulk_peers: " + peer + "\n"});
  ASSERT_TRUE(target.ok()) << target.status();
  cluster_ = *std::move(target);
  const auto worker = AttachWorker(data_.spec);
  const auto pull = [&](int32_t seed) {
    const TestSequence data(SmallSpec(), kTokens, seed);
    auto at_source = client::Worker::Attach((*source)->options(), data.spec);
    EXPECT_TRUE(at_source.ok()) << at_source.status();
    EXPECT_NE(Put(**at_source, data), nullptr);
    return worker->Pull(peer, data.token_ids, client::DefaultKeyContext(data.spec));
  };
  const auto pulled = pull(41);
  ASSERT_TRUE(pulled.ok()) << pulled.status();
  EXPECT_EQ((*pulled)->token_count(), kTokens);

  ASSERT_TRUE((*source)->Replace(ClusterService::kStore, kAfterNext).ok());
  const absl::Status refused = pull(42).status();
  EXPECT_EQ(ReasonOf(refused), "BULK_VERSION");
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr("the store that pulls speaks wire versions 1, the one asked 2 to 3; they must be "
                "of the same release or of two next to each other: upgrade the store that "
                "pulls"));
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReleaseTest, ::testing::Values(ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
