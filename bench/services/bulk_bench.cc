// certkv-bench-bulk: blocks from one store to another, both in this process.
//
//   throughput  whole blocks by PullBlocks' path over loopback against a plain socket that moves as
//               many bytes from the same slab, over as many connections, alternating in the same
//               run; and the same under mutual TLS, against the same plain socket
//   lookup      how long one block takes that another store has, checks included: what a lookup in
//               a cluster waits where nothing is here; over connections that are kept, and over a
//               new one each time
//   first read  over a link of --link_megabytes a second (a proxy that paces): how long until a
//               chain can be read, for each order of pulling, and how long a plain socket takes for
//               the FP16 originals alone, which nobody has checked or quantized then
//   long link   throughput against plain sockets over a link of --link_megabytes a second that
//               delays and loses packets (tests/support/packet_link.h): TCP as it is, between two
//               network namespaces; needs root
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "bench/kernels/bench_report.h"
#include "bench/services/bulk_stores.h"
#include "tests/support/packet_link.h"
#include "tests/support/tcp_proxy.h"

ABSL_FLAG(int32_t, blocks, 32, "blocks of a chain");
ABSL_FLAG(int32_t, link_blocks, 8, "blocks of the chain that goes over the paced link");
ABSL_FLAG(int32_t, connections, 2, "connections of a pull, and of the plain sockets");
ABSL_FLAG(int32_t, rounds, 7, "rounds of each measurement; medians are reported");
ABSL_FLAG(int32_t, long_link_rounds, 3, "rounds over each long link");
ABSL_FLAG(int32_t, lookups, 300, "lookups of one block");
ABSL_FLAG(int64_t, link_megabytes, 125, "megabytes a second of the paced link");
ABSL_FLAG(std::string, json, "", "file to write the results to");

