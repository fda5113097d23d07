// Two stores in two processes, with a GPU each that is host memory and a stub for NCCL, under
// mutual TLS: what is put on one comes to the other without TCP, and by TCP where NCCL fails.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/boot_id.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/slab_layout.h"
#include "kernels/core/status.h"
#include "services/kvstore/service_rendezvous.h"
#include "tests/nccl/stub.h"
#include "tests/support/http_client.h"
#include "tests/support/loopback.h"
#include "tests/system/certificates.h"
#include "tests/system/cluster.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokenCount = 64 * 6;  // whole blocks
constexpr int32_t kBlocks = 6;

// cluster_ is the one that pulls.
class NcclTest : public SystemTest {
 protected:
  NcclTest() {
    for (const char* command : {"ca", "server localhost 127.0.0.1", "client store-b read '*'"}) {
      CERTKV_CHECK(certificates_.Make(command), "certificates are made");
    }
  }

  std::string Yaml(int32_t device, const std::string& server, const std::string& kvstore) const {
    return absl::StrCat(
        "server:\n  tcp_security: mutual_tls\n  tls_certificate: ",
        certificates_.Path("server.crt"), "\n  tls_key: ", certificates_.Path("server.key"),
        "\n  tls_client_ca: ", certificates_.Path("ca.crt"),
        "\n  access_file: ", certificates_.Path("access.yaml"), server,
        "\nkvstore:\n  device: cuda\n  device_memory: 8MiB\n  backing_memory: 32MiB\n"
        "  device_index: ",
        device, "\n  nccl: require\n  nccl_library: ", StubNccl(),
        "\n  nccl_in_flight: 128KiB\n  nccl_timeout: 1s\n", kvstore);
  }
  void StartSource() {
    grpc_ = absl::StrCat("localhost:", UnusedPort());
    bulk_ = absl::StrCat("localhost:", UnusedPort());
    ClusterAccess access;
    access.on_device = true;
    access.server_yaml = Yaml(0, absl::StrCat("\n  tcp_address: ", grpc_),
                              absl::StrCat("  bulk_address: ", bulk_, "\n"));
    auto source = Cluster::Start(ClusterShape::kAllInOne, "", access);
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = *std::move(source);
  }
  void StartTarget(int32_t device = 1, const std::string& client = "store-b") {
    http_port_ = static_cast<uint16_t>(UnusedPort());
    ClusterAccess access;
    access.on_device = true;
    access.server_yaml = Yaml(
        device, absl::StrCat("\n  http_address: 127.0.0.1:", http_port_),
        absl::StrCat("  bulk_peers: ", bulk_, "\n  bulk_peer_ca: ", certificates_.Path("ca.crt"),
                     "\n  bulk_certificate: ", certificates_.Path(client + ".crt"),
                     "\n  bulk_key: ", certificates_.Path(client + ".key"),
                     "\n  nccl_peers: ", bulk_, "=", grpc_, "\n"));
    auto target = Cluster::Start(ClusterShape::kAllInOne, "", access);
    ASSERT_TRUE(target.ok()) << target.status();
    cluster_ = *std::move(target);
  }
  void PutOnSource() {
    data_ = std::make_unique<TestSequence>(SmallSpec(), kTokenCount, 11);
    auto worker = client::Worker::Attach(source_->options(), data_->spec);
    ASSERT_TRUE(worker.ok()) << worker.status();
    source_worker_ = *std::move(worker);
    source_sequence_ = Put(*source_worker_, *data_);
    ASSERT_NE(source_sequence_, nullptr);
  }
  absl::StatusOr<std::unique_ptr<client::Sequence>> Pull() {
    if (worker_ == nullptr) worker_ = AttachWorker(data_->spec);
    return worker_->Pull(bulk_, data_->token_ids, client::DefaultKeyContext(data_->spec),
                         client::PullOrder::kWhole);
  }
  // Whole, with the source's planes, and read with certificates that hold.
  void ExpectWhole(client::Sequence& sequence) {
    ASSERT_EQ(sequence.token_count(), kTokenCount);
    const SlabLayout& layout = worker_->device_layout();
    for (size_t i = 0; i < sequence.blocks().size(); ++i) {
      const BlockHandle& here = sequence.blocks()[i];
      const BlockHandle& there = source_sequence_->blocks()[i];
      EXPECT_EQ(here.key, there.key);
      EXPECT_TRUE(here.backing.present());
      EXPECT_EQ(
          std::memcmp(worker_->device_base() + layout.scan_offset(here.device.slot, 1, 0, 0),
                      source_worker_->device_base() +
                          source_worker_->device_layout().scan_offset(there.device.slot, 1, 0, 0),
                      static_cast<size_t>(layout.tile_layout(1).scan_bytes)),
          0);
    }
    const auto request = OpenRequest("pulled");
    ASSERT_NE(request, nullptr);
    auto attention = client::Attention::Open(*worker_, sequence, *request);
    ASSERT_TRUE(attention.ok()) << attention.status();
    EXPECT_EQ(ReadAndCheck(**attention, *data_, kTokenCount, 5).size(), 2u);
  }
  // Calls the source as the store whose certificate is `client`'s.
  std::unique_ptr<kvstore::NcclRendezvous> RendezvousAs(const std::string& client) const {
    kvstore::BulkConfig config;
    config.access.tcp_security = TcpSecurity::kMutualTls;
    config.peer_ca = certificates_.Path("ca.crt");
    config.certificate = certificates_.Path(client + ".crt");
    config.key = certificates_.Path(client + ".key");
    return kvstore::MakeGrpcRendezvous(config);
  }
  // What a store on another GPU of this machine offers for the sequence's cache.
  kvstore::NcclOffer OfferOfTheSource() const {
    const CacheSpec& spec = data_->spec;
    const SlabLayout& layout = source_worker_->device_layout();
    kvstore::NcclOffer offer;
    offer.version = 22809;  // the stub's
    offer.boot = CurrentBootId();
    offer.device_uuid.fill(0xee);
    offer.spec = DigestCacheSpec(spec);
    for (int32_t layer = 0; layer < static_cast<int32_t>(spec.layers.size()); ++layer) {
      const int64_t tiles = int64_t{spec.kv_head_count} * spec.tiles_per_block();
      offer.plane_bytes += tiles * layout.tile_layout(layer).tile_bytes();
      offer.original_bytes += tiles * kTileTokens * 2 * (spec.head_dim + spec.value_dim);
    }
    offer.movement_bytes = 1 << 16;
    return offer;
  }
  // A metric of the target, as Prometheus would get it; 0: it isn't there.
  double Metric(const std::string& name) const {
    const std::string text = HttpGet(http_port_, "/metrics").body;
    const size_t at = text.find("\n" + name + " ");
    return at == std::string::npos ? 0 : std::atof(text.c_str() + at + name.size() + 2);
  }
  double ReceivedByNccl() const {
    return Metric("certkv_kvstore_nccl_blocks_total{direction=\"received\"}");
  }
  double ReceivedByTcp() const {
    return Metric("certkv_kvstore_bulk_blocks_total{event=\"received\"}");
  }
  double Failures(const std::string& reason) const {
    return Metric(absl::StrCat("certkv_kvstore_nccl_failures_total{reason=\"", reason, "\"}"));
  }
  void TearDown() override {
    if (HasFailure() && source_ != nullptr) std::cerr << source_->Logs();
    SystemTest::TearDown();
  }

