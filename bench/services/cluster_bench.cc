// certkv-bench-cluster: a cluster of up to 1,000 nodes and 10^6 requests as a model (see
// cluster_model.h), with the measured costs of one node as input; and how long the owner of a chain
// takes to find.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "bench/kernels/bench_report.h"
#include "bench/services/cluster_model.h"
#include "kernels/core/cache_spec.h"
#include "kernels/core/slab_layout.h"

ABSL_FLAG(int64_t, requests, 1'000'000, "requests of each row");
ABSL_FLAG(double, prefill, 10'000, "tokens that a node prefills in a second");
ABSL_FLAG(double, link, 12.5e9, "bytes per second of a node's link (100 Gbit/s)");
ABSL_FLAG(double, link_share, 0.7, "share of it that the bulk plane reaches");
ABSL_FLAG(double, round_trip_us, 100, "between two nodes");
ABSL_FLAG(std::string, results, "bench/results", "folder of measured costs");
ABSL_FLAG(std::string, json, "", "file to write the results to");
ABSL_FLAG(bool, rebalance, false,
          "only: how many chains change their owner when a node comes or goes, against the ideal");

namespace certkv::bench {
namespace {

using nlohmann::json;

// Of a model with 8e9 parameters: 32 layers, 8 KV heads, d 128; one of its blocks as it travels,
// the quantized planes and the originals.
double BlockBytes() {
  CacheSpec spec;
  spec.model = "8b";
  spec.kv_head_count = 8;
  spec.group_size = 4;
  spec.head_dim = 128;
  spec.value_dim = 128;
  spec.rotary_dim = 128;
  spec.logit_scale = 0.0883883f;
  spec.layers.assign(32, LayerSpec{});
  return static_cast<double>(SlabLayout(spec, SlabKind::kDevice, 1).slot_bytes() +
                             SlabLayout(spec, SlabKind::kBacking, 1).slot_bytes());
}

// Of the file of another benchmark; 0 when it isn't there.
json Measured(const std::string& name) {
  std::ifstream file(absl::StrCat(absl::GetFlag(FLAGS_results), "/", name, ".json"));
  return file ? json::parse(file, nullptr, /*allow_exceptions=*/false) : json();
}

ClusterModelOptions Inputs() {
  ClusterModelOptions options;
  options.block_bytes = BlockBytes();
  options.prefill_tokens_per_second = absl::GetFlag(FLAGS_prefill);
  options.link_bytes_per_second = absl::GetFlag(FLAGS_link) * absl::GetFlag(FLAGS_link_share);
  for (const json& row : Measured("services").value("lookup_and_lease", json::array())) {
    if (row.value("block_count", 0) == 128)
      options.lookup_seconds = row.value("p50_us", 500.0) / 1e6;
  }
  // Two processors' queues and a network's round trip on top.
  options.peer_seconds = options.lookup_seconds + absl::GetFlag(FLAGS_round_trip_us) / 1e6;
  return options;
}

json RowOf(const std::string& name, const ClusterModelOptions& options,
           const ClusterModelResult& result) {
  const auto share = [&result](int64_t tokens) {
    return static_cast<double>(tokens) / static_cast<double>(result.tokens);
  };
  return {
      {"name", name},
      {"nodes", options.node_count},
      {"routing", RoutingName(options.routing)},
      {"offers", options.offers},
      {"asks_second", options.asks_second},
      {"churn_seconds", options.churn_seconds},
      {"requests", result.requests},
      {"simulated_seconds", result.seconds},
      {"local_hit_rate", share(result.local_tokens)},
      {"pulled_hit_rate", share(result.pulled_tokens)},
      {"moved_hit_rate", share(result.moved_tokens)},
      {"first_token_p50_ms", result.first_token_p50 * 1e3},
      {"first_token_p99_ms", result.first_token_p99 * 1e3},
      {"pulled_bytes_per_node_second", result.pulled_bytes / result.seconds / options.node_count},
      {"offered_bytes_per_node_second", result.offered_bytes / result.seconds / options.node_count},
      {"busiest_link_share", result.busiest_link_share},
      {"hottest_over_mean", result.hottest_over_mean},
      {"membership_changes", result.membership_changes}};
}

// Rows of every question that docs/scaling.md answers.
std::vector<std::pair<std::string, ClusterModelOptions>> Rows() {
  std::vector<std::pair<std::string, ClusterModelOptions>> rows;
  const auto add = [&rows](const std::string& name, const auto& change) {
    ClusterModelOptions options = Inputs();
    change(options);
    rows.emplace_back(name, options);
  };
  for (const Routing routing : {Routing::kRandom, Routing::kOwner, Routing::kPrefix}) {
    for (const int nodes : {1, 10, 100, 1000}) {
      add(absl::StrCat("size/", RoutingName(routing), "/", nodes), [&](auto& options) {
        options.routing = routing;
        options.node_count = nodes;
      });
    }
  }
  for (const Routing routing : {Routing::kRandom, Routing::kPrefix}) {
    add(absl::StrCat("no_offers/", RoutingName(routing), "/1000"), [&](auto& options) {
      options.routing = routing;
      options.node_count = 1000;
      options.offers = false;
    });
  }
  for (const bool asks_second : {true, false}) {
    add(absl::StrCat("churn/", asks_second ? "second" : "owner_only", "/100"), [&](auto& options) {
      options.routing = Routing::kRandom;
      options.node_count = 100;
      options.churn_seconds = 60;
      options.asks_second = asks_second;
    });
  }
  return rows;
}

cluster::ShardMap MapOf(int nodes) {
  std::vector<cluster::Node> list;
  for (int i = 0; i < nodes; ++i) list.push_back({absl::StrCat("node-", i), "x", "", 1, "i"});
  return cluster::ShardMap(std::move(list), 1);
}

// What finding an owner costs.
json OwnerCosts() {
  json rows = json::array();
  for (const int nodes : {10, 100, 1000}) {
    const cluster::ShardMap map = MapOf(nodes);
    constexpr int kLookups = 2000;
    BlockKey key{};
    size_t sum = 0;
    const Clocks start = ReadClocks();
    for (int i = 0; i < kLookups; ++i) {
      key.bytes[0] = static_cast<uint8_t>(i);
      key.bytes[1] = static_cast<uint8_t>(i >> 8);
      sum += map.OwnerOf(key)->name.size();
    }
    const double ns = static_cast<double>(ReadClocks().thread_ns - start.thread_ns) / kLookups;
    if (sum == 0) continue;  // never: keeps the loop
    rows.push_back({{"nodes", nodes}, {"owner_us", ns / 1e3}});
    std::printf("owner of a chain among %4d nodes: %.2f us\n", nodes, ns / 1e3);
  }
  return rows;
}

// Of 100,000 chains. The ideal is what a node that comes is to own, and one that goes owned: 1 / N
// of the larger cluster. What moves between two others is waste.
json Rebalance() {
  constexpr int kChains = 100'000;
  json rows = json::array();
  std::printf("%8s %12s %12s %12s\n", "nodes", "moved %", "ideal %", "waste %");
  for (const int nodes : {3, 10, 100, 1000}) {
    const cluster::ShardMap without = MapOf(nodes);
    const cluster::ShardMap with = MapOf(nodes + 1);
    const std::string last = absl::StrCat("node-", nodes);
    int moved = 0;
    int waste = 0;
    BlockKey key{};
    for (int i = 0; i < kChains; ++i) {
      for (int byte = 0; byte < 4; ++byte) key.bytes[byte] = static_cast<uint8_t>(i >> 8 * byte);
      const std::string& before = without.OwnerOf(key)->name;
      const std::string& after = with.OwnerOf(key)->name;
      if (before == after) continue;
      ++moved;
      if (after != last) ++waste;
    }
    rows.push_back({{"nodes", nodes},
                    {"chains", kChains},
                    {"moved_share", static_cast<double>(moved) / kChains},
                    {"ideal_share", 1.0 / (nodes + 1)},
                    {"waste_share", static_cast<double>(waste) / kChains}});
    std::printf("%8d %12.3f %12.3f %12.3f\n", nodes, 100.0 * moved / kChains, 100.0 / (nodes + 1),
                100.0 * waste / kChains);
  }
  return rows;
}

int Main() {
  if (absl::GetFlag(FLAGS_rebalance)) {
    const json report = {{"run", DescribeRun()}, {"rows", Rebalance()}};
    return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
  }
  const ClusterModelOptions inputs = Inputs();
  json report = {{"run", DescribeRun()},
                 {"inputs",
                  {{"block_bytes", inputs.block_bytes},
                   {"blocks_per_node", inputs.blocks_per_node},
                   {"link_bytes_per_second", inputs.link_bytes_per_second},
                   {"prefill_tokens_per_second", inputs.prefill_tokens_per_second},
                   {"requests_per_node_second", inputs.requests_per_second},
                   {"lookup_us", inputs.lookup_seconds * 1e6},
                   {"peer_us", inputs.peer_seconds * 1e6}}},
                 {"owner", OwnerCosts()},
                 {"rows", json::array()}};
  std::printf("%-24s %8s %8s %8s %12s %12s %10s %10s\n", "", "local %", "pulled %", "moved %",
              "p50 ms", "p99 ms", "hot/mean", "link %");
  for (const auto& [name, options] : Rows()) {
    const ClusterModelResult result = RunClusterModel(options, absl::GetFlag(FLAGS_requests));
    const json row = RowOf(name, options, result);
    std::printf("%-24s %8.1f %8.1f %8.2f %12.1f %12.1f %10.1f %10.1f\n", name.c_str(),
                row["local_hit_rate"].get<double>() * 100,
                row["pulled_hit_rate"].get<double>() * 100,
                row["moved_hit_rate"].get<double>() * 100, row["first_token_p50_ms"].get<double>(),
                row["first_token_p99_ms"].get<double>(), row["hottest_over_mean"].get<double>(),
                row["busiest_link_share"].get<double>() * 100);
    std::fflush(stdout);
    report["rows"].push_back(row);
  }
  return WriteReport(report, absl::GetFlag(FLAGS_json)) ? 0 : 1;
}

}  // namespace
}  // namespace certkv::bench

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  return certkv::bench::Main();
}
