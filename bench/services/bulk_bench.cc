// certkv-bench-bulk: blocks from one store to another, both in this process, over loopback.
//
//   throughput  whole blocks by PullBlocks' path against a plain socket that moves as many bytes
//               from the same slab, over as many connections, alternating in the same run; and the
//               same under mutual TLS, against the same plain socket
//   lookup      how long one block takes that another store has, connection and checks included:
//               what a lookup in a cluster waits where nothing is here
//   first read  over a link of --link_megabytes a second (a proxy that paces): how long until a
//               chain can be read, for each order of pulling, and how long a plain socket takes for
//               the FP16 originals alone, which nobody has checked or quantized then
//
// In a network namespace with a queue on its loopback interface all this goes over such a link:
//   unshare -Urn sh -c 'ip link set lo up; tc qdisc add dev lo root netem delay 1ms loss 0.1%;
//                       build/release/bin/certkv-bench-bulk'
// (tbf rate 2gbit burst 1mb latency 10ms where the kernel has no netem).
#include <stdlib.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "bench/kernels/bench_report.h"
#include "kernels/core/check.h"
#include "services/common/clock.h"
#include "services/kvstore/block_payload.h"
#include "services/kvstore/bulk_plane.h"
#include "tests/support/store_harness.h"
#include "tests/support/tcp_proxy.h"

ABSL_FLAG(int32_t, blocks, 32, "blocks of a chain");
ABSL_FLAG(int32_t, link_blocks, 8, "blocks of the chain that goes over the paced link");
ABSL_FLAG(int32_t, connections, 2, "connections of a pull, and of the plain sockets");
ABSL_FLAG(int32_t, rounds, 7, "rounds of each measurement; medians are reported");
ABSL_FLAG(int32_t, lookups, 300, "lookups of one block");
ABSL_FLAG(int64_t, link_megabytes, 125, "megabytes a second of the paced link");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

using kvstore::BulkConfig;
using kvstore::BulkPlane;
using kvstore::PullOrder;

constexpr int32_t kStagingSlots = 4;

// 8 layers, 8 KV heads, d 128, 256 tokens: 8.4 MB of originals and 3.4 MB of planes a block.
CacheSpec Spec() {
  CacheSpec spec = TinySpec("bulk");
  spec.kv_head_count = 8;
  spec.head_dim = 128;
  spec.value_dim = 128;
  spec.block_tokens = 256;
  spec.layers.resize(8);
  return spec;
}

StoreShape Shape(int32_t blocks) {
  StoreShape shape;
  shape.device_slots = blocks;
  shape.backing_slots = blocks;
  return shape;
}

double Seconds(const std::function<void()>& call) {
  const int64_t start = RealClock()->MonotonicNs();
  call();
  return static_cast<double>(RealClock()->MonotonicNs() - start) / 1e9;
}

// A server's and a client's certificate, made by the script that operators use.
class Certificates {
 public:
  Certificates() {
    char pattern[] = "/tmp/certkv-bench-XXXXXX";
    CERTKV_CHECK(mkdtemp(pattern) != nullptr, "/tmp can be written");
    directory_ = pattern;
    for (const char* words : {"ca", "server 127.0.0.1", "client store read x"}) {
      const std::string command =
          absl::StrCat("deploy/tls/make-certificates ", directory_, " ", words, " >/dev/null");
      CERTKV_CHECK(std::system(command.c_str()) == 0, "run from the root of the repository");
    }
  }
  ~Certificates() { std::filesystem::remove_all(directory_); }
  std::string Path(const char* name) const { return absl::StrCat(directory_, "/", name); }

 private:
  std::string directory_;
};

enum class Wire : uint8_t { kPlain, kTls };

class Stores {
 public:
  explicit Stores(const CacheSpec& spec, int32_t blocks)
      : blocks_(blocks), source_(Shape(blocks_), spec), target_(Shape(blocks_), spec) {
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
  }

  int64_t plane_bytes() const { return plane_bytes_; }
  int64_t original_bytes() const { return original_bytes_; }
  int32_t port(Wire wire = Wire::kPlain) { return ServerOf(wire)->port(); }
  const uint8_t* memory() const { return writer_.backing_memory->base(); }

