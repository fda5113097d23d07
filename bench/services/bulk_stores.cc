#include "bench/services/bulk_stores.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "kernels/core/check.h"
#include "services/common/clock.h"
#include "services/kvstore/block_payload.h"
#include "tests/support/tcp_proxy.h"

namespace certkv::bench {

using kvstore::BulkConfig;
using kvstore::BulkPlane;

namespace {

StoreShape Shape(int32_t blocks) {
  StoreShape shape;
  shape.device_slots = blocks;
  shape.backing_slots = blocks;
  return shape;
}

}  // namespace

CacheSpec BulkSpec() {
  CacheSpec spec = TinySpec("bulk");
  spec.kv_head_count = 8;
  spec.head_dim = 128;
  spec.value_dim = 128;
  spec.block_tokens = 256;
  spec.layers.resize(8);
  return spec;
}

double SecondsOf(const std::function<void()>& call) {
  const int64_t start = RealClock()->MonotonicNs();
  call();
  return static_cast<double>(RealClock()->MonotonicNs() - start) / 1e9;
}

BenchCertificates::BenchCertificates() {
  char pattern[] = "/tmp/certkv-bench-XXXXXX";
  CERTKV_CHECK(mkdtemp(pattern) != nullptr, "/tmp can be written");
  directory_ = pattern;
  for (const char* words : {"ca", "server 127.0.0.1", "client store read x"}) {
    const std::string command =
        absl::StrCat("deploy/tls/make-certificates ", directory_, " ", words, " >/dev/null");
    CERTKV_CHECK(std::system(command.c_str()) == 0, "run from the root of the repository");
  }
}

BenchCertificates::~BenchCertificates() { std::filesystem::remove_all(directory_); }

std::string BenchCertificates::Path(const char* name) const {
  return absl::StrCat(directory_, "/", name);
}

Stores::Stores(const CacheSpec& spec, int32_t blocks, const PacketLink* link)
    : blocks_(blocks), link_(link), source_(Shape(blocks_), spec), target_(Shape(blocks_), spec) {
  writer_ = source_.Attach("writer", kStagingSlots);
  worker_ = target_.Attach("worker", 1);
  for (int32_t first = 0; first < blocks_; first += kStagingSlots) {
    source_.PutUnleased(writer_, 1, first, std::min(kStagingSlots, blocks_ - first));
  }
  const auto cache = source_.engine.CacheOf(writer_.session);
  plane_bytes_ = kvstore::PlaneBytesOf(**cache);
  original_bytes_ = kvstore::OriginalBytesOf(**cache);
  for (const Wire wire : {Wire::kPlain, Wire::kTls}) {
    BulkConfig config = Config(wire);
    config.address = "127.0.0.1:0";
    ServerOf(wire) = MakePlane(&source_, config);
  }
  if (link_ == nullptr) return;
  BulkConfig config = Config(Wire::kPlain);
  config.address = PacketLink::address(1) + ":0";
  link_->At(1, [&] { link_server_ = MakePlane(&source_, config); });
}

void Stores::MakeClient(const std::string& peer, const PullSetup& setup) {
  peer_ = peer;
  BulkConfig config = Config(setup.wire);
  config.peers = peer_;
  config.connections = setup.connections;
  config.idle_connections = setup.keeps_connections ? setup.connections : 0;
  client_.reset();
  client_ = MakePlane(&target_, config);
}

void Stores::Connect(int32_t port, const PullSetup& setup) {
  MakeClient(absl::StrCat("127.0.0.1:", port), setup);
}

void Stores::ConnectOverLink(const PullSetup& setup) {
  link_->At(0, [&] {
    MakeClient(absl::StrCat(PacketLink::address(1), ":", link_server_->port()), setup);
  });
}

double Stores::Pull(int32_t count, kvstore::PullOrder order) {
  absl::Notification done;
  kvstore::PullRequest request;
  request.session = worker_.session;
  request.peer = peer_;
  request.keys = ChainKeys(1, count);
  request.order = order;
  const double seconds = SecondsOf([&] {
    client_->Pull(std::move(request), [&](const absl::StatusOr<kvstore::PullResult>& result) {
      CERTKV_CHECK(result.ok() && result->pulled_count == count, "the whole chain comes");
      const auto leased = target_.engine.LookupAndLease(worker_.session, ChainKeys(1, count), 0);
      CERTKV_CHECK(leased.ok() && static_cast<int32_t>(leased->blocks.size()) == count,
                   "and is found");
      CERTKV_CHECK(target_.engine.ReleaseLease(worker_.session, leased->lease).ok(), "released");
      done.Notify();
    });
    done.WaitForNotification();
  });
  while (target_.engine.GetStats().caches[0].blocks_leased > 0) poll(nullptr, 0, 1);
  CERTKV_CHECK(*target_.engine.DropBlocks(worker_.session, {ChainKey(1, 0)}) == count, "dropped");
  return seconds;
}

BulkConfig Stores::Config(Wire wire) const {
  BulkConfig config;
  config.access.tcp_security = TcpSecurity::kInsecure;
  if (wire == Wire::kPlain) return config;
  config.access.tcp_security = TcpSecurity::kMutualTls;
  config.access.tls_certificate = certificates_.Path("server.crt");
  config.access.tls_key = certificates_.Path("server.key");
  config.access.tls_client_ca = certificates_.Path("ca.crt");
  config.access.access_file = certificates_.Path("access.yaml");
  config.peer_ca = certificates_.Path("ca.crt");
  config.certificate = certificates_.Path("store.crt");
  config.key = certificates_.Path("store.key");
  return config;
}

std::unique_ptr<BulkPlane> Stores::MakePlane(StoreHarness* store, const BulkConfig& config) {
  BulkPlane::Dependencies with;
  with.engine = &store->engine;
  with.pool = &store->pool;
  with.clock = RealClock();
  with.lease_ms_max = 3'600'000;
  with.check_serving = [] { return absl::OkStatus(); };
  auto plane = BulkPlane::Create(config, with);
  CERTKV_CHECK(plane.ok(), "the bulk plane listens");
  return *std::move(plane);
}

PlainSender::PlainSender(const uint8_t* memory, int64_t bytes, int32_t connections,
                         const char* host)
    : listener_(ListenOn(host, &port_)) {
  for (int32_t i = 0; i < connections; ++i) {
    threads_.emplace_back([this, memory, bytes] {
      const UniqueFd client(accept(listener_.get(), nullptr, nullptr));
      SendAll(client.get(), reinterpret_cast<const char*>(memory), static_cast<size_t>(bytes));
    });
  }
}

PlainSender::~PlainSender() {
  for (std::thread& thread : threads_) thread.join();
}

double PlainReceive(int32_t port, int64_t bytes, int32_t connections, std::vector<uint8_t>& memory,
                    const char* host) {
  return SecondsOf([&] {
    std::vector<std::thread> threads;
    for (int32_t i = 0; i < connections; ++i) {
      threads.emplace_back([&, i] {
        const UniqueFd socket = ConnectTo(host, port);
        uint8_t* const to = memory.data() + i * bytes;
        int64_t got = 0;
        while (got < bytes) {
          const ssize_t count = recv(socket.get(), to + got, static_cast<size_t>(bytes - got), 0);
          CERTKV_CHECK(count > 0, "the sender sends it all");
          got += count;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

}  // namespace certkv::bench
