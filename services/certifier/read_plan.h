// One read, checked and laid out: which tokens of which blocks, for all query heads of a layer.
#ifndef CERTKV_SERVICES_CERTIFIER_READ_PLAN_H_
#define CERTKV_SERVICES_CERTIFIER_READ_PLAN_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/core/policy.h"
#include "services/certifier/mapped_cache.h"
#include "services/certifier/view.h"

namespace certkv::certifier {

// What a caller asks. Borrowed until the read has ended.
struct ReadRequest {
  int32_t layer = 0;
  int64_t query_position = 0;           // tokens 0 .. query_position are read, or the window
  absl::Span<const float> queries;      // [query heads][d], in the frame of the keys
  absl::Span<const float> sink_logits;  // [query heads] nats, or empty; -infinity = none
  bool measure_only = false;            // as ReadMode::kObserve, whatever the lease says
};

// Tokens are counted from token 64 * first_tile of the sequence; the first tile is the first of a
// block. Keeps the view's state of its moment alive.
struct ReadPlan {
  std::shared_ptr<MappedCache> cache;
  ViewSnapshot snapshot;
  ReadRequest request;
  ReadMode mode = ReadMode::kEnforce;
  int32_t first_block = 0;  // blocks [first_block, block_end) hold the tiles
  int32_t block_end = 0;
  int32_t tile_count = 0;   // tiles of those blocks
  int32_t tail_count = 0;   // tokens of the tail that are passed on
  int64_t token_begin = 0;  // range of the read, in [0, token_end)
  int64_t token_end = 0;    // at most 64 tile_count + tail_count

  const TileLayout& tile_layout() const {
    return cache->device().layout().tile_layout(request.layer);
  }
  int32_t tiles_per_block() const { return cache->spec().tiles_per_block(); }
  const BlockHandle& block_of_tile(int32_t tile) const {
    return (*snapshot.blocks)[first_block + tile / tiles_per_block()];
  }
  // Tiles that hold a token of the range: [tile_begin, tile_end).
  int32_t tile_begin() const;
  int32_t tile_end() const;
};

// Errors: InvalidArgument [LAYER_UNKNOWN], [QUERY_SIZE], [QUERY_NOT_FINITE] naming head and
//         channel, [SINK_LOGITS_INVALID], [POSITION_OUTSIDE]; FailedPrecondition
//         [POLICY_LEASE_EXPIRED]; Unavailable [STORE_UNREACHABLE].
absl::StatusOr<ReadPlan> PlanRead(const View& view, const ReadRequest& request, int64_t now_ms);

}  // namespace certkv::certifier

#endif  // CERTKV_SERVICES_CERTIFIER_READ_PLAN_H_
