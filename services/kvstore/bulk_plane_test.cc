// Blocks go from one store to another: whole, once, over connections that are cut and memory that
// is damaged.
#include "services/kvstore/bulk_plane.h"

#include "services/common/retry_delay.h"
#include "tests/support/bulk_fixture.h"

namespace certkv::kvstore {
namespace {

using ::testing::HasSubstr;

TEST_F(BulkPlaneTest, ChainComesByteForByte) {
  source_.PutUnleased(writer_, 1, 0, 24);
  Start();
  const auto result = Pull(1, 24);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pulled_count, 24);
  EXPECT_EQ(result->pulled_bytes, 24 * block_bytes());
  ExpectSame(1, 24);
  EXPECT_EQ(client_->counters().bytes_received, 24 * block_bytes());
  EXPECT_EQ(server_->counters().bytes_sent, 24 * block_bytes());
  EXPECT_EQ(server_->counters().blocks_sent, 24);
  EXPECT_EQ(proxy_->connection_count(), 2) << "several connections are used";
}

CacheSpec DitheredSpec() {
  CacheSpec spec = TinySpec();
  for (LayerSpec& layer : spec.layers) layer.key_format = KeyFormat::kK8D;
  return spec;
}

class DitheredBulkTest : public BulkPlaneTest {
 protected:
  DitheredBulkTest() : BulkPlaneTest(DitheredSpec()) {}
};

TEST_F(DitheredBulkTest, PlanesAreMadeWithTheSecretOfTheStoreThatPulls) {
  source_.PutUnleased(writer_, 1, 0, 4);
  Start();
  for (const PullOrder order : {PullOrder::kWhole, PullOrder::kOriginalsLater}) {
    const bool is_first = order == PullOrder::kWhole;
    const auto result = Pull(1, is_first ? 2 : 4, order);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->pulled_count, 2);
    EXPECT_EQ(result->pulled_bytes, 2 * original_bytes_) << "planes would be of no use";
  }
  const auto here = target_.Lookup(worker_, 1, 4);
  const auto there = source_.Lookup(writer_, 1, 4);
  ASSERT_TRUE(here.ok() && there.ok() && here->blocks.size() == 4u);
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(target_.IsReadable(worker_, here->blocks[i])) << i;
    EXPECT_NE(PlanesAt(target_, worker_, here->blocks[i]),
              PlanesAt(source_, writer_, there->blocks[i]));
  }
}

TEST_F(BulkPlaneTest, BlocksThatAreThereAreNotAskedFor) {
  source_.PutUnleased(writer_, 1, 0, 6);
  target_.PutUnleased(worker_, 1, 0, 4);
  Start();
  ASSERT_EQ(Pull(1, 6)->pulled_count, 2);
  EXPECT_EQ(client_->counters().blocks_received, 2);
  EXPECT_EQ(Pull(1, 6)->pulled_count, 0);
  EXPECT_EQ(client_->counters().blocks_received, 2);
  ExpectSame(1, 6);
}

TEST_F(BulkPlaneTest, ChainEndsBeforeWhatThePeerLacks) {
  source_.PutUnleased(writer_, 1, 0, 5);
  Start();
  const auto result = Pull(1, 20);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pulled_count, 5);
  EXPECT_EQ(target_.CountPrefix(1, 20), 5);
  WaitUntilIdle();
  EXPECT_EQ(SlotsUsed(), 5) << "slots of what did not come are free again";
}

TEST_F(BulkPlaneTest, CutConnectionGoesOnWhereItWas) {
  source_.PutUnleased(writer_, 1, 0, 8);
  BulkConfig config = Config();
  config.connections = 1;
  Start(config);
  // Less than a block at a time, so that every cut is inside of one.
  proxy_->CutAfter(block_bytes() * 2 / 5, 12);
  const auto result = Pull(1, 8);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pulled_count, 8);
  EXPECT_EQ(client_->counters().bytes_received, 8 * block_bytes()) << "nothing came twice";
  EXPECT_GE(client_->counters().reconnects, 12);
  EXPECT_EQ(client_->counters().blocks_damaged, 0);
  ExpectSame(1, 8);
}

TEST_F(BulkPlaneTest, FlippedBitOfOriginalsIsFoundAndTheBlockAskedForAgain) {
  source_.PutUnleased(writer_, 1, 0, 4);
  BulkConfig config = Config();
  config.connections = 1;
  Start(config);
  proxy_->FlipBitAt(2 * block_bytes() - 100);
  const auto result = Pull(1, 4);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(client_->counters().blocks_damaged, 1);
  EXPECT_EQ(client_->counters().bytes_received, 5 * block_bytes());
  ExpectSame(1, 4);
}

