// Who may do what, against real servers: tokens, scopes, and tenants that know nothing of each
// other.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "certkv/certifier/v1/certifier.grpc.pb.h"
#include "certkv/gate/v1/gate.grpc.pb.h"
#include "certkv/kvstore/v1/kvstore.grpc.pb.h"
#include "clients/cpp/rpc.h"
#include "clients/cpp/store_client.h"
#include "google/protobuf/descriptor.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "tests/support/http_client.h"
#include "tests/system/certificates.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class AccessTest : public SystemTest {
 protected:
  // Servers that ask for tokens at their Unix sockets, and an engine for each of two tenants.
  void Open(const std::string& more_server_yaml = "", const std::string& gate_yaml = "") {
    ASSERT_TRUE(certificates_.Make("token certifier read '*'"));
    ASSERT_TRUE(certificates_.Make("token owner read,write,admin,risk '*'"));
    ASSERT_TRUE(certificates_.Make("token a read,write,risk a"));
    ASSERT_TRUE(certificates_.Make("token b read,write,risk b"));
    ASSERT_TRUE(certificates_.Make("token looker read '*'"));
    ASSERT_TRUE(certificates_.Make("token pooled read,write pooled-1,pooled-2"));
    ClusterAccess access;
    access.server_yaml = absl::StrCat("server:\n  unix_requires_token: true\n  access_file: ",
                                      certificates_.Path("access.yaml"), "\n", more_server_yaml);
    access.reader_token = certificates_.Path("certifier.token");
    auto cluster = Cluster::Start(GetParam(), gate_yaml, access);
    ASSERT_TRUE(cluster.ok()) << cluster.status();
    cluster_ = *std::move(cluster);
  }
  client::Options As(const std::string& identity) const {
    client::Options options = cluster_->options();
    if (!identity.empty()) options.token_file = certificates_.Path(identity + ".token");
    return options;
  }
  std::unique_ptr<client::Worker> AttachAs(const std::string& identity, const CacheSpec& spec) {
    auto worker = client::Worker::Attach(As(identity), spec);
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }
  template <typename Call>
  static absl::Status Unary(const Call& call) {
    return client::CallUnary(20000, client::Retry::kNever, call);
  }
  std::unique_ptr<kvstore::v1::KvStore::Stub> Store(const std::string& identity) const {
    const client::Options options = As(identity);
    return kvstore::v1::KvStore::NewStub(client::MakeChannel(options.kvstore_target, options));
  }
  std::unique_ptr<gate::v1::Gate::Stub> Gate(const std::string& identity) const {
    const client::Options options = As(identity);
    return gate::v1::Gate::NewStub(client::MakeChannel(options.gate_target, options));
  }
  std::unique_ptr<certifier::v1::Certifier::Stub> Certifier(const std::string& identity) const {
    const client::Options options = As(identity);
    return certifier::v1::Certifier::NewStub(
        client::MakeChannel(options.certifier_target, options));
  }
  // What a call of the method with an empty message is answered with.
  static absl::Status CallEmpty(const std::string& target, const client::Options& options,
                                const google::protobuf::MethodDescriptor& method) {
    grpc::GenericStub stub(client::MakeChannel(target, options));
    grpc::CompletionQueue queue;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
    auto call = stub.PrepareCall(
        &context, absl::StrCat("/", method.service()->full_name(), "/", method.name()), &queue);
    void* tag = nullptr;
    bool ok = false;
    call->StartCall(nullptr);
    queue.Next(&tag, &ok);
    const grpc::Slice slice("");
    call->WriteLast(grpc::ByteBuffer(&slice, 1), grpc::WriteOptions(), nullptr);
    queue.Next(&tag, &ok);
    grpc::Status status;
    grpc::ByteBuffer answer;
    for (ok = true; ok;) {  // a stream would go on; these end
      call->Read(&answer, nullptr);
      queue.Next(&tag, &ok);
    }
    call->Finish(&status, nullptr);
    queue.Next(&tag, &ok);
    return FromGrpcStatus(status);
  }

  Certificates certificates_;
};

