#include "services/certifier/store_client.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/status.h"
#include "services/certifier/fake_cache.h"
#include "services/common/convert.h"
#include "services/common/errors.h"

namespace certkv::certifier {
namespace {

namespace v1 = certkv::kvstore::v1;

// As much of a store as a reader sees: one cache, its descriptor socket, and no blocks' business.
class FakeStore final : public v1::KvStore::Service {
 public:
  FakeStore(FakeCache* fake, const std::string& directory)
      : fake_(fake), fd_path_(directory + "/fd.sock"), listener_(Listen(fd_path_)) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + directory + "/kvstore.sock",
                             grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    acceptor_ = std::thread([this] { Accept(); });
  }
  ~FakeStore() override {
    server_->Shutdown(std::chrono::system_clock::now());
    stopping_ = true;
    shutdown(listener_.get(), SHUT_RDWR);
    acceptor_.join();
    CloseConnections();
    for (std::thread& thread : connections_) thread.join();
  }

  // As when the store dies: its sockets close.
  void CloseConnections() {
    absl::MutexLock lock(&mutex_);
    for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
  }
  int attach_count() const { return attach_count_; }
  int detach_count() const { return detach_count_; }
  std::atomic<bool> answers_garbage{false};

  grpc::Status GetStats(grpc::ServerContext*, const v1::GetStatsRequest*,
                        v1::Stats* stats) override {
    v1::CacheStats* cache = stats->add_caches();
    cache->set_cache_id(5);
    cache->set_spec_digest(std::string(DigestCacheSpec(fake_->spec()).view()));
    *cache->mutable_spec() = CacheSpecToProto(fake_->spec());
    return grpc::Status::OK;
  }
  grpc::Status AttachWorker(grpc::ServerContext*, const v1::AttachWorkerRequest* request,
                            v1::AttachWorkerResponse* response) override {
    EXPECT_EQ(request->cache_id(), 5);
    EXPECT_EQ(request->role(), v1::SESSION_ROLE_READER);
    response->set_session_id(++attach_count_);
    response->set_fd_token(std::string(16, 'x'));
    response->set_fd_socket(fd_path_);
    return grpc::Status::OK;
  }
  grpc::Status DetachWorker(grpc::ServerContext*, const v1::DetachWorkerRequest*,
                            v1::DetachWorkerResponse*) override {
    ++detach_count_;
    return grpc::Status::OK;
  }

 private:
  static UniqueFd Listen(const std::string& path) {
    UniqueFd socket_fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    unlink(path.c_str());
    EXPECT_EQ(bind(socket_fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(socket_fd.get(), 8), 0);
    return socket_fd;
  }
  void Accept() {
    while (!stopping_) {
      const int socket = accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC);
      if (socket < 0) return;
      absl::MutexLock lock(&mutex_);
      sockets_.push_back(socket);
      connections_.emplace_back([this, socket] { Serve(socket); });
    }
  }
  void Serve(int socket) {
    while (true) {
      const auto received = ReceiveWithFds(socket, sizeof(FdRequest), 0);
      if (!received.ok()) break;
      FdRequest request;
      std::memcpy(&request, received->bytes.data(), sizeof(request));
      FdReply reply{};
      reply.magic = answers_garbage ? 1 : kFdMagic;
      std::vector<int> fds;
      if (request.staging_id == 0) {
        EXPECT_EQ(std::string(reinterpret_cast<char*>(request.token), 16), std::string(16, 'x'));
        fds = {fake_->device_fd(), fake_->backing_fd()};
      } else if (request.staging_id == kFakeStagingId) {
        fds = {fake_->staging_fd()};
      } else {
        reply.code = static_cast<int32_t>(absl::StatusCode::kNotFound);
        std::strcpy(reply.reason, "STAGING_NOT_FOUND");
      }
      reply.fd_count = static_cast<int32_t>(fds.size());
      const absl::string_view bytes(reinterpret_cast<const char*>(&reply), sizeof(reply));
      if (!SendWithFds(socket, bytes, fds).ok()) break;
    }
    absl::MutexLock lock(&mutex_);
    std::erase(sockets_, socket);
    close(socket);
  }

  FakeCache* const fake_;
  const std::string fd_path_;
  const UniqueFd listener_;
  std::unique_ptr<grpc::Server> server_;
  std::atomic<int> attach_count_{0};
  std::atomic<int> detach_count_{0};
  std::atomic<bool> stopping_{false};
  absl::Mutex mutex_;
  std::vector<int> sockets_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> connections_;
  std::thread acceptor_;
};

class StoreClientTest : public ::testing::Test {
 protected:
  StoreClientTest() : fake_(SmallSpec(1, 1, 1, 64), 4) {
    char directory[] = "/tmp/certkv-store-client-XXXXXX";
    directory_ = mkdtemp(directory);
    std::mt19937_64 random(3);
    fake_.Put(RandomSequence(fake_.spec(), 150, 1.0f, &random));
  }
  ~StoreClientTest() override { std::filesystem::remove_all(directory_); }

