// Pulls over a link that is long, narrow and lossy, with TCP as it is: what comes is what was
// sealed, and a link that is down for a while costs time and nothing else.
#include "services/kvstore/bulk_socket.h"
#include "tests/support/bulk_fixture.h"
#include "tests/support/packet_link.h"

namespace certkv::kvstore {
namespace {

constexpr uint64_t kSeed = 20260801;

class BulkLinkTest : public BulkPlaneTest {
 protected:
  // Source and target at the ends of a link of their own; false: there is none here.
  bool StartOver(const LinkShape& shape, BulkConfig config) {
    auto link = PacketLink::Create(shape, kSeed);
    if (!link.ok()) return false;
    link_ = *std::move(link);
    BulkConfig serving = config;
    serving.address = PacketLink::address(1) + ":0";
    link_->At(1, [&] { server_ = MakePlane(&source_, serving); });
    const std::string peer = absl::StrCat(PacketLink::address(1), ":", server_->port());
    link_->At(0, [&] { StartTarget(config, peer); });
    return true;
  }
  void TearDown() override {
    client_.reset();
    server_.reset();
  }

  std::unique_ptr<PacketLink> link_;
};

constexpr char kNoLink[] =
    "needs network namespaces and /dev/net/tun; BulkPlaneTest cuts and damages connections without";

TEST_F(BulkLinkTest, ChainsComeByteForByteOverALongLossyLink) {
  LinkShape shape;
  shape.delay_us = 5'000;
  shape.bytes_per_second = 20'000'000;
  shape.queue_bytes = 200'000;
  shape.lost_per_million = 20'000;
  BulkConfig config = Config();
  config.connections = 4;
  config.in_flight_bytes = 8 * block_bytes();
  if (!StartOver(shape, config)) GTEST_SKIP() << kNoLink;
  for (const int32_t chain : {1, 2, 3}) {
    source_.PutUnleased(writer_, chain, 0, 20);
    const auto order = chain == 3 ? PullOrder::kOriginalsLater : PullOrder::kWhole;
    const auto result = Pull(chain, 20, order);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->pulled_count, 20);
    WaitUntilIdle();
    ExpectSame(chain, 20);
  }
  EXPECT_GT(link_->lost_count(), 10) << "seed " << kSeed;
  EXPECT_EQ(client_->counters().blocks_damaged, 0) << "TCP's checksums are enough for loss";
}

TEST(BulkBufferTest, BuffersThatTheSystemWouldCutShortAreLeftToGrow) {
  EXPECT_EQ(BulkBufferBytes(212'992), 0) << "Linux's default until 2025";
  EXPECT_EQ(BulkBufferBytes((4 << 20) - 1), 0);
  EXPECT_EQ(BulkBufferBytes(4 << 20), 4 << 20);
}

TEST_F(BulkLinkTest, ALinkThatIsDownForAWhileIsWaitedFor) {
  LinkShape shape;
  shape.delay_us = 1'000;
  shape.bytes_per_second = 2'000'000;
  BulkConfig config = Config();
  config.timeout_ms = 500;
  if (!StartOver(shape, config)) GTEST_SKIP() << kNoLink;
  source_.PutUnleased(writer_, 1, 0, 40);
  absl::Notification done;
  client_->Pull(Request(1, 40), [&](const absl::StatusOr<PullResult>& result) {
    EXPECT_TRUE(result.ok()) << result.status();
    done.Notify();
  });
  while (client_->counters().bytes_received == 0) poll(nullptr, 0, 5);
  LinkShape down = shape;
  down.lost_per_million = 1'000'000;
  link_->SetShape(down);
  poll(nullptr, 0, 900);
  link_->SetShape(shape);
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_GT(client_->counters().reconnects, 0) << "its connections were given up";
  EXPECT_EQ(client_->counters().bytes_received, 40 * block_bytes()) << "nothing came twice";
  ExpectSame(1, 40);
}

TEST_F(BulkLinkTest, AConnectionWhoseOtherEndIsGoneIsReplaced) {
  BulkConfig config = Config();
  config.connections = 1;
  LinkShape shape;
  shape.delay_us = 1'000;
  if (!StartOver(shape, config)) GTEST_SKIP() << kNoLink;
  source_.PutUnleased(writer_, 1, 0, 1);
  source_.PutUnleased(writer_, 2, 0, 1);
  ASSERT_EQ(Pull(1, 1)->pulled_count, 1);
  // The server goes while nothing can be said, as with a host that loses its power, and comes back
  // at the same port: its kernel knows nothing of the connection that rests here.
  LinkShape down = shape;
  down.lost_per_million = 1'000'000;
  link_->SetShape(down);
  BulkConfig serving = config;
  serving.address = absl::StrCat(PacketLink::address(1), ":", server_->port());
  server_.reset();
  link_->At(1, [&] { server_ = MakePlane(&source_, serving); });
  link_->SetShape(shape);
  const auto result = Pull(2, 1);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(client_->counters().connections_replaced, 1);
  ExpectSame(2, 1);
}

}  // namespace
}  // namespace certkv::kvstore