namespace certkv::bench {
namespace {

using kvstore::PullOrder;

constexpr uint64_t kSeed = 20260801;

nlohmann::json Throughput(Stores* stores, Wire wire) {
  const int32_t blocks = absl::GetFlag(FLAGS_blocks);
  const int32_t connections = absl::GetFlag(FLAGS_connections);
  const int64_t bytes = blocks * (stores->plane_bytes() + stores->original_bytes());
  // The plain socket sends from the originals' slab, again where it is shorter.
  const int64_t each = std::min(bytes / connections, blocks * stores->original_bytes());
  const int64_t plain_bytes = each * connections;
  std::vector<uint8_t> memory(static_cast<size_t>(plain_bytes));
  stores->Connect(stores->port(wire), {.wire = wire, .connections = connections});
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
nlohmann::json Lookup(Wire wire, bool keeps_connections) {
  CacheSpec spec = TinySpec("lookup");
  spec.kv_head_count = 3;
  spec.head_dim = 64;
  spec.value_dim = 64;
  spec.block_tokens = 64;
  spec.layers.resize(4);
  Stores stores(spec, kStagingSlots);
  stores.Connect(stores.port(wire), {.wire = wire, .keeps_connections = keeps_connections});
  std::vector<double> times;
  for (int32_t i = -20; i < absl::GetFlag(FLAGS_lookups); ++i) {  // some to warm up
    const double seconds = stores.Pull(1, PullOrder::kWhole);
    if (i >= 0) times.push_back(seconds);
  }
  std::sort(times.begin(), times.end());
  return {{"lookups", times.size()},
          {"keeps_connections", keeps_connections},
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
  stores->Connect(link.port(), {.connections = connections});
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
          {"tokens", blocks * BulkSpec().block_tokens},
          {"link_bytes_per_second", rate},
          {"seconds_until_readable", seconds},
          {"plain_socket_originals_over_planes", Median(ratios)},
          {"bytes_originals_over_planes", static_cast<double>(stores->original_bytes()) /
                                              static_cast<double>(stores->plane_bytes())}};
}

// Megabytes a second of a pull and of plain sockets over the link as it is.
nlohmann::json OverLink(const PacketLink& link, Stores* stores, const PullSetup& setup) {
  const int32_t blocks = absl::GetFlag(FLAGS_blocks) / 2;
  const int64_t bytes = blocks * (stores->plane_bytes() + stores->original_bytes());
  const int64_t each = std::min(bytes / setup.connections, blocks * stores->original_bytes());
  const int64_t plain_bytes = each * setup.connections;
  std::vector<uint8_t> memory(static_cast<size_t>(plain_bytes));
  const std::string host = PacketLink::address(1);
  std::vector<double> pulls;
  std::vector<double> plains;
  for (int32_t round = 0; round < absl::GetFlag(FLAGS_long_link_rounds); ++round) {
    // Its connections are new, as the plain sockets' are.
    stores->ConnectOverLink(setup);
    pulls.push_back(static_cast<double>(bytes) / stores->Pull(blocks, PullOrder::kWhole) / 1e6);
    std::unique_ptr<PlainSender> sender;
    link.At(1, [&] {
      sender =
          std::make_unique<PlainSender>(stores->memory(), each, setup.connections, host.c_str());
    });
    link.At(0, [&] {
      plains.push_back(static_cast<double>(plain_bytes) /
                       PlainReceive(sender->port(), each, setup.connections, memory, host.c_str()) /
                       1e6);
    });
  }
  return {{"connections", setup.connections},
          {"pull_megabytes_per_second", Median(pulls)},
          {"plain_socket_megabytes_per_second", Median(plains)},
          {"ratio", Median(pulls) / Median(plains)}};
}

nlohmann::json LongLinks() {
  struct Case {
    int64_t round_trip_ms;
    double lost_percent;
    std::vector<int32_t> connections;
  };
  const std::vector<Case> cases = {{0, 0, {1, 4}},      {10, 0, {1, 4}},   {50, 0, {1, 4}},
                                   {100, 0, {1, 4, 8}}, {10, 0.1, {1, 4}}, {50, 1, {1, 4, 8}}};
  auto link = PacketLink::Create({}, kSeed);
  if (!link.ok()) return {{"not_measured", link.status().ToString()}};
  Stores stores(BulkSpec(), absl::GetFlag(FLAGS_blocks) / 2, link->get());
  nlohmann::json rows = nlohmann::json::array();
  for (const Case& one : cases) {
    LinkShape shape;
    shape.delay_us = one.round_trip_ms * 500;
    shape.bytes_per_second = absl::GetFlag(FLAGS_link_megabytes) * 1'000'000;
    // A switch's queue: as much as is under way, and a megabyte.
    shape.queue_bytes = shape.bytes_per_second * one.round_trip_ms / 1000 + 1'000'000;
    shape.lost_per_million = static_cast<int32_t>(one.lost_percent * 1e4);
    (*link)->SetShape(shape);
    for (const int32_t connections : one.connections) {
      nlohmann::json row = OverLink(**link, &stores, {.connections = connections});
      row["round_trip_ms"] = one.round_trip_ms;
      row["lost_percent"] = one.lost_percent;
      std::fprintf(stderr, "%s\n", row.dump().c_str());
      rows.push_back(row);
    }
  }
  std::ifstream file("/proc/sys/net/ipv4/tcp_congestion_control");
  std::string congestion_control;
  file >> congestion_control;
  return {{"link_bytes_per_second", absl::GetFlag(FLAGS_link_megabytes) * 1'000'000},
          {"packet_bytes", PacketLink::kPacketBytes},
          {"congestion_control", congestion_control},
          {"rows", rows}};
}

int Main() {
  nlohmann::json report;
  {
    Stores stores(BulkSpec(), absl::GetFlag(FLAGS_blocks));
    report = {{"run", DescribeRun()},
              {"plane_bytes_of_a_block", stores.plane_bytes()},
              {"original_bytes_of_a_block", stores.original_bytes()},
              {"throughput", Throughput(&stores, Wire::kPlain)},
              {"throughput_tls", Throughput(&stores, Wire::kTls)},
              {"first_read", FirstRead(&stores)}};
  }
  report["lookup"] = Lookup(Wire::kPlain, true);
  report["lookup_tls"] = Lookup(Wire::kTls, true);
  report["lookup_new_connection"] = Lookup(Wire::kPlain, false);
  report["lookup_new_connection_tls"] = Lookup(Wire::kTls, false);
  report["long_link"] = LongLinks();
  std::printf("%s\n", report.dump(2).c_str());
  return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Main();
}
