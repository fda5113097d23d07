#include "services/cluster/config.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/core/status.h"
#include "services/cluster/shard_map.h"

namespace certkv {
namespace {

constexpr size_t kPathBytesMax = 4096;
constexpr size_t kEndpointsMax = 16;
// Stands for what each process draws for itself.
constexpr char kAnyInstance[] = "-";

absl::Status CheckClusterConfig(const ClusterConfig& config) {
  if (!config.is_on()) return absl::OkStatus();
  CERTKV_RETURN_IF_ERROR(cluster::ParseEndpoints(config.etcd).status());
  if (config.ttl_ms % 1000 != 0) {
    return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                     absl::StrCat("cluster.ttl is ", config.ttl_ms,
                                  " ms, must be whole seconds: etcd counts in them"));
  }
  return CheckNode(
      cluster::Node{config.node, config.target, config.bulk_target, config.weight, kAnyInstance});
}

}  // namespace

ConfigSection ClusterConfigSection(ClusterConfig* config) {
  ConfigSection section("cluster",
                        "The store nodes that this one shares prefixes with. Off unless etcd is "
                        "named; see docs/cluster.md.");
  section.AddString("etcd", &config->etcd, 1024,
                    "endpoints of etcd, host:port with commas between; empty: this node stands "
                    "alone");
  section.AddString("name", &config->name, 64,
                    "name of the cluster; clusters of one etcd do not see each other");
  section.AddString("node", &config->node, 64,
                    "name of this node, its own in the cluster and the same after a restart");
  section.AddString("target", &config->target, 256,
                    "gRPC address of this node's store for routers and the other nodes");
  section.AddString("bulk_target", &config->bulk_target, 256,
                    "where the other nodes reach this store's bulk_address, host:port; empty: they "
                    "fetch nothing from here");
  section.AddDuration("pull_wait", &config->pull_wait_ms, {1, 60'000},
                      "how long a lookup waits for blocks of another node; what comes later is "
                      "found by the next");
  section.AddInteger("weight", &config->weight, {1, cluster::kNodeWeightMax}, "",
                     "share of the cluster's chains that live here, in proportion to the other "
                     "nodes' weights");
  section.AddDuration("ttl", &config->ttl_ms, {1000, 3'600'000},
                      "how long the others wait for a node that gives no sign of life; whole "
                      "seconds");
  section.AddString("etcd_ca", &config->etcd_ca, kPathBytesMax,
                    "PEM file of the authority of etcd's certificate; empty: no TLS");
  section.AddString("etcd_certificate", &config->etcd_certificate, kPathBytesMax,
                    "PEM file of this node's certificate for etcd");
  section.AddString("etcd_key", &config->etcd_key, kPathBytesMax, "PEM file of its private key");
  section.AddCheck([config] { return CheckClusterConfig(*config); });
  return section;
}

namespace cluster {

absl::StatusOr<std::vector<std::string>> ParseEndpoints(const std::string& text) {
  std::vector<std::string> endpoints = absl::StrSplit(text, ',', absl::SkipWhitespace());
  for (std::string& endpoint : endpoints) {
    absl::StripAsciiWhitespace(&endpoint);
    const size_t colon = endpoint.rfind(':');
    if (colon != std::string::npos && colon > 0 && colon + 1 < endpoint.size() &&
        endpoint.find('/') == std::string::npos) {
      continue;
    }
    return MakeError(absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
                     absl::StrCat("\"", endpoint,
                                  "\" is no endpoint of etcd; write host:port, "
                                  "several with commas between"));
  }
  if (!endpoints.empty() && endpoints.size() <= kEndpointsMax) return endpoints;
  return MakeError(
      absl::StatusCode::kInvalidArgument, "CONFIG_INVALID",
      absl::StrCat(endpoints.size(), " endpoints of etcd, must be 1 to ", kEndpointsMax));
}

}  // namespace cluster
}  // namespace certkv