TEST_P(AccessTest, EveryMethodOfEveryServiceRefusesACallWithoutAToken) {
  Open();
  const client::Options nobody = As("");
  int count = 0;
  const std::pair<const google::protobuf::ServiceDescriptor*, std::string> services[] = {
      {kvstore::v1::RegisterCacheRequest::descriptor()->file()->service(0), nobody.kvstore_target},
      {certifier::v1::OpenViewRequest::descriptor()->file()->service(0), nobody.certifier_target},
      {gate::v1::OpenRequestRequest::descriptor()->file()->service(0), nobody.gate_target}};
  for (const auto& [service, target] : services) {
    for (int i = 0; i < service->method_count(); ++i) {
      const absl::Status status = CallEmpty(target, nobody, *service->method(i));
      EXPECT_EQ(ReasonOf(status), "TOKEN_REQUIRED") << service->method(i)->full_name() << status;
      EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
      ++count;
    }
  }
  EXPECT_GT(count, 25) << "the services have their methods";
}

TEST_P(AccessTest, AnEngineWithATokenPutsReadsAndReports) {
  Open();
  const TestSequence data(SmallSpec(), 200, 3);
  const auto worker = AttachAs("a", data.spec);
  ASSERT_NE(worker, nullptr);
  const auto sequence = Put(*worker, data);
  ASSERT_NE(sequence, nullptr);
  auto request = client::Request::Open(As("a"), "r", {});
  ASSERT_TRUE(request.ok()) << request.status();
  auto attention = client::Attention::Open(*worker, *sequence, **request);
  ASSERT_TRUE(attention.ok()) << attention.status();
  const auto results = ReadAndCheck(**attention, data, 200, 5);
  ASSERT_EQ(results.size(), 2u);
  for (const client::ReadResult& result : results) {
    for (const ReadCertificate& certificate : result.certificates) {
      EXPECT_EQ(certificate.outcome, Outcome::kCertified) << "it came from the certifier";
    }
  }
  ASSERT_TRUE((*request)->Flush().ok());
  const auto risk = (*request)->Risk();
  ASSERT_TRUE(risk.ok()) << risk.status();
  EXPECT_GT(risk->read_count, 0);
  EXPECT_THAT(cluster_->Logs(), Not(HasSubstr("Bearer")));
}

class CapacityTest : public AccessTest {
 protected:
  // What the dashboard tells of the store, once it has an answer or an error.
  nlohmann::json StoreSummary(uint16_t port) {
    nlohmann::json store;
    for (int i = 0; i < 500; ++i) {
      store = nlohmann::json::parse(HttpGet(port, "/api/overview").body)["store"];
      if (store["known"] == true || store["error"] != "") break;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return store;
  }
};

TEST_P(CapacityTest, GateShowsItsTokenToTheStore) {
  const uint16_t port = FreePort();
  Open(absl::StrCat("  http_address: 127.0.0.1:", port, "\n"),
       absl::StrCat("gate:\n  store_token_file: ", certificates_.Path("certifier.token"), "\n"));
  const auto worker = AttachAs("a", SmallSpec());
  const nlohmann::json store = StoreSummary(port);
  EXPECT_EQ(store["known"], true) << store.dump();
  EXPECT_EQ(store["caches"].size(), 1u) << store.dump();
}

TEST_P(CapacityTest, WithoutATokenTheDashboardSaysWhyThereIsNoCapacity) {
  const uint16_t port = FreePort();
  Open(absl::StrCat("  http_address: 127.0.0.1:", port, "\n"));
  const nlohmann::json store = StoreSummary(port);
  EXPECT_EQ(store["known"], false);
  EXPECT_THAT(store["error"].get<std::string>(), HasSubstr("neither a token"));
}

TEST_P(AccessTest, AScopeThatIsMissingIsNamed) {
  Open();
  client::StoreClient looker(As("looker"));
  EXPECT_TRUE(looker.GetStats().ok());
  const absl::Status write = looker.RegisterCache(SmallSpec()).status();
  EXPECT_EQ(write.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(ReasonOf(write), "SCOPE_MISSING");
  EXPECT_THAT(std::string(write.message()), HasSubstr("scope write"));
  EXPECT_THAT(std::string(write.message()), HasSubstr("looker"));
  gate::v1::ListRequestRisksResponse risks;
  EXPECT_EQ(ReasonOf(Unary([&](grpc::ClientContext& context) {
              return Gate("looker")->ListRequestRisks(&context, {}, &risks);
            })),
            "SCOPE_MISSING");
  gate::v1::Policy policy;
  EXPECT_EQ(ReasonOf(Unary([&](grpc::ClientContext& context) {
              return Gate("a")->UpdatePolicy(&context, {}, &policy);
            })),
            "SCOPE_MISSING");
}

TEST_P(AccessTest, AnUnknownTokenIsRefused) {
  Open();
  std::ofstream(certificates_.Path("forged.token")) << std::string(64, 'f') << "\n";
  std::filesystem::permissions(certificates_.Path("forged.token"),
                               std::filesystem::perms::owner_read);
  const absl::Status status = client::StoreClient(As("forged")).GetStats().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(ReasonOf(status), "TOKEN_UNKNOWN");
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("ffff"))) << "tokens are never told";
}

