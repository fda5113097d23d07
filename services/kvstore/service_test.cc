// The store over a real Unix socket: gRPC, descriptors, sessions that die.
#include "services/kvstore/service.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "absl/time/clock.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "services/common/errors.h"
#include "services/common/server_runner.h"
#include "tests/support/store_harness.h"

namespace certkv {
namespace {

using kvstore::v1::KvStore;
namespace v1 = kvstore::v1;

// A context with a deadline.
std::unique_ptr<grpc::ClientContext> Context(int64_t timeout_ms = 20'000) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  return context;
}

FdRequest MakeFdRequest(const std::string& token, int64_t staging_id) {
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
absl::StatusOr<FdAnswer> Ask(int socket, const FdRequest& request) {
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

TEST_F(KvStoreServiceTest, WorkerWritesAndReaderReadsInPlace) {
  Session worker = Connect();
  const auto sealed = Seal(Write(worker, 1, 4));
  ASSERT_EQ(sealed.blocks_size(), 4);
  Session reader = Connect(v1::SESSION_ROLE_READER);
  const auto found = Lookup(reader, 1, 6);
  ASSERT_EQ(found.blocks_size(), 4);
  EXPECT_GT(found.lease_id(), 0);
  const SlabLayout device(spec_, SlabKind::kDevice, cache_.device_slot_count());
  const SlabLayout backing(spec_, SlabKind::kBacking, cache_.backing_slot_count());
  ASSERT_TRUE(device.CheckHeader(reader.device.data(), reader.device.size_bytes()).ok());
  ASSERT_TRUE(backing.CheckHeader(reader.backing.data(), reader.backing.size_bytes()).ok());
  for (int i = 0; i < 4; ++i) {
    const BlockHandle handle = *BlockHandleFromProto(found.blocks(i));
    EXPECT_EQ(handle.key, ChainKey(1, i));
    EXPECT_TRUE(GenerationMatches(reader.device.data(), device, handle.device));
    const auto planes =
        CheckDevicePlanes(device, spec_, handle.key, handle.device.slot, reader.device.data());
    EXPECT_TRUE(planes.ok()) << planes;
    EXPECT_TRUE(GenerationStillMatches(reader.device.data(), device, handle.device));
    EXPECT_TRUE(
        HasOriginalsOf(backing, spec_, handle.key, handle.backing.slot, reader.backing.data()));
  }
  const v1::Stats stats = Stats();
  ASSERT_EQ(stats.caches_size(), 1);
  EXPECT_EQ(stats.caches(0).spec_digest(), cache_.spec_digest());
  EXPECT_EQ(stats.caches(0).device_slots_used(), 4);
  EXPECT_EQ(stats.caches(0).blocks_leased(), 4);
  EXPECT_TRUE(CacheSpecFromProto(stats.caches(0).spec()).ok());
  EXPECT_EQ(stats.blocks_sealed(), 4);
  EXPECT_EQ(stats.session_count(), 2);
  EXPECT_EQ(stats.lease_count(), 2);
}

TEST_F(KvStoreServiceTest, ReaderMapsAWorkersTail) {
  Session worker = Connect();
  Write(worker, 1, 1);
  Session reader = Connect(v1::SESSION_ROLE_READER);
  const FdRequest wrong = MakeFdRequest(reader.attached.fd_token(), 12345);
  const auto missing = *Ask(reader.socket.get(), wrong);
  EXPECT_STREQ(missing.reply.reason, "STAGING_NOT_FOUND");
  const auto answer = *Ask(reader.socket.get(),
                           MakeFdRequest(reader.attached.fd_token(), worker.attached.staging_id()));
  ASSERT_EQ(answer.reply.code, 0) << answer.reply.message;
  ASSERT_EQ(answer.fds.size(), 1u);
  EXPECT_EQ(answer.reply.staging_slot_count, 8);
  EXPECT_FALSE(Mapping::Map(answer.fds[0].get(), Mapping::Access::kReadWrite).ok());
  const Mapping tail = *Mapping::Map(answer.fds[0].get(), Mapping::Access::kReadOnly);
  const SlabLayout layout(spec_, SlabKind::kStaging, 8);
  EXPECT_TRUE(HasOriginalsOf(layout, spec_, ChainKey(1, 0), 0, tail.data()));
}

TEST_F(KvStoreServiceTest, WrongTokenIsRefusedClearlyAndTheConnectionCloses) {
  const UniqueFd socket = *ConnectUnixSocket(config_.fd_socket);
  const auto answer = *Ask(socket.get(), MakeFdRequest(std::string(16, 'x'), 0));
  EXPECT_EQ(answer.reply.code, static_cast<int32_t>(absl::StatusCode::kUnauthenticated));
  EXPECT_STREQ(answer.reply.reason, "FD_TOKEN_INVALID");
  EXPECT_THAT(answer.reply.message, testing::HasSubstr("attach again"));
  EXPECT_TRUE(answer.fds.empty());
  char byte = 0;
  EXPECT_EQ(read(socket.get(), &byte, 1), 0) << "closed";
}

TEST_F(KvStoreServiceTest, GarbageOnTheDescriptorSocketIsRefused) {
  const UniqueFd socket = *ConnectUnixSocket(config_.fd_socket);
  FdRequest request{};
  std::memset(&request, 0xee, sizeof(request));
  EXPECT_STREQ(Ask(socket.get(), request)->reply.reason, "FD_REQUEST_INVALID");
  const auto attached = Attach();
  const UniqueFd second = *ConnectUnixSocket(config_.fd_socket);
  EXPECT_STREQ(Ask(second.get(), MakeFdRequest(attached.fd_token(), 7))->reply.reason,
               "FD_REQUEST_INVALID");
  // A half request, then silence and an end, harms nobody.
  const UniqueFd third = *ConnectUnixSocket(config_.fd_socket);
  ASSERT_EQ(write(third.get(), &request, 7), 7);
  EXPECT_EQ(Stats().session_count(), 1);
}

TEST_F(KvStoreServiceTest, ClosedConnectionReleasesEverythingAtOnce) {
  Session worker = Connect();
  Seal(Write(worker, 1, 2));
  Write(worker, 2, 2);  // reserved, half-written
  ASSERT_EQ(Stats().lease_count(), 1);
  worker.socket.reset();
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(WaitForSessions(0));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
  const v1::Stats stats = Stats();
  EXPECT_EQ(stats.lease_count(), 0);
  EXPECT_EQ(stats.caches(0).blocks_leased(), 0);
  EXPECT_EQ(stats.caches(0).backing_slots_used(), 2) << "sealed blocks stay";
  EXPECT_EQ(stats.blocks_aborted(), 2);
  v1::LookupAndLeaseRequest request;
  request.set_session_id(worker.attached.session_id());
  request.add_block_keys(std::string(ChainKey(1, 0).view()));
  v1::LookupAndLeaseResponse response;
  const auto late = FromGrpcStatus(stub_->LookupAndLease(Context().get(), request, &response));
  EXPECT_EQ(ReasonOf(late), "SESSION_NOT_FOUND");
  EXPECT_THAT(std::string(late.message()), testing::HasSubstr("descriptor socket closed"));
}

TEST_F(KvStoreServiceTest, DetachIsIdempotent) {
  Session worker = Connect();
  v1::DetachWorkerRequest request;
  request.set_session_id(worker.attached.session_id());
  v1::DetachWorkerResponse response;
  EXPECT_TRUE(stub_->DetachWorker(Context().get(), request, &response).ok());
  EXPECT_TRUE(stub_->DetachWorker(Context().get(), request, &response).ok());
  EXPECT_EQ(Stats().session_count(), 0);
}

TEST_F(KvStoreServiceTest, EveryUnaryCallNeedsADeadline) {
  grpc::ClientContext none;
  v1::Stats stats;
  EXPECT_EQ(ReasonOf(FromGrpcStatus(stub_->GetStats(&none, {}, &stats))), "DEADLINE_REQUIRED");
  grpc::ClientContext also_none;
  v1::SealBlocksResponse sealed;
  EXPECT_EQ(ReasonOf(FromGrpcStatus(stub_->SealBlocks(&also_none, {}, &sealed))),
            "DEADLINE_REQUIRED");
}

TEST_F(KvStoreServiceTest, MalformedMessagesHaveReasons) {
  Session worker = Connect();
  v1::LookupAndLeaseRequest lookup;
  lookup.set_session_id(worker.attached.session_id());
  lookup.add_block_keys(std::string(ChainKey(1, 0).view()));
  lookup.add_block_keys("short");
  v1::LookupAndLeaseResponse found;
  const auto short_key = FromGrpcStatus(stub_->LookupAndLease(Context().get(), lookup, &found));
  EXPECT_EQ(ReasonOf(short_key), "DIGEST_SIZE");
  EXPECT_THAT(std::string(short_key.message()), testing::HasSubstr("block_keys[1]"));
  v1::AttachWorkerRequest attach;
  attach.set_cache_id(cache_.cache_id());
  attach.set_worker_name("w");
  v1::AttachWorkerResponse attached;
  EXPECT_EQ(ReasonOf(FromGrpcStatus(stub_->AttachWorker(Context().get(), attach, &attached))),
            "SESSION_ROLE_INVALID");
  v1::SealBlocksRequest seal = Write(worker, 1, 2);
  seal.mutable_entries(1)->set_parent_key("");
  v1::SealBlocksResponse sealed;
  EXPECT_EQ(ReasonOf(FromGrpcStatus(stub_->SealBlocks(Context().get(), seal, &sealed))),
            "DIGEST_SIZE");
  v1::ReserveBlocksRequest reserve;
  reserve.set_session_id(worker.attached.session_id());
  reserve.set_block_count(8);
  v1::ReserveBlocksResponse reserved;
  EXPECT_TRUE(stub_->ReserveBlocks(Context().get(), reserve, &reserved).ok())
      << "the slots of the refused seal are free";
}

TEST_F(KvStoreServiceTest, DemotedBlocksComeBackThroughLookup) {
  Stop();
  config_.device_memory_bytes = SlabLayout(spec_, SlabKind::kDevice, 2).slab_bytes();
  Start();
  Session worker = Connect();
  for (int chain = 1; chain <= 3; ++chain) {
    const auto sealed = Seal(Write(worker, chain, 2));
    v1::ReleaseLeaseRequest release;
    release.set_session_id(worker.attached.session_id());
    release.set_lease_id(sealed.lease_id());
    v1::ReleaseLeaseResponse released;
    ASSERT_TRUE(stub_->ReleaseLease(Context().get(), release, &released).ok());
  }
  v1::GetBlockRequest get;
  get.set_cache_id(cache_.cache_id());
  get.set_block_key(std::string(ChainKey(1, 1).view()));
  v1::Block block;
  ASSERT_TRUE(stub_->GetBlock(Context().get(), get, &block).ok());
  EXPECT_EQ(block.tier(), v1::BLOCK_TIER_BACKING_ONLY);
  EXPECT_EQ(block.handle().device().slot(), -1);
  const auto found = Lookup(worker, 1, 2);
  ASSERT_EQ(found.blocks_size(), 2);
  EXPECT_GE(found.blocks(1).device().slot(), 0);
  v1::FetchOriginalsRequest fetch;
  fetch.set_session_id(worker.attached.session_id());
  fetch.set_lease_id(found.lease_id());
  fetch.add_block_keys(std::string(ChainKey(1, 1).view()));
  v1::FetchOriginalsResponse fetched;
  ASSERT_TRUE(stub_->FetchOriginals(Context().get(), fetch, &fetched).ok());
  EXPECT_EQ(fetched.blocks(0).backing().slot(), found.blocks(1).backing().slot());
}

TEST_F(KvStoreServiceTest, LeaseExpiresByTheTimer) {
  Session worker = Connect();
  v1::SealBlocksRequest seal = Write(worker, 1, 1);
  seal.set_lease_duration_ms(100);
  const auto sealed = Seal(seal);
  for (int i = 0; i < 500 && Stats().leases_expired() == 0; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_EQ(Stats().leases_expired(), 1);
  v1::RenewLeaseRequest renew;
  renew.set_session_id(worker.attached.session_id());
  renew.set_lease_id(sealed.lease_id());
  v1::RenewLeaseResponse renewed;
  EXPECT_EQ(ReasonOf(FromGrpcStatus(stub_->RenewLease(Context().get(), renew, &renewed))),
            "LEASE_NOT_FOUND");
}

TEST_F(KvStoreServiceTest, WatcherSeesEventsInOrderUntilItCancels) {
  Session worker = Connect();
  auto context = std::make_unique<grpc::ClientContext>();
  const auto reader = stub_->WatchBlockEvents(context.get(), {});
  reader->WaitForInitialMetadata();
  // One event after another comes through, more in all than the queue holds.
  v1::BlockEvent event;
  int64_t last_sequence = 0;
  for (int chain = 1; chain <= 6; ++chain) {
    Seal(Write(worker, chain, 1));
    ASSERT_TRUE(reader->Read(&event));
    EXPECT_EQ(event.kind(), v1::BlockEvent::KIND_SEALED);
    EXPECT_EQ(event.block_key(), ChainKey(chain, 0).view());
    EXPECT_GT(event.sequence(), last_sequence);
    last_sequence = event.sequence();
  }
  context->TryCancel();
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(KvStoreServiceTest, WatchOfAnUnknownCacheIsRefused) {
  auto context = std::make_unique<grpc::ClientContext>();
  v1::WatchBlockEventsRequest request;
  request.set_cache_id(4711);
  const auto reader = stub_->WatchBlockEvents(context.get(), request);
  v1::BlockEvent event;
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(reader->Finish())), "CACHE_NOT_FOUND");
}

TEST_F(KvStoreServiceTest, WatcherThatFallsBehindIsCutOff) {
  Session worker = Connect();
  auto context = std::make_unique<grpc::ClientContext>();
  const auto reader = stub_->WatchBlockEvents(context.get(), {});
  reader->WaitForInitialMetadata();
  Seal(Write(worker, 1, 6));  // six events at once, the queue holds four
  v1::BlockEvent event;
  while (reader->Read(&event)) ADD_FAILURE() << "a gap before " << event.sequence();
  EXPECT_EQ(ReasonOf(FromGrpcStatus(reader->Finish())), "EVENTS_LOST");
}

TEST_F(KvStoreServiceTest, DrainRefusesNewCallsAndEndsStreams) {
  auto context = std::make_unique<grpc::ClientContext>();
  const auto reader = stub_->WatchBlockEvents(context.get(), {});
  reader->WaitForInitialMetadata();
  store_->Drain();
  v1::BlockEvent event;
  EXPECT_FALSE(reader->Read(&event));
  EXPECT_EQ(ReasonOf(FromGrpcStatus(reader->Finish())), "STORE_STOPPING");
  v1::Stats stats;
  EXPECT_EQ(ReasonOf(FromGrpcStatus(stub_->GetStats(Context().get(), {}, &stats))),
            "STORE_STOPPING");
}

TEST_F(KvStoreServiceTest, SecondStoreOnTheSameSocketIsRefusedAndADeadOnesIsReplaced) {
  const auto second = KvStoreServer::Create(config_, RealClock(), runner_->io_context());
  EXPECT_EQ(ReasonOf(second.status()), "SOCKET_IN_USE");
  EXPECT_TRUE(ConnectUnixSocket(config_.fd_socket).ok()) << "the first one still has it";
  KvStoreConfig other = config_;
  other.fd_socket = directory_ / "dead.sock";
  // A socket file that nobody listens on, as after kill -9.
  const UniqueFd dead(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, other.fd_socket.c_str());
  ASSERT_EQ(bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_TRUE(KvStoreServer::Create(other, RealClock(), runner_->io_context()).ok());
  EXPECT_FALSE(std::filesystem::exists(other.fd_socket)) << "removed at the end";
  other.fd_socket = directory_ / "file";
  std::fclose(std::fopen(other.fd_socket.c_str(), "w"));
  EXPECT_EQ(ReasonOf(KvStoreServer::Create(other, RealClock(), runner_->io_context()).status()),
            "SOCKET_PATH_TAKEN");
  other.fd_socket = directory_ / std::string(120, 'x');
  EXPECT_EQ(ReasonOf(KvStoreServer::Create(other, RealClock(), runner_->io_context()).status()),
            "SOCKET_PATH_TOO_LONG");
}

}  // namespace
}  // namespace certkv