  StoreClientOptions Options(int64_t timeout_ms = 3000) const {
    return {.store_socket = directory_ + "/kvstore.sock", .timeout_ms = timeout_ms};
  }
  SpecDigest Digest() const { return DigestCacheSpec(fake_.spec()); }
  static absl::StatusOr<AcquiredCache> Acquire(StoreClient* client, const SpecDigest& digest,
                                               int64_t staging_id) {
    absl::StatusOr<AcquiredCache> result = absl::UnknownError("not called");
    absl::Notification done;
    client->Acquire({digest, ""}, staging_id, [&](absl::StatusOr<AcquiredCache> acquired) {
      result = std::move(acquired);
      done.Notify();
    });
    done.WaitForNotification();
    return result;
  }
  // Waits for the watcher.
  static bool WaitUntilDead(const MappedCache& cache) {
    for (int i = 0; i < 500 && cache.alive(); ++i) absl::SleepFor(absl::Milliseconds(10));
    return !cache.alive();
  }

  FakeCache fake_;
  std::string directory_;
};

TEST_F(StoreClientTest, MapsACacheOnceForAllViews) {
  FakeStore store(&fake_, directory_);
  StoreClient client(Options());
  const auto first = Acquire(&client, Digest(), 0);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(ValidateHandles(*first->cache, fake_.blocks()).ok());
  EXPECT_EQ(first->staging, nullptr);
  const auto second = Acquire(&client, Digest(), 0);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second->cache, first->cache);
  EXPECT_EQ(store.attach_count(), 1);
}

TEST_F(StoreClientTest, MapsTheStagingMemoryOfAWorker) {
  FakeStore store(&fake_, directory_);
  StoreClient client(Options());
  const auto acquired = Acquire(&client, Digest(), kFakeStagingId);
  ASSERT_TRUE(acquired.ok()) << acquired.status();
  ASSERT_NE(acquired->staging, nullptr);
  EXPECT_EQ(acquired->staging->staging_id, kFakeStagingId);
  EXPECT_EQ(acquired->staging->slab.layout().kind(), SlabKind::kStaging);
  EXPECT_EQ(Acquire(&client, Digest(), kFakeStagingId)->staging, acquired->staging);
}

TEST_F(StoreClientTest, PassesTheStoresOwnErrorsOn) {
  FakeStore store(&fake_, directory_);
  StoreClient client(Options());
  SpecDigest foreign = Digest();
  foreign.bytes[0] ^= 1;
  EXPECT_EQ(ReasonOf(Acquire(&client, foreign, 0).status()), "CACHE_NOT_FOUND");
  EXPECT_EQ(ReasonOf(Acquire(&client, Digest(), 999).status()), "STAGING_NOT_FOUND");
  EXPECT_TRUE(Acquire(&client, Digest(), 0).ok());  // the connection goes on
  EXPECT_EQ(store.attach_count(), 1);
}

TEST_F(StoreClientTest, SaysWhenNoStoreAnswers) {
  StoreClient client(Options(200));
  const auto acquired = Acquire(&client, Digest(), 0);
  EXPECT_EQ(ReasonOf(acquired.status()), "STORE_UNREACHABLE") << acquired.status();
  EXPECT_EQ(acquired.status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(StoreClientTest, MarksACacheDeadWhenItsStoreGoesAndAttachesToTheNextOne) {
  auto store = std::make_unique<FakeStore>(&fake_, directory_);
  StoreClient client(Options());
  const auto first = Acquire(&client, Digest(), 0);
  ASSERT_TRUE(first.ok());
  store.reset();
  ASSERT_TRUE(WaitUntilDead(*first->cache));
  EXPECT_EQ(ReasonOf(first->cache->CheckAlive()), "STORE_UNREACHABLE");
  store = std::make_unique<FakeStore>(&fake_, directory_);
  const auto second = Acquire(&client, Digest(), 0);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_NE(second->cache, first->cache);
  EXPECT_TRUE(second->cache->alive());
  EXPECT_FALSE(first->cache->alive());
}

TEST_F(StoreClientTest, MarksACacheDeadWhenOnlyItsSessionEnds) {
  FakeStore store(&fake_, directory_);
  StoreClient client(Options());
  const auto first = Acquire(&client, Digest(), 0);
  ASSERT_TRUE(first.ok());
  store.CloseConnections();
  ASSERT_TRUE(WaitUntilDead(*first->cache));
  const auto second = Acquire(&client, Digest(), 0);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(store.attach_count(), 2);
}

TEST_F(StoreClientTest, RefusesADescriptorSocketThatIsNoStore) {
  FakeStore store(&fake_, directory_);
  store.answers_garbage = true;
  StoreClient client(Options());
  EXPECT_EQ(ReasonOf(Acquire(&client, Digest(), 0).status()), "STORE_UNREACHABLE");
}

TEST_F(StoreClientTest, DetachesWhenItEnds) {
  FakeStore store(&fake_, directory_);
  std::shared_ptr<MappedCache> cache;
  {
    StoreClient client(Options());
    cache = Acquire(&client, Digest(), 0)->cache;
  }
  EXPECT_EQ(store.detach_count(), 1);
  EXPECT_FALSE(cache->alive());
}

TEST_F(StoreClientTest, AnswersThoseWhoWaitWhenItEnds) {
  std::atomic<int> answered{0};
  {
    StoreClient client(Options(60'000));
    for (int i = 0; i < 5; ++i) {
      client.Acquire({Digest(), ""}, 0, [&](absl::StatusOr<AcquiredCache> acquired) {
        EXPECT_EQ(ReasonOf(acquired.status()), "STORE_UNREACHABLE");
        ++answered;
      });
    }
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_EQ(answered, 5);
}

}  // namespace
}  // namespace certkv::certifier