TEST_P(AccessTest, ATokenFileThatOthersMayReadIsNotUsed) {
  Open();
  chmod(certificates_.Path("a.token").c_str(), 0644);
  const auto worker = client::Worker::Attach(As("a"), SmallSpec());
  EXPECT_EQ(ReasonOf(worker.status()), "SECRET_FILE_UNSAFE") << worker.status();
}

TEST_P(AccessTest, SighupWithdrawsATokenAndABadFileChangesNothing) {
  Open();
  client::StoreClient looker(As("looker"));
  ASSERT_TRUE(looker.GetStats().ok());
  const std::string path = certificates_.Path("access.yaml");
  const auto reload_and_wait_for = [&](const std::string& event) {
    cluster_->Signal(ClusterService::kStore, SIGHUP);
    for (int i = 0; i < 2000 && !absl::StrContains(cluster_->Logs(), "event=" + event); ++i) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_THAT(cluster_->Logs(), HasSubstr("event=" + event));
  };
  chmod(path.c_str(), 0644);
  reload_and_wait_for("access_file_refused");
  EXPECT_TRUE(looker.GetStats().ok()) << "what was in force stays";
  std::ofstream(path) << "identities: []\n";
  chmod(path.c_str(), 0600);
  reload_and_wait_for("access_file_reloaded");
  EXPECT_EQ(ReasonOf(looker.GetStats().status()), "TOKEN_UNKNOWN");
}

// What tenant a has in the store, for b to look for.
class TenantTest : public AccessTest {
 protected:
  void OpenAndPut() {
    Open();
    data_ = std::make_unique<TestSequence>(SmallSpec(), 256, 9);
    worker_a_ = AttachAs("a", data_->spec);
    ASSERT_NE(worker_a_, nullptr);
    sequence_a_ = Put(*worker_a_, *data_);
    ASSERT_NE(sequence_a_, nullptr);
    ASSERT_EQ(sequence_a_->blocks().size(), 4u);
    kvstore::v1::Stats stats;
    ASSERT_TRUE(Unary([&](grpc::ClientContext& context) {
                  return Store("owner")->GetStats(&context, {}, &stats);
                }).ok());
    ASSERT_EQ(stats.caches_size(), 1);
    cache_a_ = stats.caches(0).cache_id();
  }

  std::unique_ptr<TestSequence> data_;
  std::unique_ptr<client::Worker> worker_a_;
  std::unique_ptr<client::Sequence> sequence_a_;
  int64_t cache_a_ = 0;
};

TEST_P(TenantTest, AnotherTenantFindsNoBlockOfTheSameTokens) {
  OpenAndPut();
  const auto worker_b = AttachAs("b", data_->spec);
  ASSERT_NE(worker_b, nullptr);
  const auto found =
      worker_b->Lookup(data_->token_ids, client::DefaultKeyContext(worker_b->spec()));
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_THAT((*found)->blocks(), IsEmpty());
  // And what it puts is its own, under other keys.
  const auto sequence_b = Put(*worker_b, *data_);
  ASSERT_NE(sequence_b, nullptr);
  EXPECT_EQ(sequence_b->shared_block_count(), 0);
  EXPECT_NE(sequence_b->blocks()[0].key, sequence_a_->blocks()[0].key);
}

