// Bad input at the services' doors: each gets a clear error, and the next good call works.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "clients/cpp/rpc.h"
#include "clients/cpp/store_client.h"
#include "kernels/core/fd_protocol.h"
#include "kernels/core/shared_memory.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

class DoorTest : public SystemTest {
 protected:
  void Open() {
    StartCluster();
    data_ = std::make_unique<TestSequence>(SmallSpec(), 200, 21);
    worker_ = AttachWorker(data_->spec);
    sequence_ = Put(*worker_, *data_);
    request_ = OpenRequest("door");
    const client::Options options = cluster_->options();
    store_ = kvstore::v1::KvStore::NewStub(client::MakeChannel(options.kvstore_target));
    certifier_ = certifier::v1::Certifier::NewStub(client::MakeChannel(options.certifier_target));
    gate_ = gate::v1::Gate::NewStub(client::MakeChannel(options.gate_target));
  }
  // A valid OpenViewRequest of the sequence.
  certifier::v1::OpenViewRequest ViewRequest() const {
    certifier::v1::OpenViewRequest view;
    view.set_spec_digest(std::string(worker_->spec_digest().view()));
    for (const BlockHandle& block : sequence_->blocks()) {
      *view.add_blocks() = BlockHandleToProto(block);
    }
    view.mutable_tail()->set_staging_id(sequence_->tail().staging_id);
    view.mutable_tail()->set_staging_slot(sequence_->tail().staging_slot);
    view.mutable_tail()->set_token_count(sequence_->tail().token_count);
    *view.mutable_policy() =
        PolicyLeaseToProto(request_->CurrentLease(), absl::ToUnixMillis(absl::Now()));
    return view;
  }
  absl::Status OpenView(const certifier::v1::OpenViewRequest& view) {
    certifier::v1::OpenViewResponse response;
    return client::CallUnary(5000, client::Retry::kNever, [&](grpc::ClientContext& context) {
      return certifier_->OpenView(&context, view, &response);
    });
  }

  std::unique_ptr<TestSequence> data_;
  std::unique_ptr<client::Worker> worker_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::Request> request_;
  std::unique_ptr<kvstore::v1::KvStore::Stub> store_;
  std::unique_ptr<certifier::v1::Certifier::Stub> certifier_;
  std::unique_ptr<gate::v1::Gate::Stub> gate_;
};

TEST_P(DoorTest, ACallWithoutDeadlineIsRefused) {
  Open();
  grpc::ClientContext store_context;
  kvstore::v1::Stats stats;
  const absl::Status store =
      FromGrpcStatus(store_->GetStats(&store_context, kvstore::v1::GetStatsRequest(), &stats));
  EXPECT_EQ(ReasonOf(store), "DEADLINE_REQUIRED") << store;
  grpc::ClientContext certifier_context;
  certifier::v1::OpenViewResponse view;
  const absl::Status certifier =
      FromGrpcStatus(certifier_->OpenView(&certifier_context, ViewRequest(), &view));
  EXPECT_EQ(ReasonOf(certifier), "DEADLINE_REQUIRED") << certifier;
  grpc::ClientContext gate_context;
  gate::v1::Policy policy;
  const absl::Status gate =
      FromGrpcStatus(gate_->GetPolicy(&gate_context, gate::v1::GetPolicyRequest(), &policy));
  EXPECT_EQ(ReasonOf(gate), "DEADLINE_REQUIRED") << gate;
}

TEST_P(DoorTest, AnOversizedMessageIsRefusedAndTheServerGoesOn) {
  Open();
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(-1);
  const auto stub = gate::v1::Gate::NewStub(grpc::CreateCustomChannel(
      cluster_->options().gate_target, grpc::InsecureChannelCredentials(), arguments));
  gate::v1::OpenRequestRequest request;
  request.set_request_id("big");
  request.set_label(std::string(8 << 20, 'x'));
  gate::v1::OpenRequestResponse response;
  const absl::Status status =
      client::CallUnary(5000, client::Retry::kNever, [&](grpc::ClientContext& context) {
        return stub->OpenRequest(&context, request, &response);
      });
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_TRUE(request_->Risk().ok());
}