  const Certificates certificates_;
  std::string grpc_;
  std::string bulk_;
  uint16_t http_port_ = 0;
  std::unique_ptr<Cluster> source_;
  std::unique_ptr<TestSequence> data_;
  std::unique_ptr<client::Worker> source_worker_;
  std::unique_ptr<client::Sequence> source_sequence_;
  std::unique_ptr<client::Worker> worker_;
};

TEST_F(NcclTest, BlocksComeFromAnotherProcessByNccl) {
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  ASSERT_NO_FATAL_FAILURE(StartTarget());
  const auto sequence = Pull();
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ExpectWhole(**sequence);
  EXPECT_EQ(ReceivedByNccl(), kBlocks);
  EXPECT_EQ(ReceivedByTcp(), 0);
  EXPECT_EQ(Metric("certkv_kvstore_nccl_links_total"), 1);
  EXPECT_THAT(cluster_->Logs(), HasSubstr("nccl_used version=2.28.9"));
}

TEST_F(NcclTest, TcpTakesOverWhereNcclHangs) {
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  ASSERT_NO_FATAL_FAILURE(StartTarget());
  source_->SetNcclFailures("stall=1@3");
  const auto sequence = Pull();
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ExpectWhole(**sequence);
  EXPECT_EQ(ReceivedByTcp() + ReceivedByNccl(), kBlocks);
  EXPECT_GE(ReceivedByTcp(), 1);
  EXPECT_GE(Failures("NCCL_TIMEOUT") + Failures("NCCL_FAILED"), 1);
  EXPECT_THAT(cluster_->Logs(), HasSubstr("nccl_given_up"));
}