TEST_P(TenantTest, AnotherTenantsKeyIsAsOneThatWasNeverSealed) {
  OpenAndPut();
  client::StoreClient store_b(As("b"));
  const auto cache_b = store_b.RegisterCache(data_->spec);
  ASSERT_TRUE(cache_b.ok()) << cache_b.status();
  EXPECT_NE(static_cast<int64_t>(cache_b->cache), cache_a_);
  const auto session_b = store_b.AttachWorker(cache_b->cache);
  ASSERT_TRUE(session_b.ok()) << session_b.status();
  const BlockKey stolen = sequence_a_->blocks()[0].key;
  const auto leased = store_b.LookupAndLease(session_b->session, {stolen});
  ASSERT_TRUE(leased.ok()) << leased.status();
  EXPECT_THAT(leased->blocks, IsEmpty());
  kvstore::v1::DropBlocksRequest drop;
  drop.set_session_id(static_cast<int64_t>(session_b->session));
  drop.add_block_keys(std::string(stolen.view()));
  kvstore::v1::DropBlocksResponse dropped;
  ASSERT_TRUE(Unary([&](grpc::ClientContext& context) {
                return Store("b")->DropBlocks(&context, drop, &dropped);
              }).ok());
  EXPECT_EQ(dropped.dropped_count(), 0);
  kvstore::v1::GetBlockRequest get;
  get.set_cache_id(cache_a_);
  get.set_block_key(std::string(stolen.view()));
  kvstore::v1::Block block;
  EXPECT_TRUE(Unary([&](grpc::ClientContext& context) {
                return Store("a")->GetBlock(&context, get, &block);
              }).ok());
  EXPECT_EQ(ReasonOf(Unary([&](grpc::ClientContext& context) {
              return Store("b")->GetBlock(&context, get, &block);
            })),
            "CACHE_NOT_FOUND");
}

TEST_P(TenantTest, AnotherTenantsSessionAndLeaseAreNotThere) {
  OpenAndPut();
  client::StoreClient store_a(As("a"));
  client::StoreClient store_b(As("b"));
  const auto session = store_a.AttachWorker(CacheId{cache_a_});
  ASSERT_TRUE(session.ok()) << session.status();
  const auto leased = store_a.LookupAndLease(session->session, {sequence_a_->blocks()[0].key});
  ASSERT_TRUE(leased.ok());
  ASSERT_EQ(leased->blocks.size(), 1u);
  EXPECT_EQ(ReasonOf(store_b.RenewLease(session->session, leased->lease).status()),
            "SESSION_NOT_FOUND");
  EXPECT_EQ(ReasonOf(store_b.ReserveBlocks(session->session, 1).status()), "SESSION_NOT_FOUND");
  EXPECT_TRUE(store_b.DetachWorker(session->session).ok()) << "as for one that has ended";
  EXPECT_TRUE(store_a.RenewLease(session->session, leased->lease).ok()) << "and it goes on";
  // Nor may b attach to a's cache, for itself or for a.
  EXPECT_EQ(ReasonOf(store_b.AttachWorker(CacheId{cache_a_}).status()), "CACHE_NOT_FOUND");
  client::Options as_a = As("b");
  as_a.tenant = "a";
  EXPECT_EQ(ReasonOf(client::StoreClient(as_a).RegisterCache(data_->spec).status()),
            "TENANT_FORBIDDEN");
}

TEST_P(TenantTest, AnotherTenantsMemoryCannotBeMapped) {
  OpenAndPut();
  const auto worker_b = AttachAs("b", data_->spec);
  ASSERT_NE(worker_b, nullptr);
  // Descriptors of b's session are of slabs in which nothing of a's was ever written.
  const SlabLayout& layout = worker_b->backing_layout();
  const uint8_t* base = worker_b->backing_base();
  for (const BlockHandle& block : sequence_a_->blocks()) {
    const int64_t offset = layout.key_offset(block.backing.slot, 0, 0);
    EXPECT_TRUE(std::all_of(base + offset, base + offset + 4096, [](uint8_t b) { return b == 0; }));
    const uint8_t* own = worker_a_->backing_base() + offset;
    EXPECT_FALSE(std::all_of(own, own + 4096, [](uint8_t b) { return b == 0; }));
  }
}