TEST_P(DoorTest, AForeignDigestIsNotFound) {
  Open();
  certifier::v1::OpenViewRequest view = ViewRequest();
  view.mutable_spec_digest()->at(0) ^= 1;
  const absl::Status status = OpenView(view);
  EXPECT_EQ(ReasonOf(status), "CACHE_NOT_FOUND") << status;
}

TEST_P(DoorTest, AForgedSlotIsRefused) {
  Open();
  ASSERT_TRUE(OpenView(ViewRequest()).ok());
  for (const int32_t slot : {-2, 1 << 30}) {
    certifier::v1::OpenViewRequest view = ViewRequest();
    view.mutable_blocks(0)->mutable_device()->set_slot(slot);
    const absl::Status status = OpenView(view);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << slot << ": " << status;
  }
}

TEST_P(DoorTest, AnOldGenerationIsRefused) {
  Open();
  certifier::v1::OpenViewRequest view = ViewRequest();
  auto* device = view.mutable_blocks(0)->mutable_device();
  device->set_generation(device->generation() + 2);
  EXPECT_EQ(ReasonOf(OpenView(view)), "BLOCK_REUSED");
}

TEST_P(DoorTest, AHandleThatIsReplayedAfterItsSlotWasReusedIsRefused) {
  Open();
  const certifier::v1::OpenViewRequest old = [this] {
    certifier::v1::OpenViewRequest view = ViewRequest();
    view.clear_tail();
    return view;
  }();
  ASSERT_TRUE(OpenView(old).ok());
  // The sequence goes, its blocks are dropped, and their slots get other blocks.
  std::vector<std::string> keys;
  for (const BlockHandle& block : sequence_->blocks()) keys.emplace_back(block.key.view());
  sequence_.reset();
  client::StoreClient store(cluster_->options());
  const auto cache = store.RegisterCache(data_->spec);
  ASSERT_TRUE(cache.ok());
  const auto session = store.AttachWorker(cache->cache);
  ASSERT_TRUE(session.ok());
  kvstore::v1::DropBlocksRequest drop;
  drop.set_session_id(static_cast<int64_t>(session->session));
  for (const std::string& key : keys) drop.add_block_keys(key);
  kvstore::v1::DropBlocksResponse dropped;
  ASSERT_TRUE(client::CallUnary(20000, client::Retry::kNever, [&](grpc::ClientContext& context) {
                return store_->DropBlocks(&context, drop, &dropped);
              }).ok());
  ASSERT_EQ(dropped.dropped_count(), static_cast<int>(keys.size()));
  const TestSequence other(data_->spec, 200, 77);
  sequence_ = Put(*worker_, other);
  ASSERT_NE(sequence_, nullptr);
  const absl::Status replayed = OpenView(old);
  EXPECT_EQ(ReasonOf(replayed), "BLOCK_REUSED") << replayed;
}

TEST_P(DoorTest, ALeaseOfADeadSessionIsNotThere) {
  Open();
  client::StoreClient store(cluster_->options());
  const auto cache = store.RegisterCache(data_->spec);
  ASSERT_TRUE(cache.ok());
  const auto dead = store.AttachWorker(cache->cache);
  const auto alive = store.AttachWorker(cache->cache);
  ASSERT_TRUE(dead.ok() && alive.ok());
  const BlockKey key = sequence_->blocks()[0].key;
  const auto leased = store.LookupAndLease(dead->session, {key});
  ASSERT_TRUE(leased.ok());
  ASSERT_EQ(leased->blocks.size(), 1u);
  ASSERT_TRUE(store.DetachWorker(dead->session).ok());
  const absl::Status own = store.RenewLease(dead->session, leased->lease).status();
  EXPECT_EQ(ReasonOf(own), "SESSION_NOT_FOUND") << own;
  EXPECT_THAT(std::string(own.message()), HasSubstr("detached")) << "it says how it ended";
  const absl::Status borrowed = store.RenewLease(alive->session, leased->lease).status();
  EXPECT_EQ(ReasonOf(borrowed), "LEASE_NOT_FOUND") << borrowed;
  const absl::Status fetched = store.FetchOriginals(alive->session, leased->lease, {key});
  EXPECT_EQ(ReasonOf(fetched), "LEASE_NOT_FOUND") << fetched;
}