TEST_F(NcclTest, TwoStoresOnOneGpuPullByTcp) {
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  ASSERT_NO_FATAL_FAILURE(StartTarget(0));
  const auto sequence = Pull();
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ExpectWhole(**sequence);
  EXPECT_EQ(ReceivedByTcp(), kBlocks);
  EXPECT_EQ(Failures("NCCL_SAME_DEVICE"), 1);
}

// NCCL ends with the process, and so does TCP: an error within its time, not a hang.
TEST_F(NcclTest, PeerThatDiesWhileItSendsEndsThePull) {
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  ASSERT_NO_FATAL_FAILURE(StartTarget());
  source_->SetNcclFailures("die=1@3");
  const absl::Time begin = absl::Now();
  const auto sequence = Pull();
  EXPECT_EQ(ReasonOf(sequence.status()), "BULK_DISCONNECTED") << sequence.status();
  EXPECT_LT(absl::Now() - begin, absl::Seconds(20));
  source_->SetNcclFailures("");
  source_sequence_ = nullptr;
  source_worker_ = nullptr;
  ASSERT_TRUE(source_->Restart(ClusterService::kStore).ok());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  const auto again = Pull();
  ASSERT_TRUE(again.ok()) << again.status();
  ExpectWhole(**again);
}

// A link is found by its number alone, which only the store that joined was told.
TEST_F(NcclTest, LinkAnswersItsOwnTenantAlone) {
  ASSERT_TRUE(certificates_.Make("client stranger read other"));
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  const auto joined = RendezvousAs("store-b")->Join(grpc_, OfferOfTheSource(), 5000);
  ASSERT_TRUE(joined.ok()) << joined.status();

  kvstore::NcclAsk ask;
  ask.link_id = joined->link_id;
  ask.parts = kvstore::kBulkAllParts;
  for (const BlockHandle& block : source_sequence_->blocks()) ask.keys.push_back(block.key);
  const auto foreign = RendezvousAs("stranger")->Send(grpc_, ask, 5000);
  EXPECT_EQ(ReasonOf(foreign.status()), "NCCL_LINK_NOT_FOUND") << foreign.status();
  ask.link_id = joined->link_id + 1;
  const auto unknown = RendezvousAs("store-b")->Send(grpc_, ask, 5000);
  EXPECT_EQ(ReasonOf(unknown.status()), "NCCL_LINK_NOT_FOUND") << unknown.status();

  kvstore::NcclOffer offer = OfferOfTheSource();
  const auto own = RendezvousAs("stranger")->Join(grpc_, offer, 5000);
  EXPECT_EQ(ReasonOf(own.status()), "CACHE_NOT_FOUND") << "it means its own: " << own.status();
  offer.tenant = "theirs";
  const auto named = RendezvousAs("stranger")->Join(grpc_, offer, 5000);
  EXPECT_EQ(ReasonOf(named.status()), "TENANT_FORBIDDEN") << named.status();
}

TEST_F(NcclTest, StoreThatRequiresNcclDoesNotStartWithoutIt) {
  ClusterAccess access;
  access.on_device = true;
  access.server_yaml =
      "kvstore:\n  device: cuda\n  nccl: require\n  nccl_library: /nowhere/libnccl.so.2\n";
  const auto store = Cluster::Start(ClusterShape::kAllInOne, "", access);
  EXPECT_FALSE(store.ok());
}

}  // namespace
}  // namespace certkv
