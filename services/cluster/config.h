// Settings of a store node's cluster: section "cluster" of a config file.
#ifndef CERTKV_SERVICES_CLUSTER_CONFIG_H_
#define CERTKV_SERVICES_CLUSTER_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/common/config_reader.h"

namespace certkv {

// What each field is stands in config.cc, where docs/config.md comes from.
struct ClusterConfig {
  std::string etcd;  // "": the node stands alone
  std::string name = "default";
  std::string node;
  std::string target;
  int32_t weight = 1;
  int64_t ttl_ms = 10'000;
  std::string bulk_target;
  int64_t pull_wait_ms = 500;
  std::string etcd_ca;
  std::string etcd_certificate;
  std::string etcd_key;

  bool is_on() const { return !etcd.empty(); }
};

// `config` must live as long as the section is used.
ConfigSection ClusterConfigSection(ClusterConfig* config);

namespace cluster {

// "a:2379,b:2379" in its parts, 1 to 16. Errors: InvalidArgument [CONFIG_INVALID].
absl::StatusOr<std::vector<std::string>> ParseEndpoints(const std::string& text);

}  // namespace cluster
}  // namespace certkv

#endif  // CERTKV_SERVICES_CLUSTER_CONFIG_H_
