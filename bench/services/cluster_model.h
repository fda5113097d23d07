// A cluster of store nodes as a discrete-event model: who has which prefix, and what a request
// waits for. Shards are the real ShardMap; content is drawn, not stored.
//
// A request of a chain of segments (prompt, document, turns) comes to one node. What that node has
// is free; what the chain's owner (or the owner before it) has is pulled over the network; the rest
// is computed. Both nodes' caches are LRU by segment, and a segment leaves after those behind it.
#ifndef CERTKV_BENCH_SERVICES_CLUSTER_MODEL_H_
#define CERTKV_BENCH_SERVICES_CLUSTER_MODEL_H_

#include <cstdint>
#include <list>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "bench/services/zipf.h"
#include "services/cluster/shard_map.h"

namespace certkv::bench {

// How a request finds its node.
enum class Routing : uint8_t {
  kRandom,  // any
  kOwner,   // the owner of its chain
  kPrefix,  // of the owner, where its conversation was, and two at random: the least expected wait
};
const char* RoutingName(Routing routing);

struct ClusterModelOptions {
  int node_count = 100;
  Routing routing = Routing::kPrefix;
  bool offers = true;              // a node tells the owner to fetch what it has computed
  bool asks_second = true;         // what the owner lacks is asked of the owner before it
  double requests_per_second = 3;  // of each node
  int64_t blocks_per_node = 20'000;
  int32_t block_tokens = 64;
  double block_bytes = 12e6;                  // of one block on the wire
  double link_bytes_per_second = 8e9;         // of each node, either direction
  double prefill_tokens_per_second = 10'000;  // of each node
  double lookup_seconds = 0.0005;             // local
  double peer_seconds = 0.001;                // a round trip to another node
  // Every so many seconds the oldest node leaves and a new one comes; 0 = never.
  double churn_seconds = 0;
  uint64_t seed = 20260301;
};

struct ClusterModelResult {
  int64_t requests = 0;
  int64_t tokens = 0;         // of all chains
  int64_t local_tokens = 0;   // found where the request came
  int64_t pulled_tokens = 0;  // fetched from another node
  int64_t moved_tokens = 0;   // of these, from the owner before the owner
  double offered_bytes = 0;   // fetched by owners
  double pulled_bytes = 0;
  double seconds = 0;          // of simulated time
  double first_token_p50 = 0;  // seconds until all of the chain is there
  double first_token_p99 = 0;
  double busiest_link_share = 0;  // the busiest node's sending time / the time
  double hottest_over_mean = 0;   // bytes sent by the busiest node / by the mean one
  int64_t membership_changes = 0;
};

ClusterModelResult RunClusterModel(const ClusterModelOptions& options, int64_t request_count);

}  // namespace certkv::bench

#endif  // CERTKV_BENCH_SERVICES_CLUSTER_MODEL_H_
