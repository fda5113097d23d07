// The store over a real Unix socket: gRPC, descriptors, sessions that die.
#include "services/kvstore/service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <thread>

#include "absl/time/clock.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/errors.h"
#include "tests/support/kvstore_service_fixture.h"

namespace certkv {
namespace {

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

TEST_F(KvStoreServiceTest, TheLastWordOnTheDescriptorSocketSaysWhyTheSessionEnded) {
  Session worker = Connect();
  v1::DetachWorkerRequest request;
  request.set_session_id(worker.attached.session_id());
  v1::DetachWorkerResponse response;
  ASSERT_TRUE(stub_->DetachWorker(Context().get(), request, &response).ok());
  const auto last = ReceiveWithFds(worker.socket.get(), sizeof(FdReply), 10'000);
  ASSERT_TRUE(last.ok()) << last.status();
  FdReply reply{};
  std::memcpy(&reply, last->bytes.data(), sizeof(reply));
  EXPECT_EQ(reply.magic, kFdMagic);
  EXPECT_EQ(reply.code, static_cast<int32_t>(absl::StatusCode::kFailedPrecondition));
  EXPECT_STREQ(reply.reason, kFdSessionEnded);
  EXPECT_THAT(reply.message, testing::HasSubstr("because it was detached"));
  char byte = 0;
  EXPECT_EQ(read(worker.socket.get(), &byte, 1), 0) << "closed";
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

TEST_F(KvStoreServiceTest, DrainRefusesNewCallsAndEndsStreams) {
  auto context = std::make_unique<grpc::ClientContext>();
  const auto reader = stub_->WatchBlockEvents(context.get(), {});
  v1::BlockEvent event;
  ASSERT_TRUE(reader->Read(&event));
  EXPECT_EQ(event.kind(), v1::BlockEvent::KIND_BEGUN);
  store_->Drain();
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
