#include "services/certifier/read_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/limits.h"
#include "kernels/core/status.h"

namespace certkv::certifier {
namespace {

template <typename... Parts>
absl::Status Invalid(absl::string_view reason, const Parts&... parts) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, absl::StrCat(parts...));
}

absl::Status CheckQueries(const CacheSpec& spec, const ReadRequest& request) {
  const int64_t expected = int64_t{spec.query_head_count()} * spec.head_dim;
  if (static_cast<int64_t>(request.queries.size()) != expected) {
    return Invalid("QUERY_SIZE", "queries have ", request.queries.size(), " floats, must have ",
                   spec.query_head_count(), " heads x ", spec.head_dim, " channels = ", expected);
  }
  for (int64_t i = 0; i < expected; ++i) {
    if (std::isfinite(request.queries[i])) continue;
    return Invalid("QUERY_NOT_FINITE", "query of head ", i / spec.head_dim, ", channel ",
                   i % spec.head_dim, " is ", request.queries[i],
                   ", must be finite; find out where the engine made it");
  }
  if (request.sink_logits.empty()) return absl::OkStatus();
  if (static_cast<int64_t>(request.sink_logits.size()) != spec.query_head_count()) {
    return Invalid("SINK_LOGITS_INVALID", "there are ", request.sink_logits.size(),
                   " sink logits, must be none or one for each of ", spec.query_head_count(),
                   " query heads");
  }
  for (size_t head = 0; head < request.sink_logits.size(); ++head) {
    if (request.sink_logits[head] <= std::numeric_limits<float>::max()) continue;
    return Invalid("SINK_LOGITS_INVALID", "sink logit of head ", head, " is ",
                   request.sink_logits[head], " nats, must be finite, or -infinity for none");
  }
  return absl::OkStatus();
}

absl::Status CheckLease(const PolicyLease& policy, int64_t now_ms) {
  if (now_ms < policy.expire_time_ms) return absl::OkStatus();
  return MakeError(absl::StatusCode::kFailedPrecondition, "POLICY_LEASE_EXPIRED",
                   absl::StrCat("policy lease ", policy.lease_id, " of ", policy.request,
                                " expired ", now_ms - policy.expire_time_ms,
                                " ms ago; get a new one from gate and update the view"));
}

// First and end token of the sequence that the query at `position` reads.
void SetRange(int64_t position, int32_t sliding_window, ReadPlan* plan) {
  const CacheSpec& spec = plan->cache->spec();
  const int64_t end = position + 1;
  const int64_t begin = sliding_window == 0 ? 0 : std::max<int64_t>(0, end - sliding_window);
  const auto block_count = static_cast<int64_t>(plan->snapshot.blocks->size());
  const int64_t block_end = (end + spec.block_tokens - 1) / spec.block_tokens;
  plan->first_block = static_cast<int32_t>(std::min(block_count, begin / spec.block_tokens));
  plan->block_end = static_cast<int32_t>(std::min(block_count, block_end));
  plan->tile_count = (plan->block_end - plan->first_block) * spec.tiles_per_block();
  plan->tail_count =
      static_cast<int32_t>(std::max<int64_t>(0, end - block_count * spec.block_tokens));
  const int64_t first_token = int64_t{plan->first_block} * spec.block_tokens;
  plan->token_begin = begin - first_token;
  plan->token_end = end - first_token;
}

}  // namespace

int32_t ReadPlan::tile_begin() const {
  return static_cast<int32_t>(std::min<int64_t>(tile_count, token_begin / kTileTokens));
}

int32_t ReadPlan::tile_end() const {
  return static_cast<int32_t>(
      std::min<int64_t>(tile_count, (token_end + kTileTokens - 1) / kTileTokens));
}

absl::StatusOr<ReadPlan> PlanRead(const View& view, const ReadRequest& request, int64_t now_ms) {
  const CacheSpec& spec = view.cache()->spec();
  CERTKV_RETURN_IF_ERROR(view.cache()->CheckAlive());
  if (!(request.layer >= 0 && request.layer < spec.layer_count())) {
    return Invalid("LAYER_UNKNOWN", "layer is ", request.layer, ", must be in [0, ",
                   spec.layer_count(), ")");
  }
  CERTKV_RETURN_IF_ERROR(CheckQueries(spec, request));
  ReadPlan plan;
  plan.cache = view.cache();
  plan.snapshot = view.Snapshot();
  plan.request = request;
  plan.mode = request.measure_only ? ReadMode::kObserve : plan.snapshot.policy->read_mode;
  CERTKV_RETURN_IF_ERROR(CheckLease(*plan.snapshot.policy, now_ms));
  if (!(request.query_position >= 0 && request.query_position < plan.snapshot.token_count)) {
    return Invalid("POSITION_OUTSIDE", "query_position is ", request.query_position,
                   ", the view has ", plan.snapshot.token_count,
                   " tokens; update the view before reading past its end");
  }
  SetRange(request.query_position, spec.layers[request.layer].sliding_window, &plan);
  return plan;
}

}  // namespace certkv::certifier
