// Cache-aware routing: which store node has how much of a prompt's prefix.
//
//   auto router = *PrefixRouter::Start(options, {{"a", "10.0.0.1:7000"}, {"b", "10.0.0.2:7000"}});
//   for (const PrefixScore& score : router->Score(ComputeBlockKeys(context, tokens, 64))) ...
//
// A reference for routers, small rather than fast: it follows WatchBlockEvents of every node and
// keeps all their block keys (40 bytes a block). What it says is a hint: a block may have gone
// since.
#ifndef CERTKV_CLIENTS_CPP_PREFIX_ROUTER_H_
#define CERTKV_CLIENTS_CPP_PREFIX_ROUTER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "clients/cpp/options.h"
#include "clients/cpp/prefix_index.h"
#include "kernels/core/ids.h"

namespace certkv::client {

// A store node: a name that the caller knows it by, and its gRPC target.
struct RoutedNode {
  std::string name;
  std::string target;

  bool operator==(const RoutedNode&) const = default;
};

struct PrefixScore {
  std::string node;
  PrefixCounts counts;
  // Its list is whole and its events come in. False: the counts are those of before, or none.
  bool is_current = false;
};

// Threads: safe.
class PrefixRouter {
 public:
  // `options` protect the channels (CheckAccess); targets in it are not used. Follows in the
  // background. Errors: as CheckAccess; InvalidArgument [NODE_INVALID], a name twice.
  static absl::StatusOr<std::unique_ptr<PrefixRouter>> Start(const Options& options,
                                                             const std::vector<RoutedNode>& nodes);
  ~PrefixRouter();
  PrefixRouter(const PrefixRouter&) = delete;
  PrefixRouter& operator=(const PrefixRouter&) = delete;

  // Follows these nodes from now on; those that stay as they were keep what is known of them.
  absl::Status SetNodes(const std::vector<RoutedNode>& nodes) ABSL_LOCKS_EXCLUDED(mutex_);
  // Every node once, that with the longest prefix in memory first; of equal ones that with more of
  // it in its device tier, then with more of it on disk, then by name.
  std::vector<PrefixScore> Score(absl::Span<const BlockKey> chain) const
      ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Follower;  // of one node

  explicit PrefixRouter(const Options& options);

  const Options options_;
  mutable absl::Mutex mutex_;
  std::map<std::string, std::unique_ptr<Follower>> followers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace certkv::client

#endif  // CERTKV_CLIENTS_CPP_PREFIX_ROUTER_H_