TEST_F(BulkPlaneTest, FlippedBitOfPlanesIsFoundAndTheyAreMadeAnew) {
  source_.PutUnleased(writer_, 1, 0, 4);
  BulkConfig config = Config();
  config.connections = 1;
  Start(config);
  proxy_->FlipBitAt(block_bytes() + plane_bytes_ / 2);
  const auto result = Pull(1, 4);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(client_->counters().planes_rebuilt, 1);
  EXPECT_EQ(client_->counters().blocks_damaged, 0);
  ExpectSame(1, 4);
}

TEST_F(BulkPlaneTest, EveryFlippedBitIsFound) {
  source_.PutUnleased(writer_, 1, 0, 1);
  BulkConfig config = Config();
  config.connections = 1;
  Start(config);
  // Of headers, bodies and data, wherever it is: what is found at the end is what was sealed.
  for (int64_t at = 3; at < block_bytes() + 200; at += block_bytes() / 40) {
    proxy_->FlipBitAt(proxy_->forwarded_bytes() + at);
    const auto result = Pull(1, 1);
    ASSERT_TRUE(result.ok()) << result.status();
    ExpectSame(1, 1);
    WaitUntilIdle();
    ASSERT_EQ(*target_.engine.DropBlocks(worker_.session, {ChainKey(1, 0)}), 1);
  }
}

TEST_F(BulkPlaneTest, BlockThatIsDamagedAtThePeerIsRefused) {
  source_.PutUnleased(writer_, 1, 0, 4);
  Start();
  const auto leased = source_.Lookup(writer_, 1, 4);
  const SlabLayout& layout = source_.backing_layout;
  writer_.backing_memory->base()[layout.key_offset(leased->blocks[2].backing.slot, 1, 0)] ^= 1;
  const auto result = Pull(1, 4);
  EXPECT_EQ(ReasonOf(result.status()), "BULK_BLOCK_DAMAGED") << result.status();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(client_->counters().blocks_damaged, 2) << "it is asked for twice";
  WaitUntilIdle();
  EXPECT_EQ(target_.CountPrefix(1, 4), 2) << "what came before it stays";
  EXPECT_EQ(SlotsUsed(), 2);
  EXPECT_EQ(client_->counters().pulls_failed, 1);
  ExpectSame(1, 2);
}

TEST_F(BulkPlaneTest, PeerThatDiesInTheMiddleLeavesWholeBlocks) {
  source_.PutUnleased(writer_, 1, 0, 32);
  Start();
  proxy_->StallAfter(10 * block_bytes());
  absl::Notification done;
  absl::Status status;
  client_->Pull(Request(1, 32), [&](const absl::StatusOr<PullResult>& result) {
    status = result.status();
    done.Notify();
  });
  while (proxy_->forwarded_bytes() < 10 * block_bytes()) poll(nullptr, 0, 5);
  proxy_->Refuse(true);
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_EQ(ReasonOf(status), "BULK_DISCONNECTED") << status;
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  WaitUntilIdle();
  const int32_t there = target_.CountPrefix(1, 32);
  EXPECT_LE(there, 10);
  EXPECT_EQ(SlotsUsed(), there);
  if (there > 0) ExpectSame(1, there);
  // The next call goes on from there.
  proxy_->Refuse(false);
  proxy_->StallAfter(int64_t{1} << 60);
  const auto result = Pull(1, 32);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pulled_count, 32 - there);
  ExpectSame(1, 32);
}

TEST_F(BulkPlaneTest, SlowPeerIsCutOffByTheTimeout) {
  source_.PutUnleased(writer_, 1, 0, 2);
  BulkConfig config = Config();
  config.timeout_ms = 100;
  Start(config);
  proxy_->StallAfter(block_bytes() / 2);
  const auto result = Pull(1, 2);
  EXPECT_EQ(ReasonOf(result.status()), "BULK_DISCONNECTED");
  EXPECT_THAT(std::string(result.status().message()), HasSubstr("too long"));
  WaitUntilIdle();
  EXPECT_EQ(SlotsUsed(), 0);
}

TEST_F(BulkPlaneTest, SlowLinkGetsThereInSeveralTimeouts) {
  source_.PutUnleased(writer_, 1, 0, 4);
  BulkConfig config = Config();
  config.timeout_ms = 100;
  config.connections = 1;
  Start(config);
  proxy_->SetRate(block_bytes() * 4);  // a block in 250 ms
  const auto result = Pull(1, 4);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_GT(client_->counters().reconnects, 0);
  ExpectSame(1, 4);
}

