// The truth that certificates are held against: attention in double, straight from its definition,
// sharing no code with the kernels.
#ifndef CERTKV_CLIENTS_CLI_TRUTH_H_
#define CERTKV_CLIENTS_CLI_TRUTH_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "clients/cpp/worker.h"
#include "kernels/core/cache_spec.h"

namespace certkv::cli {

// Exact softmax and output of one query head.
struct HeadTruth {
  std::vector<double> probabilities;  // [tokens read]
  std::vector<double> output;         // [d_v]
};

// Attention over the originals of one layer, as PutSequence takes them: tokens
// [token_begin, token_end) of KV head `query_head / group_size`.
HeadTruth ComputeHeadTruth(const CacheSpec& spec, const client::LayerKv& layer, int32_t query_head,
                           const float* query, int64_t token_begin, int64_t token_end);

// Keys of one layer and KV head as a reader of the device tier decodes them: [token_count][d].
// Tokens of the tail are the originals. Reads the worker's map of the slab.
// Errors: as DequantizeTile.
absl::StatusOr<std::vector<float>> DecodeServedKeys(const client::Worker& worker,
                                                    const client::Sequence& sequence,
                                                    const client::LayerKv& layer,
                                                    int32_t layer_index, int32_t kv_head);

// The softmax that a read served: keys of tile t are the originals where `tile_sources[t]` says so
// (kSourceOriginalKeys), `decoded` otherwise; sub-blocks that it says were skipped (kSkippedShift)
// have weight 0. Tiles beyond it are decoded. [tokens read], tokens from 0.
std::vector<double> ComputeServedSoftmax(const CacheSpec& spec, const client::LayerKv& layer,
                                         int32_t query_head, const float* query,
                                         absl::Span<const float> decoded,
                                         absl::Span<const uint8_t> tile_sources, int64_t token_end);

double TotalVariation(absl::Span<const double> p, absl::Span<const double> q);
double Distance(absl::Span<const double> exact, absl::Span<const float> served);
double Norm(absl::Span<const double> values);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_TRUTH_H_
