// Weights of the token witness, chosen from traces (kernels/bounds/witness_weights.h).
#ifndef CERTKV_CLIENTS_CLI_WITNESS_WEIGHTS_H_
#define CERTKV_CLIENTS_CLI_WITNESS_WEIGHTS_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "clients/cli/trace.h"

namespace certkv::cli {

// A format whose witness may have weights.
struct WeightedFormat {
  FormatChoice format;
  bool is_weighted = false;
};
// What ParseFormat takes, and "K6V4w1c" with weights.
// Errors: InvalidArgument [FORMAT_UNKNOWN]; also for weights without a witness.
absl::StatusOr<WeightedFormat> ParseWeightedFormat(absl::string_view name);

// LayerSpec::witness_weights of each layer of a trace's model.
using LayerWeights = std::vector<std::vector<float>>;

struct ChoosingTrace {
  const Trace* trace;                    // borrowed
  std::function<bool(int32_t)> chooses;  // does the query of that index choose?
};

// From the queries that choose, and from what a key format loses of the keys of their traces, whole
// tiles of them. The traces are of one model.
// Errors: InvalidArgument [TRACE_INVALID], no query chooses, or there is no tile of 64 tokens;
//         as QuantizeTile, naming layer and KV head.
absl::StatusOr<LayerWeights> ChooseWeights(absl::Span<const ChoosingTrace> traces,
                                           const FormatChoice& format);

}  // namespace certkv::cli

#endif  // CERTKV_CLIENTS_CLI_WITNESS_WEIGHTS_H_
