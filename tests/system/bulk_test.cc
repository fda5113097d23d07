// Two stores in two processes, under mutual TLS: what is put on one is pulled to the other and read
// there with the same certificates, byte for byte.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "services/common/convert.h"
#include "tests/support/tcp_proxy.h"
#include "tests/system/certificates.h"
#include "tests/system/cluster.h"
#include "tests/system/system_fixture.h"

namespace certkv {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kTokenCount = 64 * 6;  // whole blocks

// cluster_ is the one that pulls.
class BulkTest : public SystemTest {
 protected:
  void MakeCertificates() {
    ASSERT_TRUE(certificates_.Make("ca"));
    ASSERT_TRUE(certificates_.Make("server localhost 127.0.0.1"));
    ASSERT_TRUE(certificates_.Make("client store-b read '*'"));
    ASSERT_TRUE(certificates_.Make("client stranger write '*'"));
  }
  std::string Yaml(const std::string& kvstore) const {
    return absl::StrCat(
        "server:\n  tcp_security: mutual_tls\n  tls_certificate: ",
        certificates_.Path("server.crt"), "\n  tls_key: ", certificates_.Path("server.key"),
        "\n  tls_client_ca: ", certificates_.Path("ca.crt"),
        "\n  access_file: ", certificates_.Path("access.yaml"), "\nkvstore:\n", kvstore);
  }
  std::string PeerYaml(int32_t port, const std::string& client) const {
    peer_ = absl::StrCat("localhost:", port);
    return Yaml(absl::StrCat("  bulk_peers: ", peer_,
                             "\n  bulk_peer_ca: ", certificates_.Path("ca.crt"),
                             "\n  bulk_certificate: ", certificates_.Path(client + ".crt"),
                             "\n  bulk_key: ", certificates_.Path(client + ".key"), "\n"));
  }
  void StartSource() {
    auto source =
        Cluster::Start(ClusterShape::kAllInOne, "", {Yaml("  bulk_address: localhost:0\n"), ""});
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = *std::move(source);
    const std::string log = source_->Logs();
    const std::string mark = "address=localhost:";
    const size_t at = log.find(mark);
    ASSERT_NE(at, std::string::npos) << log;
    source_port_ = std::atoi(log.c_str() + at + mark.size());
  }
  void StartTarget(int32_t port, const std::string& client = "store-b") {
    auto target = Cluster::Start(ClusterShape::kAllInOne, "", {PeerYaml(port, client), ""});
    ASSERT_TRUE(target.ok()) << target.status();
    cluster_ = *std::move(target);
  }
  // Puts the sequence on the source.
  void PutOnSource() {
    data_ = std::make_unique<TestSequence>(SmallSpec(), kTokenCount, 11);
    auto worker = client::Worker::Attach(source_->options(), data_->spec);
    ASSERT_TRUE(worker.ok()) << worker.status();
    source_worker_ = *std::move(worker);
    source_sequence_ = Put(*source_worker_, *data_);
    ASSERT_NE(source_sequence_, nullptr);
  }
  absl::StatusOr<std::unique_ptr<client::Sequence>> Pull(
      client::PullOrder order = client::PullOrder::kWhole, int64_t token_count = kTokenCount) {
    if (worker_ == nullptr) worker_ = AttachWorker(data_->spec);
    return worker_->Pull(peer_, absl::MakeConstSpan(data_->token_ids).first(token_count),
                         client::DefaultKeyContext(data_->spec), order);
  }
  // Reads the last position; outputs and certificates as bytes.
  std::vector<std::string> Read(Cluster& cluster, client::Worker& worker,
                                client::Sequence& sequence, ReadMode mode) {
    tolerances_.tv_tolerance = 0.2f;
    client::RequestOptions options;
    options.tolerances = &tolerances_;
    options.read_mode = mode;
    auto request =
        client::Request::Open(cluster.options(), absl::StrCat("r", ++request_count_), options);
    EXPECT_TRUE(request.ok()) << request.status();
    auto attention = client::Attention::Open(worker, sequence, **request);
    EXPECT_TRUE(attention.ok()) << attention.status();
    std::vector<std::string> bytes;
    if (!attention.ok()) return bytes;
    const std::vector<float> queries = TestQueries(data_->spec, 3);
    for (int32_t layer = 0; layer < 2; ++layer) {
      client::ReadRequest read;
      read.layer = layer;
      read.query_position = kTokenCount - 1;
      read.queries = queries.data();
      const auto results = (*attention)->Attend(absl::MakeConstSpan(&read, 1));
      EXPECT_TRUE(results.ok()) << results.status();
      if (!results.ok()) return bytes;
      const client::ReadResult& result = results->front();
      read_status_ = result.status;
      if (!result.status.ok()) return bytes;
      EXPECT_FALSE(result.in_process);
      EXPECT_EQ(CheckReadAgainstTruth(*data_, read, result, tolerances_), "");
      bytes.emplace_back(reinterpret_cast<const char*>(result.outputs.data()),
                         result.outputs.size() * sizeof(float));
      for (const ReadCertificate& certificate : result.certificates) {
        bytes.push_back(ReadCertificateToProto(certificate).SerializeAsString());
      }
    }
    return bytes;
  }
  void TearDown() override {
    if (HasFailure() && source_ != nullptr) std::cerr << source_->Logs();
    SystemTest::TearDown();
  }