TEST_F(BulkPlaneTest, BytesInFlightAreBounded) {
  source_.PutUnleased(writer_, 1, 0, 32);
  BulkConfig config = Config();
  config.in_flight_bytes = 4 * block_bytes();
  Start(config);
  proxy_->StallAfter(0);
  absl::Notification done;
  client_->Pull(Request(1, 32), [&](const absl::StatusOr<PullResult>&) { done.Notify(); });
  while (proxy_->connection_count() < 2) poll(nullptr, 0, 5);
  EXPECT_LE(SlotsUsed(), 4);
  EXPECT_GT(SlotsUsed(), 0);
  proxy_->StallAfter(int64_t{1} << 60);
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
  ExpectSame(1, 32);
}

TEST_F(BulkPlaneTest, PullMakesRoomAmongBlocksThatNobodyHolds) {
  source_.PutUnleased(writer_, 1, 0, 40);
  for (int32_t chain = 2; chain < 10; ++chain) target_.PutUnleased(worker_, chain, 0, 8);
  Start();
  const auto result = Pull(1, 40);
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectSame(1, 40);
}

TEST_F(BulkPlaneTest, PullIntoAFullStoreIsRefusedWithADelay) {
  source_.PutUnleased(writer_, 1, 0, 4);
  ASSERT_TRUE(target_.Put(worker_, 2, 0, 62).ok());  // and leased
  Start();
  const auto result = Pull(1, 4);
  EXPECT_EQ(ReasonOf(result.status()), "STORE_FULL") << result.status();
  EXPECT_GT(RetryDelayMsOf(result.status()), 0);
  WaitUntilIdle();
  EXPECT_EQ(target_.CountPrefix(1, 4), 2) << "as many as there was room for";
}

TEST_F(BulkPlaneTest, KeysOutOfOrderAreRefused) {
  source_.PutUnleased(writer_, 1, 0, 3);
  Start();
  PullRequest request = Request(1, 3);
  std::swap(request.keys[1], request.keys[2]);
  const auto result = Pull(request);
  EXPECT_EQ(ReasonOf(result.status()), "PARENT_MISMATCH") << result.status();
  WaitUntilIdle();
  EXPECT_EQ(SlotsUsed(), 1);
}

TEST_F(BulkPlaneTest, OriginalsAloneMakeTheSamePlanes) {
  source_.PutUnleased(writer_, 1, 0, 6);
  Start();
  const auto result = Pull(1, 6, PullOrder::kOriginalsOnly);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(client_->counters().bytes_received, 6 * original_bytes_);
  ExpectSame(1, 6);
}

TEST_F(BulkPlaneTest, PlanesComeFirstAndOriginalsFollow) {
  source_.PutUnleased(writer_, 1, 0, 6);
  Start();
  proxy_->StallAfter(6 * plane_bytes_ + 2000);  // planes, and heads of frames
  const auto result = Pull(1, 6, PullOrder::kOriginalsLater);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->pulled_count, 6);
  EXPECT_EQ(result->pulled_bytes, 6 * plane_bytes_);
  const auto leased = target_.Lookup(worker_, 1, 6);
  ASSERT_TRUE(leased.ok() && leased->blocks.size() == 6u);
  for (const BlockHandle& handle : leased->blocks) {
    EXPECT_TRUE(handle.device.present());
    EXPECT_FALSE(handle.backing.present());
    EXPECT_TRUE(CheckDevicePlanes(target_.device_layout, target_.spec, handle.key,
                                  handle.device.slot, worker_.device.data())
                    .ok());
  }
  EXPECT_EQ(
      ReasonOf(
          target_.engine.FetchOriginals(worker_.session, leased->lease, ChainKeys(1, 6)).status()),
      "ORIGINALS_PENDING");
  ASSERT_TRUE(target_.engine.ReleaseLease(worker_.session, leased->lease).ok());
  proxy_->StallAfter(int64_t{1} << 60);
  WaitUntilIdle();
  ExpectSame(1, 6);
  EXPECT_EQ(client_->counters().bytes_received, 6 * block_bytes());
  EXPECT_EQ(client_->counters().originals_lost, 0);
}