  // From now on pulls go to that port.
  void Connect(int32_t port, Wire wire = Wire::kPlain) {
    peer_ = absl::StrCat("127.0.0.1:", port);
    BulkConfig config = Config(wire);
    config.peers = peer_;
    client_.reset();
    client_ = MakePlane(&target_, config);
  }
  // Seconds until the chain is there; the target has nothing of it before and after.
  double Pull(int32_t count, PullOrder order) {
    absl::Notification done;
    kvstore::PullRequest request;
    request.session = worker_.session;
    request.peer = peer_;
    request.keys = ChainKeys(1, count);
    request.order = order;
    const double seconds = Seconds([&] {
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

 private:
  BulkConfig Config(Wire wire) const {
    BulkConfig config;
    config.connections = absl::GetFlag(FLAGS_connections);
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
  std::unique_ptr<BulkPlane>& ServerOf(Wire wire) { return servers_[static_cast<size_t>(wire)]; }
  static std::unique_ptr<BulkPlane> MakePlane(StoreHarness* store, const BulkConfig& config) {
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

  const Certificates certificates_;
  const int32_t blocks_;
  StoreHarness source_;
  StoreHarness target_;
  StoreHarness::Worker writer_;
  StoreHarness::Worker worker_;
  int64_t plane_bytes_ = 0;
  int64_t original_bytes_ = 0;
  std::string peer_;
  std::unique_ptr<BulkPlane> servers_[2];
  std::unique_ptr<BulkPlane> client_;
};

// Sends so many bytes of `memory` to each of `connections` that come.
class PlainSender {
 public:
  PlainSender(const uint8_t* memory, int64_t bytes, int32_t connections)
      : listener_(ListenOnLoopback(&port_)) {
    for (int32_t i = 0; i < connections; ++i) {
      threads_.emplace_back([this, memory, bytes] {
        const UniqueFd client(accept(listener_.get(), nullptr, nullptr));
        SendAll(client.get(), reinterpret_cast<const char*>(memory), static_cast<size_t>(bytes));
      });
    }
  }
  ~PlainSender() {
    for (std::thread& thread : threads_) thread.join();
  }
  int32_t port() const { return port_; }

 private:
  int32_t port_ = 0;
  const UniqueFd listener_;
  std::vector<std::thread> threads_;
};

// Seconds until all connections have received all their bytes into `memory`.
double PlainReceive(int32_t port, int64_t bytes, int32_t connections,
                    std::vector<uint8_t>& memory) {
  return Seconds([&] {
    std::vector<std::thread> threads;
    for (int32_t i = 0; i < connections; ++i) {
      threads.emplace_back([&, i] {
        const UniqueFd socket = ConnectToLoopback(port);
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

nlohmann::json Throughput(Stores* stores, Wire wire) {
  const int32_t blocks = absl::GetFlag(FLAGS_blocks);
  const int32_t connections = absl::GetFlag(FLAGS_connections);
  const int64_t bytes = blocks * (stores->plane_bytes() + stores->original_bytes());
  // The plain socket sends from the originals' slab, again where it is shorter.
  const int64_t each = std::min(bytes / connections, blocks * stores->original_bytes());
  const int64_t plain_bytes = each * connections;
  std::vector<uint8_t> memory(static_cast<size_t>(plain_bytes));
  stores->Connect(stores->port(wire), wire);
  std::vector<double> pulls;
  std::vector<double> plains;
  std::vector<double> ratios;
  for (int32_t round = -1; round < absl::GetFlag(FLAGS_rounds); ++round) {  // one to warm up
    const double pull = static_cast<double>(bytes) / stores->Pull(blocks, PullOrder::kWhole) / 1e9;
    const PlainSender sender(stores->memory(), each, connections);
    const double plain = static_cast<double>(plain_bytes) /
                         PlainReceive(sender.port(), each, connections, memory) / 1e9;
    if (round < 0) continue;
    pulls.push_back(pull);
    plains.push_back(plain);
    ratios.push_back(pull / plain);
  }
  return {{"blocks", blocks},
          {"connections", connections},
          {"pull_gigabytes_per_second", Median(pulls)},
          {"plain_socket_gigabytes_per_second", Median(plains)},
          {"ratio", Median(ratios)},
          {"ratio_least", *std::min_element(ratios.begin(), ratios.end())},
          {"ratio_most", *std::max_element(ratios.begin(), ratios.end())}};
}

// Of a model of 4 layers with 3 KV heads of 64 channels, blocks of 64 tokens.
nlohmann::json Lookup(Wire wire) {
  CacheSpec spec = TinySpec("lookup");
  spec.kv_head_count = 3;
  spec.head_dim = 64;
  spec.value_dim = 64;
  spec.block_tokens = 64;
  spec.layers.resize(4);
  Stores stores(spec, kStagingSlots);
  stores.Connect(stores.port(wire), wire);
  std::vector<double> times;
  for (int32_t i = -20; i < absl::GetFlag(FLAGS_lookups); ++i) {  // some to warm up
    const double seconds = stores.Pull(1, PullOrder::kWhole);
    if (i >= 0) times.push_back(seconds);
  }
  std::sort(times.begin(), times.end());
  return {{"lookups", times.size()},
          {"block_bytes", stores.plane_bytes() + stores.original_bytes()},
          {"milliseconds_p50", 1e3 * times[times.size() / 2]},
          {"milliseconds_p99", 1e3 * times[times.size() * 99 / 100]}};
}

nlohmann::json FirstRead(Stores* stores) {
  const int32_t blocks = absl::GetFlag(FLAGS_link_blocks);
  const int64_t rate = absl::GetFlag(FLAGS_link_megabytes) * 1'000'000;
  const int32_t connections = absl::GetFlag(FLAGS_connections);
  const int64_t originals = blocks * stores->original_bytes();
  TcpProxy link(stores->port());
  link.SetRate(rate);
  stores->Connect(link.port());
  std::vector<uint8_t> memory(static_cast<size_t>(originals));
  const std::pair<const char*, PullOrder> orders[] = {
      {"planes_then_originals", PullOrder::kOriginalsLater},
      {"whole", PullOrder::kWhole},
      {"originals_only", PullOrder::kOriginalsOnly}};
  std::vector<std::vector<double>> times(4);
  std::vector<double> ratios;
  for (int32_t round = 0; round < absl::GetFlag(FLAGS_rounds); ++round) {
    for (size_t i = 0; i < 3; ++i) times[i].push_back(stores->Pull(blocks, orders[i].second));
    const PlainSender sender(stores->memory(), originals / connections, connections);
    TcpProxy plain_link(sender.port());
    plain_link.SetRate(rate);
    times[3].push_back(
        PlainReceive(plain_link.port(), originals / connections, connections, memory));
    ratios.push_back(times[3].back() / times[0].back());
  }
  nlohmann::json seconds;
  for (size_t i = 0; i < 3; ++i) seconds[orders[i].first] = Median(times[i]);
  seconds["plain_socket_originals"] = Median(times[3]);
  return {{"blocks", blocks},
          {"tokens", blocks * Spec().block_tokens},
          {"link_bytes_per_second", rate},
          {"seconds_until_readable", seconds},
          {"plain_socket_originals_over_planes", Median(ratios)},
          {"bytes_originals_over_planes", static_cast<double>(stores->original_bytes()) /
                                              static_cast<double>(stores->plane_bytes())}};
}

int Main() {
  Stores stores(Spec(), absl::GetFlag(FLAGS_blocks));
  const nlohmann::json report = {{"run", DescribeRun()},
                                 {"plane_bytes_of_a_block", stores.plane_bytes()},
                                 {"original_bytes_of_a_block", stores.original_bytes()},
                                 {"throughput", Throughput(&stores, Wire::kPlain)},
                                 {"throughput_tls", Throughput(&stores, Wire::kTls)},
                                 {"lookup", Lookup(Wire::kPlain)},
                                 {"lookup_tls", Lookup(Wire::kTls)},
                                 {"first_read", FirstRead(&stores)}};
  std::printf("%s\n", report.dump(2).c_str());
  return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Main();
}