  const Certificates certificates_;
  mutable std::string peer_;
  std::unique_ptr<Cluster> source_;
  int32_t source_port_ = 0;
  std::unique_ptr<TcpProxy> proxy_;
  std::unique_ptr<TestSequence> data_;
  std::unique_ptr<client::Worker> source_worker_;
  std::unique_ptr<client::Sequence> source_sequence_;
  std::unique_ptr<client::Worker> worker_;
  absl::Status read_status_;
  int32_t request_count_ = 0;
};

TEST_F(BulkTest, PulledBlocksAreReadWithTheSameCertificates) {
  ASSERT_NO_FATAL_FAILURE(MakeCertificates());
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  ASSERT_NO_FATAL_FAILURE(StartTarget(source_port_));
  auto sequence = Pull();
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ASSERT_EQ((*sequence)->token_count(), kTokenCount);
  const SlabLayout& layout = worker_->device_layout();
  for (size_t i = 0; i < (*sequence)->blocks().size(); ++i) {
    const BlockHandle& here = (*sequence)->blocks()[i];
    const BlockHandle& there = source_sequence_->blocks()[i];
    EXPECT_EQ(here.key, there.key);
    EXPECT_TRUE(here.backing.present());
    for (int32_t layer = 0; layer < 2; ++layer) {
      for (int32_t head = 0; head < data_->spec.kv_head_count; ++head) {
        EXPECT_EQ(std::memcmp(
                      worker_->device_base() + layout.scan_offset(here.device.slot, layer, head, 0),
                      source_worker_->device_base() + source_worker_->device_layout().scan_offset(
                                                          there.device.slot, layer, head, 0),
                      static_cast<size_t>(layout.tile_layout(layer).scan_bytes)),
                  0);
      }
    }
  }
  for (const ReadMode mode : {ReadMode::kEnforce, ReadMode::kExact}) {
    const auto there = Read(*source_, *source_worker_, *source_sequence_, mode);
    const auto here = Read(*cluster_, *worker_, **sequence, mode);
    EXPECT_EQ(here.size(), 2u * (1 + data_->spec.query_head_count()));
    EXPECT_EQ(here, there);
  }
}

TEST_F(BulkTest, ReadsBeforeTheOriginalsAreCertifiedOrErrors) {
  ASSERT_NO_FATAL_FAILURE(MakeCertificates());
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  proxy_ = std::make_unique<TcpProxy>(source_port_);
  ASSERT_NO_FATAL_FAILURE(StartTarget(proxy_->port()));
  // The answer comes when the planes have; then nothing more for a while. Planes are 40 % of the
  // originals; TLS adds a few thousand bytes a connection.
  const int64_t originals = kTokenCount * 2 * 2 * 64 * 4;
  proxy_->StallAfter(originals * 3 / 4);
  auto sequence = Pull(client::PullOrder::kOriginalsLater);
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  ASSERT_EQ((*sequence)->token_count(), kTokenCount);
  int32_t pending = 0;
  for (const BlockHandle& block : (*sequence)->blocks()) pending += block.backing.present() ? 0 : 1;
  ASSERT_GT(pending, 0);
  const auto certified = Read(*cluster_, *worker_, **sequence, ReadMode::kEnforce);
  EXPECT_TRUE(read_status_.ok()) << read_status_ << ": it needs no originals";
  EXPECT_FALSE(certified.empty());
  EXPECT_EQ(Read(*cluster_, *worker_, **sequence, ReadMode::kExact).size(), 0u);
  EXPECT_FALSE(read_status_.ok()) << "an exact read needs what is not there";
  proxy_->StallAfter(int64_t{1} << 60);
  for (int i = 0; i < 1000 && pending > 0; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
    sequence = worker_->Lookup(data_->token_ids, client::DefaultKeyContext(data_->spec));
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    pending = 0;
    for (const auto& block : (*sequence)->blocks()) pending += block.backing.present() ? 0 : 1;
  }
  ASSERT_EQ((*sequence)->token_count(), kTokenCount);
  for (const ReadMode mode : {ReadMode::kEnforce, ReadMode::kExact}) {
    const auto there = Read(*source_, *source_worker_, *source_sequence_, mode);
    EXPECT_EQ(Read(*cluster_, *worker_, **sequence, mode), there);
    EXPECT_FALSE(there.empty());
  }
}

TEST_F(BulkTest, ConnectionsStayUntilACertificateFileChanges) {
  ASSERT_NO_FATAL_FAILURE(MakeCertificates());
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  proxy_ = std::make_unique<TcpProxy>(source_port_);
  ASSERT_NO_FATAL_FAILURE(StartTarget(proxy_->port()));
  const auto pull = [this](int64_t token_count) {
    const auto sequence = Pull(client::PullOrder::kWhole, token_count);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    EXPECT_EQ(sequence.ok() ? (*sequence)->token_count() : 0, token_count);
  };
  for (const int64_t blocks : {1, 2, 3}) pull(64 * blocks);
  EXPECT_EQ(proxy_->connection_count(), 1) << "one handshake for three pulls";
  // The same certificate, but who knows that before it is read.
  std::ofstream(certificates_.Path("store-b.crt"), std::ios::app) << "\n";
  pull(64 * 4);
  EXPECT_EQ(proxy_->connection_count(), 2);
  std::ofstream(certificates_.Path("ca.crt"), std::ios::app) << "\n";
  pull(64 * 5);
  EXPECT_EQ(proxy_->connection_count(), 3);
}

TEST_F(BulkTest, ServersShowTheCertificateOfNow) {
  ASSERT_NO_FATAL_FAILURE(MakeCertificates());
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  ASSERT_NO_FATAL_FAILURE(StartTarget(source_port_));
  // From now on it is one that the other store does not believe.
  const Certificates other;
  ASSERT_TRUE(other.Make("ca") && other.Make("server localhost 127.0.0.1"));
  for (const char* name : {"server.crt", "server.key"}) {
    std::filesystem::copy_file(other.Path(name), certificates_.Path(name),
                               std::filesystem::copy_options::overwrite_existing);
  }
  EXPECT_EQ(ReasonOf(Pull().status()), "BULK_TLS_FAILED");
}

TEST_F(BulkTest, StrangersGetNothing) {
  ASSERT_NO_FATAL_FAILURE(MakeCertificates());
  ASSERT_NO_FATAL_FAILURE(StartSource());
  ASSERT_NO_FATAL_FAILURE(PutOnSource());
  ASSERT_NO_FATAL_FAILURE(StartTarget(source_port_, "stranger"));
  const auto forbidden = Pull();
  EXPECT_EQ(ReasonOf(forbidden.status()), "SCOPE_MISSING") << forbidden.status();
  EXPECT_THAT(source_->Logs(), HasSubstr("bulk_peer_refused"));
  const Certificates other;
  ASSERT_TRUE(other.Make("ca"));
  ASSERT_TRUE(other.Make("client store-b read '*'"));
  worker_.reset();
  cluster_.reset();
  auto target = Cluster::Start(
      ClusterShape::kAllInOne, "",
      {absl::StrCat(Yaml(
           absl::StrCat("  bulk_peers: ", peer_, "\n  bulk_peer_ca: ", certificates_.Path("ca.crt"),
                        "\n  bulk_certificate: ", other.Path("store-b.crt"),
                        "\n  bulk_key: ", other.Path("store-b.key"), "\n  bulk_timeout: 2s\n"))),
       ""});
  ASSERT_TRUE(target.ok()) << target.status();
  cluster_ = *std::move(target);
  const auto unknown = Pull();
  EXPECT_FALSE(unknown.ok()) << "its authority is not the source's";
}

TEST_F(BulkTest, StoresWithoutAPeerRefuseToPull) {
  auto cluster = Cluster::Start(ClusterShape::kAllInOne, "");
  ASSERT_TRUE(cluster.ok()) << cluster.status();
  cluster_ = *std::move(cluster);
  data_ = std::make_unique<TestSequence>(SmallSpec(), kTokenCount, 11);
  peer_ = "localhost:1";
  EXPECT_EQ(ReasonOf(Pull().status()), "BULK_PEER_UNKNOWN");
}

}  // namespace
}  // namespace certkv