TEST_P(DoorTest, ABlockInTheWrongPlaceIsNotServed) {
  Open();
  // Another block's slot under this block's key: generations match, the tile's identity doesn't.
  certifier::v1::OpenViewRequest view = ViewRequest();
  *view.mutable_blocks(0)->mutable_device() = view.blocks(1).device();
  certifier::v1::OpenViewResponse opened;
  const absl::Status status = client::CallUnary(
      5000, client::Retry::kNever,
      [&](grpc::ClientContext& context) { return certifier_->OpenView(&context, view, &opened); });
  if (!status.ok()) return;  // refused at the door is as good
  const std::vector<float> queries = TestQueries(data_->spec, 1);
  certifier::v1::CertifyRequest request;
  auto* read = request.add_reads();
  read->set_view_id(opened.view_id());
  read->set_query_position(199);
  read->set_queries(
      std::string(reinterpret_cast<const char*>(queries.data()), queries.size() * sizeof(float)));
  certifier::v1::CertifyResponse response;
  ASSERT_TRUE(client::CallUnary(5000, client::Retry::kNever, [&](grpc::ClientContext& context) {
                return certifier_->Certify(&context, request, &response);
              }).ok());
  ASSERT_EQ(response.results_size(), 1);
  EXPECT_NE(response.results(0).code(), 0);
  EXPECT_EQ(response.results(0).certificates_size(), 0);
}

TEST_P(DoorTest, AForgedTokenGetsNoDescriptors) {
  Open();
  client::StoreClient store(cluster_->options());
  const auto cache = store.RegisterCache(data_->spec);
  ASSERT_TRUE(cache.ok());
  const auto session = store.AttachWorker(cache->cache);
  ASSERT_TRUE(session.ok());
  auto socket = ConnectUnixSocket(session->fd_socket);
  ASSERT_TRUE(socket.ok()) << socket.status();
  FdRequest request{};
  request.magic = kFdMagic;
  request.token[3] = 77;
  ASSERT_TRUE(
      SendWithFds(socket->get(),
                  absl::string_view(reinterpret_cast<const char*>(&request), sizeof(request)), {})
          .ok());
  const auto answer = ReceiveWithFds(socket->get(), sizeof(FdReply), 5000);
  ASSERT_TRUE(answer.ok()) << answer.status();
  FdReply reply{};
  std::memcpy(&reply, answer->bytes.data(), sizeof(reply));
  EXPECT_NE(reply.code, 0);
  EXPECT_TRUE(answer->fds.empty());
}

TEST_P(DoorTest, AnInvalidSpecNamesTheField) {
  Open();
  client::StoreClient store(cluster_->options());
  CacheSpec spec = SmallSpec();
  spec.head_dim = 65;
  const auto cache = store.RegisterCache(spec);
  EXPECT_EQ(ReasonOf(cache.status()), "CACHE_SPEC_INVALID");
  EXPECT_THAT(std::string(cache.status().message()), HasSubstr("head_dim is 65"));
}

TEST_P(DoorTest, WorkersCannotWriteSealedMemory) {
  Open();
  auto* slab = const_cast<uint8_t*>(worker_->device_base());
  EXPECT_DEATH(slab[worker_->device_layout().scan_offset(0, 0, 0, 0)] = 1, "");
  auto* originals = const_cast<uint8_t*>(worker_->backing_base());
  EXPECT_DEATH(originals[worker_->backing_layout().key_offset(0, 0, 0)] = 1, "");
}

INSTANTIATE_TEST_SUITE_P(Shapes, DoorTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
