// Which node of a cluster a prefix chain belongs to.
#ifndef CERTKV_SERVICES_CLUSTER_SHARD_MAP_H_
#define CERTKV_SERVICES_CLUSTER_SHARD_MAP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/core/ids.h"

namespace certkv::cluster {

inline constexpr int32_t kNodeWeightMax = 1'000'000;

// A store node as its registration tells the others.
struct Node {
  std::string name;         // 1 to 64 of [a-zA-Z0-9._-]; unique in the cluster
  std::string target;       // gRPC address of its KvStore, for the other nodes
  std::string bulk_target;  // host:port of its bulk plane; "" = it has none
  int32_t weight = 1;       // its share of chains is weight / (sum of weights); [1, 1000000]
  std::string instance;     // another one after each start of the process

  bool operator==(const Node&) const = default;
};

// InvalidArgument [NODE_INVALID] naming the field, or OK.
absl::Status CheckNode(const Node& node);

// JSON, as it stands in etcd. Unknown fields are passed over, so that nodes of two versions
// understand each other. Errors: InvalidArgument [NODE_INVALID].
std::string NodeToText(const Node& node);
absl::StatusOr<Node> NodeFromText(absl::string_view text);

// Immutable. A chain lives on the node of highest random weight (rendezvous hashing: Thaler and
// Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM Transactions on
// Networking 6(1), 1998) under the logarithmic rule for unequal weights (Schindelhauer and
// Schomaker, "Weighted distributed hash tables", SPAA 2005): the owner of root `r` has the least
// -ln(u(node, r)) / weight, u uniform in (0, 1). So when a node comes or goes only the chains that
// it gains or loses move. Two processes with equal nodes agree, whatever order they saw them in.
class ShardMap {
 public:
  ShardMap() = default;
  // `revision` of the membership that `nodes` was read at. Names are unique.
  ShardMap(std::vector<Node> nodes, int64_t revision);

  // Owner of the chain that begins with block `root`; null when there are no nodes. Lives as long
  // as the map.
  const Node* OwnerOf(const BlockKey& root) const;
  // The first `count` nodes by rank, the owner first; all of them when there are fewer. The second
  // is who would own the chain if the first were not there: after a node has come, the owner
  // before.
  std::vector<const Node*> RankedFor(const BlockKey& root, size_t count) const;
  const Node* Find(absl::string_view name) const;          // null: no such node
  absl::Span<const Node> nodes() const { return nodes_; }  // by name
  int64_t revision() const { return revision_; }

 private:
  // What the owner has least of.
  double CostOf(size_t node, const BlockKey& root) const;

  std::vector<Node> nodes_;
  std::vector<uint64_t> seeds_;  // hash of each name
  int64_t revision_ = 0;
};

}  // namespace certkv::cluster

#endif  // CERTKV_SERVICES_CLUSTER_SHARD_MAP_H_
