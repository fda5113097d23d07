// Blocks that come by NCCL: the same bytes as by TCP, within their bounds, over links that are
// kept.
#include "services/kvstore/nccl_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>

#include "kernels/core/status.h"
#include "tests/nccl/nccl_fixture.h"

namespace certkv::kvstore {
namespace {

using ::testing::HasSubstr;

TEST_F(NcclPlaneTest, BlocksComeByNcclAndNothingByTcp) {
  source_.PutUnleased(writer_, 1, 0, 40);
  ASSERT_NO_FATAL_FAILURE(StartNccl());
  const auto result = Pull(1, 40);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pulled_count, 40);
  EXPECT_EQ(result->pulled_bytes, 40 * block_bytes());
  ExpectSame(1, 40);
  EXPECT_EQ(TcpBytes(), 0);
  EXPECT_EQ(client_->counters().connections_made, 0);
  EXPECT_EQ(received().blocks_received, 40);
  EXPECT_EQ(received().bytes_received, 40 * block_bytes());
  EXPECT_TRUE(Soon([this] { return sent().blocks_sent == 40; }));
  EXPECT_EQ(sent().bytes_sent, 40 * block_bytes());
  EXPECT_EQ(source_.engine.GetStats().lease_count, 0) << "what was sent is leased no more";
  EXPECT_TRUE(received().Failures().empty());
}

TEST_F(NcclPlaneTest, NoMoreIsUnderWayThanTheConfigAllows) {
  source_.PutUnleased(writer_, 1, 0, 60);
  NcclConfig config = Config();
  config.in_flight_bytes = 2 * 10'000;  // movements end within blocks
  ASSERT_NO_FATAL_FAILURE(StartNccl(config));
  TakeStubPeakBytes();
  ASSERT_TRUE(Pull(1, 60).ok());
  ExpectSame(1, 60);
  EXPECT_EQ(TcpBytes(), 0);
  // One movement of each side, and both sides are in this process.
  const int64_t peak = TakeStubPeakBytes();
  EXPECT_LE(peak, 2 * 10'000);
  EXPECT_GE(peak, 10'000) << "nothing was seen";
}

TEST_F(NcclPlaneTest, SideWithTheLesserBoundDecides) {
  source_.PutUnleased(writer_, 1, 0, 8);
  ASSERT_NO_FATAL_FAILURE(StartNccl());
  NcclConfig less = Config();
  less.in_flight_bytes = 2 * 3'000;
  source_nccl_ = *MakeNccl(&source_, less, &target_nccl_);
  TakeStubPeakBytes();
  ASSERT_TRUE(Pull(1, 8).ok());
  ExpectSame(1, 8);
  EXPECT_EQ(TcpBytes(), 0);
  EXPECT_LE(TakeStubPeakBytes(), 2 * 3'000);
}

TEST_F(NcclPlaneTest, EveryOrderComesByNccl) {
  ASSERT_NO_FATAL_FAILURE(StartNccl());
  int32_t chain = 1;
  for (const PullOrder order :
       {PullOrder::kWhole, PullOrder::kOriginalsLater, PullOrder::kOriginalsOnly}) {
    SCOPED_TRACE(static_cast<int>(order));
    source_.PutUnleased(writer_, chain, 0, 10);
    const auto result = Pull(chain, 10, order);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->pulled_count, 10);
    WaitUntilIdle();
    ExpectSame(chain++, 10);
  }
  EXPECT_EQ(TcpBytes(), 0);
}

TEST_F(NcclPlaneTest, LinkIsKeptForTheNextPull) {
  ASSERT_NO_FATAL_FAILURE(StartNccl());
  for (int32_t chain = 1; chain <= 4; ++chain) {
    source_.PutUnleased(writer_, chain, 0, 5);
    ASSERT_TRUE(Pull(chain, 5).ok());
    ExpectSame(chain, 5);
  }
  EXPECT_EQ(received().links_made, 1);
  EXPECT_EQ(received().links, 1);
  EXPECT_EQ(TcpBytes(), 0);
}

TEST_F(NcclPlaneTest, ChainEndsBeforeWhatThePeerLacks) {
  source_.PutUnleased(writer_, 1, 0, 5);
  ASSERT_NO_FATAL_FAILURE(StartNccl());
  const auto result = Pull(1, 9);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pulled_count, 5);
  ExpectSame(1, 5);
  EXPECT_EQ(received().blocks_received, 5);
  EXPECT_TRUE(received().Failures().empty()) << "to lack a block is no failure";
}

TEST_F(NcclPlaneTest, BlocksAreLeasedWhileTheyAreSent) {
  source_.PutUnleased(writer_, 1, 0, 3);
  ASSERT_NO_FATAL_FAILURE(StartNccl());
  failures_.Set("delay=300");
  std::thread pull([this] { EXPECT_TRUE(Pull(1, 3).ok()); });
  EXPECT_TRUE(Soon([this] { return source_.engine.GetStats().lease_count == 1; }));
  EXPECT_EQ(source_.engine.GetStats().caches[0].blocks_leased, 3);
  pull.join();
  EXPECT_EQ(received().blocks_received, 3);
}

TEST_F(NcclPlaneTest, LinkThatIsIdleEndsAndIsMadeAgain) {
  source_.PutUnleased(writer_, 1, 0, 3);
  source_.PutUnleased(writer_, 2, 0, 3);
  NcclConfig config = Config();
  config.idle_ms = 300;
  ASSERT_NO_FATAL_FAILURE(StartNccl(config));
  ASSERT_TRUE(Pull(1, 3).ok());
  EXPECT_TRUE(Soon([this] { return received().links == 0 && sent().links == 0; }));
  EXPECT_TRUE(Soon([this] { return source_.engine.GetStats().session_count == 1; }))
      << "the link's session ends with it";
  ASSERT_TRUE(Pull(2, 3).ok());
  ExpectSame(2, 3);
  EXPECT_EQ(received().links_made, 2);
  EXPECT_TRUE(received().Failures().empty());
}

TEST_F(NcclPlaneTest, LinkThatThePeerEndedWhileIdleIsNoFailure) {
  for (int32_t chain = 1; chain <= 3; ++chain) source_.PutUnleased(writer_, chain, 0, 3);
  ASSERT_NO_FATAL_FAILURE(StartNccl());
  NcclConfig less = Config();
  less.idle_ms = 300;
  source_nccl_ = *MakeNccl(&source_, less, &target_nccl_);
  ASSERT_TRUE(Pull(1, 3).ok());
  EXPECT_EQ(received().blocks_received, 3);
  EXPECT_TRUE(Soon([this] { return sent().links == 0; }));
  ASSERT_TRUE(Pull(2, 3).ok());
  ExpectSame(2, 3);
  EXPECT_EQ(TcpBytes(), 3 * block_bytes());
  EXPECT_TRUE(Soon([this] { return received().links == 0; }));
  EXPECT_TRUE(received().Failures().empty()) << "it is asked again at once";
  ASSERT_TRUE(Pull(3, 3).ok());
  ExpectSame(3, 3);
  EXPECT_EQ(received().blocks_received, 6);
}

TEST_F(NcclPlaneTest, ServerEndsTheIdleLinkForANewOneAndRefusesWhenAllAreBusy) {
  ASSERT_NO_FATAL_FAILURE(StartNccl());
  NcclConfig config = Config();
  config.link_limit = 2;
  source_nccl_ = *MakeNccl(&source_, config, &target_nccl_);
  NcclServer* const own = *source_nccl_->server();
  NcclOffer offer;
  offer.version = 22809;
  offer.spec = (*target_.engine.CacheOf(worker_.session))->spec_digest();
  offer.plane_bytes = plane_bytes_;
  offer.original_bytes = original_bytes_;
  offer.movement_bytes = 1000;
  failures_.Set("alone=1");
  const auto first = own->Join(offer, "a");
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = own->Join(offer, "b");
  ASSERT_TRUE(second.ok()) << second.status();
  // Both wait for their other ends, and have nothing to send.
  ASSERT_TRUE(own->Join(offer, "c").ok());
  const auto anyone = [](absl::string_view) { return true; };
  EXPECT_EQ(ReasonOf(own->CheckTenant(first->link_id, anyone)), "NCCL_LINK_NOT_FOUND");
  EXPECT_TRUE(own->CheckTenant(second->link_id, anyone).ok());
}

TEST_F(NcclPlaneTest, RequireRefusesToStartWithoutLibraryOrGpu) {
  NcclConfig config = Config();
  config.choice = NcclChoice::kRequire;
  ASSERT_TRUE(MakeNccl(&source_, config, &target_nccl_).ok());
  failures_.Set("version=21300");
  EXPECT_EQ(ReasonOf(MakeNccl(&source_, config, &target_nccl_).status()), "NCCL_VERSION");
  failures_.Set("");
  config.library = "/nowhere/libnccl.so.2";
  EXPECT_EQ(ReasonOf(MakeNccl(&source_, config, &target_nccl_).status()), "NCCL_MISSING");
  config = Config();
  config.choice = NcclChoice::kRequire;
  place_.runtime = nullptr;
  EXPECT_EQ(ReasonOf(MakeNccl(&source_, config, &target_nccl_).status()), "DEVICE_MISSING");
}

TEST_F(NcclPlaneTest, AutoGoesOnByTcpWithoutTheLibrary) {
  source_.PutUnleased(writer_, 1, 0, 4);
  NcclConfig config = Config();
  config.library = "/nowhere/libnccl.so.2";
  ASSERT_NO_FATAL_FAILURE(StartNccl(config));
  EXPECT_EQ(target_nccl_->detour(), nullptr);
  EXPECT_EQ(FailuresOf("NCCL_MISSING"), 1);
  ASSERT_TRUE(Pull(1, 4).ok());
  ExpectSame(1, 4);
  EXPECT_EQ(TcpBytes(), 4 * block_bytes());
  const auto server = source_nccl_->server();
  EXPECT_EQ(ReasonOf(server.status()), "NCCL_OFF");
  EXPECT_THAT(server.status().message(), HasSubstr("/nowhere"));
}

TEST(NcclConfigTest, PeersAreThoseThatAreEncryptedOrHere) {
  BulkConfig bulk;
  bulk.access.tcp_security = TcpSecurity::kMutualTls;
  bulk.peers = "cache-1:7071, 127.0.0.1:7071";
  NcclConfig good;
  good.peers = "cache-1:7071=cache-1:7070, 127.0.0.1:7071=127.0.0.1:7070";
  ASSERT_TRUE(CheckNcclPeers(good, bulk).ok()) << CheckNcclPeers(good, bulk);
  EXPECT_EQ(good.PeerAddresses()->at("cache-1:7071"), "cache-1:7070");
  EXPECT_TRUE(CheckNcclPeers(NcclConfig(), BulkConfig()).ok());
  BulkConfig insecure = bulk;
  insecure.access.tcp_security = TcpSecurity::kInsecure;
  EXPECT_THAT(CheckNcclPeers(good, insecure).message(), HasSubstr("cache-1:7070"));
  NcclConfig local = good;
  local.peers = "cache-1:7071=127.0.0.1:7070";
  EXPECT_TRUE(CheckNcclPeers(local, insecure).ok());
  const std::pair<const char*, const char*> cases[] = {
      {"cache-1:7071", "bulk_address=tcp_address"},
      {"cache-1:7071=cache-1", "host:port"},
      {"cache-1=cache-1:7070", "host:port"},
      {"cache-2:7071=cache-2:7070", "none of kvstore.bulk_peers"},
  };
  for (const auto& [peers, text] : cases) {
    NcclConfig bad = good;
    bad.peers = peers;
    const absl::Status status = CheckNcclPeers(bad, bulk);
    EXPECT_EQ(ReasonOf(status), "CONFIG_INVALID") << peers;
    EXPECT_THAT(status.message(), HasSubstr(text)) << peers;
  }
  NcclConfig node = good;
  node.peers = "cache-2:7071=cache-2:7070";
  bulk.has_members = true;
  EXPECT_TRUE(CheckNcclPeers(node, bulk).ok()) << "a node of the cluster";
}

}  // namespace
}  // namespace certkv::kvstore
