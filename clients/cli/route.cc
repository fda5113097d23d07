// `certkv route`: which store has how much of a prompt.
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "clients/cli/commands.h"
#include "clients/cli/table.h"
#include "clients/cli/trace.h"
#include "clients/cpp/prefix_router.h"
#include "clients/cpp/store_client.h"
#include "clients/cpp/worker.h"
#include "kernels/core/block_key.h"
#include "kernels/core/status.h"

namespace certkv::cli {
namespace {

using client::PrefixRouter;
using client::PrefixScore;
using client::RoutedNode;
using nlohmann::json;

absl::StatusOr<std::vector<RoutedNode>> ParseNodes(const std::vector<std::string>& texts) {
  std::vector<RoutedNode> nodes;
  for (const std::string& text : texts) {
    const std::vector<std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    if (parts.size() != 2) {
      return MakeError(absl::StatusCode::kInvalidArgument, "NODE_INVALID",
                       absl::StrCat("\"", text,
                                    "\" is no node: write NAME=TARGET, as in "
                                    "a=10.0.0.1:7000"));
    }
    nodes.push_back({parts[0], parts[1]});
  }
  return nodes;
}

// Keys of the trace's blocks, as a worker of these options would make them.
absl::StatusOr<std::vector<BlockKey>> KeysOf(const client::Options& services,
                                             const RouteOptions& options,
                                             const std::string& target) {
  CERTKV_ASSIGN_OR_RETURN(const FormatChoice format, ParseFormat(options.format));
  CERTKV_ASSIGN_OR_RETURN(const auto trace, Trace::Open(options.trace_path));
  const CacheSpec spec = trace->MakeSpec(format);
  BlockKeyContext context = client::DefaultKeyContext(spec);
  if (!services.tenant.empty()) {
    // Only a store knows the salt of a tenant's pool.
    client::Options of_store = services;
    of_store.kvstore_target = target;
    CERTKV_ASSIGN_OR_RETURN(const auto cache, client::StoreClient(of_store).RegisterCache(spec));
    context.tenant_salt = cache.tenant_salt;
  }
  return ComputeBlockKeys(context, trace->token_ids(), spec.block_tokens);
}

bool AllAreCurrent(const std::vector<PrefixScore>& scores) {
  for (const PrefixScore& score : scores) {
    if (!score.is_current) return false;
  }
  return true;
}

absl::Status Route(const GlobalOptions& global, const RouteOptions& options) {
  CERTKV_ASSIGN_OR_RETURN(const auto nodes, ParseNodes(options.nodes));
  CERTKV_ASSIGN_OR_RETURN(const auto router, PrefixRouter::Start(global.services, nodes));
  CERTKV_ASSIGN_OR_RETURN(const auto keys, KeysOf(global.services, options, nodes[0].target));
  const absl::Time deadline = absl::Now() + absl::Milliseconds(global.services.rpc_timeout_ms);
  std::vector<PrefixScore> scores = router->Score(keys);
  while (!AllAreCurrent(scores) && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(20));
    scores = router->Score(keys);
  }
  Table table;
  table.AddColumn("node", Table::Align::kLeft);
  for (const char* title : {"in memory", "quantized", "with disk"}) table.AddColumn(title);
  table.AddColumn("", Table::Align::kLeft);
  json data = {{"blocks", keys.size()}, {"nodes", json::array()}};
  for (const PrefixScore& score : scores) {
    table.AddRow({score.node, FormatCount(score.counts.memory_blocks),
                  FormatCount(score.counts.device_blocks), FormatCount(score.counts.stored_blocks),
                  score.is_current ? "" : "does not answer"});
    data["nodes"].push_back({{"node", score.node},
                             {"memory_blocks", score.counts.memory_blocks},
                             {"device_blocks", score.counts.device_blocks},
                             {"stored_blocks", score.counts.stored_blocks},
                             {"is_current", score.is_current}});
  }
  Print(global, data,
        absl::StrCat("leading blocks of ", FormatCount(static_cast<int64_t>(keys.size())), ":\n",
                     table.Render()));
  if (AllAreCurrent(scores)) return absl::OkStatus();
  return MakeError(absl::StatusCode::kUnavailable, "NODE_UNAVAILABLE",
                   absl::StrCat("not every node answered within ", global.services.rpc_timeout_ms,
                                " ms; check the targets, or raise --timeout-ms"));
}

}  // namespace

int RunRoute(const GlobalOptions& global, const RouteOptions& options) {
  const absl::Status status = Route(global, options);
  return status.ok() ? kExitOk : Fail(status);
}

}  // namespace certkv::cli
