// Connections to other stores stay open between pulls, and nobody notices when one has ended.
#include "services/kvstore/bulk_pool.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>

#include "tests/support/bulk_fixture.h"

namespace certkv::kvstore {
namespace {

class BulkPoolTest : public BulkPlaneTest {
 protected:
  // A pull over one connection at a time.
  static BulkConfig SingleConfig() {
    BulkConfig config = Config();
    config.connections = 1;
    config.idle_connections = 1;
    return config;
  }
  // Pulls one block of another chain each time.
  void PullNext() {
    const int32_t chain = ++chain_;
    source_.PutUnleased(writer_, chain, 0, 1);
    const auto result = Pull(chain, 1);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->pulled_count, 1);
    ExpectSame(chain, 1);
  }
  const BulkCounters& ours() const { return client_->counters(); }
  // Waits until a count is that.
  static void WaitFor(const std::atomic<int64_t>& count, int64_t wanted) {
    for (int i = 0; i < 2000 && count != wanted; ++i) poll(nullptr, 0, 5);
    EXPECT_EQ(count, wanted);
  }

  int32_t chain_ = 0;
};

TEST_F(BulkPoolTest, PullsUseTheConnectionsOfPullsBefore) {
  BulkConfig config = Config();
  config.timeout_ms = 300;
  Start(config);
  PullNext();
  poll(nullptr, 0, 500);  // nobody waits for it, so it takes as long as it likes
  for (int i = 1; i < 5; ++i) PullNext();
  EXPECT_EQ(proxy_->connection_count(), 1);
  EXPECT_EQ(ours().connections_made, 1);
  EXPECT_EQ(ours().connections_reused, 4);
  EXPECT_EQ(ours().connections_replaced, 0);
  EXPECT_EQ(ours().reconnects, 0);
  EXPECT_EQ(ours().idle_connections, 1);
  EXPECT_EQ(server_->counters().connections, 1);
}

TEST_F(BulkPoolTest, APullWithOriginalsThatFollowGivesItsConnectionsBackAtTheEnd) {
  Start(SingleConfig());
  source_.PutUnleased(writer_, 1, 0, 4);
  proxy_->StallAfter(4 * plane_bytes_ + 2000);
  ASSERT_EQ(Pull(1, 4, PullOrder::kOriginalsLater)->pulled_count, 4);
  EXPECT_EQ(ours().idle_connections, 0) << "its originals come over it";
  proxy_->StallAfter(int64_t{1} << 60);
  WaitFor(ours().idle_connections, 1);
  ExpectSame(1, 4);
}

TEST_F(BulkPoolTest, AConnectionThatEndedIsReplacedOnceAndThePullGoesOn) {
  Start(SingleConfig());
  PullNext();
  proxy_->Refuse(true);
  WaitFor(server_->counters().connections, 0);
  proxy_->Refuse(false);
  PullNext();
  EXPECT_EQ(ours().connections_replaced, 1);
  EXPECT_EQ(ours().connections_made, 2);
  EXPECT_EQ(ours().reconnects, 0) << "of this pull nothing was cut";
  EXPECT_EQ(ours().idle_connections, 1);
}

TEST_F(BulkPoolTest, AConnectionIsReplacedOnceOnly) {
  Start(SingleConfig());
  PullNext();
  proxy_->Refuse(true);
  WaitFor(server_->counters().connections, 0);
  source_.PutUnleased(writer_, 9, 0, 1);
  EXPECT_EQ(ReasonOf(Pull(9, 1).status()), "BULK_DISCONNECTED");
  EXPECT_EQ(ours().connections_replaced, 1);
  EXPECT_EQ(ours().idle_connections, 0) << "nothing of use is left";
  proxy_->Refuse(false);
  EXPECT_EQ(Pull(9, 1)->pulled_count, 1);
}

TEST_F(BulkPoolTest, AHalfOpenConnectionIsGivenUpSoon) {
  BulkConfig config = SingleConfig();
  config.timeout_ms = 3'600'000;
  Start(config);
  PullNext();
  proxy_->FreezeOpen();
  const int64_t begin_ns = RealClock()->MonotonicNs();
  PullNext();
  EXPECT_LT(RealClock()->MonotonicNs() - begin_ns, 20 * BulkClient::kRestedAnswerMs * 1'000'000);
  EXPECT_EQ(ours().connections_replaced, 1);
}

TEST_F(BulkPoolTest, ABlockThatIsCutOffOnAnOldConnectionGoesOnWhereItWas) {
  Start(SingleConfig());
  PullNext();
  source_.PutUnleased(writer_, 9, 0, 4);
  const int64_t before = ours().bytes_received;
  const int64_t cut = proxy_->forwarded_bytes() + block_bytes() * 3 / 2;
  proxy_->StallAfter(cut);
  absl::Notification done;
  client_->Pull(Request(9, 4), [&](const absl::StatusOr<PullResult>& result) {
    EXPECT_TRUE(result.ok()) << result.status();
    done.Notify();
  });
  while (proxy_->forwarded_bytes() < cut) poll(nullptr, 0, 5);
  proxy_->FreezeOpen();
  proxy_->StallAfter(int64_t{1} << 60);
  ASSERT_TRUE(done.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_EQ(ours().bytes_received - before, 4 * block_bytes()) << "nothing came twice";
  EXPECT_EQ(ours().connections_replaced, 0) << "it had answered";
  EXPECT_EQ(ours().reconnects, 1);
  ExpectSame(9, 4);
}

TEST_F(BulkPoolTest, IdleConnectionsAreClosedAfterTheirTime) {
  BulkConfig config = Config();
  config.idle_time_ms = 100;
  Start(config);
  PullNext();
  WaitFor(server_->counters().connections, 0);
  EXPECT_EQ(ours().idle_connections, 0);
  PullNext();
  EXPECT_EQ(ours().connections_reused, 0);
}

TEST_F(BulkPoolTest, IdleConnectionsToOnePeerAreBounded) {
  BulkConfig config = Config();
  config.connections = 4;
  config.idle_connections = 2;
  config.in_flight_bytes = 4 * block_bytes();
  Start(config);
  source_.PutUnleased(writer_, 9, 0, 32);
  ASSERT_EQ(Pull(9, 32)->pulled_count, 32);
  EXPECT_EQ(proxy_->connection_count(), 4);
  WaitFor(ours().idle_connections, 2);
  WaitFor(server_->counters().connections, 2);
}

TEST_F(BulkPoolTest, NoneStaysWhereTheConfigSaysSo) {
  BulkConfig config = Config();
  config.idle_connections = 0;
  Start(config);
  PullNext();
  WaitFor(server_->counters().connections, 0);
  PullNext();
  EXPECT_EQ(ours().connections_made, 2);
}

TEST_F(BulkPoolTest, AConnectionThatIsTooOldIsMadeAnew) {
  FakeClock clock;
  BulkConfig config = SingleConfig();
  Start(config);
  BulkPlane::Dependencies with;
  with.engine = &target_.engine;
  with.pool = &target_.pool;
  with.clock = &clock;
  with.check_serving = [] { return absl::OkStatus(); };
  config.peers = peer_;
  client_ = *BulkPlane::Create(config, with);
  PullNext();
  // Never idle for long, and still it ends.
  for (int64_t ms = 0; ms <= BulkPool::kAgeMsMax; ms += config.idle_time_ms / 2) {
    PullNext();
    clock.AdvanceMs(config.idle_time_ms / 2);
  }
  EXPECT_EQ(ours().connections_made, 1);
  PullNext();
  EXPECT_EQ(ours().connections_made, 2);
}

TEST_F(BulkPoolTest, EachTokenIsShownOnConnectionsOfItsOwnAndAllOfThemAreBounded) {
  const std::string path = absl::StrCat(testing::TempDir(), "bulk_pool_token_", getpid());
  const auto write = [&](int number) {
    std::ofstream(path, std::ios::trunc) << std::string(40, 'a') << number << "\n";
    chmod(path.c_str(), 0600);
  };
  write(0);
  BulkConfig config = SingleConfig();
  config.token_file = path;
  config.connection_limit = 200;
  Start(config);
  PullNext();
  PullNext();
  EXPECT_EQ(ours().connections_made, 1);
  const auto many = static_cast<int>(BulkPool::kIdleMax) + 2;
  for (int i = 1; i < many; ++i) {
    write(i);
    PullNext();
  }
  EXPECT_EQ(ours().connections_made, many);
  EXPECT_EQ(ours().connections_reused, 1);
  EXPECT_EQ(ours().idle_connections, static_cast<int64_t>(BulkPool::kIdleMax));
  write(2);
  PullNext();
  EXPECT_EQ(ours().connections_made, many) << "that one is still open";
  write(1);
  PullNext();
  EXPECT_EQ(ours().connections_made, many + 1) << "that one had rested the longest";
  std::remove(path.c_str());
}

// Also where nothing changed but the time.
TEST_F(BulkPoolTest, CertificatesThatAreOverAreNotUsedAnyMore) {
  std::string directory = absl::StrCat(testing::TempDir(), "certkv_pool_XXXXXX");
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  for (const char* words : {"ca", "client store read x"}) {
    const std::string command =
        absl::StrCat("deploy/tls/make-certificates ", directory, " ", words, " >/dev/null 2>&1");
    ASSERT_EQ(std::system(command.c_str()), 0) << "it runs from the root of the repository";
  }
  BulkConfig config;
  config.access.tcp_security = TcpSecurity::kMutualTls;
  config.peer_ca = directory + "/ca.crt";
  config.certificate = directory + "/store.crt";
  config.key = directory + "/store.key";
  FakeClock clock;
  clock.AdvanceMs(RealClock()->NowMs() - FakeClock::kStartMs);
  BulkCounters counters;
  boost::asio::io_context io_context;
  const auto pool = std::make_shared<BulkPool>(config, &clock, &counters, &io_context);
  const auto first = pool->CurrentTls();
  ASSERT_TRUE(first.ok()) << first.status();
  clock.AdvanceMs(2 * BulkPool::kFilesCheckMs);
  EXPECT_EQ(*pool->CurrentTls(), *first) << "the same files, the same context";
  clock.AdvanceMs(int64_t{20} * 365 * 24 * 3'600'000);
  EXPECT_EQ(ReasonOf(pool->CurrentTls().status()), "TLS_CERTIFICATE_EXPIRED");
  std::filesystem::remove_all(directory);
}

TEST_F(BulkPoolTest, PeersAreTheSameOnlyIfAllThatWasShownIs) {
  const BulkPeer peer;
  EXPECT_TRUE(peer.IsSame(peer));
  const std::function<void(BulkPeer*)> changes[] = {
      [](BulkPeer* other) { other->address = "127.0.0.1:1"; },
      [](BulkPeer* other) {
        other->tls =
            std::make_shared<boost::asio::ssl::context>(boost::asio::ssl::context::tls_client);
      },
      [](BulkPeer* other) { other->hello.spec = DigestCacheSpec(TinySpec("other")); },
      [](BulkPeer* other) { other->hello.tenant = "other"; },
      [](BulkPeer* other) { other->hello.token = "other"; },
  };
  for (const auto& change : changes) {
    BulkPeer other;
    change(&other);
    EXPECT_FALSE(peer.IsSame(other));
  }
}

TEST_F(BulkPoolTest, AServerClosesTheLongestIdleConnectionForANewOne) {
  BulkConfig config = SingleConfig();
  config.connection_limit = 2;
  Start(config);
  std::vector<std::unique_ptr<BulkPlane>> others;
  for (int i = 0; i < 3; ++i) {
    PullNext();
    others.push_back(std::move(client_));
    StartTarget(config, peer_);
  }
  EXPECT_EQ(server_->counters().connections_displaced, 1);
  EXPECT_EQ(server_->counters().peers_refused, 0);
  WaitFor(server_->counters().connections, 2);
  // The first one's was closed, and it does not mind.
  client_ = std::move(others[0]);
  PullNext();
  EXPECT_EQ(ours().connections_replaced, 1);
}

TEST_F(BulkPoolTest, APeerWhoseSessionEndedMeanwhileIsGreetedAnew) {
  Start(SingleConfig());
  PullNext();
  // The source gives its cache up for others, and gets it anew with other blocks.
  for (int i = 0; i < 2000 && source_.engine.GetStats().lease_count > 0; ++i) poll(nullptr, 0, 5);
  source_.engine.EndSession(writer_.session, "test");
  std::vector<CacheSpec> specs;
  for (int i = 0; i < KvStoreConfig().cache_limit; ++i) specs.push_back(TinySpec(absl::StrCat(i)));
  for (const CacheSpec& spec : specs) ASSERT_TRUE(source_.engine.RegisterCache(spec, "").ok());
  ASSERT_EQ(source_.engine.GetStats().session_count, 0) << "the peer's ended, too";
  const auto again = source_.engine.RegisterCache(source_.spec, "");
  ASSERT_TRUE(again.ok()) << again.status();
  source_.cache = again->cache;
  writer_ = source_.Attach("writer", 8);
  PullNext();
  EXPECT_EQ(ours().connections_replaced, 1);
}

TEST_F(BulkPoolTest, StopClosesWhatRests) {
  Start();
  PullNext();
  client_->Stop();
  EXPECT_EQ(ours().idle_connections, 0);
  WaitFor(server_->counters().connections, 0);
}

}  // namespace
}  // namespace certkv::kvstore
