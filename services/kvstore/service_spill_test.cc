// What the server does about the directory of its tier on disk.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <boost/asio/io_context.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/metric_table.h"
#include "services/common/retry_delay.h"
#include "services/common/server_runner.h"
#include "services/kvstore/service.h"
#include "services/kvstore/spill_open.h"
#include "tests/support/fake_clock.h"
#include "tests/support/fake_spill_store.h"
#include "tests/support/store_harness.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

class ServiceSpillTest : public testing::Test {
 protected:
  ServiceSpillTest()
      : directory_(fs::temp_directory_path() /
                   ("certkv-service-spill-test-" + std::to_string(getpid()))) {
    fs::remove_all(directory_);
    fs::create_directories(directory_);
    config_.fd_socket = directory_ / "fd.sock";
    config_.spill_directory = directory_ / "blocks";
  }
  ~ServiceSpillTest() override { fs::remove_all(directory_); }

  absl::StatusOr<std::unique_ptr<KvStoreServer>> Create() {
    return KvStoreServer::Create(config_, RealClock(), &io_context_);
  }

  const fs::path directory_;
  KvStoreConfig config_;
  boost::asio::io_context io_context_;
};

TEST_F(ServiceSpillTest, MakesTheDirectoryForItselfAlone) {
  ASSERT_TRUE(Create().ok());
  EXPECT_EQ(fs::status(config_.spill_directory).permissions(), fs::perms::owner_all);
  EXPECT_TRUE(Create().ok()) << "the first one has let go of it";
}

TEST_F(ServiceSpillTest, DoesNotStartOnADirectoryOfSomebodyElse) {
  fs::create_directories(config_.spill_directory);
  std::ofstream(config_.spill_directory + "/photo.jpg") << "x";
  const auto server = Create();
  EXPECT_EQ(ReasonOf(server.status()), "SPILL_FOREIGN");
  EXPECT_THAT(std::string(server.status().message()), HasSubstr("spill_directory"));
}

TEST_F(ServiceSpillTest, TwoStoresDoNotShareADirectory) {
  const auto first = Create();
  ASSERT_TRUE(first.ok());
  config_.fd_socket += "2";
  EXPECT_EQ(ReasonOf(Create().status()), "SPILL_IN_USE");
}

TEST_F(ServiceSpillTest, GoesOnFromMemoryWhenTheDatabaseIsDamaged) {
  ASSERT_TRUE(Create().ok());
  for (const auto& file : fs::directory_iterator(config_.spill_directory)) {
    if (file.path().filename().string().rfind("MANIFEST", 0) == 0) fs::resize_file(file.path(), 3);
  }
  EXPECT_TRUE(Create().ok());
  const auto tier = kvstore::OpenSpill(config_, RealClock());
  ASSERT_TRUE(tier.ok()) << tier.status();
  EXPECT_FALSE((*tier)->CanWrite());
  EXPECT_NE((*tier)->GetStats().error, "");
}

TEST_F(ServiceSpillTest, GoesOnFromMemoryWhenTheDirectoryCannotBeMade) {
  std::ofstream(directory_ / "file") << "x";
  config_.spill_directory = directory_ / "file" / "blocks";
  EXPECT_TRUE(Create().ok());
}

// A store whose disk lists its blocks no faster than the test lets it.
class ServiceOpeningTest : public ServiceSpillTest {
 protected:
  static constexpr int32_t kBlocks = 5000;
  ServiceOpeningTest() {
    FakeSpillStore disk(&disk_);
    for (int32_t i = 0; i < kBlocks; ++i) {
      kvstore::SpilledBlock block;
      block.key = ChainKey(i, 0);
      EXPECT_TRUE(disk.Put(DigestCacheSpec(TinySpec()), std::vector<uint8_t>(10), &block).ok());
    }
    disk_.on_list = [this] {
      if (++listed_ == kBlocks / 2) may_go_on_.WaitForNotification();
    };
    ServerConfig server_config;
    server_config.unix_socket = directory_ / "store.sock";
    runner_ = std::make_unique<ServerRunner>("opening_test", server_config);
    auto tier = std::make_unique<kvstore::SpillTier>(std::make_unique<FakeSpillStore>(&disk_),
                                                     kvstore::SpillLimits{.size_bytes = 1 << 20},
                                                     RealClock());
    config_.spill_directory = "of a test";
    server_ =
        *KvStoreServer::CreateOn(std::move(tier), config_, RealClock(), runner_->io_context());
    const absl::Status started =
        runner_->Start({{.name = kService, .services = server_->grpc_services(), .drain = [this] {
                           server_->Drain();
                         }}});
    server_->WhenReady([this] { ready_.Notify(); });
    EXPECT_TRUE(started.ok()) << started;
    const auto channel =
        grpc::CreateChannel(runner_->targets()[0], grpc::InsecureChannelCredentials());
    store_ = kvstore::v1::KvStore::NewStub(channel);
  }
  ~ServiceOpeningTest() override {
    LetGoOn();
    runner_->Stop();
    server_.reset();
  }
  void LetGoOn() {
    if (!may_go_on_.HasBeenNotified()) may_go_on_.Notify();
  }
  static void SetDeadline(grpc::ClientContext* context) {
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  }
  absl::Status Register() {
    grpc::ClientContext context;
    SetDeadline(&context);
    kvstore::v1::RegisterCacheRequest request;
    *request.mutable_spec() = CacheSpecToProto(TinySpec());
    kvstore::v1::RegisterCacheResponse response;
    return FromGrpcStatus(store_->RegisterCache(&context, request, &response));
  }
  kvstore::v1::SpillStats DiskStats() {
    grpc::ClientContext context;
    SetDeadline(&context);
    kvstore::v1::Stats response;
    EXPECT_TRUE(store_->GetStats(&context, {}, &response).ok());
    return response.spill();
  }
  std::string Metrics() {
    MetricTable table;
    table.AddSource({KvStoreServer::MetricInfos(),
                     [this](MetricSink* sink) { server_->CollectMetrics(sink); }});
    return table.ToText();
  }