TEST_F(BulkPlaneTest, BlocksWhoseOriginalsDoNotFollowAreLost) {
  source_.PutUnleased(writer_, 1, 0, 6);
  Start();
  proxy_->StallAfter(6 * plane_bytes_ + 2000);
  ASSERT_EQ(Pull(1, 6, PullOrder::kOriginalsLater)->pulled_count, 6);
  const auto leased = target_.Lookup(worker_, 1, 6);
  proxy_->Refuse(true);
  for (int i = 0; i < 2000 && client_->counters().originals_lost < 6; ++i) poll(nullptr, 0, 5);
  EXPECT_EQ(client_->counters().originals_lost, 6);
  EXPECT_EQ(target_.Lookup(worker_, 1, 6)->blocks.size(), 0u);
  EXPECT_EQ(
      ReasonOf(
          target_.engine.FetchOriginals(worker_.session, leased->lease, ChainKeys(1, 6)).status()),
      "ORIGINAL_LOST");
  ASSERT_TRUE(target_.engine.ReleaseLease(worker_.session, leased->lease).ok());
  WaitUntilIdle();
  target_.engine.CheckInvariants();
  // Pulled anew, with their originals.
  proxy_->Refuse(false);
  proxy_->StallAfter(int64_t{1} << 60);
  const auto result = Pull(1, 6);
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectSame(1, 6);
}

TEST_F(BulkPlaneTest, DamagedOriginalsThatFollowMakeTheBlockLost) {
  source_.PutUnleased(writer_, 1, 0, 2);
  Start();
  const auto leased = source_.Lookup(writer_, 1, 2);
  writer_.backing_memory
      ->base()[source_.backing_layout.value_offset(leased->blocks[1].backing.slot, 0, 0)] ^= 16;
  ASSERT_EQ(Pull(1, 2, PullOrder::kOriginalsLater)->pulled_count, 2) << "their planes are good";
  WaitUntilIdle();
  EXPECT_EQ(client_->counters().originals_lost, 1);
  EXPECT_EQ(target_.Lookup(worker_, 1, 2)->blocks.size(), 1u);
  ExpectSame(1, 1);
}

TEST_F(BulkPlaneTest, TwoPullsOfOneChainPublishItOnce) {
  source_.PutUnleased(writer_, 1, 0, 16);
  Start();
  absl::Notification done[2];
  int32_t pulled[2] = {};
  for (int i = 0; i < 2; ++i) {
    client_->Pull(Request(1, 16), [&, i](const absl::StatusOr<PullResult>& result) {
      EXPECT_TRUE(result.ok()) << result.status();
      pulled[i] = result.ok() ? result->pulled_count : -1;
      done[i].Notify();
    });
  }
  for (auto& one : done) ASSERT_TRUE(one.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_EQ(pulled[0] + pulled[1], 16);
  WaitUntilIdle();
  EXPECT_EQ(SlotsUsed(), 16);
  ExpectSame(1, 16);
}

TEST_F(BulkPlaneTest, StopEndsAPullSoon) {
  source_.PutUnleased(writer_, 1, 0, 4);
  BulkConfig config = Config();
  config.timeout_ms = 3'600'000;
  Start(config);
  proxy_->StallAfter(block_bytes() / 2);
  absl::Notification done;
  absl::Status status;
  client_->Pull(Request(1, 4), [&](const absl::StatusOr<PullResult>& result) {
    status = result.status();
    done.Notify();
  });
  while (proxy_->forwarded_bytes() < block_bytes() / 2) poll(nullptr, 0, 5);
  client_->Stop();
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_EQ(ReasonOf(status), "STORE_STOPPING") << status;
  EXPECT_EQ(ReasonOf(Pull(1, 4).status()), "STORE_STOPPING");
  WaitUntilIdle();
  EXPECT_EQ(SlotsUsed(), 0);
}

TEST_F(BulkPlaneTest, PullThatNobodyWaitsForEnds) {
  source_.PutUnleased(writer_, 1, 0, 4);
  Start();
  PullRequest request = Request(1, 4);
  request.is_cancelled = [] { return true; };
  EXPECT_EQ(ReasonOf(Pull(request).status()), "PULL_CANCELLED");
  WaitUntilIdle();
  EXPECT_EQ(SlotsUsed(), 0);
}

TEST_F(BulkPlaneTest, PeerThatIsNotConfiguredIsRefused) {
  Start();
  PullRequest request = Request(1, 1);
  request.peer = "127.0.0.1:1";
  const absl::Status status = Pull(request).status();
  EXPECT_EQ(ReasonOf(status), "BULK_PEER_UNKNOWN");
  EXPECT_THAT(std::string(status.message()), HasSubstr("bulk_peers"));
}

TEST_F(BulkPlaneTest, PeerThatDoesNotListenIsUnavailable) {
  int32_t port = 0;
  ListenOnLoopback(&port).reset();
  StartTarget(Config(), absl::StrCat("127.0.0.1:", port));
  EXPECT_EQ(ReasonOf(Pull(1, 1).status()), "BULK_DISCONNECTED");
  EXPECT_EQ(SlotsUsed(), 0);
}

}  // namespace
}  // namespace certkv::kvstore