TEST_P(TenantTest, AnotherTenantsViewAndRiskAreNotThere) {
  OpenAndPut();
  auto request = client::Request::Open(As("a"), "secret", {});
  ASSERT_TRUE(request.ok()) << request.status();
  certifier::v1::OpenViewRequest open;
  open.set_spec_digest(std::string(worker_a_->spec_digest().view()));
  for (const BlockHandle& block : sequence_a_->blocks()) {
    *open.add_blocks() = BlockHandleToProto(block);
  }
  *open.mutable_policy() =
      PolicyLeaseToProto((*request)->CurrentLease(), absl::ToUnixMillis(absl::Now()));
  certifier::v1::OpenViewResponse view;
  const absl::Status opened = Unary([&](grpc::ClientContext& context) {
    return Certifier("a")->OpenView(&context, open, &view);
  });
  ASSERT_TRUE(opened.ok()) << opened;
  const std::vector<float> queries = TestQueries(data_->spec, 1);
  certifier::v1::CertifyRequest certify;
  auto* read = certify.add_reads();
  read->set_view_id(view.view_id());
  read->set_query_position(200);
  read->set_queries(
      std::string(reinterpret_cast<const char*>(queries.data()), queries.size() * sizeof(float)));
  for (const char* who : {"a", "b"}) {
    certifier::v1::CertifyResponse response;
    ASSERT_TRUE(Unary([&](grpc::ClientContext& context) {
                  return Certifier(who)->Certify(&context, certify, &response);
                }).ok());
    ASSERT_EQ(response.results_size(), 1);
    EXPECT_EQ(response.results(0).reason(), std::string(who) == "a" ? "" : "VIEW_NOT_FOUND");
  }
  // The same handles in a view of b's are of b's cache, which has none of them.
  certifier::v1::OpenViewResponse stolen;
  EXPECT_EQ(ReasonOf(Unary([&](grpc::ClientContext& context) {
              return Certifier("b")->OpenView(&context, open, &stolen);
            })),
            "CACHE_NOT_FOUND");
  gate::v1::GetRequestRiskRequest get;
  get.set_request("requests/secret");
  gate::v1::RequestRisk risk;
  EXPECT_TRUE(Unary([&](grpc::ClientContext& context) {
                return Gate("a")->GetRequestRisk(&context, get, &risk);
              }).ok());
  EXPECT_EQ(risk.tenant(), "a") << "an identity of one tenant acts for it without a word";
  EXPECT_EQ(ReasonOf(Unary([&](grpc::ClientContext& context) {
              return Gate("b")->GetRequestRisk(&context, get, &risk);
            })),
            "REQUEST_NOT_FOUND");
  gate::v1::ListRequestRisksResponse risks;
  ASSERT_TRUE(Unary([&](grpc::ClientContext& context) {
                return Gate("b")->ListRequestRisks(&context, {}, &risks);
              }).ok());
  EXPECT_EQ(risks.risks_size(), 0);
}

TEST_P(TenantTest, CountsOfAllTenantsAreForThoseWhoMayActForAll) {
  OpenAndPut();
  kvstore::v1::Stats stats;
  ASSERT_TRUE(Unary([&](grpc::ClientContext& context) {
                return Store("b")->GetStats(&context, {}, &stats);
              }).ok());
  EXPECT_EQ(stats.caches_size(), 0);
  EXPECT_EQ(stats.blocks_sealed(), 0);
  EXPECT_EQ(stats.session_count(), 0);
  kvstore::v1::ListBlocksResponse blocks;
  EXPECT_EQ(ReasonOf(Unary([&](grpc::ClientContext& context) {
              return Store("b")->ListBlocks(&context, {}, &blocks);
            })),
            "TENANT_FORBIDDEN");
  gate::v1::Policy policy;
  EXPECT_EQ(ReasonOf(Unary([&](grpc::ClientContext& context) {
              return Gate("b")->GetPolicy(&context, {}, &policy);
            })),
            "TENANT_FORBIDDEN");
  // Of several tenants one must be named.
  client::StoreClient pooled(As("pooled"));
  EXPECT_EQ(ReasonOf(pooled.RegisterCache(data_->spec).status()), "TENANT_FORBIDDEN");
}

INSTANTIATE_TEST_SUITE_P(Shapes, AccessTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);
INSTANTIATE_TEST_SUITE_P(Shapes, CapacityTest, ::testing::Values(ClusterShape::kAllInOne),
                         ShapeName);
INSTANTIATE_TEST_SUITE_P(Shapes, TenantTest,
                         ::testing::Values(ClusterShape::kAllInOne, ClusterShape::kThreeProcesses),
                         ShapeName);

}  // namespace
}  // namespace certkv