  static constexpr char kService[] = "certkv.kvstore.v1.KvStore";
  FakeDisk disk_;
  int listed_ = 0;
  absl::Notification may_go_on_;
  absl::Notification ready_;
  std::unique_ptr<ServerRunner> runner_;
  std::unique_ptr<KvStoreServer> server_;
  std::unique_ptr<kvstore::v1::KvStore::Stub> store_;
};

TEST_F(ServiceOpeningTest, SaysHowFarItIsAndServesNothingUntilItIsOpen) {
  const absl::Status refused = Register();
  EXPECT_EQ(ReasonOf(refused), "STORE_OPENING");
  EXPECT_TRUE(absl::IsUnavailable(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("2048 blocks of 20480 bytes"));
  EXPECT_GT(RetryDelayMsOf(refused), 0);
  EXPECT_EQ(DiskStats().state(), kvstore::v1::SPILL_STATE_OPENING);
  EXPECT_EQ(DiskStats().blocks(), 2048);
  EXPECT_EQ(DiskStats().bytes(), 20480);
  EXPECT_THAT(Metrics(), HasSubstr("certkv_kvstore_disk_opening_blocks 2048"));
  EXPECT_THAT(Metrics(), HasSubstr("certkv_kvstore_disk_open_info 0"));
  EXPECT_FALSE(ready_.HasBeenNotified());
  LetGoOn();
  ready_.WaitForNotification();
  EXPECT_TRUE(Register().ok());
  EXPECT_EQ(DiskStats().state(), kvstore::v1::SPILL_STATE_WORKS);
  EXPECT_EQ(DiskStats().blocks(), kBlocks);
  EXPECT_THAT(Metrics(), HasSubstr("certkv_kvstore_disk_opening_blocks 0"));
  EXPECT_THAT(Metrics(), HasSubstr("certkv_kvstore_disk_open_info 1"));
}

TEST_F(ServiceOpeningTest, StopsWhileItOpens) {
  server_->Drain();
  EXPECT_EQ(ReasonOf(Register()), "STORE_STOPPING");
  std::thread later([this] {
    absl::SleepFor(absl::Milliseconds(50));
    LetGoOn();
  });
  runner_->Stop();
  server_.reset();
  later.join();
  EXPECT_LT(listed_, kBlocks) << "it did not read on to the end";
  EXPECT_FALSE(ready_.HasBeenNotified());
  EXPECT_EQ(disk_.files.size(), size_t{kBlocks});
}

TEST_F(ServiceSpillTest, ALineASecondSaysHowFarOpeningIs) {
  FakeDisk disk;
  FakeSpillStore store(&disk);
  for (int32_t i = 0; i < 10 * 1024; ++i) {
    kvstore::SpilledBlock block;
    block.key = ChainKey(i, 0);
    ASSERT_TRUE(store.Put(DigestCacheSpec(TinySpec()), std::vector<uint8_t>(10), &block).ok());
  }
  FakeClock clock;
  int listed = 0;
  disk.on_list = [&] {
    if (++listed % 1024 == 0) clock.AdvanceMs(400);
  };
  kvstore::SpillTier tier(std::make_unique<FakeSpillStore>(&disk), {.size_bytes = 1 << 20}, &clock);
  testing::internal::CaptureStderr();
  {
    kvstore::SpillLoader loader(&tier, "/blocks", &clock);
    loader.WaitUntilLoaded(absl::InfiniteDuration());
  }
  const std::string log = testing::internal::GetCapturedStderr();
  // After 1.2, 2.4 and 3.6 seconds of 4.
  EXPECT_THAT(log, HasSubstr("event=spill_opening directory=/blocks blocks=3072 bytes=30720"));
  EXPECT_THAT(log, HasSubstr("blocks=6144"));
  EXPECT_THAT(log, HasSubstr("blocks=9216"));
  EXPECT_EQ(absl::StrSplit(log, "event=spill_opening").operator std::vector<std::string>().size(),
            4u);
  EXPECT_THAT(log, HasSubstr("event=spill_open directory=/blocks blocks=10240"));
}

TEST_F(ServiceSpillTest, IsOffByDefault) {
  const auto tier = kvstore::OpenSpill(KvStoreConfig{}, RealClock());
  ASSERT_TRUE(tier.ok());
  EXPECT_EQ(*tier, nullptr);
}

}  // namespace
}  // namespace certkv
