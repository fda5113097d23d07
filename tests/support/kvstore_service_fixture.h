// The store over a real Unix socket, for its tests: gRPC, descriptors, sessions.
#ifndef CERTKV_TESTS_SUPPORT_KVSTORE_SERVICE_FIXTURE_H_
#define CERTKV_TESTS_SUPPORT_KVSTORE_SERVICE_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "gtest/gtest.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/common/server_runner.h"
#include "services/kvstore/service.h"
#include "tests/support/store_harness.h"

namespace certkv {

using kvstore::v1::KvStore;
namespace v1 = kvstore::v1;

// A context with a deadline.
inline std::unique_ptr<grpc::ClientContext> Context(int64_t timeout_ms = 20'000) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  return context;
}

inline FdRequest MakeFdRequest(const std::string& token, int64_t staging_id) {
  FdRequest request{};
  request.magic = kFdMagic;
  std::memcpy(request.token, token.data(), std::min(token.size(), sizeof(request.token)));
  request.staging_id = staging_id;
  return request;
}

struct FdAnswer {
  FdReply reply{};
  std::vector<UniqueFd> fds;
};
inline absl::StatusOr<FdAnswer> Ask(int socket, const FdRequest& request) {
  CERTKV_RETURN_IF_ERROR(SendWithFds(
      socket, absl::string_view(reinterpret_cast<const char*>(&request), sizeof(request)), {}));
  CERTKV_ASSIGN_OR_RETURN(BytesWithFds got, ReceiveWithFds(socket, sizeof(FdReply), 10'000));
  FdAnswer answer;
  std::memcpy(&answer.reply, got.bytes.data(), sizeof(answer.reply));
  answer.fds = std::move(got.fds);
  return answer;
}

class KvStoreServiceTest : public testing::Test {
 protected:
  struct Session {
    v1::AttachWorkerResponse attached;
    UniqueFd socket;
    Mapping device;
    Mapping backing;
    Mapping staging;
  };

  KvStoreServiceTest() {
    directory_ = std::filesystem::temp_directory_path() /
                 ("certkv-kvstore-test-" + std::to_string(getpid()));
    std::filesystem::create_directory(directory_);
    config_.device_memory_bytes = SlabLayout(spec_, SlabKind::kDevice, 8).slab_bytes();
    config_.backing_memory_bytes = SlabLayout(spec_, SlabKind::kBacking, 8).slab_bytes();
    config_.fd_socket = directory_ / "fd.sock";
    config_.event_queue_limit = 4;
    Start();
  }
  ~KvStoreServiceTest() override {
    Stop();
    std::filesystem::remove_all(directory_);
  }

  void Start() {
    ServerConfig server_config;
    server_config.unix_socket = directory_ / "grpc.sock";
    server_config.io_threads = 2;
    server_config.log_level = LogLevel::kError;
    runner_ = std::make_unique<ServerRunner>("service_test", server_config);
    auto server = KvStoreServer::Create(config_, RealClock(), runner_->io_context());
    ASSERT_TRUE(server.ok()) << server.status();
    store_ = *std::move(server);
    const absl::Status started = runner_->Start(
        {{"certkv.kvstore.v1.KvStore", store_->grpc_services(), [this] { store_->Drain(); }}});
    ASSERT_TRUE(started.ok()) << started;
    stub_ = KvStore::NewStub(
        grpc::CreateChannel(runner_->targets()[0], grpc::InsecureChannelCredentials()));
    v1::RegisterCacheRequest request;
    *request.mutable_spec() = CacheSpecToProto(spec_);
    const auto status = stub_->RegisterCache(Context().get(), request, &cache_);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  void Stop() {
    runner_->Stop();
    store_.reset();
  }

  v1::AttachWorkerResponse Attach(v1::SessionRole role = v1::SESSION_ROLE_WORKER) {
    v1::AttachWorkerRequest request;
    request.set_cache_id(cache_.cache_id());
    request.set_worker_name("worker");
    request.set_role(role);
    request.set_staging_slot_count(role == v1::SESSION_ROLE_WORKER ? 8 : 0);
    v1::AttachWorkerResponse response;
    const auto status = stub_->AttachWorker(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  Session Connect(v1::SessionRole role = v1::SESSION_ROLE_WORKER) {
    Session session;
    session.attached = Attach(role);
    session.socket = *ConnectUnixSocket(session.attached.fd_socket());
    const auto answer = *Ask(session.socket.get(), MakeFdRequest(session.attached.fd_token(), 0));
    EXPECT_EQ(answer.reply.code, 0) << answer.reply.message;
    EXPECT_EQ(answer.fds.size(), role == v1::SESSION_ROLE_WORKER ? 3u : 2u);
    session.device = *Mapping::Map(answer.fds[0].get(), Mapping::Access::kReadOnly);
    session.backing = *Mapping::Map(answer.fds[1].get(), Mapping::Access::kReadOnly);
    if (role == v1::SESSION_ROLE_WORKER) {
      session.staging = *Mapping::Map(answer.fds[2].get(), Mapping::Access::kReadWrite);
    }
    return session;
  }

  // Reserves and writes blocks [0, count) of a chain.
  v1::SealBlocksRequest Write(Session& session, int32_t chain, int32_t count) {
    v1::ReserveBlocksRequest reserve;
    reserve.set_session_id(session.attached.session_id());
    reserve.set_block_count(count);
    v1::ReserveBlocksResponse reserved;
    const auto status = stub_->ReserveBlocks(Context().get(), reserve, &reserved);
    EXPECT_TRUE(status.ok()) << status.error_message();
    const SlabLayout layout(spec_, SlabKind::kStaging, session.attached.staging_slot_count());
    EXPECT_TRUE(layout.CheckHeader(session.staging.data(), session.staging.size_bytes()).ok());
    v1::SealBlocksRequest seal;
    seal.set_session_id(session.attached.session_id());
    for (int32_t i = 0; i < count; ++i) {
      FillOriginals(layout, spec_, ChainKey(chain, i), reserved.staging_slots(i),
                    session.staging.data());
      v1::SealEntry* entry = seal.add_entries();
      entry->set_staging_slot(reserved.staging_slots(i));
      entry->set_block_key(std::string(ChainKey(chain, i).view()));
      entry->set_parent_key(std::string(ChainParent(chain, i).view()));
    }
    return seal;
  }

  v1::SealBlocksResponse Seal(const v1::SealBlocksRequest& request) {
    v1::SealBlocksResponse response;
    const auto status = stub_->SealBlocks(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  v1::LookupAndLeaseResponse Lookup(const Session& session, int32_t chain, int32_t count) {
    v1::LookupAndLeaseRequest request;
    request.set_session_id(session.attached.session_id());
    for (const BlockKey& key : ChainKeys(chain, count)) {
      request.add_block_keys(std::string(key.view()));
    }
    v1::LookupAndLeaseResponse response;
    const auto status = stub_->LookupAndLease(Context().get(), request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  v1::Stats Stats() {
    v1::Stats stats;
    EXPECT_TRUE(stub_->GetStats(Context().get(), {}, &stats).ok());
    return stats;
  }
  // Waits until the store has `count` sessions; false after 10 s.
  bool WaitForSessions(int32_t count) {
    for (int i = 0; i < 1000; ++i) {
      if (Stats().session_count() == count) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }

  const CacheSpec spec_ = TinySpec();
  KvStoreConfig config_;
  std::filesystem::path directory_;
  std::unique_ptr<ServerRunner> runner_;
  std::unique_ptr<KvStoreServer> store_;
  std::unique_ptr<KvStore::Stub> stub_;
  v1::RegisterCacheResponse cache_;
};

}  // namespace certkv

#endif  // CERTKV_TESTS_SUPPORT_KVSTORE_SERVICE_FIXTURE_H_
